package test

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"agentctl/relay/plugins/sandbox"
)

// TestScript types what a user types. The commands beside testscript's own:
//
//	exits CODE command...          runs it and wants this exit code
//	daemon NAME REGEXP command...  starts it and waits for a line like this; the strings of
//	                               that line's JSON become NAME_KEY in the environment
//	halt NAME [CODE]               (stop is testscript's own, and ends a script) SIGTERM, and wants this exit code (0); NAME.out and
//	                               NAME.err then hold what it printed
//	until REGEXP command...        repeats it until its stdout is like this
//	build FILE PACKAGE             builds the program of a package of this module; $ROOT is the root of the sources
//	ca                             makes ca.pem, cert.pem and key.pem for 127.0.0.1
//	activate SOCKET command...     starts the command for each connection, as its stdin, as systemd does
//	fakerelay NAME FILE [STATUS]   serves FILE as the stream of every call, or as the whole
//	                               answer with this status; NAME is then its URL
func TestScript(t *testing.T) {
	t.Parallel()
	bin := filepath.Dir(binary(t, "agentctl", ""))
	testscript.Run(t, testscript.Params{
		Dir:                "testdata/script",
		UpdateScripts:      *update,
		RequireUniqueNames: true,
		Setup: func(e *testscript.Env) error {
			run, err := os.MkdirTemp("", "ac") // a socket's path is short
			if err != nil {
				return err
			}
			e.Defer(func() { _ = os.RemoveAll(run) })
			d := &daemons{byName: make(map[string]*process)}
			e.Values[daemonsKey{}] = d
			e.Defer(d.killAll)
			root, err := filepath.Abs("..")
			if err != nil {
				return err
			}
			for k, v := range map[string]string{"ROOT": root, "PATH": bin + ":" + os.Getenv("PATH"), "AGENTCTL_SOCKET": filepath.Join(run, "agentctl.sock"),
				"RUN": run, "HOME": e.WorkDir, "NO_COLOR": "1", "TMPDIR": run, "AGENTCTL_METRICS_LISTEN": "127.0.0.1:0"} {
				e.Setenv(k, v)
			}
			if sandbox.Available() != nil {
				e.Setenv("AGENTCTL_PLUGIN_SANDBOX", "off") // plugins start all the same
			}
			return nil
		},
		Condition: func(name string) (bool, error) {
			if name != "landlock" {
				return false, fmt.Errorf("no such condition: %q", name)
			}
			return sandbox.Available() == nil, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": cmdExits, "daemon": cmdDaemon, "halt": cmdHalt, "until": cmdUntil, "ca": cmdCA, "fakerelay": cmdFakeRelay, "build": cmdBuild, "activate": cmdActivate,
		},
	})
}

// daemons are the programs that a script runs in the background, by the name that it gave them.
type daemons struct {
	mu     sync.Mutex // protects byName: a script that fails ends them from another goroutine
	byName map[string]*process
}

type daemonsKey struct{} // of a script's *daemons

func (d *daemons) killAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.byName {
		p.kill()
	}
}

// command returns a command with the script's directory and the variables that agentctl reads.
func command(ts *testscript.TestScript, args []string) *exec.Cmd {
	path, err := exec.LookPath(args[0])
	if args[0] == "agentctl" {
		path, err = filepath.Join(strings.Split(ts.Getenv("PATH"), ":")[0], "agentctl"), nil
	}
	ts.Check(err)
	cmd := exec.Command(path, args[1:]...)
	cmd.Dir = ts.MkAbs(".")
	for _, k := range []string{"PATH", "HOME", "TMPDIR", "NO_COLOR", "AGENTCTL_SOCKET", "AGENTCTL_METRICS_LISTEN", "AGENTCTL_RELAY",
		"AGENTCTL_TOKEN_FILE", "AGENTCTL_CA_FILE", "AGENTCTL_STATE_DIR", "AGENTCTL_CONTEXT", "AGENTCTL_CA_SHA256"} {
		if v := ts.Getenv(k); v != "" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	return cmd
}

// cmdActivate is a socket unit with Accept=yes.
func cmdActivate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: activate SOCKET command...")
	}
	// The command is made once, here: the script's environment belongs to its goroutine.
	unit := command(ts, args[1:])
	path, argv, dir, env := unit.Path, unit.Args[1:], unit.Dir, unit.Env
	l, err := net.Listen("unix", args[0])
	ts.Check(err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			stdin, err := conn.(*net.UnixConn).File()
			_ = conn.Close()
			if err != nil {
				continue
			}
			cmd := exec.Command(path, argv...)
			cmd.Dir, cmd.Env, cmd.Stdin = dir, env, stdin
			wg.Go(func() { _ = cmd.Run(); _ = stdin.Close() })
		}
	})
	ts.Defer(func() { _ = l.Close(); wg.Wait() })
}

func exitCode(err error) int {
	var ee *exec.ExitError
	if errors.As(err, &ee) {
		return ee.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}

func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE command...")
	}
	cmd := command(ts, args[1:])
	cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
	timer := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	if code := exitCode(cmd.Run()); strconv.Itoa(code) != args[0] {
		ts.Fatalf("exit code %d, want %s", code, args[0])
	}
}

func cmdDaemon(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: daemon NAME REGEXP command...")
	}
	re, err := regexp.Compile(args[1])
	ts.Check(err)
	p, err := startCommand(command(ts, args[2:]))
	ts.Check(err)
	d := ts.Value(daemonsKey{}).(*daemons)
	d.mu.Lock()
	d.byName[args[0]] = p
	d.mu.Unlock()
	line, err := p.waitLine(re.MatchString)
	if err != nil {
		ts.Fatalf("%s: wait for a line like %s: %v", args[0], args[1], err)
	}
	setenvs(ts, args[0], line)
}

// setenvs sets NAME_KEY for each string in a line of JSON.
func setenvs(ts *testscript.TestScript, name, line string) {
	var m map[string]any
	if json.Unmarshal([]byte(line), &m) != nil {
		return
	}
	for k, v := range m {
		if s, ok := v.(string); ok {
			ts.Setenv(name+"_"+k, s)
		}
	}
}

func cmdHalt(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: halt NAME [CODE]")
	}
	d := ts.Value(daemonsKey{}).(*daemons)
	d.mu.Lock()
	p := d.byName[args[0]]
	delete(d.byName, args[0])
	d.mu.Unlock()
	if p == nil {
		ts.Fatalf("no daemon %s", args[0])
	}
	code, err := p.exit()
	if err != nil {
		ts.Fatalf("%s: %v", args[0], err)
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]+".out"), []byte(p.out.String()), 0o600))
	ts.Check(os.WriteFile(ts.MkAbs(args[0]+".err"), []byte(p.err.String()), 0o600))
	want := "0"
	if len(args) > 1 {
		want = args[1]
	}
	if strconv.Itoa(code) != want {
		ts.Fatalf("%s ended with %d, want %s\n%s%s", args[0], code, want, p.out, p.err)
	}
}

func cmdUntil(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: until REGEXP command...")
	}
	re, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	var out, errs bytes.Buffer
	for begin := time.Now(); ; {
		out.Reset()
		errs.Reset()
		cmd := command(ts, args[1:])
		cmd.Stdout, cmd.Stderr = &out, &errs
		_ = cmd.Run()
		if re.Match(out.Bytes()) {
			break
		}
		waited := time.Since(begin)
		if waited > patience {
			ts.Fatalf("%s passed without %s\n%s%s", patience, args[0], &out, &errs)
		}
		// Each attempt starts a process, which costs more than what it waits for: what takes long is asked
		// for less often.
		time.Sleep(max(100*time.Millisecond, waited/4))
	}
	_, _ = ts.Stdout().Write(out.Bytes())
}

func cmdBuild(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: build FILE PACKAGE")
	}
	path, err := builtPackage(args[1])
	ts.Check(err)
	// By another process: one that this process forks meanwhile would hold the file open for writing,
	// and the kernel starts no such program (ETXTBSY).
	ts.Check(exec.Command("cp", path, ts.MkAbs(args[0])).Run())
}

func cmdCA(ts *testscript.TestScript, _ bool, _ []string) {
	ca, cert, key, err := certificates("127.0.0.1")
	ts.Check(err)
	for name, b := range map[string][]byte{"ca.pem": ca, "cert.pem": cert, "key.pem": key} {
		ts.Check(os.WriteFile(ts.MkAbs(name), b, 0o600))
	}
}

// certificates makes an authority and a certificate of an address, PEM.
func certificates(ip string) (ca, cert, key []byte, err error) {
	template := func(n int64, name string) *x509.Certificate {
		return &x509.Certificate{SerialNumber: big.NewInt(n), Subject: pkix.Name{CommonName: name}, BasicConstraintsValid: true,
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, nil, err
	}
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, nil, err
	}
	root := template(1, "agentctl test authority")
	root.IsCA, root.KeyUsage = true, x509.KeyUsageCertSign
	caDER, err := x509.CreateCertificate(rand.Reader, root, root, &caKey.PublicKey, caKey)
	if err != nil {
		return nil, nil, nil, err
	}
	leaf := template(2, ip)
	leaf.IPAddresses, leaf.ExtKeyUsage = []net.IP{net.ParseIP(ip)}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	der, err := x509.CreateCertificate(rand.Reader, leaf, root, &leafKey.PublicKey, caKey)
	if err != nil {
		return nil, nil, nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(leafKey)
	encode := func(typ string, b []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: b}) }
	return encode("CERTIFICATE", caDER), encode("CERTIFICATE", der), encode("PRIVATE KEY", keyDER), err
}

// cmdFakeRelay serves a stream that is written by hand, to see what the client makes of it.
func cmdFakeRelay(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 && len(args) != 3 {
		ts.Fatalf("usage: fakerelay NAME FILE [STATUS]")
	}
	events := ts.ReadFile(args[1])
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	gone := make(chan struct{}) // closed when the client has closed its connection
	var once sync.Once
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if len(args) == 3 {
			status, _ := strconv.Atoi(args[2])
			w.WriteHeader(status)
			_, _ = io.WriteString(w, events)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		sc := bufio.NewWriter(w)
		_, _ = sc.WriteString(events)
		_ = sc.Flush()
		_ = http.NewResponseController(w).Flush()
		select { // the stream stays open: the client closes it
		case <-r.Context().Done():
			once.Do(func() { close(gone) })
		case <-time.After(patience):
		}
	})}
	go func() { _ = srv.Serve(ln) }()
	ts.Setenv(args[0], "http://"+ln.Addr().String())
	ts.Defer(func() {
		_ = srv.Close()
		select {
		case <-gone:
		default:
			if len(args) == 2 {
				ts.Logf("the client never closed the stream of %s", args[0])
			}
		}
	})
}

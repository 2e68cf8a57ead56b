package test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/transport/link"
)

// run starts a daemon that connects to the test relay.
func (r *testRelay) run(name string, args ...string) (p *process, node, dir, socket string) {
	r.t.Helper()
	minted := r.mint(auth.MintRequest{Class: "device"})
	dir = r.t.TempDir()
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte(minted.Token+"\n"), 0o600); err != nil {
		r.t.Fatal(err)
	}
	run, err := os.MkdirTemp("", "ac")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = os.RemoveAll(run) })
	socket = filepath.Join(run, "s")
	p = startProcess(r.t, nil, binary(r.t, "agentctl-board", "agentctl_omit_relay"), append([]string{"run", "--relay", r.url, "--token-file", token,
		"--state-dir", filepath.Join(dir, "state"), "--socket", socket, "--name", name, "--interval", "200ms", "--log-level", "debug"}, args...)...)
	p.waitOutput(`"msg":"ready"`)
	p.waitOutput("node id assigned by the relay") // and kept
	eventually(r.t, "the board is online", func() bool {
		return r.call("sysecho."+minted.NodeID+".echo.invoke", `{}`).status == http.StatusUnprocessableEntity
	})
	return p, minted.NodeID, dir, socket
}

// hashFiles hashes what a directory holds, sockets and times aside.
func hashFiles(t testing.TB, dir string) map[string]string {
	t.Helper()
	m := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		m[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// RFC-0005 §12, §1: the text of a message is stored in no file and no log of relay or board,
// and neither are the names that the taxonomy dropped; the board's state does not change.
func TestRFC0005MessagesAreNotStored(t *testing.T) {
	t.Parallel()
	const canary = "CANARY-7f3a91"
	r := newTestRelay(t)
	p, node, dir, _ := r.run("attic")
	before := hashFiles(t, filepath.Join(dir, "state"))
	echo := "sysecho." + node + ".echo.invoke"
	for _, args := range []string{text(canary), `{"message":"` + canary + `","` + canary + `":1}`, `{"message":["` + canary + `"]}`, `{"message":"` + canary + `\n"}`} {
		r.call(echo, args)
	}
	for _, body := range []string{canary, `{"tool":"` + canary + `","arguments":{}}`, `{"tool":"` + echo + `","arguments":{},"` + canary + `":1}`} {
		r.callRaw(body)
	}
	r.call("sysecho."+node+".nosuch.invoke", text(canary))
	r.call(echo, text("x"), "Authorization", "Bearer "+canary)
	r.call(echo, text("x"), "Traceparent", canary)
	r.do(http.MethodGet, "/"+canary, canary, nil)
	r.do(http.MethodGet, "/v1/nodes?limit="+canary, "", r.headers())
	liar := r.device(mockOptions{script: func(m *mockDevice) func(string, link.Cmd) {
		return func(id string, _ link.Cmd) { m.refuse(id, manifest.Internal, canary) }
	}})
	r.call(liar.echoTool(), text(canary))
	_ = liar.write(`{"type":"error","msg_id":"` + manifest.NewULID() + `","payload":{"code":"E_INTERNAL","message":"` + canary + `"}}`)
	_ = liar.write(canary)
	liar.waitClosed()
	p.stop()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	after := hashFiles(t, filepath.Join(dir, "state"))
	for name := range after {
		if strings.HasPrefix(filepath.Base(name), "history.db") { // samples are kept, and nothing else
			if strings.Contains(after[name], canary) {
				t.Errorf("%s is in %s", canary, name)
			}
			delete(before, name)
			delete(after, name)
		}
	}
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("the board's state changed from %v to %v", before, after)
	}
	logs := map[string]string{"the relay's log": r.logs.String(), "the board's log": p.out.String() + p.err.String()}
	for _, m := range []map[string]string{logs, after, hashFiles(t, r.dir)} {
		for name, content := range m {
			for _, word := range []string{canary, "E_TIMEOUT", "E_DEVICE_OFFLINE", "E_INVALID_ARGS", "E_UNAUTHORIZED"} {
				if strings.Contains(content, word) {
					t.Errorf("%s is in %s", word, name)
				}
			}
		}
	}
	if len(logs["the relay's log"]) == 0 || len(logs["the board's log"]) == 0 {
		t.Error("there are no logs")
	}
}

// A board dials out: it listens on no TCP and no UDP port.
func TestBoardHasNoListeners(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	p, _, _, socket := r.run("attic")
	inodes := make(map[string]bool)
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if l, err := os.Readlink(fd); err == nil && strings.HasPrefix(l, "socket:[") {
			inodes[strings.Trim(l, "socket:[]")] = true
		}
	}
	connected := 0
	for _, proto := range []string{"tcp", "tcp6", "udp", "udp6"} {
		f, err := os.Open("/proc/net/" + proto)
		if err != nil {
			continue
		}
		for sc := bufio.NewScanner(f); sc.Scan(); {
			field := strings.Fields(sc.Text())
			if len(field) < 10 || !inodes[field[9]] {
				continue
			}
			if field[3] == "0A" || strings.HasPrefix(proto, "udp") {
				t.Errorf("the board listens: %s %s", proto, sc.Text())
			}
			connected++
		}
		_ = f.Close()
	}
	if connected != 1 {
		t.Errorf("%d TCP sockets, want the link alone", connected)
	}
	if st, err := os.Stat(socket); err != nil || st.Mode().Type() != fs.ModeSocket || st.Mode().Perm()&0o007 != 0 {
		t.Errorf("the control socket: %v %v", st, err)
	}
	p.stop()
	if _, err := os.Stat(socket); err == nil {
		t.Error("the control socket is still there")
	}
}

// The relay goes and comes back under the same address: so does the board, by itself, and
// it is the node that it was.
func TestBoardReconnects(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := newTestRelay(t, func(o *relay.Options) { o.Listener = ln })
	p, node, dir, _ := r.run("attic")
	var id struct {
		NodeID   string `json:"node_id"`
		TenantID string `json:"tenant_id"`
	}
	b, err := os.ReadFile(filepath.Join(dir, "state", "identity.json"))
	if err != nil || json.Unmarshal(b, &id) != nil || id.NodeID != node || id.TenantID != auth.DefaultTenant {
		t.Fatalf("identity %s, %v", b, err)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	p.waitOutput(`"state":"waiting"`)
	again := newTestRelay(t, func(o *relay.Options) { o.StateDir, o.Listen = r.dir, ln.Addr().String() })
	eventually(t, "the board answers again", func() bool {
		a := again.call("sysecho."+node+".echo.invoke", text("again"))
		if a.status != http.StatusOK && a.status != http.StatusServiceUnavailable {
			t.Fatalf("while the board reconnects: %d %s", a.status, a.body)
		}
		return a.status == http.StatusOK
	})
	p.stop()
}

// RFC-0005 §11, §7: a round trip is far below the budgets.
func TestRFC0005Latency(t *testing.T) {
	r := newTestRelay(t)
	var took []time.Duration
	for range 10 { // 10 a second each
		m := r.device(mockOptions{})
		for range 9 {
			begin := time.Now()
			if a := r.call(m.echoTool(), text("ping")); a.status != http.StatusOK {
				t.Fatalf("%d %s", a.status, a.body)
			}
			took = append(took, time.Since(begin))
		}
	}
	slices.Sort(took)
	p10, p50, p99 := took[len(took)/10], took[len(took)/2], took[len(took)*99/100]
	t.Logf("p10 %s, p50 %s, p99 %s", p10, p50, p99)
	if p10 > 50*time.Millisecond { // a busy machine delays the others
		t.Errorf("p10 %s", p10)
	}
}

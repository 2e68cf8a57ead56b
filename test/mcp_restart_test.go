package test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/auth"
)

// bridgeProcess is `agentctl mcp` and its client.
type bridgeProcess struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Scanner
}

func startBridge(t *testing.T, bin string, args ...string) *bridgeProcess {
	cmd := exec.Command(bin, append([]string{"mcp"}, args...)...)
	cmd.Env = []string{"HOME=" + t.TempDir()}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(2*patience, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
		kill.Stop()
	})
	b := &bridgeProcess{t, in, bufio.NewScanner(out)}
	b.out.Buffer(nil, 1<<20)
	return b
}

// request sends a request and returns the answer, past notifications. It runs outside of the
// test's goroutine too, so it reports failures as an answer.
func (b *bridgeProcess) request(id int, method, params string) string {
	if _, err := fmt.Fprintf(b.in, `{"jsonrpc":"2.0","id":%d,"method":%q,"params":%s}`+"\n", id, method, params); err != nil {
		return err.Error()
	}
	for b.out.Scan() {
		if line := b.out.Text(); strings.Contains(line, fmt.Sprintf(`"id":%d,`, id)) {
			return line
		}
	}
	return "the bridge ended"
}

// waitTool waits until a tool whose name begins with prefix is listed, and returns its name.
func (b *bridgeProcess) waitTool(prefix string) (name string) {
	b.t.Helper()
	eventually(b.t, "a tool "+prefix+"*", func() bool {
		_, rest, ok := strings.Cut(b.request(2, "tools/list", "{}"), `"name":"`+prefix)
		rest, _, _ = strings.Cut(rest, `"`)
		name = prefix + rest
		return ok
	})
	return name
}

// restartInit has the parameters of initialize.
const restartInit = `{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}`

// TestRestartUnderCalls: the relay is ended and killed under a loop of calls. Through the bridge
// none of them fails; over HTTP the session is the same afterwards, and an answer says what became
// of its call.
func TestRestartUnderCalls(t *testing.T) {
	t.Parallel()
	dir, bin := t.TempDir(), binary(t, "agentctl", "")
	state, agentToken, deviceToken := filepath.Join(dir, "relay"), filepath.Join(dir, "agent"), filepath.Join(dir, "device")
	token := createToken(t, state, auth.MintRequest{Class: "agent"}).Token
	writeToken(t, agentToken, token)
	writeToken(t, deviceToken, createToken(t, state, auth.MintRequest{Class: "device"}).Token)
	// An address without other tests: after a restart the port has to be free.
	r := startRelay(t, state, "--listen", "127.0.0.73:0", "--sse-listen", "127.0.0.1:0")
	startProcess(t, nil, bin, "run", "--mock", "1", "--relay", r.url, "--token-file", deviceToken,
		"--state-dir", filepath.Join(dir, "board"), "--socket", filepath.Join(dir, "s"))
	bridge := startBridge(t, bin, "--relay", r.url, "--token-file", agentToken, "--toolset", "boards")
	bridge.request(1, "initialize", restartInit)
	_, _ = io.WriteString(bridge.in, `{"jsonrpc":"2.0","method":"notifications/initialized"}`+"\n")
	call := `{"name":"` + bridge.waitTool("sysecho_") + `","arguments":{"message":"x"}}`
	session := newMCPSession(t, r.url, token)

	var viaBridge, viaHTTP, cut atomic.Int64
	stop := make(chan struct{})
	var calls sync.WaitGroup
	calls.Go(func() {
		eachTick(stop, func(id int) bool {
			got := bridge.request(id, "tools/call", call)
			if strings.Contains(got, `"isError"`) || !strings.Contains(got, `"result"`) {
				t.Errorf("through the bridge: %s", got)
				return false
			}
			viaBridge.Add(1)
			return true
		})
	})
	calls.Go(func() {
		eachTick(stop, func(id int) bool {
			switch status, got, err := session.post(id, "tools/call", call); {
			case err != nil: // there is no relay
			case status == 200 && !strings.Contains(got, `"error"`):
				viaHTTP.Add(1)
			case strings.Contains(got, `"outcome"`) && (status == 200 || status == 503):
				cut.Add(1)
			default:
				t.Errorf("over HTTP: %d %s", status, got)
				return false
			}
			return true
		})
	})
	endCalls := sync.OnceFunc(func() { close(stop); calls.Wait() })
	defer endCalls()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		bridged, posted := viaBridge.Load()+2, viaHTTP.Load()+2
		ok := poll(20*time.Millisecond, func() bool { return t.Failed() || viaBridge.Load() >= bridged && viaHTTP.Load() >= posted })
		if !ok || t.Failed() {
			t.Fatalf("before %v: only %d calls through the bridge and %d over HTTP", sig, viaBridge.Load(), viaHTTP.Load())
		}
		_ = r.cmd.Process.Signal(sig)
		<-r.ended
		r = startRelay(t, state, "--listen", strings.TrimPrefix(r.url, "http://"), "--sse-listen", "127.0.0.1:0")
	}
	eventually(t, "the session works after the restarts", func() bool {
		status, got, err := session.post(5, "tools/call", call)
		return err == nil && status == 200 && !strings.Contains(got, `"error"`)
	})
	endCalls()
	// An id of one process is made again by another only if it is whole.
	session.id = session.id[:len(session.id)-1]
	if status, got, err := session.post(1, "ping", "{}"); err != nil || status != 404 {
		t.Errorf("an id that lacks a character: %d %s %v, want 404", status, got, err)
	}
	t.Logf("%d calls through the bridge, %d over HTTP, %d of them with an outcome in place of a result", viaBridge.Load(), viaHTTP.Load()+cut.Load(), cut.Load())
}

// eachTick calls fn with growing ids until it returns false or stop is closed. Two such loops stay below
// the 10 calls a second that a board's echo takes.
func eachTick(stop <-chan struct{}, fn func(id int) bool) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for id := 10; ; id++ {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		if !fn(id) {
			return
		}
	}
}

func writeToken(t *testing.T, path, token string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
}

// mcpSession is a session over HTTP, whose client connects again for each request if it has to.
type mcpSession struct{ url, token, id string }

func newMCPSession(t *testing.T, url, token string) *mcpSession {
	t.Helper()
	s := &mcpSession{url: url, token: token}
	if status, got, err := s.post(1, "initialize", restartInit); err != nil || s.id == "" {
		t.Fatalf("initialize: %d %s %v", status, got, err)
	}
	return s
}

// post sends a request and returns the answer whole. The first answer's session is kept.
func (s *mcpSession) post(id int, method, params string) (status int, answer string, err error) {
	body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":%q,"params":%s}`, id, method, params)
	req, err := http.NewRequest(http.MethodPost, s.url+"/mcp", strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header = http.Header{"Authorization": {"Bearer " + s.token}, "Content-Type": {"application/json"}, "Accept": {"application/json, text/event-stream"}}
	if s.id != "" {
		req.Header.Set("Mcp-Session-Id", s.id)
		req.Header.Set("Mcp-Protocol-Version", "2025-11-25")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	if s.id == "" {
		s.id = resp.Header.Get("Mcp-Session-Id")
	}
	raw, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(raw), err
}

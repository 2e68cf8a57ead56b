package test

import (
	"bufio"
	"context"
	"encoding/json"
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

const restartInit = `{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}`

// TestRestartUnderCalls: the relay is ended and killed under a loop of calls. Through the bridge
// none of them fails; over HTTP the session is the same afterwards, and an answer says what became
// of its call.
func TestRestartUnderCalls(t *testing.T) {
	t.Parallel()
	dir, bin := t.TempDir(), binary(t, "agentctl", "")
	state := filepath.Join(dir, "relay")
	store, err := auth.Open(auth.Options{StateDir: state})
	if err != nil {
		t.Fatal(err)
	}
	token := map[string]string{}
	for name, req := range map[string]auth.MintRequest{"agent": {Class: "agent"}, "device": {Class: "device"}} {
		minted, err := store.Mint(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		token[name] = minted[0].Token
		if err := os.WriteFile(filepath.Join(dir, name), []byte(minted[0].Token), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_ = store.Close()
	listen := "127.0.0.73:0" // an address without other tests, since the port has to be free after a restart
	var p *process
	var url string
	up := func() {
		t.Helper()
		p = startProcess(t, nil, bin, "relay", "--state-dir", state, "--listen", listen, "--metrics-listen", "", "--sse-listen", "127.0.0.1:0")
		p.waitOutput(`"ready":true`)
		if url != "" {
			return // it listens where it did
		}
		var line struct{ URL string }
		if err := json.Unmarshal([]byte(p.out.String()), &line); err != nil {
			t.Fatal(err)
		}
		url, listen = line.URL, strings.TrimPrefix(line.URL, "http://")
	}
	up()
	startProcess(t, nil, bin, "run", "--mock", "1", "--relay", url, "--token-file", filepath.Join(dir, "device"),
		"--state-dir", filepath.Join(dir, "board"), "--socket", filepath.Join(dir, "s"))
	b := startBridge(t, bin, "--relay", url, "--token-file", filepath.Join(dir, "agent"), "--toolset", "boards")
	b.request(1, "initialize", restartInit)
	_, _ = io.WriteString(b.in, `{"jsonrpc":"2.0","method":"notifications/initialized"}`+"\n")
	tool := ""
	for end := time.Now().Add(patience); tool == ""; time.Sleep(50 * time.Millisecond) {
		list := b.request(2, "tools/list", "{}")
		if i := strings.Index(list, `"name":"sysecho_`); i >= 0 {
			tool, _, _ = strings.Cut(list[i+len(`"name":"`):], `"`)
		} else if time.Now().After(end) {
			t.Fatalf("the board does not come: %s", list)
		}
	}
	call := `{"name":"` + tool + `","arguments":{"message":"x"}}`

	post := func(session, body string) (status int, head http.Header, answer string, err error) {
		req, err := http.NewRequest(http.MethodPost, url+"/mcp", strings.NewReader(body))
		if err != nil {
			return 0, nil, "", err
		}
		req.Header = http.Header{"Authorization": {"Bearer " + token["agent"]}, "Content-Type": {"application/json"}, "Accept": {"application/json, text/event-stream"}}
		if session != "" {
			req.Header.Set("Mcp-Session-Id", session)
			req.Header.Set("Mcp-Protocol-Version", "2025-11-25")
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, nil, "", err
		}
		defer func() { _ = resp.Body.Close() }()
		raw, err := io.ReadAll(resp.Body)
		return resp.StatusCode, resp.Header, string(raw), err
	}
	_, head, _, err := post("", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":`+restartInit+`}`)
	if err != nil {
		t.Fatal(err)
	}
	session := head.Get("Mcp-Session-Id")

	stop := make(chan struct{})
	var calls sync.WaitGroup
	var viaBridge, viaHTTP, cut atomic.Int64
	calls.Go(func() {
		for id := 10; ; id++ {
			select {
			case <-stop:
				return
			case <-time.After(300 * time.Millisecond): // two loops stay below the 10 a second of the tool
			}
			if got := b.request(id, "tools/call", call); strings.Contains(got, `"isError"`) || !strings.Contains(got, `"result"`) {
				t.Errorf("through the bridge: %s", got)
				return
			}
			viaBridge.Add(1)
		}
	})
	calls.Go(func() {
		for id := 10; ; id++ {
			select {
			case <-stop:
				return
			case <-time.After(300 * time.Millisecond):
			}
			status, _, got, err := post(session, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":%s}`, id, call))
			switch {
			case err != nil: // there is no relay
			case status == 200 && !strings.Contains(got, `"error"`):
				viaHTTP.Add(1)
			case strings.Contains(got, `"outcome"`) && (status == 200 || status == 503):
				cut.Add(1)
			default:
				t.Errorf("over HTTP: %d %s", status, got)
				return
			}
		}
	})
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		bridged, posted := viaBridge.Load()+3, viaHTTP.Load()+3
		for end := time.Now().Add(patience); viaBridge.Load() < bridged || viaHTTP.Load() < posted; time.Sleep(20 * time.Millisecond) {
			if t.Failed() || time.Now().After(end) {
				close(stop)
				t.Fatalf("only %d calls through the bridge and %d over HTTP", viaBridge.Load(), viaHTTP.Load())
			}
		}
		_ = p.cmd.Process.Signal(sig)
		<-p.ended
		up()
	}
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		if status, _, got, err := post(session, `{"jsonrpc":"2.0","id":5,"method":"tools/call","params":`+call+`}`); err == nil && status == 200 && !strings.Contains(got, `"error"`) {
			break
		} else if time.Now().After(end) {
			t.Fatalf("after the restarts: %d %s %v", status, got, err)
		}
	}
	close(stop)
	calls.Wait()
	t.Logf("%d calls through the bridge, %d over HTTP, %d of them with an outcome in place of a result", viaBridge.Load(), viaHTTP.Load()+cut.Load(), cut.Load())
	// An id of one process is made again by another only if it is whole.
	if status, _, got, err := post(session[:len(session)-1], `{"jsonrpc":"2.0","id":1,"method":"ping"}`); err != nil || status != 404 {
		t.Errorf("a cut id: %d %s %v", status, got, err)
	}
}

package test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentctl/test/faultdisk"
)

// diskRelay is a relay process whose state directory is on a disk that fails on command.
type diskRelay struct {
	t                 *testing.T
	disk              *faultdisk.Disk
	process           *process
	url, metrics, sse string
	dir, token        string
}

func newDiskRelay(t *testing.T) *diskRelay {
	t.Helper()
	d := &diskRelay{t: t, disk: faultdisk.New(t)}
	d.dir = filepath.Join(d.disk.Dir, "state")
	d.process = startProcess(t, nil, binary(t, "agentctl", ""), "relay", "--state-dir", d.dir, "--listen", "127.0.0.1:0",
		"--metrics-listen", "127.0.0.1:0", "--sse-listen", "127.0.0.1:0",
		"--without", "triage") // it uses the relay by itself, which the tests would count
	d.process.waitOutput(`"ready":true`)
	var line struct {
		URL     string `json:"url"`
		Metrics string `json:"metrics_url"`
		SSE     string `json:"sse_url"`
	}
	if err := json.Unmarshal([]byte(d.process.out.String()), &line); err != nil {
		t.Fatal(err)
	}
	d.url, d.metrics, d.sse = line.URL, line.Metrics, line.SSE
	out, _, _ := d.command("token", "create", "--class", "admin", "--state-dir", d.dir)
	d.token = strings.TrimSpace(out)
	return d
}

// command runs a command of agentctl, for patience at most.
func (d *diskRelay) command(args ...string) (stdout, stderr string, code int) {
	d.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.Command(binary(d.t, "agentctl", ""), args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	kill := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	_ = cmd.Run()
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// answer is a body of the API, as far as these tests read it.
type diskAnswer struct {
	status int
	took   time.Duration
	body   string
	Error  struct {
		Code      string `json:"code"`
		Reason    string `json:"reason"`
		Retryable bool   `json:"retryable"`
	} `json:"error"`
}

func (d *diskRelay) request(method, url, body string) (a diskAnswer) {
	d.t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+d.token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	began := time.Now()
	res, err := (&http.Client{Timeout: patience}).Do(req)
	if err != nil {
		d.t.Errorf("%s %s: %v", method, url, err)
		return a
	}
	defer func() { _ = res.Body.Close() }()
	b, _ := io.ReadAll(res.Body)
	a.status, a.took, a.body = res.StatusCode, time.Since(began), string(b)
	_ = json.Unmarshal(b, &a)
	return a
}

func (d *diskRelay) tool(name, args string) diskAnswer {
	d.t.Helper()
	return d.request("POST", d.url+"/mcp/tools/call", `{"tool":"`+name+`","arguments":`+args+`}`)
}

func (d *diskRelay) ready() diskAnswer { d.t.Helper(); return d.request("GET", d.url+"/readyz", "") }

// await waits for patience at most. On an idle machine every fault shows, and is gone, within 10 s.
func (d *diskRelay) await(what string, ok func() bool) {
	d.t.Helper()
	if !poll(100*time.Millisecond, ok) {
		d.t.Fatalf("%s passed without: %s", patience, what)
	}
}

// mocks links boards, and returns the id of one.
func (d *diskRelay) mocks(n string) (node string) {
	d.t.Helper()
	tokens, _, _ := d.command("token", "create", "--class", "device", "--count", n, "--state-dir", d.dir)
	path := filepath.Join(d.t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte(tokens), 0o600); err != nil {
		d.t.Fatal(err)
	}
	startProcess(d.t, nil, binary(d.t, "agentctl", ""), "run", "--mock", n, "--relay", d.url, "--token-file", path)
	d.await("linked boards", func() bool {
		var list struct {
			Agents []struct{ ID, Kind, Status string }
		}
		_ = json.Unmarshal([]byte(d.tool("agents.list", "{}").body), &list)
		for _, a := range list.Agents {
			if a.Kind == "device" && a.Status == "online" {
				node = a.ID
			}
		}
		return node != ""
	})
	return node
}

// A disk that does not answer, fails, is full or read-only stops what has to be durable, and that
// only, says so everywhere within 10 s, and is forgotten within 10 s after its end.
func TestDiskFaultsReal(t *testing.T) {
	skipUnlessSlow(t)
	d := newDiskRelay(t)
	node := d.mocks("2")
	echo := func() diskAnswer { return d.tool("sysecho."+node+".echo.invoke", `{"message":"x"}`) }
	create := func() diskAnswer { return d.tool("tickets.create", `{"title":"x"}`) }
	mint := func() diskAnswer { return d.request("POST", d.url+"/v1/tokens", `{"class":"agent"}`) }
	ingest := func() diskAnswer {
		return d.request("POST", strings.TrimSuffix(d.sse, "sse")+"events", `{"topic":"x/y","data":1}`)
	}
	for _, c := range []struct {
		fault     string
		store     string
		fails     []func() diskAnswer
		works     []func() diskAnswer
		retryable bool
	}{
		{"hang fsync events.db*", "events.db", []func() diskAnswer{create, ingest}, []func() diskAnswer{echo, mint}, true},
		{"hang write relay.db*", "relay.db", []func() diskAnswer{mint}, []func() diskAnswer{echo, create, ingest}, true},
		{"hang any *", "events.db", []func() diskAnswer{create, mint}, []func() diskAnswer{echo}, true},
		{"fail fsync events.db* EIO", "events.db", []func() diskAnswer{create, ingest}, []func() diskAnswer{echo, mint}, true},
		{"full 0", "events.db", []func() diskAnswer{create, mint}, []func() diskAnswer{echo}, true},
		// SQLite calls a page that it cannot read damage, which would stand for ever.
		{"fail any relay.db* EIO", "relay.db", []func() diskAnswer{mint}, []func() diskAnswer{echo, create, ingest}, true},
		{"fail any events.db* EIO", "events.db", []func() diskAnswer{create, ingest}, []func() diskAnswer{echo, mint}, true},
		{"readonly", "events.db", []func() diskAnswer{create, mint}, []func() diskAnswer{echo}, false},
	} {
		d.disk.Fault(strings.Fields(c.fault)...)
		var wg sync.WaitGroup
		for _, call := range c.fails {
			wg.Go(func() {
				a := call()
				// A write to a file that is open fails as on a broken disk; a probe finds out why.
				for began := time.Now(); !c.retryable && a.Error.Retryable && time.Since(began) < patience; a = call() {
					time.Sleep(100 * time.Millisecond)
				}
				if a.Error.Code != "E_INTERNAL" || a.Error.Reason != "storage" || a.Error.Retryable != c.retryable || a.took > patience/4 {
					t.Errorf("%s: %d after %v: %s", c.fault, a.status, a.took, a.body)
				}
			})
		}
		for _, call := range c.works {
			wg.Go(func() {
				a := call()
				// A call that waits for the store takes 2 s each time, one on a busy machine does not.
				for i := 0; i < 10 && a.status/100 == 2 && a.took > 2*time.Second; i++ {
					a = call()
				}
				if a.status/100 != 2 || a.took > 2*time.Second {
					t.Errorf("%s: a call that needs no such store: %d after %v: %s", c.fault, a.status, a.took, a.body)
				}
			})
		}
		d.await(c.fault+" in readyz", func() bool {
			a := d.ready()
			return a.status == 503 && strings.Contains(a.body, "storage: "+c.store)
		})
		wg.Wait()
		if a := d.request("GET", d.metrics, ""); !strings.Contains(a.body, `agentctl_storage_healthy{store="`+c.store+`"} 0`) {
			t.Errorf("%s: /metrics after %v", c.fault, a.took)
		}
		if a := d.request("GET", d.url+"/healthz", ""); a.status != 200 {
			t.Errorf("%s: /healthz %d", c.fault, a.status)
		}
		if out, errs, code := d.command("relay", "status", "-o", "json", "--state-dir", d.dir); code != 1 || !strings.Contains(out, `"store": "`+c.store+`"`) {
			t.Errorf("%s: relay status: %d %s%s", c.fault, code, out, errs)
		}
		d.disk.Clear()
		d.await("the end of "+c.fault, func() bool { return d.ready().status == 200 })
		for _, call := range append(c.fails, c.works...) {
			if a := call(); a.status/100 != 2 {
				t.Errorf("after %s: %d %s", c.fault, a.status, a.body)
			}
		}
	}
	lines := 0
	for line := range strings.Lines(d.process.err.String()) {
		if strings.Contains(line, `"level":"error"`) || strings.Contains(line, `"level":"warn"`) {
			lines++
		}
	}
	if lines > 80 { // of eight faults, in more than three minutes' worth of the limit
		t.Errorf("%d lines in the log", lines)
	}
}

// Boards that link while relay.db hangs become ready, and are in the registry afterwards. What
// happens to them meanwhile is in the event log, in order.
func TestDiskBoardsLinkReal(t *testing.T) {
	skipUnlessSlow(t)
	d := newDiskRelay(t)
	for _, store := range []string{"relay.db*", "events.db*"} {
		tokens, _, _ := d.command("token", "create", "--class", "device", "--count", "3", "--state-dir", d.dir)
		path := filepath.Join(t.TempDir(), "tokens")
		if err := os.WriteFile(path, []byte(tokens), 0o600); err != nil {
			t.Fatal(err)
		}
		linked := func() int {
			return strings.Count(d.tool("agents.list", "{}").body, `"status":"online","transport":"link"`)
		}
		before := linked()
		d.disk.Fault("hang", "fsync", store)
		mocks := startProcess(t, nil, binary(t, "agentctl", ""), "run", "--mock", "3", "--relay", d.url, "--token-file", path)
		d.await("boards that link", func() bool { return linked() == before+3 })
		d.disk.Clear()
		d.await("the end of the fault", func() bool { return d.ready().status == 200 })
		d.await("the boards in the registry", func() bool {
			return strings.Count(d.request("GET", d.url+"/v1/nodes", "").body, `"cap_id":"echo"`) >= before+3
		})
		d.await("their presence in the event log", func() bool {
			out, _, _ := d.command("events", "replay", "--state-dir", d.dir)
			return strings.Count(out, "presence.online") >= before+3
		})
		_ = mocks.cmd.Process.Kill()
		<-mocks.ended
		d.await("the boards as gone", func() bool { return linked() == 0 })
	}
}

// Every call is in the event log or in a gap, also those that were offered to a commit that failed.
func TestDiskGapReal(t *testing.T) {
	skipUnlessSlow(t)
	d := newDiskRelay(t)
	node := d.mocks("2")
	calls := 0
	call := func() {
		t.Helper()
		calls++
		if a := d.tool("sysecho."+node+".echo.invoke", `{"message":"x"}`); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
		time.Sleep(110 * time.Millisecond) // the board serves ten a second
	}
	for range 10 {
		call()
	}
	d.disk.Fault("fail", "fsync", "events.db*", "EIO")
	for range 30 {
		call()
	}
	d.await("the fault", func() bool { return d.ready().status == 503 })
	d.disk.Clear()
	d.await("the end of the fault", func() bool { return d.ready().status == 200 })
	for range 10 {
		call()
	}
	stored, missing := 0, 0
	defer func() { t.Logf("%d calls, %d stored, %d reported as missing", calls, stored, missing) }()
	d.await("all calls", func() bool {
		out, _, _ := d.command("events", "replay", "-o", "ndjson", "--state-dir", d.dir)
		stored, missing = 0, 0
		for line := range strings.Lines(out) {
			var e struct {
				Type, Aggregate string
				Payload         struct{ Counts map[string]int }
			}
			_ = json.Unmarshal([]byte(line), &e)
			if e.Type == "call" && strings.Contains(line, ".echo.invoke") {
				stored++
			}
			missing += e.Payload.Counts["call"]
		}
		return stored+missing >= calls
	})
	if stored+missing != calls || missing < 20 {
		t.Errorf("%d calls, %d are stored and %d are reported as missing", calls, stored, missing)
	}
}

// A relay stops within its time while its disk hangs. The process itself goes when the disk lets
// go of it: this disk puts its callers into a sleep that no signal ends.
func TestDiskStopReal(t *testing.T) {
	skipUnlessSlow(t)
	for _, fault := range []string{"hang fsync events.db*", "hang any *"} {
		d := newDiskRelay(t)
		d.disk.Fault(strings.Fields(fault)...)
		go d.tool("tickets.create", `{"title":"x"}`)
		d.await("the fault", func() bool { return d.ready().status == 503 })
		began := time.Now()
		if err := d.process.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		d.await("the end", func() bool { return strings.Contains(d.process.err.String(), `"msg":"relay stopped"`) })
		if took := time.Since(began); took > patience/4 {
			t.Errorf("%s: stopped after %v", fault, took)
		}
		d.disk.Clear()
		select {
		case <-d.process.ended:
		case <-time.After(patience):
			t.Errorf("%s: the process is still there after the end of the fault", fault)
		}
	}
}

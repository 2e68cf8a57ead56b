package mcp

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime/debug"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// The server of the benchmark is a separate process, so that its CPU is counted apart from
// its clients'. AGENTCTL_MCP_BENCH names the kind of server to be.
func TestMain(m *testing.M) {
	if kind := os.Getenv("AGENTCTL_MCP_BENCH"); kind != "" {
		benchServer(kind)
		return
	}
	_ = flag.Set("test.parallel", "8") // the parallel tests wait, most for notifyInterval; -parallel overrides it
	os.Exit(m.Run())
}

func benchServer(kind string) {
	debug.SetGCPercent(400) // as the relay sets it
	var t testing.B
	var srv *httptest.Server
	if kind == "bare" {
		srv = httptest.NewServer(http.HandlerFunc(bareEcho))
	} else {
		e := newEnv(&t, Options{})
		e.load(newBoard("default", nodeA))
		srv = e.srv
		e.mu.Lock()
		e.audit = make([]kernel.Record, 0, 1<<20)
		e.mu.Unlock()
	}
	if f := os.Getenv("AGENTCTL_MCP_PROFILE"); f != "" {
		out, err := os.Create(f + "." + kind)
		if err != nil {
			panic(err)
		}
		defer out.Close()
		if err := pprof.StartCPUProfile(out); err != nil {
			panic(err)
		}
		defer pprof.StopCPUProfile()
	}
	fmt.Println(srv.Listener.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the benchmark closes it
}

// bareEcho is the least that a JSON-RPC server over net/http does.
func bareEcho(w http.ResponseWriter, r *http.Request) {
	var in struct {
		ID     json.RawMessage `json:"id"`
		Params struct {
			Name      string          `json:"name"`
			Arguments json.RawMessage `json:"arguments"`
		} `json:"params"`
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &in)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"jsonrpc": "2.0", "id": in.ID, "result": map[string]any{"structuredContent": in.Params.Arguments}})
}

// BenchmarkEcho measures the CPU that a server process uses for one echo: bare net/http,
// /mcp without sessions and /mcp with one. Compare cpu-us/op of the three.
func BenchmarkEcho(b *testing.B) {
	for _, kind := range []string{"bare", "modern", "legacy"} {
		b.Run(kind, func(b *testing.B) { benchEcho(b, kind) })
	}
}

func benchEcho(b *testing.B, kind string) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "AGENTCTL_MCP_BENCH="+kind)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	addr = strings.TrimSpace(addr)

	tool := "sysecho." + nodeA + ".echo.invoke"
	head, meta := "", ""
	switch kind {
	case "modern":
		head = "Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: " + tool + "\r\n"
		meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}},`
	case "legacy":
		c := dial(b, addr)
		res := c.post("", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`)
		head = "Mcp-Protocol-Version: 2025-11-25\r\nMcp-Session-Id: " + res.Header.Get("Mcp-Session-Id") + "\r\n"
	}
	const conns = 8
	run := func(n int) {
		var wg sync.WaitGroup
		for k := range conns {
			c := dial(b, addr)
			wg.Go(func() {
				for i := k; i < n; i += conns {
					res := c.post(head, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{%s"name":%q,"arguments":{"message":"hello"}}}`, i, meta, tool))
					if res == nil || res.StatusCode != http.StatusOK {
						b.Errorf("call %d failed", i)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	run(2000) // warm up
	before := cpuOf(b, cmd.Process.Pid)
	b.ResetTimer()
	run(b.N)
	b.StopTimer()
	b.ReportMetric(float64((cpuOf(b, cmd.Process.Pid)-before).Microseconds())/float64(b.N), "cpu-us/op")
}

type rawConn struct {
	b    testing.TB
	c    net.Conn
	r    *bufio.Reader
	addr string
}

func dial(b testing.TB, addr string) *rawConn { return dialWith(b, net.Dialer{}, addr) }

func dialWith(b testing.TB, d net.Dialer, addr string) *rawConn {
	c, err := d.Dial("tcp", addr)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return &rawConn{b, c, bufio.NewReader(c), addr}
}

// post sends one request and reads its answer to the end; nil after an error.
func (c *rawConn) post(head, body string) *http.Response {
	_, err := io.WriteString(c.c, "POST /mcp HTTP/1.1\r\nHost: "+c.addr+"\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"+
		"Authorization: Bearer default/bench\r\n"+head+"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
	if err != nil {
		c.b.Error(err)
		return nil
	}
	res, err := http.ReadResponse(c.r, nil)
	if err != nil {
		c.b.Error(err)
		return nil
	}
	got, err := io.ReadAll(res.Body)
	if err != nil || strings.Contains(string(got), `"isError"`) {
		c.b.Errorf("%s %v", got, err)
		return nil
	}
	return res
}

// cpuOf sums what the scheduler has given to a process's threads, in nanoseconds.
func cpuOf(b *testing.B, pid int) time.Duration {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	tasks, err := os.ReadDir(dir)
	if err != nil {
		b.Skip("no /proc here")
	}
	var sum int64
	for _, t := range tasks {
		data, err := os.ReadFile(dir + "/" + t.Name() + "/schedstat")
		if err != nil {
			continue // the thread has ended
		}
		n, _ := strconv.ParseInt(strings.Fields(string(data))[0], 10, 64)
		sum += n
	}
	return time.Duration(sum)
}

// BenchmarkListTools renders a full page of 30,000 tools, and the fleet toolset.
func BenchmarkListTools(b *testing.B) {
	e := newEnv(b, Options{})
	for i := range 10_000 {
		e.load(newBoard("default", fmt.Sprintf("01j8zz3f0v4q7k2m9x5c1b%04d", i)))
	}
	fleet := &grouped{name: "fleet", scope: manifest.ScopeToolsList, group: kernel.GroupFleet}
	for i := range 12 {
		fleet.tools = append(fleet.tools, fmt.Sprintf("fleet.tool_%d", i))
	}
	e.load(fleet)
	b.Run("default", func(b *testing.B) { listToolset(b, e, kernel.DefaultToolset) })
	b.Run("fleet", func(b *testing.B) { listToolset(b, e, kernel.FleetToolset) })
}

func listToolset(b *testing.B, e *env, set kernel.Toolset) {
	c, err := e.authenticate(httptest.NewRequest("GET", "/", nil))
	if err != nil {
		b.Fatal(err)
	}
	x := &exchange{caller: c, modern: true, toolset: set, tenant: &tenant{h: e.h}}
	b.ReportAllocs()
	for b.Loop() {
		res, err := x.tenant.listTools(x, "")
		if err != nil || len(res.(*result).body) < 1000 {
			b.Fatal(err)
		}
	}
}

// stream sends a POST and gives the JSON messages of its event stream.
func (c *rawConn) stream(head, body string) <-chan map[string]any {
	c.b.Helper()
	_, err := io.WriteString(c.c, "POST /mcp HTTP/1.1\r\nHost: "+c.addr+"\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"+
		head+"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
	if err != nil {
		c.b.Fatal(err)
	}
	return c.events()
}

// events reads a response and gives the JSON messages of its event stream.
func (c *rawConn) events() <-chan map[string]any {
	c.b.Helper()
	res, err := http.ReadResponse(c.r, nil)
	if err != nil {
		c.b.Fatal(err)
	}
	if res.StatusCode != http.StatusOK {
		got, _ := io.ReadAll(res.Body)
		c.b.Fatalf("stream: %s %s", res.Status, got)
	}
	ch := make(chan map[string]any, 4096)
	go func() {
		defer close(ch)
		sc := bufio.NewScanner(res.Body)
		for sc.Scan() {
			var m map[string]any
			if d, ok := strings.CutPrefix(sc.Text(), "data: "); ok && json.Unmarshal([]byte(d), &m) == nil {
				ch <- m
			}
		}
	}()
	return ch
}

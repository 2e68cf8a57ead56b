package process

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// notes is the example plugin of docs/examples, built once.
var notes = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "notes")
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "run")
	out, err := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-o", bin, "agentctl/docs/examples/notes").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return bin, nil
})

func TestMain(m *testing.M) {
	stopGrace, drainTimeout = 500*time.Millisecond, time.Second
	_ = flag.Set("test.parallel", "8") // the parallel tests wait for processes and listQuiet; -parallel overrides it
	code := m.Run()
	if bin, err := notes(); err == nil {
		_ = os.RemoveAll(filepath.Dir(bin))
	}
	os.Exit(code)
}

type scopes []string

func (s scopes) Has(want string) bool {
	for _, have := range s {
		if have == want {
			return true
		}
	}
	return false
}

func caller(have ...string) *kernel.Caller {
	return &kernel.Caller{Tenant: "default", Actor: "tester", Transport: "inproc", Scopes: scopes(have)}
}

var all = caller(manifest.ScopeTicketsRead, manifest.ScopeTicketsWrite, manifest.ScopeKernelAdmin)

// harness is a kernel with a running host and a plugin directory.
type harness struct {
	t    *testing.T
	k    *kernel.Kernel
	h    *Host
	dir  string
	logs *observer.ObservedLogs
}

func newHarness(t *testing.T, names ...string) *harness {
	t.Helper()
	state := t.TempDir() // the plugins are below what they must not see, as by default
	r := &harness{t: t, k: kernel.New(kernel.Options{}), dir: filepath.Join(state, "plugins")}
	if err := os.Mkdir(r.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zap.DebugLevel)
	r.logs = logs
	r.h = New(Options{
		Dir: r.dir, Kernel: r.k, Version: "test", Logger: zap.New(core),
		DataDir: filepath.Join(state, "plugin-data"), Private: []string{state}, NoSandbox: sandbox.Available() != nil,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.k.Run(ctx) })
	started := make(chan struct{})
	wg.Go(func() {
		close(started)
		_ = r.h.Run(ctx, names...)
	})
	<-started
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r
}

// folder makes a plugin folder with a manifest, and an executable when run is not "".
func (r *harness) folder(name, manifest, run string) string {
	r.t.Helper()
	dir := filepath.Join(r.dir, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "plugin.json"), []byte(manifest), 0o644); err != nil {
		r.t.Fatal(err)
	}
	if run != "" {
		if err := os.WriteFile(filepath.Join(dir, "run"), []byte(run), 0o755); err != nil {
			r.t.Fatal(err)
		}
	}
	return dir
}

// notes installs the example as its documentation says.
func (r *harness) notes() {
	r.t.Helper()
	bin, err := notes()
	if err != nil {
		r.t.Fatal(err)
	}
	exe, err := os.ReadFile(bin)
	if err != nil {
		r.t.Fatal(err)
	}
	m, err := os.ReadFile("../../../docs/examples/notes/plugin.json")
	if err != nil {
		r.t.Fatal(err)
	}
	r.folder("notes", string(m), string(exe))
}

func (r *harness) load(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		_, err := r.h.Load(ctx, name)
		if !errors.Is(err, ErrNotRunning) {
			return err
		}
	}
}

func (r *harness) call(tool, args string) (*kernel.Result, error) {
	return r.k.Call(context.Background(), &kernel.Request{Caller: all, Tool: tool, Arguments: json.RawMessage(args)})
}

func (r *harness) mustCall(tool, args, want string) {
	r.t.Helper()
	res, err := r.call(tool, args)
	if err != nil {
		r.t.Fatalf("%s: %v", tool, err)
	}
	if string(res.Structured) != want {
		r.t.Fatalf("%s: got %s, want %s", tool, res.Structured, want)
	}
}

// until waits for a condition that another goroutine or process makes true.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

// pid is that of the plugin's process, from the log.
func (r *harness) pid() int {
	r.t.Helper()
	es := r.logs.FilterMessage("plugin started").All()
	if len(es) == 0 {
		r.t.Fatal("no plugin was started")
	}
	return int(es[len(es)-1].ContextMap()["pid"].(int64))
}

// newNotesHarness is a harness with the example plugin of the documentation, loaded.
func newNotesHarness(t *testing.T) *harness {
	t.Helper()
	r := newHarness(t)
	r.notes()
	if err := r.load("notes"); err != nil {
		t.Fatal(err)
	}
	return r
}

// toolNames are the names of the tools that a caller may call, with spaces between them.
func (r *harness) toolNames(c *kernel.Caller) string {
	tools, _ := r.k.ListTools(c, "", 10)
	var names []string
	for _, tool := range tools {
		names = append(names, tool.Name)
	}
	return strings.Join(names, " ")
}

func TestExamplePlugin(t *testing.T) {
	t.Parallel()
	r := newNotesHarness(t)
	r.mustCall("notes.add", `{"text":"water the beans"}`, `{"number":1}`)
	r.mustCall("notes.search", `{"word":"beans"}`, `{"notes":["water the beans"]}`)
	if _, err := r.call("notes.add", `{"text":""}`); manifest.AsError(err).Code != manifest.ManifestInvalid {
		t.Errorf("arguments that break the schema: %v, want %s", err, manifest.ManifestInvalid)
	}
	for _, tt := range []struct {
		c    *kernel.Caller
		want string
	}{
		{all, "notes.add notes.search"},
		{caller(manifest.ScopeTicketsRead), "notes.search"},
		{caller(manifest.ScopeCallReadOnly), ""},
	} {
		if got := r.toolNames(tt.c); got != tt.want {
			t.Errorf("a caller with %v sees %q, want %q", tt.c.Scopes, got, tt.want)
		}
	}
}

// The subscribers of a resource are notified when the plugin says that it has changed.
func TestWatchedResource(t *testing.T) {
	t.Parallel()
	r := newNotesHarness(t)
	reader := caller(manifest.ScopeTicketsRead)
	sub, err := r.k.Subscribe("default")
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	release, err := r.k.Watch(reader, "mcp://notes/all.json")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	n := 0
	until(t, "an update of the watched resource", func() bool { // the plugin may not have received the subscription yet
		n++
		r.mustCall("notes.add", `{"text":"again"}`, `{"number":`+strconv.Itoa(n)+`}`)
		select {
		case <-sub.Ready():
			return len(sub.Next().Updated) > 0
		default:
			return false
		}
	})
	_, content, err := r.k.Read(context.Background(), reader, "mcp://notes/all.json")
	if err != nil || !strings.HasPrefix(string(content), `["again"`) {
		t.Errorf("read: %s, %v", content, err)
	}
}

// Unload ends the process, if the version is the one that runs.
func TestUnload(t *testing.T) {
	t.Parallel()
	r := newNotesHarness(t)
	if err := r.h.Unload(t.Context(), "notes@2.0.0"); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("another version: %v, want %v", err, ErrNotLoaded)
	}
	if err := r.h.Unload(t.Context(), "notes@1.0.0"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(r.pid(), 0); err == nil {
		t.Error("the process outlived its plugin")
	}
	if got := r.toolNames(all); got != "" {
		t.Errorf("an unloaded plugin still offers %q", got)
	}
}

// TestKilledPluginIsRestarted: its tools stay listed, the next call waits for it.
func TestKilledPluginIsRestarted(t *testing.T) {
	t.Parallel()
	r := newNotesHarness(t)
	for i := range 3 {
		r.mustCall("notes.add", `{"text":"x"}`, `{"number":1}`) // a new process knows nothing
		old := r.pid()
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		// Not sooner, or the next call may still reach the dying one.
		until(t, "start of another process", func() bool { return r.pid() != old })
		if got := r.h.List(); len(got) != 1 || got[0].Failures != i+1 {
			t.Errorf("list: %+v", got)
		}
		if tools, _ := r.k.ListTools(all, "", 10); len(tools) != 2 {
			t.Errorf("tools went with the process: %v", tools)
		}
	}
}

// shellServer is a plugin in a few lines of shell: it answers the handshake and does as notified.
func shellServer(calls string) string {
	return `#!/bin/sh
while read -r line; do
  id=$(printf '%s' "$line" | sed -n 's/.*"id":\([0-9]*\).*/\1/p')
  case $line in
  *'"initialize"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"protocolVersion":"2025-06-18","capabilities":{}}}';;
  *'"tools/list"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"tools":[{"name":"odd.do"}]}}';;
  *'"tools/call"'*) ` + calls + `;;
  esac
done
`
}

const odd = `{"name":"odd","version":"0.1.0","tools":[{"name":"odd.do","description":"d","inputSchema":{"type":"object"},"outputSchema":{"type":"object","required":["n"]}}]}`

func TestMisbehavingPlugins(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, calls string
		reason      string
	}{
		{"dies in a call", `kill -9 $$`, "plugin_died"},
		{"answers nonsense", `echo '{"jsonrpc":"2.0","id":'$id',"result":7}'`, manifest.ReasonBadResult},
		{"lies about its result", `echo '{"jsonrpc":"2.0","id":'$id',"result":{"structuredContent":{"m":1}}}'`, manifest.ReasonBadResult},
		{"fails", `echo '{"jsonrpc":"2.0","id":'$id',"error":{"code":-32603,"message":"secret"}}'`, "plugin_error"},
		{"writes no JSON", `echo hello`, "plugin_died"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := newOddHarness(t, tt.calls).call("odd.do", `{}`)
			if e := manifest.AsError(err); err == nil || e.Reason != tt.reason || strings.Contains(e.Message, "secret") {
				t.Errorf("got %v (%+v), want the reason %s", err, e, tt.reason)
			}
		})
	}
}

// newOddHarness is a harness with the shell server odd, loaded, which does this at each call.
func newOddHarness(t *testing.T, calls string) *harness {
	t.Helper()
	r := newHarness(t)
	r.folder("odd", odd, shellServer(calls))
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	return r
}

// A JSON-RPC error of a plugin is its answer, and no fault.
func TestPluginAnswersAnError(t *testing.T) {
	t.Parallel()
	r := newOddHarness(t, `echo '{"jsonrpc":"2.0","id":'$id',"error":{"code":-32602,"message":"no such bed"}}'`)
	res, err := r.call("odd.do", `{}`)
	if err != nil || res.RPCError == nil || res.RPCError.Code != -32602 {
		t.Errorf("got %+v, %v; want the error -32602", res, err)
	}
}

// A call of a plugin that hangs ends with its caller's time.
func TestPluginThatHangs(t *testing.T) {
	t.Parallel()
	r := newOddHarness(t, `sleep 60`)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := r.k.Call(ctx, &kernel.Request{Caller: all, Tool: "odd.do"}); manifest.AsError(err).Code != manifest.DeadlineExceeded {
		t.Errorf("got %v, want %s", err, manifest.DeadlineExceeded)
	}
}

// A plugin gets the trace id of a call, and who calls. What it writes to stderr is logged.
func TestPluginLearnsItsCaller(t *testing.T) {
	t.Parallel()
	r := newOddHarness(t, `echo "$line" >&2; echo '{"jsonrpc":"2.0","id":'$id',"result":{"content":[],"structuredContent":{"n":1}}}'`)
	trace := strings.Repeat("a", 32)
	if _, err := r.k.Call(t.Context(), &kernel.Request{Caller: all, Tool: "odd.do", TraceID: trace}); err != nil {
		t.Fatal(err)
	}
	lines := func() *observer.ObservedLogs { return r.logs.FilterMessage("plugin stderr") }
	until(t, "a line of stderr", func() bool { return lines().Len() > 0 })
	line := fmt.Sprint(lines().All()[0].ContextMap()["line"])
	for _, want := range []string{`"traceparent":"00-` + trace + `-`, `"agentctl/caller":{"agent_id":"tester","tenant":"default"}`} {
		if !strings.Contains(line, want) {
			t.Errorf("the plugin got %s, want %s in it", line, want)
		}
	}
}

// What is wrong with a folder is said before anything runs.
func TestRefused(t *testing.T) {
	for _, tt := range []struct {
		name  string
		lay   func(r *harness)
		wants string
	}{
		{"nothing there", func(*harness) {}, "no such file"},
		{"no executable", func(r *harness) { r.folder("odd", odd, "") }, `neither an executable "run" nor a socket`},
		{"bad JSON", func(r *harness) { r.folder("odd", "{", shellServer("")) }, "plugin.json of plugin odd"},
		{"another name", func(r *harness) { r.folder("odd", strings.ReplaceAll(odd, "odd", "even"), shellServer("")) }, "names the plugin even"},
		{"another's tool", func(r *harness) { r.folder("odd", strings.Replace(odd, "odd.do", "kernel.do", 1), shellServer("")) }, "must begin with the plugin's name"},
		{"another's resource", func(r *harness) {
			r.folder("odd", strings.Replace(odd, `"tools"`, `"resources":[{"uri":"mcp://even/a.json","description":"d"}],"tools"`, 1), shellServer(""))
		}, "must begin with the plugin's name: mcp://odd/"},
		{"a device's scope", func(r *harness) {
			r.folder("odd", strings.Replace(odd, `"tools"`, `"capabilities":["device.connect"],"tools"`, 1), shellServer(""))
		}, "(use odd.read, or one of tools.call.read_only, "},
		{"a schema that reads files", func(r *harness) {
			r.folder("odd", strings.Replace(odd, `{"type":"object"}`, `{"$ref":"file:///etc/passwd"}`, 1), shellServer(""))
		}, "refers to another document"},
		{"writable by others", func(r *harness) {
			if err := os.Chmod(filepath.Join(r.folder("odd", odd, shellServer("")), "run"), 0o777); err != nil {
				r.t.Fatal(err)
			}
		}, "chmod go-w"},
		{"a link", func(r *harness) {
			dir := r.folder("odd", odd, "")
			if err := os.Symlink("/bin/true", filepath.Join(dir, "run")); err != nil {
				r.t.Fatal(err)
			}
		}, "not a link"},
		{"serves less than it says", func(r *harness) {
			r.folder("odd", strings.Replace(odd, `"tools":[`, `"tools":[{"name":"odd.more","description":"d","inputSchema":{"type":"object"}},`, 1), shellServer(""))
		}, "tools/list of the server has not"},
		{"does not greet", func(r *harness) { r.folder("odd", odd, "#!/bin/sh\nexit 3\n") }, "does not answer initialize"},
		{"does not start", func(r *harness) { r.folder("odd", odd, "#!/nonexistent\n") }, "start "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newHarness(t)
			tt.lay(r)
			if err := r.load("odd"); err == nil || !strings.Contains(err.Error(), tt.wants) {
				t.Errorf("got %v, want %q in it", err, tt.wants)
			}
			if tools, _ := r.k.ListTools(all, "", 10); len(tools) != 0 {
				t.Errorf("it offers %v", tools)
			}
		})
	}
	r := newHarness(t)
	for _, name := range []string{"../odd", "kernel", "", "a/b"} {
		if err := r.load(name); err == nil || !strings.Contains(err.Error(), "cannot be the name") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// socketServer serves the example plugin at a socket, for any number of connections. Its stop ends
// it as the end of its process would.
func socketServer(t *testing.T, bin, path string, conns chan<- net.Conn) (stop func()) {
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			if conns != nil {
				conns <- nc
			}
			wg.Go(func() {
				defer nc.Close()
				defer context.AfterFunc(ctx, func() { _ = nc.Close() })() // ends the copying, too
				cmd := exec.CommandContext(ctx, bin)
				cmd.Stdin, cmd.Stdout = nc, nc
				_ = cmd.Run()
			})
		}
	})
	return func() {
		_ = ln.Close()
		cancel()
		wg.Wait()
	}
}

// socketPlugin makes the folder of the example plugin behind a socket, and returns the
// program and the path of the socket.
func (r *harness) socketPlugin() (bin, socket string) {
	r.t.Helper()
	bin, err := notes()
	if err != nil {
		r.t.Fatal(err)
	}
	m, err := os.ReadFile("../../../docs/examples/notes/plugin.json")
	if err != nil {
		r.t.Fatal(err)
	}
	return bin, filepath.Join(r.folder("notes", string(m), ""), socketFile)
}

// TestSocketPlugin: the same example behind a unix socket.
func TestSocketPlugin(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	bin, socket := r.socketPlugin()
	conns := make(chan net.Conn, 16)
	defer socketServer(t, bin, socket, conns)()
	if err := r.load("notes"); err != nil {
		t.Fatal(err)
	}
	r.mustCall("notes.add", `{"text":"x"}`, `{"number":1}`)
	(<-conns).Close()
	again := <-conns // it is dialled again
	r.mustCall("notes.add", `{"text":"x"}`, `{"number":1}`)
	if err := r.h.Unload(t.Context(), "notes"); err != nil {
		t.Fatal(err)
	}
	again.Close()
}

// A server that is replaced again and again is connected as soon as its socket is there, however
// long the back-off is by then. Calls wait for it.
func TestReplacedSockets(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	bin, socket := r.socketPlugin()
	stop := socketServer(t, bin, socket, nil)
	defer func() { stop() }()
	if err := r.load("notes"); err != nil {
		t.Fatal(err)
	}
	for range 9 {
		stop()
		until(t, "end of the connection", func() bool { return r.h.List()[0].State == "down" })
		stop = socketServer(t, bin, socket, nil)
		r.mustCall("notes.add", `{"text":"x"}`, `{"number":1}`)
	}
}

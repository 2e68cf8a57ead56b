package stages_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

type scopes string

func (s scopes) Has(scope string) bool { return slices.Contains(strings.Fields(string(s)), scope) }

func agent(has ...string) *kernel.Caller {
	return &kernel.Caller{Tenant: "a", Actor: "agent-1", Transport: "http", Scopes: scopes(strings.Join(append(has, "x:y"), " "))}
}

// plugin answers as its functions say, and remembers the arguments that it saw.
type plugin struct {
	name string
	call func(*kernel.Request) (*kernel.Result, error)
	read string
	// schema is the output schema of do; nil: none.
	schema json.RawMessage

	mu   sync.Mutex // protects seen
	seen []string
}

func (p *plugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: p.name, Version: "1.0.0", Inline: true,
		Tools:     []*kernel.Tool{{Name: p.name + ".do", ToolInfo: &kernel.ToolInfo{Scope: "x:y", OutputSchema: p.schema}}, {Name: p.name + ".other", ToolInfo: &kernel.ToolInfo{Scope: "x:y"}}},
		Resources: []*kernel.Resource{{URI: "mcp://" + p.name + "/all.json", Scope: "x:y", MIME: "application/json"}}}
}

func (p *plugin) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	p.mu.Lock()
	p.seen = append(p.seen, string(r.Arguments))
	p.mu.Unlock()
	if p.call != nil {
		return p.call(r)
	}
	return &kernel.Result{Structured: json.RawMessage(`{"by":"` + p.name + `"}`)}, nil
}

func (p *plugin) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return []byte(p.read), nil
}

func (p *plugin) last() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.seen) == 0 {
		return "nothing"
	}
	return p.seen[len(p.seen)-1]
}

// newKernel is a real kernel with plugins and a Manager.
func newKernel(t *testing.T, opt stages.Options, plugins ...*plugin) (*kernel.Kernel, *stages.Manager) {
	t.Helper()
	k := kernel.New(kernel.Options{})
	for _, p := range plugins {
		if err := k.Load(p, false); err != nil {
			t.Fatal(err)
		}
	}
	m, err := stages.New(k.Pipeline(), opt)
	if err != nil {
		t.Fatal(err)
	}
	return k, m
}

// enable configures a stage for every request and switches it on.
func enable(t *testing.T, m *stages.Manager, name, config string) {
	t.Helper()
	if err := m.Configure(name, "global", []byte(config)); err != nil {
		t.Fatal(err)
	}
	if err := m.Enable(name, "global"); err != nil {
		t.Fatal(err)
	}
}

func request(c *kernel.Caller, tool, args, meta string) *kernel.Request {
	r := &kernel.Request{Caller: c, Tool: tool, Arguments: json.RawMessage(args)}
	if meta != "" {
		r.Meta = json.RawMessage(meta)
	}
	return r
}

func wantCode(t *testing.T, what string, err error, code manifest.Code, reason string) {
	t.Helper()
	var e *manifest.Error
	if !errors.As(err, &e) || e.Code != code || (reason != "" && e.Reason != reason) {
		t.Errorf("%s: got %v (%+v), want %s for %s", what, err, e, code, reason)
	}
}

// keyDir is a directory with keys "k1" and "k2", and some that are no good.
func keyDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	for name, f := range map[string]struct {
		text string
		mode os.FileMode
	}{
		filepath.Join(dir, "k1"):    {strings.Repeat("1", 32) + "\n", 0o600},
		filepath.Join(dir, "k2"):    {strings.Repeat("2", 40), 0o400},
		filepath.Join(dir, "short"): {strings.Repeat("1", 31) + "\n", 0o600},
		filepath.Join(dir, "open"):  {strings.Repeat("1", 32), 0o644},
		filepath.Join(dir, "large"): {strings.Repeat("1", 4097), 0o600},
		outside:                     {strings.Repeat("1", 32), 0o600},
	} {
		if err := os.WriteFile(name, []byte(f.text), f.mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Notify implements kernel.Session.
func (s *progress) Notify(_ context.Context, method string, params json.RawMessage) error {
	s.notified = append(s.notified, method+" "+string(params))
	return nil
}

// Request implements kernel.Session.
func (s *progress) Request(_ context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	s.notified = append(s.notified, method+" "+string(params))
	return json.RawMessage(`{}`), nil
}

// device is a board as a plugin: one unary tool and one stream.
type device struct{ node string }

func (d *device) tool() string { return "sysecho." + d.node + ".echo.invoke" }

func (d *device) stream() string { return "sys." + d.node + ".metrics.subscribe" }

func (d *device) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "device:" + d.node, Version: "1.0.0", Tenant: "a", Tools: []*kernel.Tool{
		{Name: d.tool(), NodeID: d.node, ToolInfo: &kernel.ToolInfo{Scope: "x:y"}}, {Name: d.stream(), NodeID: d.node, ToolInfo: &kernel.ToolInfo{Scope: "x:y", Streams: true}}}}
}

func (d *device) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	if r.Tool == d.stream() {
		return &kernel.Result{Stream: stream{}}, nil
	}
	return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
}

// loadDevice loads a board.
func loadDevice(t *testing.T, k *kernel.Kernel) *device {
	t.Helper()
	d := &device{node: "01hzx9k3m4p7q8r9s0t1v2w3xy"}
	if err := k.Load(d, false); err != nil {
		t.Fatal(err)
	}
	return d
}

// stream is a metric stream without frames.
type stream struct{ kernel.Stream }

package test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	plugproc "agentctl/relay/plugins/process"
)

// TestTranscript plays one script to one plugin in every way a caller can reach the
// kernel and in every way a plugin can be attached to it. What comes back must be the
// same, word for word: testdata/transcript.golden.
func TestTranscript(t *testing.T) {
	t.Parallel()
	golden, err := os.ReadFile("testdata/transcript.golden")
	if err != nil && !*update {
		t.Fatal(err)
	}
	bin, err := builtPackage("agentctl/docs/examples/notes")
	if err != nil {
		t.Fatal(err)
	}
	for plugin, attach := range map[string]func(*testing.T, *kernel.Kernel, string) (watched func() bool){
		"inproc": attachNotes, "process": attachProcess, "socket": attachSocket,
	} {
		for transport, dial := range map[string]func(*testing.T, *kernel.Kernel) speaker{
			"inproc": speakBus, "http": speakHTTP, "sse": speakSSE, "stdio": speakStdio,
		} {
			t.Run(plugin+"/"+transport, func(t *testing.T) {
				k := kernel.New(kernel.Options{})
				ctx, cancel := context.WithCancel(context.Background())
				var wg sync.WaitGroup
				wg.Go(func() { _ = k.Run(ctx) })
				t.Cleanup(func() { cancel(); wg.Wait() })
				watched := attach(t, k, bin)
				got := playTranscript(t, dial(t, k), watched)
				if *update {
					if err := os.WriteFile("testdata/transcript.golden", []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
					golden = []byte(got)
				}
				if got != string(golden) {
					t.Errorf("got\n%swant\n%s", got, golden)
				}
			})
		}
	}
}

// speaker is a client of the kernel. What it returns is free of what only its transport
// has.
type speaker interface {
	tools() string
	call(tool, args string) string
	read(uri string) string
	subscribe(uri string)
	updated() string // waits for the next update of a resource
}

// playTranscript waits for watched before it changes a subscribed resource: MCP confirms a
// subscription to the client, but not when it has reached the plugin.
func playTranscript(t *testing.T, s speaker, watched func() bool) string {
	t.Helper()
	const uri = "mcp://notes/all.json"
	var b strings.Builder
	line := func(did, got string) { fmt.Fprintf(&b, "%s\n  %s\n", did, got) }
	call := func(tool, args string) { line("tools/call "+tool+" "+args, s.call(tool, args)) }
	line("tools/list", s.tools())
	call("notes.add", `{"text":"water the beans"}`)
	call("notes.add", `{"text":"turn the compost"}`)
	call("notes.search", `{"word":"beans"}`)
	call("notes.search", `{"word":""}`)
	call("notes.search", `{"word":"x","more":1}`)
	call("notes.burn", `{}`)
	line("resources/read "+uri, s.read(uri))
	line("resources/read mcp://notes/none.json", s.read("mcp://notes/none.json"))
	s.subscribe(uri)
	eventually(t, "the plugin knows of the subscription", watched)
	call("notes.add", `{"text":"third"}`)
	line("updated", s.updated())
	line("resources/read "+uri, s.read(uri))
	return b.String()
}

type allScopes struct{}

func (allScopes) Has(string) bool { return true }

func notesCaller(transport string) *kernel.Caller {
	return &kernel.Caller{Tenant: "default", Actor: "script", Transport: transport, Scopes: allScopes{}}
}

// --- the ways to attach the plugin

// inprocNotes is the example plugin as a part of this program.
type inprocNotes struct {
	m *kernel.Manifest

	mu      sync.Mutex // protects the fields below
	notes   []string
	changed func()
}

func attachNotes(t *testing.T, k *kernel.Kernel, _ string) func() bool {
	t.Helper()
	m, err := plugproc.Manifest(notesManifest(t))
	if err != nil {
		t.Fatal(err)
	}
	p := &inprocNotes{m: m, notes: []string{}}
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.changed != nil
	}
}

func (p *inprocNotes) Manifest() *kernel.Manifest { return p.m }

func (p *inprocNotes) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	var a struct{ Text, Word string }
	if err := json.Unmarshal(r.Arguments, &a); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var v any
	if r.Target().Name == "notes.add" {
		p.notes = append(p.notes, a.Text)
		if p.changed != nil {
			p.changed()
		}
		v = map[string]any{"number": len(p.notes)}
	} else {
		found := []string{}
		for _, n := range p.notes {
			if strings.Contains(n, a.Word) {
				found = append(found, n)
			}
		}
		v = map[string]any{"notes": found}
	}
	b, err := json.Marshal(v)
	return &kernel.Result{Structured: b}, err
}

func (p *inprocNotes) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return json.Marshal(p.notes)
}

func (p *inprocNotes) Watch(ctx context.Context, _ string, changed func()) error {
	p.mu.Lock()
	p.changed = changed
	p.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

func notesManifest(t *testing.T) []byte {
	t.Helper()
	m, err := os.ReadFile("../docs/examples/notes/plugin.json")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func attachFolder(t *testing.T, k *kernel.Kernel, lay func(folder string)) func() bool {
	t.Helper()
	dir := t.TempDir()
	folder := filepath.Join(dir, "notes")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "plugin.json"), notesManifest(t), 0o644); err != nil {
		t.Fatal(err)
	}
	lay(folder)
	core, logs := observer.New(zap.DebugLevel)
	h := plugproc.New(plugproc.Options{Dir: dir, Kernel: k, Version: "test", Logger: zap.New(core)})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	for {
		_, err := h.Load(ctx, "notes")
		if err == nil {
			return func() bool { return logs.FilterMessage("plugin accepted a subscription").Len() > 0 }
		}
		if !errors.Is(err, plugproc.ErrNotRunning) {
			t.Fatal(err)
		}
	}
}

func attachProcess(t *testing.T, k *kernel.Kernel, bin string) func() bool {
	return attachFolder(t, k, func(folder string) {
		b, err := os.ReadFile(bin)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "run"), b, 0o755); err != nil {
			t.Fatal(err)
		}
	})
}

func attachSocket(t *testing.T, k *kernel.Kernel, bin string) func() bool {
	return attachFolder(t, k, func(folder string) {
		ln, err := net.Listen("unix", filepath.Join(folder, "run.sock"))
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				nc, err := ln.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					defer nc.Close()
					cmd := exec.Command(bin)
					cmd.Stdin, cmd.Stdout = nc, nc
					_ = cmd.Run()
				})
			}
		})
		t.Cleanup(func() { ln.Close(); wg.Wait() })
	})
}

// --- the ways to speak to the kernel

// bus speaks to the kernel in its own process.
type bus struct {
	t   *testing.T
	k   *kernel.Kernel
	c   *kernel.Caller
	sub *kernel.Subscription
}

func speakBus(t *testing.T, k *kernel.Kernel) speaker {
	sub, err := k.Subscribe("default")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sub.Close)
	return &bus{t, k, notesCaller("inproc"), sub}
}

func (b *bus) tools() string {
	var names []string
	list, _ := b.k.ListTools(b.c, "", 100)
	for _, t := range list {
		names = append(names, t.Name)
	}
	return strings.Join(names, " ")
}

func (b *bus) call(tool, args string) string {
	res, err := b.k.Call(b.t.Context(), &kernel.Request{Caller: b.c, Tool: tool, Arguments: json.RawMessage(args)})
	if err != nil {
		if e := manifest.AsError(err); e.Code != manifest.BadRequest {
			return string(e.Code)
		}
		return "no such tool"
	}
	return compact(res.Structured)
}

func (b *bus) read(uri string) string {
	_, content, err := b.k.Read(b.t.Context(), b.c, uri)
	if err != nil {
		return "no such resource"
	}
	return compact(content)
}

func (b *bus) subscribe(uri string) {
	release, err := b.k.Watch(b.c, uri)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(release)
}

func (b *bus) updated() string {
	deadline := time.After(patience)
	for {
		select {
		case <-b.sub.Ready():
			if c := b.sub.Next(); len(c.Updated) > 0 {
				return strings.Join(c.Updated, " ")
			}
		case <-deadline:
			return "nothing"
		}
	}
}

func compact(b []byte) string {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err.Error()
	}
	out, _ := json.Marshal(v) // it was JSON
	return string(out)
}

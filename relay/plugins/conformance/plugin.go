// Package conformance is a plugin with the tools, resources and prompts that the official
// MCP conformance suite calls by name. It is off by default and has no other use:
// `agentctl relay --anonymous --plugin conformance`.
//
//	p := conformance.New(k)
//	err := k.Load(p, false)
//
// The scenarios of the npm package @modelcontextprotocol/conformance define what each
// fixture answers. tools.go has the tools that need no input and those that send requests
// to the client during a call; inputrequired.go the tools of protocol version 2026-07-28,
// which ask for input by their result (SEP-2322); resources.go resources and prompts.
package conformance

import (
	"cmp"
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"agentctl/relay/kernel"
)

// scope is the scope that every fixture requires: that of a read-only tool.
const scope = "tools:call:read_only"

// Plugin serves the fixtures. Make one with New. All callers share its two lists: a tool that
// changes them changes them for every client.
type Plugin struct {
	k   *kernel.Kernel
	key [32]byte // signs request states

	mu                 sync.Mutex // protects the fields below
	hasTransientTool   bool       // whether test_transient_tool is in the list
	hasTransientPrompt bool       // whether test_transient_prompt is in the list
}

// New makes the plugin. It notifies the subscribers of k of its changes.
func New(k *kernel.Kernel) *Plugin {
	p := &Plugin{k: k}
	_, _ = rand.Read(p.key[:]) // never fails on Linux
	return p
}

var (
	_ kernel.Plugin        = (*Plugin)(nil)
	_ kernel.Reader        = (*Plugin)(nil)
	_ kernel.Watcher       = (*Plugin)(nil)
	_ kernel.MethodHandler = (*Plugin)(nil)
)

// Manifest implements kernel.Plugin.
// The kernel reads it at each Load, so test_trigger_tool_change loads the plugin again.
func (p *Plugin) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: "conformance", Version: "1.0.0", Resources: resources}
	for i := range tools {
		m.Tools = append(m.Tools, tools[i].tool())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hasTransientTool {
		m.Tools = append(m.Tools, (&fixture{name: "test_transient_tool", about: "Is in the list after every other test_trigger_tool_change."}).tool())
	}
	return m
}

// fixture is a tool of the suite.
type fixture struct {
	name  string
	about string
	input string // JSON schema; empty: no arguments
	run   runFunc
}

// runFunc runs a fixture.
type runFunc = func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error)

// tool is the fixture as the kernel lists it. It has no CheckArguments: the suite tests what
// a server does with odd arguments.
func (f *fixture) tool() *kernel.Tool {
	in := cmp.Or(f.input, `{"type":"object"}`)
	return &kernel.Tool{Name: f.name, ToolInfo: &kernel.ToolInfo{Description: f.about, InputSchema: json.RawMessage(in), Scope: scope}}
}

// Call implements kernel.Plugin. test_transient_tool has no entry in tools, so it gets the
// answer at the end.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for i := range tools {
		if tools[i].name == r.Tool {
			return tools[i].run(ctx, p, r)
		}
	}
	return texts("This tool does nothing."), nil
}

// object is a JSON object.
type object = map[string]any

// encode encodes plain values of this package, which cannot fail.
func encode(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

// textBlock is an MCP content block with a formatted text.
func textBlock(format string, a ...any) object {
	return object{"type": "text", "text": fmt.Sprintf(format, a...)}
}

// content is a result with these blocks.
func content(blocks ...object) *kernel.Result {
	res := &kernel.Result{}
	for _, b := range blocks {
		res.Content = append(res.Content, encode(b))
	}
	return res
}

// texts is a result with one text block.
func texts(format string, a ...any) *kernel.Result { return content(textBlock(format, a...)) }

// failure is the result of a tool that failed.
func failure(format string, a ...any) *kernel.Result {
	res := texts(format, a...)
	res.IsError = true
	return res
}

// sleep waits for d, or until the call ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

//go:embed pixel.png
var pixelPNG []byte // one red pixel

//go:embed silence.wav
var silenceWAV []byte // four samples: 8 kHz, mono, 8 bit

// imageBlock is an MCP content block with the picture.
func imageBlock() object {
	return object{"type": "image", "data": base64.StdEncoding.EncodeToString(pixelPNG), "mimeType": "image/png"}
}

// resourceBlock is an MCP content block with an embedded text resource.
func resourceBlock(uri, mime, text string) object {
	return object{"type": "resource", "resource": object{"uri": uri, "mimeType": mime, "text": text}}
}

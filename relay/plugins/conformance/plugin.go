// Package conformance is a plugin with the tools, resources and prompts that the
// official MCP conformance suite calls by name. It is off by default and of no use to
// anybody else: `agentctl relay --anonymous --plugin conformance`.
//
//	p := conformance.New(k)
//	err := k.Load(p, false)
//
// What a fixture has to answer is told by the scenarios of the npm package
// @modelcontextprotocol/conformance.
package conformance

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"sync"
	"time"

	"agentctl/relay/kernel"
)

// scope is what a caller must hold for every fixture: that of any read-only tool.
const scope = "tools:call:read_only"

// Plugin serves the fixtures. Make one with New.
type Plugin struct {
	k   *kernel.Kernel
	key [32]byte // signs request states

	mu      sync.Mutex // protects extra
	extra   bool       // whether the transient tool is in the list
	prompts bool       // whether the transient prompt is
}

// New makes the plugin; k is the kernel that it announces its changes to.
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
func (p *Plugin) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: "conformance", Version: "1.0.0", Resources: resources}
	for i := range tools {
		m.Tools = append(m.Tools, tools[i].tool())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.extra {
		m.Tools = append(m.Tools, (&fixture{name: "test_transient_tool", about: "Is in the list after every other test_trigger_tool_change."}).tool())
	}
	return m
}

// fixture is one tool.
type fixture struct {
	name  string
	about string
	input string // JSON schema; empty: no arguments
	run   func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error)
}

func (f *fixture) tool() *kernel.Tool {
	in := f.input
	if in == "" {
		in = `{"type":"object"}`
	}
	return &kernel.Tool{Name: f.name, Description: f.about, InputSchema: json.RawMessage(in), Scope: scope}
}

// Call implements kernel.Plugin.
func (p *Plugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	for i := range tools {
		if tools[i].name == r.Tool {
			return tools[i].run(ctx, p, r)
		}
	}
	return texts("This tool does nothing."), nil
}

// object is a JSON object in the making.
type object = map[string]any

// encode turns a value of this package's own making into JSON; it cannot fail.
func encode(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

func textBlock(format string, a ...any) object {
	return object{"type": "text", "text": fmt.Sprintf(format, a...)}
}

func content(blocks ...object) *kernel.Result {
	res := &kernel.Result{}
	for _, b := range blocks {
		res.Content = append(res.Content, encode(b))
	}
	return res
}

func texts(format string, a ...any) *kernel.Result { return content(textBlock(format, a...)) }

func failure(format string, a ...any) *kernel.Result {
	res := texts(format, a...)
	res.IsError = true
	return res
}

// sleep waits, or less when the call ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// picture is a PNG of one red pixel.
var picture = sync.OnceValue(func() []byte {
	img := image.NewRGBA(image.Rect(0, 0, 1, 1))
	img.Set(0, 0, color.RGBA{R: 255, A: 255})
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		panic(err)
	}
	return buf.Bytes()
})

// silence is a WAV file of four samples: 8 kHz, mono, 8 bit.
var silence = sync.OnceValue(func() []byte {
	samples := []byte{128, 128, 128, 128}
	var buf bytes.Buffer
	buf.WriteString("RIFF")
	for _, part := range []any{
		uint32(36 + len(samples)), [8]byte{'W', 'A', 'V', 'E', 'f', 'm', 't', ' '},
		uint32(16), uint16(1), uint16(1), uint32(8000), uint32(8000), uint16(1), uint16(8),
		[4]byte{'d', 'a', 't', 'a'}, uint32(len(samples)), samples,
	} {
		_ = binary.Write(&buf, binary.LittleEndian, part) // a bytes.Buffer takes everything
	}
	return buf.Bytes()
})

func imageBlock() object {
	return object{"type": "image", "data": base64.StdEncoding.EncodeToString(picture()), "mimeType": "image/png"}
}

func resourceBlock(uri, mime, text string) object {
	return object{"type": "resource", "resource": object{"uri": uri, "mimeType": mime, "text": text}}
}

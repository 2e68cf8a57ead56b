package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"image/png"
	"strings"
	"testing"

	"agentctl/relay/kernel"
)

// failingSession is a client that supports nothing and records all notifications.
type failingSession struct {
	caps string
	said []string
}

func (d *failingSession) Notify(_ context.Context, method string, params json.RawMessage) error {
	d.said = append(d.said, method+" "+string(params))
	return nil
}
func (*failingSession) Request(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	return nil, errors.New("nobody there")
}
func (*failingSession) ProgressToken() any              { return nil }
func (d *failingSession) Capabilities() json.RawMessage { return json.RawMessage(d.caps) }

type allScopes struct{}

func (allScopes) Has(string) bool { return true }

var caller = &kernel.Caller{Tenant: "t", Actor: "a", Scopes: allScopes{}}

// TestFixtures calls every tool of a loaded plugin once: each has to answer or to ask.
func TestFixtures(t *testing.T) {
	k := kernel.New(kernel.Options{})
	if err := k.Load(New(k), false); err != nil {
		t.Fatal(err)
	}
	list, _ := k.ListTools(caller, "", 100)
	if len(list) != len(tools) {
		t.Fatalf("%d tools, want %d", len(list), len(tools))
	}
	for _, tool := range list {
		var schema map[string]any
		if err := json.Unmarshal(tool.InputSchema, &schema); err != nil || schema["type"] != "object" || tool.Description == "" {
			t.Errorf("%s: schema %s, %v", tool.Name, tool.InputSchema, err)
		}
		res, err := k.Call(t.Context(), &kernel.Request{Caller: caller, Tool: tool.Name, Session: &failingSession{}})
		if err != nil {
			t.Errorf("%s: %v", tool.Name, err)
			continue
		}
		if len(res.Content) == 0 && len(res.InputRequests) == 0 && res.RPCError == nil {
			t.Errorf("%s answers nothing", tool.Name)
		}
		for _, c := range res.Content {
			if !json.Valid(c) {
				t.Errorf("%s: content %s", tool.Name, c)
			}
		}
	}
}

func TestChanges(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := New(k)
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	sub, err := k.Subscribe("t")
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	for _, want := range []int{len(tools) + 1, len(tools)} {
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: caller, Tool: "test_trigger_tool_change", Session: &failingSession{}}); err != nil {
			t.Fatal(err)
		}
		if list, _ := k.ListTools(caller, "", 100); len(list) != want || !sub.Next().Tools {
			t.Errorf("%d tools, want %d and to be notified", len(list), want)
		}
	}
	before := string(p.listPrompts())
	if _, err := k.Call(t.Context(), &kernel.Request{Caller: caller, Tool: "test_trigger_prompt_change", Session: &failingSession{}}); err != nil {
		t.Fatal(err)
	}
	if string(p.listPrompts()) == before || !sub.Next().Prompts {
		t.Error("the list of prompts did not change, or nobody was notified")
	}
}

func TestNotifies(t *testing.T) {
	k := kernel.New(kernel.Options{})
	if err := k.Load(New(k), false); err != nil {
		t.Fatal(err)
	}
	for tool, word := range map[string]string{"test_tool_with_logging": "notifications/message", "test_tool_with_progress": "notifications/progress"} {
		d := &failingSession{}
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: caller, Tool: tool, Session: d}); err != nil {
			t.Fatal(err)
		}
		if len(d.said) != 3 || !strings.HasPrefix(d.said[2], word) {
			t.Errorf("%s said %q, want three of %s", tool, d.said, word)
		}
	}
}

// TestState: only a state of this process, for this tool, is taken.
func TestState(t *testing.T) {
	p := New(nil)
	s := p.sign("a", "name:Ada")
	if got, ok := p.verify("a", s); !ok || got != "name:Ada" {
		t.Errorf("got %q %v", got, ok)
	}
	flipped := []byte(s)
	flipped[0] ^= 1
	for name, bad := range map[string]string{"empty": "", "longer": s + "-TAMPERED", "flipped": string(flipped), "of another process": New(nil).sign("a", "name:Ada"), "no signature": strings.Split(s, ".")[0]} {
		if _, ok := p.verify("a", bad); ok {
			t.Errorf("a state is taken: %s", name)
		}
	}
	if _, ok := p.verify("b", s); ok {
		t.Error("the state of another tool is taken")
	}
}

func TestMedia(t *testing.T) {
	if img, err := png.Decode(bytes.NewReader(pixelPNG)); err != nil || img.Bounds().Dx() != 1 {
		t.Errorf("picture: %v", err)
	}
	w := silenceWAV
	if len(w) != 48 || string(w[:4]) != "RIFF" || int(w[4])+8 != len(w) || string(w[8:16]) != "WAVEfmt " || string(w[36:40]) != "data" {
		t.Errorf("sound: % x", w)
	}
}

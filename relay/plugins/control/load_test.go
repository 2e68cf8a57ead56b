package control_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"pgregory.net/rapid"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

func TestHealth(t *testing.T) {
	h := newHarness(t)
	h.problems = []string{"the event log is behind"}
	got, err := h.call(admin, "kernel.health.get", "")
	if err != nil || !strings.HasPrefix(got, `{"status":"degraded","problems":["the event log is behind"],`) {
		t.Errorf("got %s, %v", got, err)
	}
}

// Pages of plugins meet every plugin once.
func TestPluginPages(t *testing.T) {
	h := newHarness(t)
	for i := range 25 {
		if err := h.k.Load(&emptyPlugin{fmt.Sprintf("p%02d", i)}, false); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for after, n := "", 0; n < 10; n++ {
		args := `{"limit":7}`
		if after != "" {
			args = `{"limit":7,"after":"` + after + `"}`
		}
		text, err := h.call(admin, "kernel.introspection.plugins", args)
		if err != nil {
			t.Fatal(err)
		}
		var page struct {
			Total   int
			Next    string
			Plugins []struct{ Name string }
		}
		if err := json.Unmarshal([]byte(text), &page); err != nil || page.Total != 26 || len(page.Plugins) > 7 {
			t.Fatalf("%s: %v", text, err)
		}
		for _, p := range page.Plugins {
			got = append(got, p.Name)
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if len(got) != 26 || !slices.IsSorted(got) || len(slices.Compact(got)) != 26 {
		t.Errorf("got %v", got)
	}
}

type emptyPlugin struct{ name string }

func (n *emptyPlugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: n.name, Version: "1.0.0", Tools: []*kernel.Tool{{Name: n.name + ".do", ToolInfo: &kernel.ToolInfo{Scope: "x:y"}}}}
}

func (n *emptyPlugin) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{}, nil
}

// The check accepts what a JSON Schema library accepts by the schema that clients are
// shown, and what it accepts has the same meaning.
func TestArguments(t *testing.T) {
	h := newHarness(t)
	tools, _ := h.k.ListTools(admin, "", 100)
	inputs := make([]*jsonschema.Schema, len(tools))
	for i, tool := range tools {
		inputs[i] = compile(t, tool.InputSchema)
	}
	values := []string{`"acl"`, `"trace"`, `"global"`, `"plugin=tickets"`, `"plugin="`, `"tenant=x"`, `""`, `"Acl"`, `"weather@1.0.0"`, `"a b"`, `"\u0061cl"`, `"x\n"`, `{}`, `{"a":[1]}`, `[]`, `["acl"]`,
		`["acl",1]`, `["acl","Acl"]`, `null`, `true`, `0`, `1`, `500`, `501`, `1e2`, `2.5`, `-1`, `1e400`, `[` + strings.Repeat(`"a",`, 32) + `"a"]`}
	keys := []string{"name", "scope", "config", "order", "tool", "after", "limit", "Name", "other"}
	rapid.Check(t, func(rt *rapid.T) {
		i := rapid.IntRange(0, len(tools)-1).Draw(rt, "tool")
		picked := rapid.SliceOfNDistinct(rapid.SampledFrom(keys), 0, 4, rapid.ID[string]).Draw(rt, "keys")
		parts := make([]string, len(picked))
		for j, k := range picked {
			v := rapid.SampledFrom(values).Draw(rt, k)
			if rapid.Bool().Draw(rt, "fits") {
				v = map[string]string{"config": `{}`, "order": `["acl"]`, "limit": `5`, "scope": `"global"`}[k]
				if v == "" {
					v = `"acl"`
				}
			}
			parts[j] = fmt.Sprintf("%q:%s", k, v)
		}
		raw := "{" + strings.Join(parts, ",") + "}"
		out, err := tools[i].CheckArguments([]byte(raw))
		if strings.Contains(raw, "1e400") {
			if err == nil && strings.Contains(string(out), "limit") {
				rt.Fatalf("%s %s: let through", tools[i].Name, raw)
			}
			return // the library keeps what a float64 cannot hold
		}
		doc, e := jsonschema.UnmarshalJSON(strings.NewReader(raw))
		if e != nil {
			rt.Fatal(e)
		}
		verdict := inputs[i].Validate(doc)
		if (err == nil) != (verdict == nil) {
			rt.Fatalf("%s %s: the check says %v, the schema %v", tools[i].Name, raw, err, verdict)
		}
		if err != nil {
			if e := manifest.AsError(err); e.Code != manifest.ManifestInvalid {
				rt.Fatalf("%s: %v", raw, err)
			}
			return
		}
		again, err := jsonschema.UnmarshalJSON(bytes.NewReader(out))
		if err != nil || inputs[i].Validate(again) != nil {
			rt.Fatalf("%s: let through as %s: %v", raw, out, err)
		}
	})
	for _, bad := range []string{``, `null`, `[]`, `{"name":"acl","name":"acl"}`, `{"name":"acl"} {}`, "{\"name\":\"\xff\"}", `{"name":"acl"`} {
		if _, err := tools[0].CheckArguments([]byte(bad)); err == nil {
			t.Errorf("%q: let through", bad)
		}
	}
}

// The control plane answers within a second while slow calls hold every place of a
// plugin and a flood of fast ones keeps the processors busy.
func TestAnswersUnderSaturation(t *testing.T) {
	h := newHarness(t)
	slow := blockingPlugin{block: make(chan struct{})}
	if err := h.k.Load(slow, false); err != nil {
		t.Fatal(err)
	}
	if err := h.k.Load(&emptyPlugin{"fast"}, false); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"acl", "redact", "rate"} {
		if err := h.m.Enable(name, "global"); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.m.Configure("rate", "global", []byte(`{"limits":[{"per":"agent","rps":100000,"burst":100000}]}`)); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 2 * kernel.DefaultConcurrency {
		wg.Go(func() {
			_, _ = h.k.Call(ctx, &kernel.Request{Caller: others, Tool: "simple.do"})
		})
	}
	for i := range 32 {
		c := caller(fmt.Sprint("flood", i), "x:y")
		wg.Go(func() {
			for ctx.Err() == nil {
				_, _ = h.k.Call(ctx, &kernel.Request{Caller: c, Tool: "fast.do"})
			}
		})
	}
	for h.k.Stats().InFlight < kernel.DefaultConcurrency {
		time.Sleep(time.Millisecond)
	}
	var worst time.Duration
	for i := range 20 {
		start := time.Now()
		if _, err := h.call(admin, "kernel.health.get", ""); err != nil {
			t.Error(err)
		}
		tool := "kernel.middleware.enable"
		if i%2 == 1 {
			tool = "kernel.middleware.disable"
		}
		if _, err := h.call(admin, tool, `{"name":"acl","scope":"plugin=fast"}`); err != nil {
			t.Error(err)
		}
		worst = max(worst, time.Since(start))
	}
	if got := h.k.Stats().InFlight; got < kernel.DefaultConcurrency {
		t.Errorf("only %d calls in flight", got)
	}
	stop()
	close(slow.block)
	wg.Wait()
	if worst > time.Second {
		t.Errorf("health and a swap took %v", worst)
	}
	t.Logf("worst of 20: %v", worst)
}

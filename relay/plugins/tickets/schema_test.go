package tickets

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"pgregory.net/rapid"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

func compile(t testing.TB, raw []byte) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("mem:x", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("mem:x")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestArguments: the check accepts what a JSON Schema library accepts by the schema that
// clients are shown, and what it accepts has the same meaning.
func TestArguments(t *testing.T) {
	schemas := make([]*jsonschema.Schema, len(tools()))
	for i := range tools() {
		schemas[i] = compile(t, tools()[i].tool.InputSchema)
	}
	id := "01HZX9K3M4P7Q8R9S0T1V2W3XY"
	texts := []string{"", "x", " x", "x\ny", "\u00fc\u2028", id, strings.ToLower(id), "8" + id[1:], "ann@example", "-x", "open", "low", "none", "a b",
		strings.Repeat("\u00fc", MaxTitle), strings.Repeat("x", MaxTitle+1), strings.Repeat("\U0001F600", MaxBody+1)}
	var value func(depth int) *rapid.Generator[any]
	names := []string{"id", "title", "body", "node_id", "priority", "approval", "action", "expires_in_s", "idempotency_key", "status",
		"limit", "cursor", "text", "agent_id", "to", "ID", "other"}
	value = func(depth int) *rapid.Generator[any] {
		return rapid.Custom(func(rt *rapid.T) any {
			switch rapid.IntRange(0, 9).Draw(rt, "kind") {
			case 0:
				return rapid.SampledFrom([]any{nil, true, []any{"x"}}).Draw(rt, "other")
			case 1, 2:
				return json.Number(rapid.SampledFrom([]string{"0", "1", "-1", "100", "101", "1e1", "20.0", "20.5", "604800", "604801", "1e400"}).Draw(rt, "number"))
			case 3, 4:
				if depth > 0 {
					return rapid.MapOfN(rapid.SampledFrom(names), value(depth-1), 0, 4).Draw(rt, "object")
				}
			}
			return rapid.SampledFrom(texts).Draw(rt, "text")
		})
	}
	rapid.Check(t, func(rt *rapid.T) {
		i := rapid.IntRange(0, len(tools())-1).Draw(rt, "tool")
		args := object{}
		for name := range compileProps(tools()[i].tool.InputSchema) {
			switch rapid.IntRange(0, 5).Draw(rt, name) {
			case 0, 1: // missing
			case 2:
				args[name] = value(1).Draw(rt, name)
			default:
				args[name] = good[name]
			}
		}
		if rapid.IntRange(0, 9).Draw(rt, "more") == 0 {
			args[rapid.SampledFrom(names).Draw(rt, "name")] = value(1).Draw(rt, "value")
		}
		raw := mustJSON(args)
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
		if err != nil {
			rt.Skip("the other library cannot read it: ", err)
		}
		want := schemas[i].Validate(doc)
		normal, got := tools()[i].tool.CheckArguments(raw)
		if (want == nil) != (got == nil) {
			rt.Fatalf("%s %s: the check says %v, the library %v", tools()[i].tool.Name, raw, got, want)
		}
		if got != nil {
			if e := manifest.AsError(got); e.Code != manifest.ManifestInvalid || !ascii(e.Message) {
				rt.Fatalf("%s: %v", raw, got)
			}
			return
		}
		var a, b any
		if json.Unmarshal(raw, &a) != nil || json.Unmarshal(normal, &b) != nil || fmt.Sprint(a) != fmt.Sprint(b) {
			rt.Fatalf("%s became %s", raw, normal)
		}
	})
}

// good is a value of each argument that fits.
var good = object{"id": "01HZX9K3M4P7Q8R9S0T1V2W3XY", "title": "x", "body": "y", "node_id": "01hzx9k3m4p7q8r9s0t1v2w3xy", "priority": "low",
	"approval": object{"action": "z", "expires_in_s": 60}, "idempotency_key": "k", "status": "open", "limit": 10, "cursor": "01HZX9K3M4P7Q8R9S0T1V2W3XY",
	"text": "t", "agent_id": "ann", "to": "closed"}

func compileProps(raw []byte) object {
	var s struct{ Properties object }
	_ = json.Unmarshal(raw, &s)
	return s.Properties
}

func ascii(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

// TestStrict: what a schema cannot say.
func TestStrict(t *testing.T) {
	for _, raw := range []string{`{"title":"x","title":"y"}`, `{"Title":"x"}`, "{\"title\":\"\xff\"}", `{"title":"x"} {}`, `{"title":"x",}`, ``, `[]`, `"x"`,
		`{"title":"x","approval":{"action":"y","action":"z"}}`, `{"title":"\ud800"}`} {
		if out, err := createFields.Check([]byte(raw)); err == nil {
			t.Errorf("%s is taken as %s", raw, out)
		}
	}
	out, err := listFields.Check([]byte(` { "limit" : 2e1 } `))
	if err != nil || string(out) != `{"limit":20}` {
		t.Errorf("got %s, %v", out, err)
	}
}

// TestAnswers: every answer fits the output schema, errors included.
func TestAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newHarness(t)
		schemas := make(map[string]*jsonschema.Schema)
		for i := range tools() {
			schemas[tools()[i].tool.Name] = compile(t, tools()[i].tool.OutputSchema)
		}
		call := func(c *kernel.Caller, tool string, args object) {
			t.Helper()
			res, err := d.k.Call(context.Background(), &kernel.Request{Caller: c, Tool: "tickets." + tool, Arguments: mustJSON(args)})
			if err != nil {
				t.Fatalf("%s: %v", tool, err)
			}
			doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(res.Structured))
			if err != nil {
				t.Fatal(err)
			}
			if err := schemas["tickets."+tool].Validate(doc); err != nil {
				t.Errorf("%s answers %s: %v", tool, res.Structured, err)
			}
		}
		call(ann, "list", object{})
		call(ann, "create", object{"title": "x", "approval": object{"action": "y"}, "node_id": node})
		id := d.do(ann, "list", object{}).Tickets[0].ID
		call(ann, "comment", object{"id": id, "text": "c"})
		call(ann, "assign", object{"id": id, "agent_id": "bob"})
		call(ann, "transition", object{"id": id, "to": Approved})
		call(ann, "transition", object{"id": id, "to": Open})
		call(bob, "transition", object{"id": id, "to": Approved})
		call(ann, "get", object{"id": id})
		call(ann, "create", object{"title": "y"})
		call(ann, "list", object{"limit": 1})
	})
}

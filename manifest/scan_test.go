package manifest

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"agentctl/strictjson"
)

// literal draws number literals around the bounds of the schemas, in all spellings.
func literal(t *rapid.T) string {
	base := rapid.SampledFrom([]string{"0", "1", "99", "100", "101", "999", "1000", "5000", "60000", "60001",
		"1699999999999", "1700000000000", "1745300000000", "9007199254740993", "999999999999999999", "1000000000000000000"}).Draw(t, "whole")
	if rapid.IntRange(0, 3).Draw(t, "sign") == 0 {
		base = "-" + base
	}
	if rapid.Bool().Draw(t, "fraction") {
		base += "." + rapid.StringMatching(`(0{0,22}[0-9]{0,3}|9{1,20})[05]`).Draw(t, "digits")
	}
	if rapid.IntRange(0, 4).Draw(t, "power") == 0 {
		base += rapid.SampledFrom([]string{"e0", "e1", "E+2", "e-1", "e-3", "e15", "e-400", "e400", "e99999999999"}).Draw(t, "e")
	}
	return base
}

func scalar(t *rapid.T, name string) string {
	switch rapid.IntRange(0, 9).Draw(t, "type") {
	case 0:
		return rapid.SampledFrom([]string{"null", "true", "{}", "[]", `""`, `"5"`, "{\"a\":1}"}).Draw(t, "other")
	case 1, 2:
		return `"` + rapid.StringMatching(`([ -!#-\[\]-~]|\\"|\\\\|\\/|\\n|\\u0041|é){0,6}`).Draw(t, "text") + `"`
	}
	switch name {
	case "node_id":
		return `"` + rapid.StringMatching(`[0-9a-z]{2}hzx9k3m4p7q8r9s0t1v2w3x[a-z]?`).Draw(t, "id") + `"`
	case "stream_id":
		return `"` + rapid.StringMatching(`[0-9]1HZXC0000000000000000DEV[0A-Z]`).Draw(t, "id") + `"`
	case "message":
		return `"` + strings.Repeat("x", rapid.SampledFrom([]int{0, 1, 1023, 1024, 1025}).Draw(t, "length")) + `"`
	}
	return literal(t)
}

// TestNearlyRight compares Validate and the fast path with the oracle, for objects that almost
// fit the schema.
func TestNearlyRight(t *testing.T) {
	var flat []string
	for _, ref := range SchemaNames() {
		if s, _ := lookupSchema(ref); s.object().exact {
			flat = append(flat, ref)
		}
	}
	if len(flat) != 11 {
		t.Fatalf("the fast path knows %v, want the seven schemas of echo and metrics and four inputs without words or arrays", flat)
	}
	fits := 0
	rapid.Check(t, func(t *rapid.T) {
		s, _ := lookupSchema(rapid.SampledFrom(flat).Draw(t, "schema"))
		sh := s.object()
		var members []string
		for _, p := range sh.properties {
			if rapid.IntRange(0, 19).Draw(t, "drop") > 0 {
				members = append(members, fmt.Sprintf("%q:%s", p.name, scalar(t, p.name)))
			}
		}
		if rapid.IntRange(0, 19).Draw(t, "extra") == 0 {
			members = append(members, `"extra":1`)
		}
		if rapid.IntRange(0, 3).Draw(t, "shuffle") == 0 {
			members = rapid.Permutation(members).Draw(t, "order")
		}
		sep := rapid.SampledFrom([]string{",", ", ", ",\n"}).Draw(t, "separator")
		raw := []byte("{" + strings.Join(members, sep) + "}")
		if _, err := strictjson.Decode(raw); err != nil {
			if Validate(s.ref, raw) == nil {
				t.Fatalf("%s is valid but does not decode: %v", raw, err)
			}
			return
		}
		want := oracleFits(s.ref, raw)
		if err := Validate(s.ref, raw); (err == nil) != want {
			t.Fatalf("%s: got %v, the oracle says %v", raw, err, want)
		}
		if _, fast := sh.scan(raw); fast && !want {
			t.Fatalf("%s: the fast path accepts what the oracle refuses", raw)
		}
		if want {
			fits++
		}
	})
	if fits == 0 {
		t.Error("no generated value fits: the test says nothing")
	}
}

// The plain form of what devices and callers send takes the fast path.
func TestPlainFormsAreFast(t *testing.T) {
	tests := []struct{ ref, raw string }{
		{"system.echo.invoke.input", `{"message":"ping"}`},
		{"system.echo.invoke.input", `{"message":"say \"hi\" \\o/"}`},
		{"system.echo.invoke.input", `{ "message" : "` + strings.Repeat("x", 1024) + `" }`},
		{"system.echo.invoke.output", `{"message":"ping","received_at_ms":1745236800012,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"}`},
		{"system.metrics.snapshot.input", `{}`},
		{"system.metrics.subscribe.input", `{}`},
		{"system.metrics.subscribe.input", `{"interval_ms":5000}`},
		{"system.metrics.subscribe.output", `{"interval_ms":5000,"stream_id":"01HZXC0000000000000000DEV0"}`},
		{"system.metrics.subscribe.frame", benchFrame},
		{"system.metrics.subscribe.frame", strings.Replace(benchFrame, "12.4", "12.400000000000002", 1)},
		{"system.metrics.snapshot.output", benchFrame},
	}
	for _, tt := range tests {
		s, _ := lookupSchema(tt.ref + "@1.0.0")
		if _, ok := s.object().scan([]byte(tt.raw)); !ok {
			t.Errorf("%s takes the long way for %s", tt.raw, tt.ref)
		}
	}
}

// Patterns outside the simple form are left to the library.
func TestPatternForms(t *testing.T) {
	tests := []struct {
		expr string
		ok   bool
	}{
		{`^[a-z]*$`, true},
		{`^[a-z]+$`, true},
		{`^[0-7][0-9A-Z]{25}$`, true},
		{`^[0-7][0-9A-Z]{25}[a-z]*$`, true},
		{`[a-z]*`, false},
		{`^[a-z]*`, false},
		{`^[a-z]{1,24}$`, false},
		{`^[a-z]*[0-9]$`, false},
		{`^[^a]*$`, false},
		{`^(a|bc)$`, false},
		{`^$`, true},
		{`(`, false},
	}
	for _, tt := range tests {
		p, ok := newPattern(&tt.expr, true)
		if ok != tt.ok {
			t.Errorf("%s: understood %v, want %v", tt.expr, ok, tt.ok)
		}
		if ok && p.allows(0, '_') {
			t.Errorf("%s matches _", tt.expr)
		}
	}
}

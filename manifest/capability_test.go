package manifest

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// The capability object of RFC-0005 §9, byte for byte in what matters.
func TestEchoIsTheRFCs(t *testing.T) {
	const want = `{"cap_id":"echo","kind":"system.echo","schema_ref":"mcp://schemas/system.echo.invoke.input@1.0.0","verbs":["invoke"],"safety_class":"read_only","constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}}`
	got, err := json.Marshal(Echo())
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
	for _, c := range []Capability{Echo(), Metrics()} {
		raw, _ := json.Marshal(c)
		if err := Validate(CapabilityRef, raw); err != nil {
			t.Errorf("%s: %v", c.CapID, err)
		}
		if err := c.Check(); err != nil {
			t.Errorf("%s: %v", c.CapID, err)
		}
		if c.Constraints.Deadline() != 2*time.Second {
			t.Errorf("%s: deadline %v", c.CapID, c.Constraints.Deadline())
		}
	}
	if (Constraints{}).Deadline() != 2*time.Second {
		t.Error("the default deadline is not 2 s")
	}
}

func TestCapabilityRefusals(t *testing.T) {
	tests := []struct {
		name string
		edit func(*Capability)
	}{
		{"unknown kind", func(c *Capability) { c.Kind = "system.foo" }},
		{"kind in upper case", func(c *Capability) { c.Kind = "System.metrics" }},
		{"no kind", func(c *Capability) { c.Kind = "" }},
		{"mutating", func(c *Capability) { c.SafetyClass = Mutating }},
		{"destructive", func(c *Capability) { c.SafetyClass = Destructive }},
		{"unknown class", func(c *Capability) { c.SafetyClass = "careless" }},
		{"no class", func(c *Capability) { c.SafetyClass = "" }},
		{"no verbs", func(c *Capability) { c.Verbs = nil }},
		{"unknown verb", func(c *Capability) { c.Verbs = []string{"snapshot", "call"} }},
		{"another kind's verb", func(c *Capability) { c.Verbs = []string{"invoke"} }},
		{"a verb twice", func(c *Capability) { c.Verbs = []string{"snapshot", "snapshot"} }},
		{"too many verbs", func(c *Capability) { c.Verbs = []string{"snapshot", "subscribe", "snapshot"} }},
		{"schema of the second verb", func(c *Capability) { c.SchemaRef = "mcp://schemas/system.metrics.subscribe.input@1.0.0" }},
		{"schema of another version", func(c *Capability) { c.SchemaRef = "mcp://schemas/system.metrics.snapshot.input@2.0.0" }},
		{"schema in a file", func(c *Capability) { c.SchemaRef = "file:///etc/passwd" }},
		{"no cap_id", func(c *Capability) { c.CapID = "" }},
		{"cap_id in upper case", func(c *Capability) { c.CapID = "Metrics" }},
		{"cap_id with a dot", func(c *Capability) { c.CapID = "a.b" }},
		{"cap_id with a hyphen", func(c *Capability) { c.CapID = "a-b" }},
		{"cap_id with a line feed", func(c *Capability) { c.CapID = "metrics\n" }},
		{"long cap_id", func(c *Capability) { c.CapID = strings.Repeat("a", 25) }},
		{"rate 0", func(c *Capability) { c.Constraints.RateLimitRPS = 0 }},
		{"rate -1", func(c *Capability) { c.Constraints.RateLimitRPS = -1 }},
		{"rate 101", func(c *Capability) { c.Constraints.RateLimitRPS = 101 }},
		{"concurrency 0", func(c *Capability) { c.Constraints.MaxConcurrency = 0 }},
		{"concurrency 65", func(c *Capability) { c.Constraints.MaxConcurrency = 65 }},
		{"deadline 0", func(c *Capability) { c.Constraints.DeadlineMSDefault = 0 }},
		{"deadline 5001", func(c *Capability) { c.Constraints.DeadlineMSDefault = 5001 }},
	}
	for _, tt := range tests {
		c := Metrics()
		tt.edit(&c)
		err := c.Check()
		if err == nil || AsError(err).Code != ManifestInvalid {
			t.Errorf("%s: Check says %v, want E_MANIFEST_INVALID", tt.name, err)
			continue
		}
		for _, quoted := range []string{"careless", "system.foo", "passwd", "Metrics", "a-b"} {
			if strings.Contains(err.Error(), quoted) {
				t.Errorf("%s: the message quotes %q", tt.name, quoted)
			}
		}
		if tools, err := Project(testNode, &c); err == nil {
			t.Errorf("%s: Project made %d tools", tt.name, len(tools))
		}
	}
}

// Whatever Check admits fits the announced schema too, so that the two cannot drift.
func TestCheckAndSchemaAgree(t *testing.T) {
	classes := []SafetyClass{ReadOnly, Mutating, Destructive, "x"}
	verbs := [][]string{{}, {"invoke"}, {"snapshot"}, {"subscribe"}, {"snapshot", "subscribe"}, {"subscribe", "snapshot"}, {"invoke", "invoke"}, {"call"}, {"query"}, {"get"}, {"read"}, {"top"}, {"list"}, {"run"}}
	admitted := 0
	kinds := []string{"system.foo"}
	for _, k := range Kinds {
		kinds = append(kinds, k.Name)
	}
	for _, kind := range kinds {
		for _, class := range classes {
			for _, v := range verbs {
				numbers := []int{0, 1, 64, 65, 100, 101, 5000, 5001}
				if class != ReadOnly { // refused whatever the numbers are
					numbers = numbers[1:2]
				}
				for _, n := range numbers {
					c := Capability{CapID: "a", Kind: kind, Verbs: v, SafetyClass: class, Constraints: Constraints{n, n, n}}
					if len(v) > 0 {
						c.SchemaRef = SchemaPrefix + kind + "." + v[0] + ".input@1.0.0"
					}
					raw, _ := json.Marshal(c)
					check, schema := c.Check(), Validate(CapabilityRef, raw)
					if (check == nil) != (schema == nil) {
						t.Errorf("%s: Check says %v, the schema %v", raw, check, schema)
					}
					if check == nil {
						admitted++
					}
				}
			}
		}
	}
	if admitted != 28 { // (4 metrics verb lists + 1 of each of 10 kinds) x 2 of the numbers
		t.Errorf("%d of the combinations were admitted, want 28", admitted)
	}
}

func TestCodes(t *testing.T) {
	if len(Codes) != 7 {
		t.Errorf("%d codes, want the closed set of seven", len(Codes))
	}
	for _, c := range Codes {
		if !c.Valid() {
			t.Errorf("%s is not valid", c)
		}
		e := `{"error":{"code":"` + string(c) + `","message":"x","retryable":true,"trace_id":"0af7651916cd43dd8448eb211c80319c"}}`
		if err := Validate(ErrorRef, []byte(e)); err != nil {
			t.Errorf("%s: not in the schema of the envelope", c)
		}
	}
	if Code("E_INVALID_ARGS").Valid() || Code("").Valid() {
		t.Error("a code outside the set is valid")
	}
	if e := AsError(errTest); e.Code != Internal || strings.Contains(e.Message, "secret") {
		t.Errorf("a foreign error became %v", e)
	}
}

var errTest = &time.ParseError{Message: "secret"}

func TestHash(t *testing.T) {
	// sha256sum of the three bytes abc.
	if got := Hash([]byte("abc")); got != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Errorf("Hash(abc) = %s", got)
	}
}

// FuzzCapability checks that Check and the schema admit the same capabilities, except for what
// the schema cannot express (schema_ref is the first verb's), and that nothing panics.
func FuzzCapability(f *testing.F) {
	for _, c := range []Capability{Echo(), Metrics()} {
		raw, _ := json.Marshal(c)
		f.Add(raw)
	}
	for _, c := range corpus(f) {
		if c.ref == CapabilityRef {
			f.Add(c.value)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		schema := Validate(CapabilityRef, raw)
		norm, err := CheckArgs(CapabilityRef, raw)
		if (err == nil) != (schema == nil) {
			t.Fatalf("%q: Validate says %v, CheckArgs %v", raw, schema, err)
		}
		if err == nil {
			raw = norm // 2e3 is an integer to the schema, not to Go
		}
		var c Capability
		if err := json.Unmarshal(raw, &c); err != nil {
			if schema == nil {
				t.Errorf("%q fits the schema but is no Capability: %v", raw, err)
			}
			return
		}
		check := c.Check()
		if again, _ := json.Marshal(c); check == nil && Validate(CapabilityRef, again) != nil {
			t.Errorf("Check admits %s, the schema does not", again)
		}
		if schema == nil && check != nil {
			k, _ := LookupKind(c.Kind)
			if v, ok := k.Verb(c.Verbs[0]); !ok || v.Input == c.SchemaRef {
				t.Errorf("the schema admits %q, Check says %v", raw, check)
			}
		}
		tools, err := Project(testNode, &c)
		if err == nil && (check != nil || len(tools) != len(c.Verbs)) {
			t.Errorf("%q became %d tools", raw, len(tools))
		}
		for _, tool := range tools {
			if _, ok := ParseToolName(tool.Canonical); !ok {
				t.Errorf("%q became %q", raw, tool.Canonical)
			}
		}
	})
}

// The kinds of one verb: their capabilities are valid, cap_id is the last word of the kind, and a tool
// has a short name even behind the prefix that an MCP client puts before it.
func TestInspectionKinds(t *testing.T) {
	want := map[string]string{
		KindInfo: "sysinfo get", KindModules: "sysmod read", KindProcesses: "sysproc top inspect", KindServices: "syssvc list inspect",
		KindJournal: "sysjrnl query inspect", KindDisks: "sysdisk list", KindNetwork: "sysnet list inspect", KindDoctor: "sysdoc run inspect",
	}
	for name, row := range want {
		k, _ := LookupKind(name)
		c := Inspection(name)
		tools, err := Project(testNode, &c)
		if err != nil || len(tools) != 1 || !k.SinceV21 {
			t.Errorf("%s: %v, %d tools", name, err, len(tools))
			continue
		}
		got := k.Short + " " + tools[0].Verb.Name
		if k.ExtraScope == ScopeBoardsInspect {
			got += " inspect"
		}
		if got != row || name != "system."+c.CapID {
			t.Errorf("%s is %s with cap_id %s, want %s", name, got, c.CapID, row)
		}
		if n := len("mcp__agentctl__" + tools[0].Name().Alias()); n > MaxToolNameLen {
			t.Errorf("%s has %d characters with the prefix", tools[0].Name().Alias(), n)
		}
		if n := len(tools[0].Verb.Description); n > 300 {
			t.Errorf("%s: the description has %d characters", name, n)
		}
	}
}

package manifest

import (
	"regexp"
	"strings"
	"testing"
)

const testNode = "01hzx9k3m4p7q8r9s0t1v2w3xy"

// toolRE is the pattern of RFC-0002 §5.7.
var toolRE = regexp.MustCompile(`^[a-z0-9_]+(\.[a-z0-9_]+){3}$`)

func TestProjectedNames(t *testing.T) {
	echo, metrics := Echo(), Metrics()
	tests := []struct {
		c     *Capability
		names []string
	}{
		{&echo, []string{"sysecho." + testNode + ".echo.invoke"}},
		{&metrics, []string{"sys." + testNode + ".metrics.snapshot", "sys." + testNode + ".metrics.subscribe"}},
	}
	for _, tt := range tests {
		tools, err := Project(testNode, tt.c)
		if err != nil || len(tools) != len(tt.names) {
			t.Fatalf("Project(%s) = %d tools, %v", tt.c.CapID, len(tools), err)
		}
		for i, tool := range tools {
			if tool.Canonical != tt.names[i] || tool.Name().String() != tt.names[i] {
				t.Errorf("got %s, want %s", tool.Canonical, tt.names[i])
			}
			if tool.Capability != tt.c || tool.Kind.Name != tt.c.Kind || tool.Verb.Name != tt.c.Verbs[i] {
				t.Errorf("%s: belongs to %v %s %s", tool.Canonical, tool.Capability, tool.Kind.Name, tool.Verb.Name)
			}
		}
	}
	// The lengths that the RFCs give, and space for a client's prefix.
	for name, want := range map[string]int{"sysecho." + testNode + ".echo.invoke": 46, "sys." + testNode + ".metrics.subscribe": 48} {
		if len(name) != want {
			t.Errorf("%s has %d characters, want %d", name, len(name), want)
		}
		n, _ := ParseToolName(name)
		if alias := "mcp__agentctl__" + n.Alias(); len(alias) > MaxToolNameLen {
			t.Errorf("%s has %d characters", alias, len(alias))
		}
	}
}

func TestProjectRefuses(t *testing.T) {
	long, bad := Metrics(), Echo()
	long.CapID = strings.Repeat("m", 24) // sys. + 26 + . + 24 + .subscribe = 65
	bad.Verbs = []string{"call"}
	echo := Echo()
	tests := []struct {
		name, node string
		c          *Capability
	}{
		{"a name over 64 characters", testNode, &long},
		{"a capability that Check refuses", testNode, &bad},
		{"an upper case node id", strings.ToUpper(testNode), &echo},
		{"no node id", "", &echo},
	}
	for _, tt := range tests {
		tools, err := Project(tt.node, tt.c)
		if err == nil || AsError(err).Code != ManifestInvalid || tools != nil {
			t.Errorf("%s: got %d tools, %v", tt.name, len(tools), err)
		}
	}
	long.CapID = long.CapID[1:] // 64: fits
	if tools, err := Project(testNode, &long); err != nil || len(tools[1].Canonical) != MaxToolNameLen {
		t.Errorf("a name of 64 characters: %v", err)
	}
}

func TestParseToolName(t *testing.T) {
	tests := []struct {
		s    string
		want bool
	}{
		{"sysecho." + testNode + ".echo.invoke", true},
		{"sys." + testNode + ".a_b.c_d", true},
		{"system.echo", false},
		{"sysecho." + testNode + ".echo", false},
		{"sysecho." + testNode + ".echo.invoke.now", false},
		{"sysecho." + strings.ToUpper(testNode) + ".echo.invoke", false},
		{"Sysecho." + testNode + ".echo.invoke", false},
		{"sysecho.8zzzzzzzzzzzzzzzzzzzzzzzzz.echo.invoke", false},
		{"sysecho.node.echo.invoke", false},
		{"." + testNode + ".echo.invoke", false},
		{"sysecho." + testNode + "..invoke", false},
		{"sysecho." + testNode + ".echo.", false},
		{"sysecho." + testNode + ".echo.invoke\n", false},
		{"sysecho." + testNode + ".echo." + strings.Repeat("i", 30), false},
		{"sysecho_" + testNode + "_echo_invoke", false},
		{"", false},
	}
	for _, tt := range tests {
		if _, got := ParseToolName(tt.s); got != tt.want {
			t.Errorf("ParseToolName(%q) = %v, want %v", tt.s, got, tt.want)
		}
	}
}

func TestCanonical(t *testing.T) {
	dotted := "sys." + testNode + ".a_b.subscribe"
	tests := []struct{ in, want string }{
		{"sys_" + testNode + "_a_b_subscribe", dotted},
		{dotted, dotted},
		{"tickets.create", "tickets.create"},
		{"tickets_create", "tickets_create"},
		{"sys_" + testNode, "sys_" + testNode},
		{"sys_" + testNode + "_a", "sys_" + testNode + "_a"},
		{"sys_" + testNode + "__a_", "sys_" + testNode + "__a_"},
		{"sys_" + strings.ToUpper(testNode) + "_a_b", "sys_" + strings.ToUpper(testNode) + "_a_b"},
		{"Sys_" + testNode + "_a_b", "Sys_" + testNode + "_a_b"},
		{"", ""},
		{"_", "_"},
	}
	for _, tt := range tests {
		if got := Canonical(tt.in); got != tt.want {
			t.Errorf("Canonical(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

// Every tool of every kind keeps its name through the flat spelling.
func TestAliasesOfAllKinds(t *testing.T) {
	seen := map[string]string{}
	for _, k := range Kinds {
		if strings.Contains(k.Short, "_") || len(k.Short) > 8 {
			t.Errorf("%s: kind_short %q would make aliases ambiguous", k.Name, k.Short)
		}
		for _, v := range k.Verbs {
			if strings.Contains(v.Name, "_") {
				t.Errorf("%s: verb %q would make aliases ambiguous", k.Name, v.Name)
			}
			n := ToolName{k.Short, testNode, "a_b", v.Name}
			if got := Canonical(n.Alias()); got != n.String() {
				t.Errorf("alias %s comes back as %s", n.Alias(), got)
			}
			if other, taken := seen[n.Alias()]; taken {
				t.Errorf("%s and %s share an alias", other, n.String())
			}
			seen[n.Alias()] = n.String()
		}
	}
}

// FuzzToolName: parse and print, both spellings, with the RFC's pattern as oracle.
func FuzzToolName(f *testing.F) {
	for _, s := range []string{"sysecho." + testNode + ".echo.invoke", "sys_" + testNode + "_metrics_subscribe", "a.b.c.d", "system.echo", "...", "_", "a._.b._"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, ok := ParseToolName(s)
		parts := strings.Split(s, ".")
		want := toolRE.MatchString(s) && len(s) <= MaxToolNameLen && ValidNodeID(parts[1])
		if ok != want {
			t.Fatalf("ParseToolName(%q) = %v, the pattern says %v", s, ok, want)
		}
		c := Canonical(s)
		if Canonical(c) != c {
			t.Fatalf("Canonical(%q) = %q, which is not canonical", s, c)
		}
		if !ok {
			if _, now := ParseToolName(c); !now && c != s {
				t.Fatalf("Canonical(%q) = %q, which is no name either", s, c)
			}
			return
		}
		if n.String() != s || c != s {
			t.Fatalf("%q prints as %q, canonical %q", s, n.String(), c)
		}
		// An underscore in the first or last part makes the flat spelling ambiguous; no
		// kind and no verb has one.
		if !strings.Contains(n.Short+n.Verb, "_") && Canonical(n.Alias()) != s {
			t.Fatalf("alias %q of %q comes back as %q", n.Alias(), s, Canonical(n.Alias()))
		}
	})
}

// TestHasOwnWord: only words of the registry count as ours, whatever a board calls a capability.
func TestHasOwnWord(t *testing.T) {
	for capID, want := range map[string]bool{
		"echo": true, "echo2": true, "echo_2": true, "echo_": true,
		"b": false, "metrics": false, "echo_ignore_all_rules": false, "ignore_echo": false, "echo_2_2": false, "ech": false,
	} {
		c := Echo()
		c.CapID = capID
		tools, err := Project(testNode, &c)
		if err != nil || tools[0].HasOwnWord() != want {
			t.Errorf("%s: %v, %v", capID, err, tools[0].HasOwnWord())
		}
	}
}

func TestArgumentTypes(t *testing.T) {
	for tool, want := range map[string]map[string]ArgumentType{
		"sysjrnl." + testNode + ".journal.query": {"text": {Type: "string"}, "cursor": {Type: "string"}, "limit": {Type: "integer"}, "nothing": {}},
		"syshist." + testNode + ".history.query": {"metrics": {Type: "array", Items: "string"}, "step_ms": {Type: "integer"}},
	} {
		types := ArgumentTypes(tool)
		for name, typ := range want {
			if types[name] != typ {
				t.Errorf("%s: %s is %v, want %v", tool, name, types[name], typ)
			}
		}
	}
	for _, tool := range []string{"tickets.create", "sysecho." + testNode + ".echo.invoke", "sysnew." + testNode + ".a.get", "sysjrnl." + testNode + ".journal.list"} {
		if ArgumentTypes(tool) != nil {
			t.Errorf("%s is not known", tool)
		}
	}
}

// TestSelectTool: each tool is found by its short name and by its full one, and a word that several
// have is not guessed.
func TestSelectTool(t *testing.T) {
	const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"
	var tools []Tool
	for i := range Kinds {
		k := &Kinds[i]
		c := &Capability{Kind: k.Name, CapID: k.Name[strings.LastIndexByte(k.Name, '.')+1:]}
		for j := range k.Verbs {
			c.Verbs = append(c.Verbs, k.Verbs[j].Name)
		}
		for j := range k.Verbs {
			name := ToolName{k.Short, node, c.CapID, k.Verbs[j].Name}
			tools = append(tools, Tool{Canonical: name.String(), Capability: c, Kind: k, Verb: &k.Verbs[j]})
		}
	}
	second := tools[1] // of another capability of the same kind
	other := *second.Capability
	other.CapID = "metrics_2"
	second.Capability = &other
	second.Canonical = ToolName{second.Kind.Short, node, other.CapID, second.Verb.Name}.String()
	tools = append(tools, second)
	for i := range tools {
		short := tools[i].ShortName(tools)
		for _, word := range []string{short, tools[i].Canonical, tools[i].Name().Alias(), tools[i].Name().CapID + "." + tools[i].Name().Verb} {
			if found, ok := SelectTool(tools, word); !ok || found.Canonical != tools[i].Canonical {
				t.Errorf("%s: found %v, want %s", word, found, tools[i].Canonical)
			}
		}
	}
	for word, want := range map[string]string{
		"snapshot": "sys." + node + ".metrics.snapshot", "query": "syshist." + node + ".history.query", "top": "sysproc." + node + ".processes.top",
		"metrics_2.snapshot": "sys." + node + ".metrics_2.snapshot", "list": "", "metrics": "", "": "", "echo.snapshot": "",
	} {
		found, ok := SelectTool(tools, word)
		if ok != (want != "") || ok && found.Canonical != want {
			t.Errorf("%q: found %v, want %q", word, found, want)
		}
	}
}

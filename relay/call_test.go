package relay

import (
	"strings"
	"testing"
	"unicode"

	"agentctl/manifest"
)

// FuzzAccept checks that a caller gets a stream only by naming its type, and that splitting
// the header into several lines changes nothing.
func FuzzAccept(f *testing.F) {
	for _, s := range []string{"", "*/*", "text/event-stream", "application/json, text/event-stream;q=0", "a/b;q=\"", ",,;", "text/event-stream;q=NaN",
		"TEXT/EVENT-STREAM;charset=utf-8, */*;q=0.1", "text/event-stream ; q = 0"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		wantJSON, wantStream := parseAccept([]string{a, b})
		lower := strings.ToLower(a + "," + b)
		if wantStream && !strings.Contains(lower, "text/event-stream") {
			t.Errorf("%q, %q: a stream", a, b)
		}
		said := strings.TrimFunc(lower, func(r rune) bool { return r == ',' || unicode.IsSpace(r) }) != ""
		if wantJSON && said && !strings.Contains(lower, "application/") && !strings.Contains(lower, "*/*") {
			t.Errorf("%q, %q: JSON", a, b)
		}
		if j, s := parseAccept([]string{a + "," + b}); j != wantJSON || s != wantStream {
			t.Errorf("%q, %q: %v %v apart, %v %v together", a, b, wantJSON, wantStream, j, s)
		}
	})
}

func TestParseAccept(t *testing.T) {
	tests := []struct {
		accept       string
		json, stream bool
	}{
		{`text/event-stream;x="a,b"`, false, true}, // a comma in quotes does not separate
		{`text/html;x="a,text/event-stream"`, false, false},
		{`text/html;x="\",text/event-stream`, false, false},
		{"text/event-stream;;q=0.5", false, true}, // an empty parameter is none
		{"text/event-stream;", false, true},
		{"text/event-stream;q=NaN", false, false},
		{"text/event-stream;q=1e0", false, false},
		{"text/event-stream;q=+1", false, false},
		{"text/event-stream;q=1.001", false, false},
		{"text/event-stream;q=0.0001", false, false},
		{"text/event-stream;q=0.001", false, true},
		{"text/event-stream; Q=0.", false, false},
		{"application/json;q=0, */*", false, false}, // the most specific range decides
		{"*/*, application/json;q=0", false, false},
		{"application/*;q=0, */*;q=1", false, false},
		{"*/*;q=0, application/json", true, false},
		{"*/*;q=0", false, false},
		{"application/json;q=0, application/json", true, false},
	}
	for _, tt := range tests {
		if j, s := parseAccept([]string{tt.accept}); j != tt.json || s != tt.stream {
			t.Errorf("Accept %q: JSON %v, stream %v, want %v, %v", tt.accept, j, s, tt.json, tt.stream)
		}
	}
}

func TestIsSubscribe(t *testing.T) {
	for name, want := range map[string]bool{
		"sys.01hzx9k3m4p7q8r9s0t1v2w3xy.metrics.subscribe": true,
		"sys_01hzx9k3m4p7q8r9s0t1v2w3xy_metrics_subscribe": true,
		"sys.01HZX9K3M4P7Q8R9S0T1V2W3XY.metrics.subscribe": true, // of that form, and refused for its name
		"sys.01hzx9k3m4p7q8r9s0t1v2w3xy.metrics.snapshot":  false,
		"news.subscribe":      false, // plugins' tools
		"news.list.subscribe": false,
		"news.auto_subscribe": false,
	} {
		if got := isStreamTool(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// FuzzPluginName checks that no name is a device tool's and a plugin's at once, and that a
// plugin's has lower case letters, digits, underscores and inner dots only.
func FuzzPluginName(f *testing.F) {
	for _, s := range []string{"tickets.create", "kernel.middleware.list", "system.echo", "sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke", "a..b", ".a", "a.", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		plugin := isPluginTool(s)
		if _, device := manifest.ParseToolName(s); device && plugin {
			t.Errorf("%q is both", s)
		}
		if plugin && (strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_.") != "" || strings.HasPrefix(s, "system.") || len(s) > 64) {
			t.Errorf("%q is taken for a plugin's tool", s)
		}
	})
}

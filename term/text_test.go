package term

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// hostile holds what a terminal would act on: C0 and C1 controls and bidirectional
// overrides, and two letters that must stay.
const hostile = "\x1b]0;x\x07\x1b[31m \u009b2J \u202e\u2066 a\u00e9"

func isHostile(s string) bool { return strings.ContainsAny(s, "\x1b\x07\u009b\u202e\u2066") }

func TestSafeText(t *testing.T) {
	var table bytes.Buffer
	tb := NewTable(&table, "A", "B")
	tb.Row(hostile, 1)
	if err := tb.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{SafeLine(hostile), SafeText("a\n" + hostile), Indent(hostile), table.String()} {
		if isHostile(got) || !strings.Contains(got, "a\u00e9") {
			t.Errorf("got %q", got)
		}
	}
	if got := SafeText("a\tb\n\n c"); got != "a    b\n\n c" {
		t.Errorf("got %q", got)
	}
	if got := Indent("a\r\n\tb\n\n"); got != "  a\n      b" {
		t.Errorf("got %q", got)
	}
}

// Escaped JSON means the same as before and holds nothing that a terminal acts on.
func TestJSONEscaper(t *testing.T) {
	in, _ := json.Marshal(map[string]string{"k": hostile + "\U000E0041\u2028\U0001F600 \x7f"})
	var out bytes.Buffer
	if n, err := (jsonEscaper{&out}).Write(append(in, '\n')); n != len(in)+1 || err != nil {
		t.Fatal(n, err)
	}
	if isHostile(out.String()) || strings.ContainsAny(out.String(), "\x7f\U000E0041") || !strings.Contains(out.String(), "\U0001F600") {
		t.Errorf("got %q", out.String())
	}
	var a, b any
	if err := json.Unmarshal(out.Bytes(), &b); err != nil || json.Unmarshal(in, &a) != nil || a.(map[string]any)["k"] != b.(map[string]any)["k"] {
		t.Errorf("%q is not the same as %q (%v)", out.String(), in, err)
	}
}

// YAML has the same text as JSON, whatever characters that has, and on a terminal nothing that it acts on.
func TestYAMLEscapes(t *testing.T) {
	in := map[string]string{"k": hostile + "\U000E0041\u2028\u0085\ufeff\uffff\U0001F600 \x7f", "plain": "a: b"}
	var raw, shown bytes.Buffer
	for w, out := range map[io.Writer]*bytes.Buffer{&raw: &raw, jsonEscaper{&shown}: &shown} {
		if err := WriteYAML(w, in); err != nil {
			t.Fatal(err)
		}
		var got map[string]string
		if err := yaml.Unmarshal(out.Bytes(), &got); err != nil || !maps.Equal(got, in) {
			t.Errorf("got %q (%v) of %q, want %q", got, err, out, in)
		}
	}
	if isHostile(shown.String()) || !strings.Contains(shown.String(), "plain: 'a: b'") {
		t.Errorf("got %q", shown.String())
	}
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	tb := NewTable(&b, "NAME", "N")
	tb.Row("attic", 7)
	tb.Row("x\ty", "")
	if err := tb.Flush(); err != nil || b.String() != "NAME   N\nattic  7\nx?y    \n" {
		t.Errorf("%v, got %q", err, b.String())
	}
}

func TestTruncate(t *testing.T) {
	tests := []struct {
		in    string
		width int
		want  string
	}{
		{"abcdef", 3, "abc"}, {"ab", 3, "ab"}, {"▁▂▃▄", 2, "▁▂"}, {"a\x1b[31mbcd\x1b[0me", 2, "a\x1b[31mb\x1b[0m"},
	}
	for _, tt := range tests {
		if got := Truncate(tt.in, tt.width); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

func TestValue(t *testing.T) {
	tests := []struct {
		v          float64
		unit, want string
	}{
		{12.34, "%", "12.3 %"}, {512, "MiB", "512 MiB"}, {16000, "MiB", "15.6 GiB"}, {999, "B/s", "999 B/s"},
		{1500, "B/s", "1.5 kB/s"}, {999_900, "B/s", "1.0 MB/s"}, {2e9, "B/s", "2.0 GB/s"}, {2e12, "B/s", "2000.0 GB/s"}, {0.5, "", "0.50"},
	}
	for _, tt := range tests {
		if got := Value(tt.v, tt.unit); got != tt.want {
			t.Errorf("%v %s: got %q, want %q", tt.v, tt.unit, got, tt.want)
		}
	}
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{time.Minute: "1m", 2 * time.Hour: "2h", 90 * time.Second: "1m30s", 0: "0s", 200 * time.Millisecond: "200ms"} {
		if got := Span(d); got != want {
			t.Errorf("%v: got %q, want %q", d, got, want)
		}
	}
}

func TestAgo(t *testing.T) {
	if got := Ago(0); got != "never" {
		t.Errorf("got %q", got)
	}
	for d, want := range map[time.Duration]string{0: "now", 30 * time.Second: "30 s ago", 30 * time.Minute: "30 min ago", 3 * time.Hour: "3 h ago", 50 * time.Hour: "2 days ago"} {
		if got := Ago(time.Now().Add(-d).UnixMilli()); got != want {
			t.Errorf("%v: got %q, want %q", d, got, want)
		}
	}
}

func TestWrap(t *testing.T) {
	tests := []struct{ text, want string }{
		{"", ""},
		{"a", "a"},
		{"one two three", "one two|three"},
		{"incomprehensible a b", "incomprehensible|a b"},
	}
	for _, tt := range tests {
		if got := strings.Join(Wrap(tt.text, 8), "|"); got != tt.want {
			t.Errorf("Wrap(%q) = %q, want %q", tt.text, got, tt.want)
		}
	}
}

func TestWriteYAML(t *testing.T) {
	var b bytes.Buffer
	v := struct {
		Z int      `json:"z"`
		A []string `json:"a,omitempty"`
	}{7, []string{"x: y", "1"}}
	if err := WriteYAML(&b, v); err != nil || b.String() != "z: 7\na:\n  - 'x: y'\n  - \"1\"\n" {
		t.Errorf("%v, got %q", err, b.String())
	}
}

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/manifest"
)

// steering is what a terminal would act on, in a text of somebody else.
const steering = "\x1b]0;x\x07\x1b[31m \u009b2J \u202e\u2066 a\u00e9"

func steers(s string) bool { return strings.ContainsAny(s, "\x1b\x07\u009b\u202e\u2066") }

// TestSteering: no relay, board or agent steers the terminal of who looks.
func TestSteering(t *testing.T) {
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	n := node{NodeID: steering, Name: steering, Capabilities: []manifest.Capability{{CapID: steering, Verbs: []string{steering}}}}
	k := ticket{ID: steering, Title: steering, Body: steering, Status: steering, Priority: steering, NodeID: steering, AgentID: steering, CreatedBy: steering, Allowed: []string{steering}}
	if printNodes(cmd, []node{n}) != nil || printTickets(cmd, []ticket{k}) != nil || printTicket(&out, &k) != nil {
		t.Error("not printed")
	}
	for _, s := range []string{out.String(), plain(steering), plainLines("a\n" + steering)} {
		if steers(s) || !strings.Contains(s, "a\u00e9") {
			t.Errorf("got %q", s)
		}
	}
	if got := plainLines("a\tb\n\n c"); got != "a    b\n\n c" {
		t.Errorf("got %q", got)
	}
	if got := indent("a\r\n\tb\n\n"); got != "  a\n      b" {
		t.Errorf("got %q", got)
	}
}

// TestEscaper: JSON on a terminal says the same and steers nothing.
func TestEscaper(t *testing.T) {
	in, _ := json.Marshal(map[string]string{"k": steering + "\U000E0041\u2028\U0001F600 \x7f"})
	var out bytes.Buffer
	if n, err := (escaper{&out}).Write(append(in, '\n')); n != len(in)+1 || err != nil {
		t.Fatal(n, err)
	}
	if steers(out.String()) || strings.ContainsAny(out.String(), "\x7f\U000E0041") || !strings.Contains(out.String(), "\U0001F600") {
		t.Errorf("got %q", out.String())
	}
	var a, b any
	if err := json.Unmarshal(out.Bytes(), &b); err != nil || json.Unmarshal(in, &a) != nil || a.(map[string]any)["k"] != b.(map[string]any)["k"] {
		t.Errorf("%q says something else than %q (%v)", out.String(), in, err)
	}
}

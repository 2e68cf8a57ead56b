package clientcmd

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/manifest"
	"agentctl/term"
)

// steering is what a terminal would act on, in a text of somebody else.
const steering = "\x1b]0;x\x07\x1b[31m \u009b2J \u202e\u2066 a\u00e9"

func steers(s string) bool { return strings.ContainsAny(s, "\x1b\x07\u009b\u202e\u2066") }

// TestSteering: no relay, board or agent steers the terminal of its reader.
func TestSteering(t *testing.T) {
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	n := client.Node{NodeID: steering, NodeAttributes: client.NodeAttributes{Name: steering, Tags: []string{steering}, Description: steering}, Capabilities: []manifest.Capability{{CapID: steering, Verbs: []string{steering}}}}
	k := client.Ticket{ID: steering, Title: steering, Body: steering, Status: steering, Priority: steering, NodeID: steering, AgentID: steering, CreatedBy: steering, Allowed: []string{steering}}
	if printNodes(cmd, []client.Node{n}, []string{steering}) != nil || describeNode(cmd, &n) != nil || printTickets(cmd, []client.Ticket{k}) != nil || printTicket(&out, &k) != nil {
		t.Error("not printed")
	}
	for _, s := range []string{out.String(), term.SafeLine(steering), term.SafeText("a\n" + steering)} {
		if steers(s) || !strings.Contains(s, "a\u00e9") {
			t.Errorf("got %q", s)
		}
	}
}

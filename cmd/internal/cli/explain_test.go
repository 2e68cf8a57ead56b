package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/manifest"
)

// What a server wrote gets into a command that a person is asked to type only if it is harmless there.
func TestServerTextInCommands(t *testing.T) {
	for message, want := range map[string]string{
		"the token lacks the scope tickets:read of this tool":  " --add-scope tickets:read",
		"the token lacks the scope notes:write":                " --add-scope notes:write",
		"the token lacks the scope x;reboot of this tool":      "",
		"the token lacks the scope $(reboot):read of the tool": "",
		"no such node": "",
	} {
		if got := lackingScope(message); got != want {
			t.Errorf("lackingScope(%q) = %q, want %q", message, got, want)
		}
	}
	for arguments, want := range map[string]string{
		`{"board":"attic"}`:             "attic",
		`{"boards":["cellar","attic"]}`: "cellar",
		`{"board":"a; reboot"}`:         "NODE",
		`{"board":"$(reboot)"}`:         "NODE",
		`{"board":7}`:                   "NODE",
		``:                              "NODE",
	} {
		if got := (&CallError{Arguments: json.RawMessage(arguments)}).board(); got != want {
			t.Errorf("board of %s = %q, want %q", arguments, got, want)
		}
	}
}

// newCommand returns the command 'agentctl NAME' of a relay, without anything to run.
func newCommand(name string) *cobra.Command {
	root, c := &cobra.Command{Use: "agentctl"}, &cobra.Command{Use: name}
	c.Flags().String("relay", "", "")
	root.AddCommand(c)
	return c
}

// An error of a plugin's tool leads to the plugin, one of a board's tool to the board.
func TestExplainCall(t *testing.T) {
	boardTool := manifest.ToolName{Short: "sys", NodeID: "01arz3ndektsv4rrffq69g5fav", CapID: "metrics", Verb: manifest.VerbSnapshot}.String()
	call := newCommand("call")
	for _, tt := range []struct {
		tool   string
		answer client.Error
		code   int
		text   string
	}{
		{"notes.add", client.Error{Status: 400, Code: manifest.BadRequest, Message: `no tool "notes.add"`}, ExitFailure, "agentctl plugin load notes"},
		{"notes.add", client.Error{Status: 500, Code: manifest.Internal, Message: "boom"}, ExitFailure, "plugin notes"},
		{"notes.add", client.Error{Status: 504, Code: manifest.DeadlineExceeded, Message: "late", Outcome: manifest.OutcomeUnknown}, ExitTimeout, "it may have run"},
		{boardTool, client.Error{Status: 503, Code: manifest.NodeOffline, Message: "offline", Outcome: manifest.NotSent}, ExitOffline, "it did not run"},
		{boardTool, client.Error{Status: 504, Code: manifest.DeadlineExceeded, Message: "late"}, ExitTimeout, "agentctl status"},
	} {
		got := Explain(call, &CallError{Tool: tt.tool, Err: &tt.answer})
		if got.Code != tt.code || !strings.Contains(got.Error(), tt.text) {
			t.Errorf("%s, %v: exit %d %q, want %d with %q", tt.tool, &tt.answer, got.Code, got, tt.code, tt.text)
		}
	}
}

package boardcmd

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/cli/clitest"
)

// Flags that contradict each other are refused before anything is asked: no relay gets a request, and
// nothing is printed that could be taken for the answer.
func TestHistoryRefusesFlags(t *testing.T) {
	clitest.HideEnvironment(t)
	requests := 0
	relay := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests++ }))
	defer relay.Close()
	for _, tt := range []struct {
		name string
		args []string
		says string
	}{
		{"a relay without a board", []string{"--relay", relay.URL}, "--board NODE"},
		{"a board and a socket", []string{"--relay", relay.URL, "--board", "attic", "--socket", "/none"}, "give either --board"},
		{"a step below 1 ms", []string{"--relay", relay.URL, "--board", "attic", "--step", "10us"}, "--step"},
		{"no time", []string{"--relay", relay.URL, "--board", "attic", "--since", "x"}, "--since: not a time"},
		{"no end", []string{"--socket", "/none", "--until", "x"}, "--until: not a time"},
	} {
		code, out, errs := clitest.Run(t, newHistory(), "", tt.args...)
		if code != cli.ExitUsage || out != "" || !strings.Contains(errs, tt.says) {
			t.Errorf("%s: exit %d, stdout %q, stderr %q; want exit %d with %q", tt.name, code, out, errs, cli.ExitUsage, tt.says)
		}
	}
	if requests > 0 {
		t.Errorf("the relay got %d requests, want none", requests)
	}
}

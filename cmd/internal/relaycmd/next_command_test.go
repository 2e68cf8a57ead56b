package relaycmd

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/cmd/internal/cli/clitest"
)

// A relay that revoked nothing is no reason to print a command that does not exist: token ls works on a
// state directory only.
func TestRevokeNothingOverHTTP(t *testing.T) {
	clitest.HideEnvironment(t)
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	relay := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"revoked_tokens":0}`))
	}))
	defer relay.Close()
	code, out, errs := clitest.Run(t, newTokenRevoke(), "", "--jti", "01HZX9K3M4P7Q8R9S0T1V2W3XY", "--relay", relay.URL)
	if code != 0 || strings.Contains(out, "--relay") || !strings.Contains(out, "on the relay's machine: agentctl token ls\n") {
		t.Errorf("exit %d, %q, %q", code, out, errs)
	}
}

// What is printed as the way back works: token create does not use the relay of the environment or of a
// context, but would make a token in a state directory of this machine.
func TestNodeRevokeNamesTheWayBack(t *testing.T) {
	clitest.HideEnvironment(t)
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte("t"), 0o600); err != nil {
		t.Fatal(err)
	}
	relay := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","name":"attic","revoked_tokens":1}`))
	}))
	defer relay.Close()
	const create = "agentctl token create --class device --node 01hzx9k3m4p7q8r9s0t1v2w3xy"
	flags := " --relay " + relay.URL + " --token-file " + token
	t.Setenv("AGENTCTL_RELAY", relay.URL)
	t.Setenv("AGENTCTL_TOKEN_FILE", token)
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"revoke", "attic"}, "create a token, on the relay's machine: " + create + "\n"},
		{append([]string{"revoke", "attic"}, strings.Fields(flags)...), "create a token: " + create + flags + "\n"},
	} {
		code, out, errs := clitest.Run(t, NewNode(), "", tt.args...)
		if code != 0 || !strings.HasSuffix(out, tt.want) {
			t.Errorf("%q: exit %d, %q, %q", tt.args, code, out, errs)
		}
	}
}

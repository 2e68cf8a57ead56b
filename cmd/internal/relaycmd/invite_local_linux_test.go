package relaycmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/cmd/internal/cli/clitest"
	"agentctl/relay/audit"
	"agentctl/relay/auth"
)

// The audit log names the tenant of an invite, also where the command was given none.
func TestInviteRecords(t *testing.T) {
	clitest.HideEnvironment(t)
	dir := t.TempDir()
	store, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		t.Helper()
		code, out, errs := clitest.Run(t, NewInvite(), "", append(args, "--state-dir", dir)...)
		if code != 0 {
			t.Fatalf("%q: exit code %d: %s", args, code, errs)
		}
		return out
	}
	line := strings.Fields(run("--url", "https://relay.example"))
	run("revoke", line[len(line)-1])
	b, err := os.ReadFile(filepath.Join(dir, audit.FileName))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"tool":"invites.create","decision":"begin"`, `"tool":"invites.create","target":`, `"tool":"invites.revoke","target":`} {
		found := false
		for l := range strings.Lines(string(b)) {
			found = found || strings.Contains(l, want) && strings.Contains(l, `"tenant":"default"`)
		}
		if !found {
			t.Errorf("no line of tenant default has %s:\n%s", want, b)
		}
	}
}

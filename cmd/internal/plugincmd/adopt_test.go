//go:build linux

package plugincmd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/cli/clitest"
	"agentctl/relay/plugins/process"
)

// What flags give to a server is added to what its manifest has, with absolute paths, each once.
func TestAdoptFlags(t *testing.T) {
	t.Chdir(t.TempDir())
	here, err := filepath.Abs("data")
	if err != nil {
		t.Fatal(err)
	}
	a := adoption{env: []string{"A=1=2"}, read: []string{"data", "/etc/hosts"}, write: []string{here}, noNetwork: true}
	m := process.PluginManifest{Sandbox: process.DeclaredSandbox{Read: []string{"/etc/hosts"}}}
	if err := a.addFlags(&m); err != nil {
		t.Fatal(err)
	}
	if m.Env["A"] != "1=2" || !slices.Equal(m.Sandbox.Read, []string{"/etc/hosts", here}) || !slices.Equal(m.Sandbox.Write, []string{here}) {
		t.Errorf("got %v, %+v", m.Env, m.Sandbox)
	}
	if m.Sandbox.Network == nil || *m.Sandbox.Network {
		t.Error("the server has a network")
	}
	if err := (&adoption{env: []string{"SECRET"}}).addFlags(&m); err == nil || !strings.Contains(err.Error(), "--env SECRET: use NAME=VALUE") {
		t.Errorf("got %v", err)
	}
}

// The report is for review: it names what the server may do, and no text of the server reaches the
// terminal as it is.
func TestAdoptReport(t *testing.T) {
	t.Parallel()
	a := &adoption{folder: "/plugins/notes"}
	r := newAdoptReport(a, &process.Adoption{
		Server: "notes \x1b[2J1.0", Protocol: "2025-11-25", LeftOut: []process.LeftOut{{Name: "odd", Reason: "it runs as a task"}},
		Manifest: &process.PluginManifest{Name: "notes", Command: []string{"/usr/bin/notes"}, Capabilities: []string{"notes.read", "notes.write"},
			Tools:   []process.DeclaredTool{{Name: "notes.list", Capability: "notes.read"}, {Name: "notes.add", Capability: "notes.write"}},
			Sandbox: process.DeclaredSandbox{Write: []string{"/srv/notes"}}},
	})
	r.Written = true
	var out bytes.Buffer
	cmd := newPluginAdopt()
	cmd.SetOut(&out)
	if err := r.print(cmd); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"tools with the scope notes:read: notes.list\n", "tools with the scope notes:write: notes.add\n",
		"left out: odd: it runs as a task\n", "writes: /srv/notes\n", "network: yes",
		"Wrote /plugins/notes/plugin.json.", "agentctl plugin load notes --token-file operator.token\n", "--add-scope notes:read --add-scope notes:write\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("the server controls the terminal: %q", out.String())
	}
}

// A manifest that is written and cannot be loaded is in the data on stdout all the same, and in no text.
func TestAdoptPrintsDataIfNotLoaded(t *testing.T) {
	t.Parallel()
	a := &adoption{name: "notes", folder: filepath.Join(t.TempDir(), "notes")}
	cmd := &cobra.Command{Use: "adopt"}
	a.relay.AddFlags(cmd)
	a.relay.TokenFile = filepath.Join(t.TempDir(), "missing")
	a.out.Format = "json"
	var out bytes.Buffer
	cmd.SetOut(&out)
	err := a.finish(cmd, &process.Adoption{Manifest: &process.PluginManifest{Name: "notes"}, JSON: []byte("{}")})
	var r adoptReport
	if jsonErr := json.Unmarshal(out.Bytes(), &r); err == nil || jsonErr != nil || !r.Written || r.Loaded || r.LeftOut == nil {
		t.Errorf("got %v, and on stdout, %v:\n%s", err, jsonErr, out.String())
	}
}

// A dry run of plugin allow refuses a digest that is not that of plugin.json, as the relay does.
func TestAllowDryRunChecksDigest(t *testing.T) {
	clitest.HideEnvironment(t)
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	relay := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"name":"notes","version":"1","digest":"ab","call":["*:echo"]}`))
	}))
	defer relay.Close()
	for digest, want := range map[string]int{"": 0, "ab": 0, "cd": cli.ExitFailure} {
		code, out, errs := clitest.Run(t, newPluginAllow(), "", "notes", "--dry-run", "--digest", digest, "--relay", relay.URL)
		if code != want || strings.Contains(out, "would allow") != (want == 0) || strings.Contains(errs, "agentctl plugin show notes --relay") != (want != 0) {
			t.Errorf("digest %q: exit %d, %q, %q", digest, code, out, errs)
		}
	}
}

func TestAllowedText(t *testing.T) {
	t.Parallel()
	asks := client.PluginBus{Name: "notes", Call: []string{"*:echo"}}
	allowed := asks
	allowed.Allowed, allowed.Tenants = true, []string{"acme", "lab"}
	everywhere := allowed
	everywhere.Tenants, everywhere.By = []string{"*"}, "ann"
	for want, b := range map[string]client.PluginBus{
		"it asks for nothing":                            {Name: "notes"},
		"no; allow it with: agentctl plugin allow notes": asks,
		"in tenant acme, lab":                            allowed,
		"in every tenant by ann,":                        everywhere,
	} {
		if got := allowedText(&b, ""); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestShellQuote(t *testing.T) {
	for word, want := range map[string]string{
		"/etc/agentctl/token":      "/etc/agentctl/token",
		"https://relay.example:80": "https://relay.example:80",
		"":                         "''",
		"two words":                "'two words'",
		"$(reboot)":                "'$(reboot)'",
		"it's":                     `'it'\''s'`,
	} {
		if got := ShellQuote(word); got != want {
			t.Errorf("ShellQuote(%q) = %s, want %s", word, got, want)
		}
	}
}

// The next step repeats the flags that were given, and no defaults.
func TestGivenFlags(t *testing.T) {
	c := &cobra.Command{Use: "x"}
	c.Flags().String("state-dir", "/var/lib/x", "")
	c.Flags().String("relay", "http://127.0.0.1:1", "")
	if err := c.ParseFlags([]string{"--state-dir", "/tmp/my state"}); err != nil {
		t.Fatal(err)
	}
	if got, want := GivenFlags(c, "state-dir", "relay", "missing"), " --state-dir '/tmp/my state'"; got != want {
		t.Errorf("GivenFlags = %q, want %q", got, want)
	}
}

// The next step finds the same state directory and the same relay, whatever their paths are.
func TestHints(t *testing.T) {
	c := &cobra.Command{Use: "x"}
	var dir string
	var relay RelayFlags
	AddStateDirFlag(c, &dir)
	relay.AddFlags(c)
	if got := StateDirHint(c) + RelayHint(c); got != "" {
		t.Errorf("without flags: %q", got)
	}
	if err := c.ParseFlags([]string{"--state-dir", "/tmp/my state", "--token-file", "my token", "--relay", "https://relay.example"}); err != nil {
		t.Fatal(err)
	}
	if got, want := StateDirHint(c), " --state-dir '/tmp/my state'"; got != want {
		t.Errorf("StateDirHint = %q, want %q", got, want)
	}
	if got, want := RelayHint(c), " --relay https://relay.example --token-file 'my token'"; got != want {
		t.Errorf("RelayHint = %q, want %q", got, want)
	}
}

func TestReadCode(t *testing.T) {
	const code = "7K3M-9QTR-2HXW-DB5N"
	file := filepath.Join(t.TempDir(), "code.txt")
	if err := os.WriteFile(file, []byte(code+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		args  []string
		file  string
		stdin string
		exit  int
		text  string // of the error
	}{
		{name: "argument", args: []string{code}},
		{name: "file", file: file},
		{name: "standard input", args: []string{"-"}, stdin: code + "\n"},
		{name: "both", args: []string{code}, file: file, exit: ExitUsage, text: "not both"},
		{name: "none", exit: ExitUsage, text: "agentctl invite"},
		{name: "no code", args: []string{"hello"}, exit: ExitUsage},
		{name: "no file", file: file + ".missing", exit: ExitFailure, text: "read the code"},
		{name: "too much", args: []string{"-"}, stdin: strings.Repeat(" ", maxCode) + code, exit: ExitUsage},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := &cobra.Command{}
			cmd.SetIn(strings.NewReader(tt.stdin))
			got, err := ReadCode(cmd, tt.args, tt.file, "agentctl invite")
			if tt.exit == 0 {
				if want := strings.ReplaceAll(code, "-", ""); err != nil || strings.ReplaceAll(got, "-", "") != want {
					t.Errorf("code %q, %v; want %q", got, err, want)
				}
				return
			}
			var e *ExitError
			if !errors.As(err, &e) || e.Code != tt.exit || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want exit %d with %q", err, tt.exit, tt.text)
			}
		})
	}
}

//go:build linux

package boardcmd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/cli/clitest"
	"agentctl/config"
	"agentctl/configctl"
	"agentctl/control"
)

// TestConfigFlagsPage checks that docs/config.md names for each key the flag of agentctl
// run that sets it, and no other flag.
func TestConfigFlagsPage(t *testing.T) {
	page, err := os.ReadFile("../../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "## Keys\n")
	table, _, _ = strings.Cut(table, "\n## ")
	column := map[string]string{} // of flags, by key
	for line := range strings.SplitSeq(table, "\n") {
		if cells := strings.Split(line, "|"); len(cells) == 7 {
			column[strings.Trim(cells[1], " `")] = cells[4]
		}
	}
	flags := newRun().Flags()
	for _, key := range config.KeyNames() {
		name := flagName(key)
		isListed := strings.Contains(column[key], "`--"+name+"`")
		if isListed != (flags.Lookup(name) != nil) || strings.Count(column[key], "`--") > 1 {
			t.Errorf("%s: docs/config.md has %q; the flag --%s exists: %v", key, column[key], name, flags.Lookup(name) != nil)
		}
	}
	if column["relay"] == "" || len(column) < len(config.KeyNames()) {
		t.Errorf("docs/config.md lists only %d keys", len(column))
	}
}

// TestChangeError checks that an error of config set names sudo once: the control socket's
// error does so already, the one of a file does not.
func TestChangeError(t *testing.T) {
	file := &fs.PathError{Op: "open", Path: "/var/lib/agentctl/settings.yaml", Err: fs.ErrPermission}
	socket := fmt.Errorf("control socket /run/agentctl.sock: %w", control.ErrPermission)
	for _, err := range []error{file, socket, errors.Join(socket, file)} {
		got := cli.Explain(newConfigSet(), changeError(err))
		if n := strings.Count(got.Error(), "use sudo"); n != 1 || got.Code != cli.ExitUnauthorized {
			t.Errorf("%v: exit %d, names sudo %d times: %v", err, got.Code, n, got)
		}
	}
}

// The printed undo can be pasted into a shell: it restores the old value, whatever characters it has, or
// removes a setting that was not saved before.
func TestUndoChange(t *testing.T) {
	t.Parallel()
	diskPath, modules := config.FindKey("disk_path"), config.FindKey("modules")
	for _, tt := range []struct {
		name   string
		change configctl.Change
		want   string
	}{
		{"not saved before", configctl.Change{Key: diskPath, Old: "/"}, "agentctl config unset disk_path"},
		{"a value", configctl.Change{Key: diskPath, Old: "/mnt", WasSaved: true}, "agentctl config set disk_path /mnt"},
		{"a value with spaces", configctl.Change{Key: diskPath, Old: "/mnt/my disk", WasSaved: true}, "agentctl config set disk_path '/mnt/my disk'"},
		{"a list", configctl.Change{Key: modules, Old: []string{"network", "wear"}, WasSaved: true}, "agentctl config set modules network,wear"},
		{"an empty list", configctl.Change{Key: modules, Old: []string{}, WasSaved: true}, "agentctl config set modules ''"},
		{"an empty text", configctl.Change{Key: diskPath, Old: "", WasSaved: true}, "agentctl config set disk_path ''"},
	} {
		if got := undoChange(&tt.change); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

// Alert rules that are removed are printed as a file has them: config set could not restore them.
func TestUnsetRules(t *testing.T) {
	clitest.HideEnvironment(t)
	dir := t.TempDir()
	const rules = "alerts:\n  rules:\n    - id: hot\n      metric: temperature_c\n      op: '>'\n      threshold: 80\n"
	file := filepath.Join(dir, config.SettingsFile)
	if err := os.WriteFile(file, []byte(rules+"      level: warn\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := clitest.Run(t, newConfig(), "", "unset", "alerts.rules", "--state-dir", dir)
	if code != 0 || errs != "" || !strings.Contains(out, rules) || strings.Contains(out, "config set") {
		t.Fatalf("exit %d, %q, %q", code, out, errs)
	}
	_, again, _ := strings.Cut(out, "\n\n")
	again, _, _ = strings.Cut(again, "\n\n")
	if err := os.WriteFile(file, []byte(again+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if given, problems := config.ReadFile(file); len(problems) > 0 || len(given) != 1 {
		t.Errorf("what was printed is no file: %v\n%s", problems, again)
	}
}

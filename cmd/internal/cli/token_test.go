package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A token file that cannot be used ends a command with the exit code of docs/cli.md and with what to
// type next.
func TestReadToken(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		content string
		mode    os.FileMode // 0: there is no file
		code    int
		says    string
	}{
		{"a token", "abc\n", 0o600, ExitOK, ""},
		{"no file", "", 0, ExitUnauthorized, "create one on the relay with: agentctl token create"},
		{"an empty file", "", 0o600, ExitFailure, "create one on the relay with: agentctl token create"},
		{"a file that others can read", "abc\n", 0o644, ExitFailure, "chmod 600"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "token")
			if tt.mode != 0 {
				if err := errors.Join(os.WriteFile(file, []byte(tt.content), tt.mode), os.Chmod(file, tt.mode)); err != nil {
					t.Fatal(err)
				}
			}
			token, err := ReadToken(file)
			if tt.code == ExitOK {
				if err != nil || token != strings.TrimSpace(tt.content) {
					t.Errorf("got %q, %v", token, err)
				}
				return
			}
			failure := Explain(newCommand("ls"), err)
			if failure == nil || failure.Code != tt.code || !strings.Contains(failure.Error(), tt.says) {
				t.Errorf("got %v, want exit %d with %q", failure, tt.code, tt.says)
			}
		})
	}
}

package config

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCredential(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"token": "abc\n", "empty": "", "blank": "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	for name, want := range map[string]string{"token": filepath.Join(dir, "token"), "empty": "", "blank": "", "absent": ""} {
		if got := Credential(name); got != want {
			t.Errorf("credential(%q) = %q, want %q", name, got, want)
		}
	}
	t.Setenv("CREDENTIALS_DIRECTORY", "")
	if got := Credential("token"); got != "" {
		t.Errorf("without systemd: %q", got)
	}
}

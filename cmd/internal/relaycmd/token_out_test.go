//go:build unix

package relaycmd

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/relay/auth"
)

// A token goes to stdout, or into a file that only its owner can read; a file that is there stays.
func TestTokenOut(t *testing.T) {
	t.Parallel()
	created := []auth.Minted{{Token: "one"}, {Token: "two"}}
	path := filepath.Join(t.TempDir(), "tokens")
	var stdout bytes.Buffer
	cmd := newTokenCreate()
	cmd.SetOut(&stdout)
	cmd.SetErr(io.Discard)

	if err := (&tokenOut{}).write(cmd, created); err != nil || stdout.String() != "one\ntwo\n" {
		t.Errorf("stdout: got %q, %v", stdout.String(), err)
	}
	o := &tokenOut{path: path}
	if err := o.write(cmd, created); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "one\ntwo\n" {
		t.Errorf("file: got %q, %v", b, err)
	}
	if st, err := os.Stat(path); err != nil {
		t.Error(err)
	} else if st.Mode().Perm() != 0o600 {
		t.Errorf("file: got mode %v", st.Mode())
	}
	if err := o.check(); err == nil || !strings.Contains(err.Error(), "--force") {
		t.Errorf("a file that exists: got %v before a token is made", err)
	}
	if err := o.write(cmd, created[:1]); err == nil || !strings.Contains(err.Error(), "--force") {
		t.Errorf("a file that exists: got %v", err)
	}
	o.force = true
	if err := o.write(cmd, created[:1]); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "one\n" {
		t.Errorf("replaced: got %q, %v", b, err)
	}
	if d := o.described(created); d[0].Token != "" || created[0].Token != "one" {
		t.Errorf("-o prints the token %q of a file, and changes the caller's to %q", d[0].Token, created[0].Token)
	}
}

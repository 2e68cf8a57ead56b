package doctor

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/daemon"
	"agentctl/manifest"
	"agentctl/transport/enroll"
)

// TestDirInUse: the daemon names its history's file, also before it has written it.
func TestDirInUse(t *testing.T) {
	d := &target{stateDir: "/configured"}
	for path, want := range map[string]string{"": "/configured", "/state/history.db": "/state", "/state": "/state"} {
		if got := d.dirInUse(&daemon.Status{Storage: daemon.StorageStatus{Path: path}}); got != want {
			t.Errorf("%q: %s, want %s", path, got, want)
		}
	}
}

func TestJoin(t *testing.T) {
	dir := t.TempDir()
	d := &target{stateDir: dir, configPath: filepath.Join(dir, "config.yaml")}
	path := filepath.Join(dir, enroll.CredentialFile)
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	expect(t, "a board that has not joined", d.checkJoin(nil), Skip, "not joined")
	write(path, "{}")
	expect(t, "a damaged file", d.checkJoin(nil), Fail, "damaged")
	write(path, `{"relay":"https://relay.example","node_id":"`+manifest.NewNodeID()+`","tenant_id":"t","code_sha256":"x","private_key":"`+
		base64.RawURLEncoding.EncodeToString(make([]byte, 32))+`","token":"a.b.c","gen":1,"expires_at_ms":1,"request_id":"r"}`)
	expect(t, "a good one", d.checkJoin(nil), OK, "https://relay.example")
	if d.credential() == nil || !d.isJoined(nil) {
		t.Error("the credential is not found")
	}
	expect(t, "its token", d.checkToken(nil, testNow), Skip, "the line join")
	write(filepath.Join(dir, daemon.JoinFile), "x")
	expect(t, "a join file that is left", d.checkJoin(nil), Warn, "sudo rm ")
	if err := os.Remove(filepath.Join(dir, daemon.JoinFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	expect(t, "a key that others may read", d.checkJoin(nil), Warn, "chmod 0600")
	for state, want := range map[string]Status{daemon.JoinRefused: Fail, daemon.JoinDamaged: Fail, daemon.JoinJoining: Warn, daemon.JoinOverridden: Warn} {
		s := &daemon.Status{Join: &daemon.JoinStatus{State: state, Error: "why", Hint: "do this"}}
		f := d.checkJoin(s)
		expect(t, state, f, want, "why")
		if !strings.Contains(f.Next, "do this") {
			t.Errorf("%s: next is %q", state, f.Next)
		}
	}
}

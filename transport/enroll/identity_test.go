package enroll

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"agentctl/atomicfile"
	"agentctl/manifest"
)

func TestIdentitySurvivesRestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	a, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !manifest.ValidNodeID(a.NodeID()) || len(a.InstanceID()) != 32 {
		t.Fatalf("identity %q %q", a.NodeID(), a.InstanceID())
	}
	st, err := os.Stat(filepath.Join(dir, FileName))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("identity file %v %v, want 0600", st, err)
	}
	node := manifest.NewNodeID()
	if changed, err := a.SetNode(node, "home"); err != nil || !changed {
		t.Fatalf("SetNode: %v %v, want a change", changed, err)
	}
	if changed, err := a.SetNode(node, "home"); err != nil || changed {
		t.Fatalf("SetNode again: %v %v, want no change", changed, err)
	}
	b, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if b.NodeID() != node || b.InstanceID() != a.InstanceID() {
		t.Errorf("after a restart %s/%s, want %s/%s", b.NodeID(), b.InstanceID(), node, a.InstanceID())
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 1 {
		t.Errorf("state directory holds %v, want one file", left)
	}
}

// TestDamagedIdentity: whatever has the place of the identity, the board gets one, and the old file
// is kept. The node is the credential's, where there is one.
func TestDamagedIdentity(t *testing.T) {
	good := `{"instance_id":"00112233445566778899aabbccddeeff","node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"}`
	contents := map[string]string{
		"empty":        "",
		"unknown key":  strings.TrimSuffix(good, "}") + `,"x":1}`,
		"bad node id":  `{"instance_id":"00112233445566778899aabbccddeeff","node_id":"zzzz"}`,
		"huge":         strings.Repeat(" ", maxFileBytes+1),
		"wrong length": `{"instance_id":"0011","node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"}`,
		"noise":        "\x00\xff\xfe",
	}
	for n := 1; n < len(good); n += 13 {
		contents[fmt.Sprint("cut at ", n)] = good[:n]
	}
	for name, content := range contents {
		for _, joined := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " joined ", joined), func(t *testing.T) {
				dir := t.TempDir()
				p := filepath.Join(dir, FileName)
				if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
				cred := testCredential(t)
				if joined {
					if err := cred.save(dir); err != nil {
						t.Fatal(err)
					}
				}
				id, err := Load(dir)
				if err != nil {
					t.Fatal(err)
				}
				d := id.Damage()
				if d == nil || d.Aside == "" || d.Problem == "" {
					t.Fatalf("damage %+v", d)
				}
				if kept, _ := os.ReadFile(d.Aside); string(kept) != content {
					t.Error("the damaged file was not kept")
				}
				if joined != (id.NodeID() == cred.NodeID) || !manifest.ValidNodeID(id.NodeID()) {
					t.Errorf("node %s, that of the credential is %s", id.NodeID(), cred.NodeID)
				}
				again, err := Load(dir)
				if err != nil || again.Damage() != nil || again.data() != id.data() {
					t.Errorf("after a restart %+v, %v, %v; want %+v", again.data(), err, again.Damage(), id.data())
				}
			})
		}
	}
}

// TestIdentityUnreadable: a file of another owner, and one on a disk that fails, stay as they are.
func TestIdentityUnreadable(t *testing.T) {
	for _, fault := range []error{syscall.EACCES, syscall.EIO} {
		id := &Identity{path: filepath.Join(t.TempDir(), FileName), d: data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}, unsaved: true}
		if err := os.WriteFile(id.path, []byte("precious"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := id.setAsideDamaged(&os.PathError{Err: fault}); err != nil || id.Damage() == nil || id.Damage().Aside != "" {
			t.Fatalf("%v: %v, %+v", fault, err, id.Damage())
		}
		if _, err := id.SetNode(manifest.NewNodeID(), "home"); err == nil {
			t.Errorf("%v: the new identity was saved", fault)
		}
		if id.RetrySave() {
			t.Errorf("%v: RetrySave wants no other attempt", fault)
		}
		if b, _ := os.ReadFile(id.path); string(b) != "precious" {
			t.Errorf("%v: the file was replaced", fault)
		}
		// The disk works again, or a person saw to the file.
		if err := os.WriteFile(id.path, []byte(`{"instance_id":"4c1d0cb2a6cf4d8b9a1c3f0f5f2b7e61","node_id":"`+id.NodeID()+`"}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if !id.RetrySave() || id.Damage() != nil || id.InstanceID() != "4c1d0cb2a6cf4d8b9a1c3f0f5f2b7e61" {
			t.Errorf("%v: the file is not read again: %v", fault, id.Damage())
		}
	}
}

// TestIdentityOnFullDisk: the identity is saved as soon as the disk accepts it; a file that
// appears meanwhile is not replaced.
func TestIdentityOnFullDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	id := &Identity{path: filepath.Join(dir, FileName), d: data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}, unsaved: true}
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // in the way
		t.Fatal(err)
	}
	if id.RetrySave() {
		t.Fatal("it was saved in a directory that is a file")
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if !id.RetrySave() {
		t.Fatal("it was not saved")
	}
	again, err := Load(dir)
	if err != nil || again.NodeID() != id.NodeID() {
		t.Fatalf("after a restart %v, %v; want %s", again, err, id.NodeID())
	}
	other := &Identity{path: id.path, d: data{InstanceID: NewInstanceID(), NodeID: manifest.NewNodeID()}, unsaved: true}
	if !other.RetrySave() {
		t.Fatal("RetrySave wants another attempt")
	}
	if again, err = Load(dir); err != nil || again.NodeID() != id.NodeID() {
		t.Errorf("the identity on the disk was replaced: %v, %v", again, err)
	}
	for err, want := range map[error]bool{syscall.EROFS: true, &os.PathError{Err: syscall.ENOSPC}: true, syscall.EACCES: false, syscall.ENOTDIR: false} {
		if isDiskFault(err) != want {
			t.Errorf("isDiskFault(%v) is %v", err, !want)
		}
	}
}

// testCredential is a credential that is not from a relay.
func testCredential(t *testing.T) *Credential {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &Credential{Relay: "https://relay.example", NodeID: manifest.NewNodeID(), TenantID: "default",
		CodeSHA256: "00", Key: key, Token: "x.y.z", Gen: 1, RequestID: "01HZX9K3M4P7Q8R9S0T1V2W3XY"}
}

// TestLostIdentity: the credential brings the identity back to which its token is bound.
func TestLostIdentity(t *testing.T) {
	for _, content := range []string{"", "{", "missing"} {
		f, srv := newFakeRelay(t)
		dir := t.TempDir()
		if _, _, err := Join(t.Context(), JoinOptions{StateDir: dir, Relay: srv.URL, Code: f.code}); err != nil {
			t.Fatal(err)
		}
		before, err := Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, FileName)
		if err = os.WriteFile(path, []byte(content), 0o600); content == "missing" {
			err = os.Remove(path)
		}
		if err != nil {
			t.Fatal(err)
		}
		after, err := Load(dir)
		if err != nil || after.InstanceID() != before.InstanceID() || after.NodeID() != f.nodeID {
			t.Errorf("%q: instance %s, was %s; %v", content, after.InstanceID(), before.InstanceID(), err)
		}
	}
}

// TestKeepInstance: a credential of an older version gets the instance of its token, and no other.
func TestKeepInstance(t *testing.T) {
	id := NewInstanceID()
	sum := sha256.Sum256([]byte(id))
	c := testCredential(t)
	c.Token = "x." + base64.RawURLEncoding.EncodeToString([]byte(`{"iid":"`+hex.EncodeToString(sum[:])+`"}`)) + ".z"
	c.keepInstance(NewInstanceID())
	if c.InstanceID != "" {
		t.Error("the instance of another installation is kept")
	}
	c.keepInstance(id)
	if c.InstanceID != id {
		t.Errorf("instance %q, want %q", c.InstanceID, id)
	}
}

// TestJoinOverDamage: a code that is joined with replaces a damaged credential, which is kept.
func TestJoinOverDamage(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "cut": `{"relay":"https://rel`, "noise": "\x00\xff", "of a newer version": `{"relay":"x","new":1}`} {
		t.Run(name, func(t *testing.T) {
			f, srv := newFakeRelay(t)
			dir := t.TempDir()
			for _, file := range []string{CredentialFile, pendingFile} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			c, already, err := Join(t.Context(), JoinOptions{StateDir: dir, Relay: srv.URL, Code: f.code})
			if err != nil || already || c.NodeID != f.nodeID {
				t.Fatalf("Join: %+v %v %v", c, already, err)
			}
			aside, err := atomicfile.Aside(dir)
			if err != nil || len(aside) != 2 {
				t.Fatalf("set aside are %q, %v; want both", aside, err)
			}
			for _, file := range aside {
				if b, _ := os.ReadFile(filepath.Join(dir, file)); string(b) != content {
					t.Errorf("%s holds %q", file, b)
				}
			}
		})
	}
}

// TestDamagedLeft: a board that has left does not join again by a file when the record of it is
// damaged.
func TestDamagedLeft(t *testing.T) {
	dir := t.TempDir()
	if HasLeft(dir, "AAAA") {
		t.Error("a board that never left has left")
	}
	if err := os.WriteFile(filepath.Join(dir, leftFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !HasLeft(dir, "AAAA") {
		t.Error("an empty record counts as none")
	}
}

package enroll

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

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

func TestDamagedIdentityIsRefused(t *testing.T) {
	for name, content := range map[string]string{
		"empty":        "",
		"cut":          `{"instance_id":"00112233445566778899aabbccddeeff","no`,
		"unknown key":  `{"instance_id":"00112233445566778899aabbccddeeff","node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","x":1}`,
		"bad node id":  `{"instance_id":"00112233445566778899aabbccddeeff","node_id":"zzzz"}`,
		"huge":         strings.Repeat(" ", maxFileBytes+1),
		"wrong length": `{"instance_id":"0011","node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p := filepath.Join(dir, FileName)
			if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "damaged") {
				t.Errorf("Load: %v, want an error with the word damaged", err)
			}
			if after, _ := os.ReadFile(p); string(after) != content {
				t.Error("the damaged file was overwritten")
			}
		})
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

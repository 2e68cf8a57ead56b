package atomicfile

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestSetAside(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "identity.json"), filepath.Join(dir, "settings.yaml")
	if err := os.Mkdir(other, 0o700); err != nil { // whatever is in the place of the file
		t.Fatal(err)
	}
	if _, err := SetAside(other); err != nil {
		t.Fatal(err)
	}
	var last string
	for i := range maxAside + 2 {
		if err := os.WriteFile(path, []byte(fmt.Sprint(i)), 0o600); err != nil {
			t.Fatal(err)
		}
		aside, err := SetAside(path)
		if err != nil || aside == last {
			t.Fatalf("set aside as %s after %s: %v", aside, last, err)
		}
		last = aside
	}
	if b, err := os.ReadFile(last); err != nil || string(b) != fmt.Sprint(maxAside+1) {
		t.Errorf("the newest holds %q, %v", b, err)
	}
	if names, err := Aside(dir); err != nil || len(names) != maxAside+1 {
		t.Errorf("set aside are %q, %v; want %d of the one and the other", names, err, maxAside)
	}
	if exists(path) || exists(other) {
		t.Error("a file is still in its place")
	}
	if _, err := SetAside(path); err == nil {
		t.Error("a file that does not exist was set aside")
	}
}

// No name with a time is free where the filesystem refuses all of them.
func TestSetAsideFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("x", 250))
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if aside, err := SetAside(path); err == nil || !exists(path) {
		t.Errorf("a file with too long a name was set aside as %s", aside)
	}
}

func TestRemoveStale(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	for name, age := range map[string]time.Duration{
		".identity.json-123":  time.Hour,
		".identity.json-1970": -20000 * 24 * time.Hour, // written before a clock was lost
		".settings.yaml-99":   time.Second,             // perhaps of another process
		".hidden":             time.Hour,
		".x-y":                time.Hour,
		"identity.json-123":   time.Hour,
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now.Add(-age), now.Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	n, err := RemoveStale(dir)
	var left []string
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if err != nil || n != 2 || !slices.Equal(left, []string{".hidden", ".settings.yaml-99", ".x-y", "identity.json-123"}) {
		t.Errorf("removed %d, %v; left %q", n, err, left)
	}
}

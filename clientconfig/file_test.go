package clientconfig

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func writeFile(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // whatever the umask is
		t.Fatal(err)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func checkMode(t *testing.T, path string, want fs.FileMode) {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode(); runtime.GOOS != "windows" && got != want {
		t.Errorf("%s has mode %v, want %v", path, got, want)
	}
}

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b", "mcp.json")
	f, err := Read(path)
	if err != nil || !f.IsNew {
		t.Fatal(f, err)
	}
	if err := f.Write([]byte("one")); err != nil {
		t.Fatal(err)
	}
	checkMode(t, path, 0o600)
	if err := f.Write([]byte("two")); !errors.Is(err, ErrChanged) {
		t.Errorf("written over a file that was made meanwhile: %v", err)
	}
	writeFile(t, path, "one", 0o644)
	if f, err = Read(path); err != nil || string(f.Data) != "one" || f.IsNew {
		t.Fatal(f, err)
	}
	if err := f.Write([]byte("two")); err != nil {
		t.Fatal(err)
	}
	checkMode(t, path, 0o644)
	checkMode(t, f.BackupPath(), 0o644)
	if readFile(t, path) != "two" || readFile(t, f.BackupPath()) != "one" {
		t.Error(readFile(t, path), readFile(t, f.BackupPath()))
	}
	if err := f.Write([]byte("three")); !errors.Is(err, ErrChanged) || readFile(t, path) != "two" {
		t.Errorf("written over a changed file: %v, %s", err, readFile(t, path))
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 2 {
		t.Errorf("files that are left: %v, %v", left, err)
	}
}

func TestSymlink(t *testing.T) {
	dir := t.TempDir()
	target, link := filepath.Join(dir, "dotfiles.json"), filepath.Join(dir, "mcp.json")
	writeFile(t, target, "one", 0o640)
	if err := os.Symlink("dotfiles.json", link); err != nil {
		t.Skip("this system makes no symbolic links:", err)
	}
	f, err := Read(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Write([]byte("two")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 || readFile(t, target) != "two" {
		t.Error("the link is not one any more, or its file is not written:", info, err, readFile(t, target))
	}
	checkMode(t, target, 0o640)
	if err := os.Remove(target); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(link); err == nil || !strings.Contains(err.Error(), "leads nowhere") {
		t.Errorf("a dangling link: %v", err)
	}
}

func TestRefusedFiles(t *testing.T) {
	dir := t.TempDir()
	check := func(path string, want error) {
		t.Helper()
		f, err := Read(path)
		if err == nil {
			err = f.Write([]byte("new"))
		}
		var fe *FileError
		if !errors.Is(err, want) || !errors.As(err, &fe) || fe.Path != path {
			t.Errorf("%s: %v, want %v", filepath.Base(path), err, want)
		}
	}
	check(dir, ErrNotRegular)
	large := filepath.Join(dir, "large")
	writeFile(t, large, "", 0o600)
	if err := os.Truncate(large, maxFile+1); err != nil {
		t.Fatal(err)
	}
	check(large, ErrTooLarge)
	readOnly := filepath.Join(dir, "readonly")
	writeFile(t, readOnly, "x", 0o444)
	check(readOnly, ErrReadOnly)
	if readFile(t, readOnly) != "x" {
		t.Error("a read-only file was written")
	}
	inFile := filepath.Join(readOnly, "mcp.json")
	if f, err := Read(inFile); err == nil {
		if f.Write([]byte("new")) == nil {
			t.Error("written below a file")
		}
	}
}

func TestDiff(t *testing.T) {
	f := &File{Path: "mcp.json", Data: []byte("a\r\n" + strings.Repeat("x", 1000) + "\r\nb\r\n")}
	d := f.Diff([]byte("a\r\n" + strings.Repeat("x", 1000) + "\r\nb\r\nc\r\n"))
	if !strings.Contains(d, "\n+c\n") || !strings.HasPrefix(d, "--- mcp.json\n+++ mcp.json (after)\n") || len(d) > 400 {
		t.Errorf("%s", d)
	}
	if d := f.Diff(f.Data); d != "" {
		t.Errorf("no change: %q", d)
	}
}

// FuzzEdit checks that an edit of any file that is accepted can be repeated without a change and
// undone, and that the entry is there in between.
func FuzzEdit(f *testing.F) {
	f.Add("cursor", []byte("{\n  \"mcpServers\": {\"x\": {}} // c\n}\n"))
	f.Add("codex", []byte("# c\n[mcp_servers.agentctl]\nurl = 'x'\n[a]\n"))
	f.Add("codex", []byte("[mcp_servers.agentctl.env]\na = 1"))
	f.Add("claude-code", []byte("{\"mcpServers\":{\"agentctl\":{\"url\":1,}}}"))
	f.Add("cursor", []byte("{\"mcpServers\":{\"agentctl\":{\"env\":{\"A\":\"b\", // c\n}}}}"))
	f.Add("codex", []byte("[mcp_servers.agentctl]\nenv.A = 'b'\n"))
	f.Add("codex", []byte("[mcp_servers.agentctl]\nenv = {'A b' = \"\\u0000\"}\n"))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		c, err := Find(name)
		if err != nil || !c.Writable {
			return
		}
		connected, err := c.Connect(data, testStdio)
		if err != nil {
			return
		}
		if again, err := c.Connect(connected, testStdio); err != nil || !bytes.Equal(again, connected) {
			t.Fatalf("%q became %q, and connected again %q, %v", data, connected, again, err)
		}
		if !bytes.Contains(connected, []byte("/usr/bin/agentctl")) {
			t.Fatalf("%q became %q", data, connected)
		}
		withEnv := testStdio
		withEnv.Env = []EnvVar{{"XDG_CONFIG_HOME", "/srv/ann/config"}}
		if set, err := c.Connect(connected, withEnv); err == nil {
			if again, err := c.Connect(set, withEnv); err != nil || !bytes.Equal(again, set) {
				t.Fatalf("%q with a variable became %q, and again %q, %v", connected, set, again, err)
			}
			if !bytes.Contains(set, []byte("/srv/ann/config")) {
				t.Fatalf("%q with a variable became %q", connected, set)
			}
		}
		removed, err := c.Disconnect(connected)
		if err != nil {
			t.Fatalf("%q: disconnect %q: %v", data, connected, err)
		}
		if again, err := c.Disconnect(removed); err != nil || !bytes.Equal(again, removed) {
			t.Fatalf("%q: disconnected twice: %q, %v", removed, again, err)
		}
	})
}

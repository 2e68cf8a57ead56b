package auth

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

// files are texts by the names of their files, relative to some directory.
type files map[string]string

// write makes the files below a directory.
func (f files) write(t *testing.T, dir string) {
	t.Helper()
	for name, text := range f {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// readAll returns all files below a directory but the lock.
func readAll(t *testing.T, dir string) files {
	t.Helper()
	found := files{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && name != lockFile {
			var b []byte
			b, err = os.ReadFile(filepath.Join(dir, name))
			found[name] = string(b)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// lockDir is LockStateDir, which must succeed.
func lockDir(t *testing.T, dir string) *Exclusive {
	t.Helper()
	x, err := LockStateDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// A restore that was killed after any of its steps is completed by the next process that opens the
// directory, or has changed nothing. Nobody sees a mixture of old and new files.
func TestSwapIsCompleted(t *testing.T) {
	t.Parallel()
	before := files{"relay.db": "old", "relay.db-wal": "old", "keys/k": "old", "relay.json": "old"}
	staged := files{"relay.db": "new", "keys/k": "new", "relay.json": "new"}
	after := files{"relay.db": "new", "keys/k": "new", "relay.json": "new",
		"aside/relay.db": "old", "aside/relay.db-wal": "old", "aside/keys/k": "old", "aside/relay.json": "old"}

	type step func(d *stateDir) error
	steps := []step{
		func(d *stateDir) error { // from here on the restore counts as done
			return d.replace(swapFile, []byte(`{"aside":"aside","old":["relay.db","relay.db-wal","keys","relay.json"],"new":["keys","relay.db","relay.json"]}`))
		},
		func(d *stateDir) error { return d.mkdir("aside") },
	}
	for _, name := range []string{"relay.db", "relay.db-wal", "keys", "relay.json"} {
		steps = append(steps, func(d *stateDir) error { return d.moveUnlessThere(name, filepath.Join("aside", name)) })
	}
	for _, name := range []string{"keys", "relay.db", "relay.json"} {
		steps = append(steps, func(d *stateDir) error { return d.root.Rename(filepath.Join(swapDir, name), name) })
	}
	steps = append(steps, func(d *stateDir) error { return d.root.RemoveAll(swapDir) })

	for killedAfter := range len(steps) + 1 {
		dir := filepath.Join(t.TempDir(), "state")
		before.write(t, dir)
		x := lockDir(t, dir)
		staging, err := x.Staging()
		if err != nil {
			t.Fatal(err)
		}
		staged.write(t, staging)
		for _, step := range steps[:killedAfter] {
			if err := step(x.dir); err != nil {
				t.Fatal(err)
			}
		}
		x.Close()

		lockDir(t, dir).Close() // as the next process
		want := after
		if killedAfter == 0 {
			want = before
		}
		if got := readAll(t, dir); !maps.Equal(got, want) {
			t.Errorf("killed after %d steps, the files are %v, want %v", killedAfter, got, want)
		}
	}
}

// Exclusive.Swap does these steps.
func TestSwap(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	files{"relay.db": "old", "keep": "old"}.write(t, dir)
	x := lockDir(t, dir)
	defer x.Close()
	staging, err := x.Staging()
	if err != nil {
		t.Fatal(err)
	}
	files{"relay.db": "new", "keys/k": "new"}.write(t, staging)
	if err := x.Swap("aside", []string{"relay.db", "keys", "missing"}); err != nil {
		t.Fatal(err)
	}
	want := files{"relay.db": "new", "keys/k": "new", "keep": "old", "aside/relay.db": "old"}
	if got := readAll(t, dir); !maps.Equal(got, want) {
		t.Errorf("the files are %v, want %v", got, want)
	}
}

// What a restore staged before it was killed has signing keys, and is deleted at the next start.
func TestStagingIsRemoved(t *testing.T) {
	t.Parallel()
	dir, _, _ := closedState(t)
	if err := os.CopyFS(filepath.Join(dir, swapDir, keysDir), os.DirFS(filepath.Join(dir, keysDir))); err != nil {
		t.Fatal(err)
	}
	openStore(t, Options{StateDir: dir})
	if _, err := os.Lstat(filepath.Join(dir, swapDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the staging directory: got %v, want that it is gone", err)
	}
}

// A state directory is not locked for a restore while a Store has it open.
func TestLockWhileOpen(t *testing.T) {
	t.Parallel()
	s := openStore(t, Options{})
	if _, err := LockStateDir(s.dir.path); !errors.Is(err, ErrInUse) {
		t.Errorf("got %v, want ErrInUse", err)
	}
}

// A Store does not get its shared lock during a restore.
func TestOpenDuringRestore(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	x := lockDir(t, dir)
	defer x.Close()
	second := stateDir{path: dir, root: x.dir.root}
	if err := second.openLock(); err != nil {
		t.Fatal(err)
	}
	defer second.lock.Close()
	if err := second.flock(false); !errors.Is(err, ErrInUse) { // acquireShared would wait lockTimeout
		t.Errorf("got %v, want ErrInUse", err)
	}
}

package statedir

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func newProber(dir string) *prober { return &prober{dir: dir} }

func TestProbe(t *testing.T) {
	dir := t.TempDir()
	p := newProber(dir)
	for _, write := range []bool{false, true, false} {
		if r := p.run(write); r.state != OK || r.free == 0 || len(r.damaged) > 0 {
			t.Fatalf("%+v", r)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, probeFile)); err != nil || st.Mode().Perm() != 0o600 || st.Size() == 0 {
		t.Errorf("the file of the probe: %v, %v", st, err)
	}
	if err := os.Truncate(filepath.Join(dir, probeFile), 0); err != nil { // as after a power cut
		t.Fatal(err)
	}
	if r := p.run(false); r.state != OK {
		t.Errorf("an empty file: %+v", r)
	}
	for _, name := range []string{"identity.json.damaged-20260101T000000.000", "history.db.corrupt-20260101T000000.000", "history.db.corrupt-20260101T000000.000-wal"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if r := p.run(false); len(r.damaged) != 2 || !slices.IsSorted(r.damaged) {
		t.Errorf("damaged %q", r.damaged)
	}
	for name, put := range map[string]func(path string) error{
		"a directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "x"), 0o700) },
		"a link":      func(path string) error { return os.Symlink("/etc/passwd", path) },
		"a pipe":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		dir := t.TempDir()
		if err := put(filepath.Join(dir, probeFile)); err != nil {
			t.Fatal(err)
		}
		if r := newProber(dir).run(false); r.state != OK {
			t.Errorf("%s in place of the probe's file: %+v", name, r)
		}
		if r := newProber(dir).run(false); len(r.damaged) != 1 {
			t.Errorf("%s: set aside are %q", name, r.damaged)
		}
	}
	if r := newProber(filepath.Join(dir, "none")).run(false); r.state != Failing || !strings.Contains(r.detail, "no such file") {
		t.Errorf("no directory: %+v", r)
	}
}

// TestProbeWritesSeldom: on a disk, a probe that is not asked to write does not.
func TestProbeWritesSeldom(t *testing.T) {
	dir := t.TempDir()
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		t.Fatal(err)
	}
	isDisk := !slices.Contains(notDisks, int64(fs.Type))
	p := newProber(dir)
	if r := p.run(true); !r.written {
		t.Fatalf("%+v", r)
	}
	if r := p.run(false); r.written == isDisk {
		t.Errorf("on a disk %v, written %v", isDisk, r.written)
	}
}

func TestStateOf(t *testing.T) {
	for err, want := range map[error]State{syscall.ENOSPC: Full, syscall.EDQUOT: Full, syscall.EROFS: ReadOnly, syscall.EACCES: ReadOnly,
		syscall.EIO: Failing, syscall.ENOTCONN: Failing, errors.New("x"): Failing} {
		if got := stateOf(&os.PathError{Err: err}); got != want {
			t.Errorf("%v is %s, want %s", err, got, want)
		}
	}
}

// mountTmpfs mounts a small filesystem, and skips where that is not possible.
func mountTmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skip("mounting needs root: ", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func TestProbeOfRealFaults(t *testing.T) {
	dir := mountTmpfs(t, "8m")
	p := newProber(dir)
	if r := p.run(false); r.state != OK {
		t.Fatalf("%+v", r)
	}
	ballast, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64<<10)
	for err == nil {
		_, err = ballast.Write(b)
	}
	ballast.Close()
	if r := p.run(false); r.state != Full || r.free > minFree {
		t.Errorf("a full disk: %+v", r)
	}
	if err := os.Remove(ballast.Name()); err != nil {
		t.Fatal(err)
	}
	if r := p.run(false); r.state != OK {
		t.Errorf("with space again: %+v", r)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if r := p.run(false); r.state != ReadOnly {
		t.Errorf("read-only: %+v", r)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	if r := p.run(false); r.state != OK {
		t.Errorf("writable again: %+v", r)
	}
}

package history

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentctl/sqlitefile/sqlitefiletest"
)

// diskDir is the directory for temporary files that are not in memory.
var diskDir string

// childEnv makes the test binary a child that records into the file it names.
const childEnv = "HISTORY_TEST_RECORD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		if err := recordForEver(path); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	flag.Set("rapid.checks", strconv.Itoa(often(100, 4))) // by default; the command line may say more
	diskDir = os.TempDir()
	sqlitefiletest.Main(m)
}

// recordForEver commits batches of 25 samples, one for each second of a fake clock, and
// prints a line when each is committed. It begins after the newest sample in the file.
func recordForEver(path string) error {
	c := &fakeClock{wall: epoch + 365*msPerDay, mono: time.Minute}
	s, err := Open(Options{Path: path, MaxBytes: MinMaxBytes, Now: c.now, Mono: c.monotonic, BootID: "boot"})
	if err != nil {
		return err
	}
	last := int64(epoch)
	err = s.withDB(func(d *db) error {
		n, err := d.number("SELECT max(ts) FROM samples")
		last = max(last, n)
		return err
	})
	if err != nil {
		return err
	}
	c.set(last)
	for i := 0; ; i++ {
		for range 25 {
			c.step(time.Second)
			s.Add(c.sample(i), reading("network.bytes_in_per_s", float64(i)))
		}
		if err := s.Flush(context.Background()); err != nil {
			return err
		}
		now, _ := c.now()
		fmt.Println("committed", now)
	}
}

// child is recordForEver in a child process.
type child struct {
	cmd *exec.Cmd
	out io.Reader
}

func startChild(t *testing.T, path string) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(exe)}
	c.cmd.Env = append(os.Environ(), childEnv+"="+path)
	c.cmd.Stderr = os.Stderr
	if c.out, err = c.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

// run lets the child commit something and has cut called at a random moment. It returns
// the time up to which the child reported commits: before the cut began, and in all.
func (c *child) run(t *testing.T, cut func()) (before, all int64) {
	t.Helper()
	var committed atomic.Int64
	cutting := make(chan struct{})
	lines := bufio.NewScanner(c.out)
	for lines.Scan() {
		n := int64(0)
		if _, err := fmt.Sscanf(lines.Text(), "committed %d", &n); err != nil && committed.Load() == 0 {
			t.Fatalf("the child says %q", lines.Text())
		}
		if n == 0 {
			continue // it could not write any more
		}
		if committed.Swap(n) == 0 {
			go func() { // commits go on while this sleeps, up to 12 ms: a few of them
				defer close(cutting)
				time.Sleep(time.Duration(rand.IntN(12_000)) * time.Microsecond)
				before = committed.Load()
				cut()
			}()
		}
	}
	if committed.Load() == 0 {
		t.Fatal("the child committed nothing")
	}
	<-cutting
	c.cmd.Wait()
	return before, committed.Load()
}

// checkCommitted holds a file against what was committed: the newest thousand seconds
// up to then, each with its reading.
func checkCommitted(t *testing.T, path string, committed int64) {
	t.Helper()
	checkIntegrity(t, path)
	s, err := Open(Options{Path: path, MaxAge: 10 * 365 * 24 * time.Hour, BootID: "boot"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := committed - 1_000_000
	for _, r := range query(t, s, Query{FromMS: max(epoch+1000, committed-999_000), ToMS: committed}) {
		want = max(want+1000, r.TSMS) // the file may have begun later
		if r.TSMS != want || !r.HasSample || len(r.Modules) != 1 {
			t.Fatalf("row %+v, want a whole one at %d", r, want)
		}
	}
	if want != committed {
		t.Fatalf("the newest row is of %d, but %d was committed", want, committed)
	}
	if st := s.Stats(); st.Quarantined != 0 {
		t.Fatalf("stats %+v: the file was found corrupt", st)
	}
}

// TestKill: kill -9 at random moments, 60 times in a slow run, and no committed row is lost.
func TestKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.db")
	for range often(60, 4) {
		c := startChild(t, path)
		_, committed := c.run(t, func() { c.cmd.Process.Kill() })
		checkCommitted(t, path, committed)
	}
}

// limitEnv makes the test binary a child whose files may not grow beyond a limit.
const limitEnv = "HISTORY_TEST_LIMIT"

// TestFileSizeLimit simulates a full disk by a limit on the size of files, where the test
// cannot mount a filesystem.
func TestFileSizeLimit(t *testing.T) {
	if os.Getenv(limitEnv) == "" {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(exe, "-test.run", "^TestFileSizeLimit$")
		cmd.Env = append(os.Environ(), limitEnv+"=1", "GORACE=atexit_sleep_ms=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	signal.Ignore(unix.SIGXFSZ)
	limit := func(n uint64) {
		var old unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
			t.Fatal(err)
		}
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: min(n, old.Max), Max: old.Max}); err != nil {
			t.Fatal(err)
		}
	}
	s, c := open(t, Options{})
	record(s, c, 100)
	flush(t, s)
	limit(200 << 10)
	saved := int64(100)
	for range 100 {
		record(s, c, 100)
		if s.Flush(t.Context()) != nil {
			break
		}
		saved += 100
	}
	if st := s.Stats(); st.State != "degraded:io" || st.Rows != saved || st.Unsaved != 100 {
		t.Errorf("stats %+v, want degraded:io, %d rows and 100 unsaved", st, saved)
	}
	if got := query(t, s, Query{FromMS: epoch}); int64(len(got)) != saved+100 {
		t.Errorf("%d rows, want %d", len(got), saved+100)
	}
	limit(1 << 40)
	flush(t, s)
	if st := s.Stats(); st.State != "ok" || st.Rows != saved+100 {
		t.Errorf("stats %+v, want ok and %d rows", st, saved+100)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	checkIntegrity(t, s.path)
}

// loopExt4 mounts an ext4 filesystem on a loop device.
func loopExt4(t *testing.T, megabytes int64) (dir, device string, mount, unmount func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may mount a filesystem")
	}
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, megabytes<<20); err != nil {
		t.Fatal(err)
	}
	run := func(name string, args ...string) string {
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			t.Skipf("no loop device here: %s %v: %v: %s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	// The inode tables are written now, not by the kernel while something is measured.
	run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
	device = run("losetup", "--find", "--show", image)
	t.Cleanup(func() { exec.Command("losetup", "--detach", device).Run() })
	dir = t.TempDir()
	mount = func() {
		if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	unmount = func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		t.Skipf("cannot mount a loop device here: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir, device, mount, unmount
}

// TestPowerCut: 3 times, 30 in a slow run, the filesystem ends between one write and the next, and what
// had not reached the device is lost. No committed row is.
func TestPowerCut(t *testing.T) {
	dir, _, mount, unmount := loopExt4(t, 64)
	path := filepath.Join(dir, "history.db")
	cut := func() {
		f, err := os.Open(dir)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		const shutdown, noLogFlush = 0x8004587d, 2 // EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
		flags := uint32(noLogFlush)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), shutdown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
			t.Errorf("shut the filesystem down: %v", errno)
		}
	}
	for range often(30, 3) {
		c := startChild(t, path)
		time.AfterFunc(10*time.Second, func() { c.cmd.Process.Kill() }) // it ends by itself when a write fails
		// While a filesystem is being shut down a sync may return as if it had succeeded;
		// with the power gone it would not return. So what counts is what was said before.
		committed, _ := c.run(t, cut)
		unmount()
		mount()
		checkCommitted(t, path, committed)
	}
}

// TestTornWrite: of the sectors that a commit writes any may have reached the disk when
// the power fails. The commits before it stay, and it is there as a whole or not at all.
func TestTornWrite(t *testing.T) {
	s, c := open(t, Options{Path: filepath.Join(quickDir(t), "history.db")})
	torn := filepath.Join(quickDir(t), "torn.db")
	read := func(suffix string) []byte {
		b, err := os.ReadFile(s.path + suffix)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return b
	}
	rng := rand.New(rand.NewPCG(1, 2))
	tried, whole := 0, 0
	for n := int64(0); tried < often(300, 30); n += 40 {
		db, wal := read(""), read("-wal")
		record(s, c, 40)
		flush(t, s)
		wal2 := read("-wal")
		if n == 0 || !bytes.Equal(db, read("")) {
			continue // the WAL was moved into the file, which a separate sync protects
		}
		for range 5 {
			tried++
			mix := slices.Clone(wal)
			mix = append(mix, make([]byte, max(0, len(wal2)-len(mix)))...)
			if rng.IntN(4) == 0 {
				mix = mix[:len(wal)+rng.IntN(len(mix)-len(wal)+1)] // it had not grown so far yet
			}
			for at := 0; at < min(len(mix), len(wal2)); at += 512 {
				if rng.IntN(8) > 0 {
					copy(mix[at:min(at+512, len(mix))], wal2[at:])
				}
			}
			if rng.IntN(5) == 0 {
				mix = wal2
			}
			if err := errors.Join(os.WriteFile(torn, db, 0o640), os.WriteFile(torn+"-wal", mix, 0o640)); err != nil {
				t.Fatal(err)
			}
			os.Remove(torn + "-shm")
			checkIntegrity(t, torn)
			d, err := openDB(torn)
			if err != nil {
				t.Fatal(err)
			}
			if d.rows != n && d.rows != n+40 {
				t.Fatalf("%d rows, want %d or %d", d.rows, n, n+40)
			}
			if d.rows == n+40 {
				whole++
			}
			d.close()
		}
	}
	if whole == 0 || whole == tried {
		t.Errorf("the last commit was there %d times of %d: nothing was torn", whole, tried)
	}
}

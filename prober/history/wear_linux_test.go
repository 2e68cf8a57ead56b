package history

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentctl/prober"
)

// written is how many bytes a block device has taken so far.
func written(t *testing.T, device string) int64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device), "stat"))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b))
	var sectors int64
	if _, err := fmt.Sscan(f[6], &sectors); err != nil {
		t.Fatal(err)
	}
	return sectors * 512
}

// TestWear: a day of one sample a second, with the default flush, costs the card at most 75 MB, the
// filesystem's own journal included, and a row at most 45 bytes of file. The second day, which
// removes as much as it adds, stays within that, and so does the third, on which a
// board with all modules adds its seven readings each ten seconds. In a run that is not
// slow, an hour represents each day, of which a quarter more is allowed: with so short a retention
// rows are removed in smaller steps.
func TestWear(t *testing.T) {
	const perFlush = int(DefaultFlush / time.Second)
	flushes := often(86_400/perFlush, 3600/perFlush)
	rows := int64(flushes * perFlush)
	bar := 75e6 * float64(rows) / 86_400
	if !slow() {
		bar *= 1.25
	}
	dir, device, _, _ := loopExt4(t, 256)
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	// Between two flushes the kernel has minutes to write what is dirty. The test makes it write them at once.
	settle := func() {
		if err := unix.Syncfs(int(root.Fd())); err != nil {
			t.Fatal(err)
		}
	}
	s, c := open(t, Options{Path: filepath.Join(dir, "history.db"), MaxAge: time.Duration(rows) * time.Second})
	for _, day := range []string{"first day", "second day", "day with modules"} {
		var readings []prober.Reading
		if day == "day with modules" {
			for i := range 7 {
				readings = append(readings, reading(keyNames[i], 0))
			}
		}
		settle()
		before := written(t, device)
		counted := int64(0)
		for range flushes {
			for i := range perFlush {
				c.step(time.Second)
				if i%10 == 0 {
					s.Add(c.sample(i), readings...)
				} else {
					s.Add(c.sample(i))
				}
			}
			had := s.Stats().WrittenToday // 0 when the day is new
			flush(t, s)
			counted += s.Stats().WrittenToday - had
			settle()
		}
		total := written(t, device) - before
		st := s.Stats()
		row := float64(st.Bytes) / float64(st.Rows)
		t.Logf("%s of %d h: %.1f MB written to the device, %.1f MB counted; %d rows of %.1f bytes", day, rows/3600, float64(total)/1e6, float64(counted)/1e6, st.Rows, row)
		if float64(total) > bar {
			t.Errorf("%s: %.1f MB written, want at most %.1f", day, float64(total)/1e6, bar/1e6)
		}
		if counted < total/3 || counted > total {
			t.Errorf("%s: %.1f MB counted of %.1f MB", day, float64(counted)/1e6, float64(total)/1e6)
		}
		if slow() && row > 45 && readings == nil || st.Rows < rows || st.Rows > rows+3900 {
			t.Errorf("%s: %d rows of %.1f bytes, want %d of at most 45", day, st.Rows, row, rows)
		}
	}
	if st := s.Stats(); st.Dropped+st.Repeated != 0 {
		t.Errorf("stats %+v, want nothing lost", st)
	}
}

// TestWrittenToday checks that the count is what the kernel reports, and that a day begins at 0.
func TestWrittenToday(t *testing.T) {
	dir, err := os.MkdirTemp(diskDir, "history-test-") // the kernel does not count what is written to memory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	runtime.LockOSThread() // the kernel counts by thread
	before := threadWrites()
	if err := os.WriteFile(filepath.Join(dir, "probe"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	counts := threadWrites() > before
	runtime.UnlockOSThread()
	if !counts {
		t.Skip("the kernel does not count what is written to " + dir)
	}
	s, c := open(t, Options{Path: filepath.Join(dir, "history.db")})
	record(s, c, 3000)
	flush(t, s)
	st := s.Stats()
	if st.WrittenToday < 3000*30 || st.WrittenToday > 2_000_000 {
		t.Errorf("%d bytes counted for 3000 rows", st.WrittenToday)
	}
	c.step(24 * time.Hour)
	if n := s.Stats().WrittenToday; n != 0 {
		t.Errorf("%d bytes on a new day, want 0", n)
	}
	record(s, c, 1)
	flush(t, s)
	if n := s.Stats().WrittenToday; n == 0 || n >= st.WrittenToday {
		t.Errorf("%d bytes for a commit on a new day, after %d", n, st.WrittenToday)
	}
}

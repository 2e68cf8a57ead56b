package prober

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// tree copies a fixture, so that a test may change its files.
func tree(t *testing.T, name string) (root string) {
	t.Helper()
	root = t.TempDir() + "/"
	if err := os.CopyFS(root, os.DirFS("testdata/proc/"+name)); err != nil {
		t.Fatal(err)
	}
	return root
}

func write(t *testing.T, path, text string) {
	t.Helper()
	// In place, as a file of /proc changes: the open descriptor sees it.
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// later puts the second stat of a fixture in the place of the first.
func later(t *testing.T, root string) {
	t.Helper()
	b, err := os.ReadFile(root + "proc/stat.later")
	if err != nil {
		t.Fatal(err)
	}
	write(t, root+"proc/stat", string(b))
}

func threeSeconds() time.Duration { return 3 * time.Second }

// fixed is a statfs of 1,000 blocks, 400 free, 300 of them for users.
func fixed(_ string, st *unix.Statfs_t) error {
	*st = unix.Statfs_t{Blocks: 1000, Bfree: 400, Bavail: 300}
	return nil
}

func openMachine(t *testing.T, root string) *machineSource {
	t.Helper()
	m := newMachine(root, "/", threeSeconds).(*machineSource)
	m.disk.statfs = fixed
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestMachineReadsFixtures(t *testing.T) {
	const kb = 1024
	tests := []struct {
		tree        string
		first, next float64 // cpu_pct
		used, total uint64
		load        [3]float64
	}{
		{"pizero", 6.53, 20.8, (440620 - 292708) * kb, 440620 * kb, [3]float64{0.31, 0.24, 0.18}},
		{"quad", 1.76, 70.6, (3882360 - 1913204) * kb, 3882360 * kb, [3]float64{3.92, 2.07, 1.15}},
		{"linux-3.2", 3.71, 36.74, (254380 - 40112 - 138900 - 12044 + 3*2660) * kb, 254380 * kb, [3]float64{0, 0.01, 0.05}},
		{"linux-2.6", 3.71, 80.04, (254380 - 40112 - 120336) * kb, 254380 * kb, [3]float64{12.5, 9.99, 100}},
		{"container", 1.48, 75, (131072 - 100000) * kb, 131072 * kb, [3]float64{0.1, 0.2, 0.3}},
	}
	for _, tt := range tests {
		t.Run(tt.tree, func(t *testing.T) {
			if tt.tree == "linux-3.2" && os.Getpagesize() != 4096 {
				t.Skip("the watermarks of zoneinfo are pages; the figures are for pages of 4 KiB")
			}
			root := tree(t, tt.tree)
			m := openMachine(t, root)
			var s Sample
			if err := m.Read(&s); err != nil {
				t.Fatal(err)
			}
			if s.CPUPct != tt.first {
				t.Errorf("first cpu_pct %v, want %v, the mean since boot", s.CPUPct, tt.first)
			}
			later(t, root)
			if err := m.Read(&s); err != nil {
				t.Fatal(err)
			}
			want := Sample{CPUPct: tt.next, MemBytes: tt.used, MemTotalBytes: tt.total,
				DiskPct: 66.67, Load1: tt.load[0], Load5: tt.load[1], Load15: tt.load[2], cpu: s.cpu}
			if s != want {
				t.Errorf("got  %+v\nwant %+v", s, want)
			}
			if err := s.checkReadings(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestMachineRefusesBadFiles(t *testing.T) {
	tests := []struct {
		name, file, text string
		want             string // in the error
	}{
		{"empty stat", "stat", "", "it is empty"},
		{"empty meminfo", "meminfo", "", "it is empty"},
		{"empty loadavg", "loadavg", "", "it is empty"},
		{"garbage stat", "stat", "\xff\xfe\x00", "no complete"},
		{"zeros", "stat", "cpu  0 0 0 0 0 0 0 0 0 0\n", "zero"},
		{"huge counter", "stat", "cpu  " + strings.Repeat("9", 400) + " 1 1 1 1 1 1\n", "not a number"},
		{"line longer than the buffer", "stat", "cpu  1 1 1 1 1 1 1" + strings.Repeat(" 1", 600) + "\n", "no complete"},
		{"huge memory", "meminfo", "MemTotal: 18446744073709551615 kB\n", "not a number"},
		{"available is more than there is, free too", "meminfo",
			"MemTotal: 10 kB\nMemFree: 11 kB\nMemAvailable: 12 kB\n", "contradict"},
		{"available is more than there is, no free", "meminfo", "MemTotal: 10 kB\nMemAvailable: 12 kB\n", "contradict"},
		{"huge load", "loadavg", "1e308 0 0 1/1 1\n", "not a number"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			root := tree(t, "quad")
			path := root + "proc/" + tt.file
			good, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			m := openMachine(t, root)
			write(t, path, tt.text)
			s := Sample{}
			err = m.Read(&s)
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "try: cat "+path) {
				t.Errorf("got %v, want %q and the file to look at", err, tt.want)
			}
			if s.CPUPct != 0 || s.MemTotalBytes != 0 {
				t.Errorf("a failed reading left %+v", s)
			}
			write(t, path, string(good))
			if err := m.Read(&s); err != nil {
				t.Errorf("after the file is well again: %v", err)
			}
		})
	}
}

func TestMachineWithoutProc(t *testing.T) {
	for _, file := range []string{"stat", "meminfo", "loadavg"} {
		root := tree(t, "quad")
		path := root + "proc/" + file
		if err := os.Rename(path, path+".away"); err != nil {
			t.Fatal(err)
		}
		m := openMachine(t, root)
		var s Sample
		err := m.Read(&s)
		if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "ProcSubset=pid") {
			t.Errorf("without %s: %v, want not-exist and a hint", file, err)
		}
		if err := os.Rename(path+".away", path); err != nil {
			t.Fatal(err)
		}
		if err := m.Read(&s); err != nil {
			t.Errorf("%s is back: %v", file, err)
		}
	}
}

// TestMachineOpensAgain checks that a descriptor which fails is closed and opened again.
func TestMachineOpensAgain(t *testing.T) {
	root := tree(t, "quad")
	m := openMachine(t, root)
	dir, err := unix.Open(root, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	m.meminfo.fd = dir // the machine closes it
	var s Sample
	if err := m.Read(&s); !errors.Is(err, unix.EISDIR) {
		t.Errorf("reading a directory: %v", err)
	}
	if err := m.Read(&s); err != nil {
		t.Errorf("the next reading: %v", err)
	}
}

func TestUsedPct(t *testing.T) {
	tests := []struct {
		name                string
		blocks, free, avail uint64
		want                float64
		err                 error
	}{
		{"reserved blocks are not available", 1000, 400, 300, 66.67, nil},
		{"full", 1000, 0, 0, 100, nil},
		{"full for users", 1000, 50, 0, 100, nil},
		{"new", 1000, 1000, 950, 0, nil},
		{"proc", 0, 0, 0, 0, errDiskNoSize},
		{"more free than there is", 10, 11, 0, 0, errDiskRange},
		{"available is -1", 10, 5, 1<<64 - 1, 0, errDiskRange},
		{"all reserved", 10, 10, 0, 0, errDiskRange},
	}
	for _, tt := range tests {
		if got, err := usedPct(tt.blocks, tt.free, tt.avail); got != tt.want || err != tt.err {
			t.Errorf("%s: got %v, %v, want %v, %v", tt.name, got, err, tt.want, tt.err)
		}
	}
}

// TestHungStatfs simulates a dead mount: the last disk value is used at first, then samples have
// none, and the disk is sampled again when the mount is back.
func TestHungStatfs(t *testing.T) {
	root := tree(t, "quad")
	synctest.Test(t, func(t *testing.T) {
		p := New(Options{Root: root, Interval: time.Second})
		m := p.source.(*machineSource)
		hang := make(chan struct{})
		calls := 0
		m.disk.statfs = func(path string, st *unix.Statfs_t) error {
			if calls++; calls == 3 {
				<-hang
			}
			return fixed(path, st)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()

		// Readings at 0 and 1 s have a new figure; the call of 2 s hangs.
		time.Sleep(4*time.Second + 500*time.Millisecond)
		s, err := p.Latest()
		if err != nil || s.DiskPct != 66.67 || s.Mono != 4*time.Second {
			t.Errorf("at 4 s: %+v, %v, want the last disk figure", s, err)
		}
		// The figure of 1 s may be used until 4 s.
		time.Sleep(time.Second)
		synctest.Wait()
		s, err = p.Latest()
		if err != nil || s.Mono != 5*time.Second || s.DiskPct != 0 || s.MemTotalBytes == 0 {
			t.Errorf("at 5 s: %+v, %v, want a sample without the disk", s, err)
		}
		if err := s.DiskErr; !errors.Is(err, ErrDisk) || !errors.Is(err, errDiskHung) || !strings.Contains(err.Error(), "try: df /") {
			t.Errorf("at 5 s: %v, want that the disk hangs", err)
		}
		if err := s.Check(); !errors.Is(err, ErrDisk) {
			t.Errorf("Check: %v, want it to be no frame", err)
		}
		if calls != 3 {
			t.Errorf("%d calls of statfs, want 3: none while one is out", calls)
		}
		if st := p.Stats(); st.Slips != 0 || st.Errors != 0 {
			t.Errorf("stats %+v, want no errors and no slips", st)
		}
		close(hang)
		time.Sleep(time.Second)
		if s, err := p.Latest(); err != nil || s.Mono != 6*time.Second || s.DiskErr != nil || s.DiskPct != 66.67 {
			t.Errorf("when it answers again: %+v, %v", s, err)
		}
		cancel()
		if err := <-done; errors.Is(err, ErrHung) {
			t.Error(err)
		}
	})
}

func TestStatfsThatNeverAnswers(t *testing.T) {
	root := tree(t, "quad")
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		d := newDiskReader("/mnt", func(string, *unix.Statfs_t) error { <-hang; return nil }, threeSeconds)
		m := newMachine(root, "/mnt", threeSeconds).(*machineSource)
		m.disk = d
		begin := time.Now()
		var s Sample
		for range 10 {
			if err := m.Read(&s); err != nil || !errors.Is(s.DiskErr, errDiskHung) {
				t.Errorf("got %v, disk %v, want an error of the disk: there never was a figure", err, s.DiskErr)
			}
		}
		if took := time.Since(begin); took != diskTimeout {
			t.Errorf("ten readings took %v, want to wait %v once", took, diskTimeout)
		}
		if err := m.Close(); !errors.Is(err, errDiskHung) {
			t.Errorf("Close: %v, want to hear that a call is left behind", err)
		}
		close(hang)
		synctest.Wait()
	})
}

func TestStatfsError(t *testing.T) {
	root := tree(t, "quad")
	m := newMachine(root, filepath.Join(root, "gone"), threeSeconds)
	defer m.Close()
	var s Sample
	if err := m.Read(&s); err != nil || !errors.Is(s.DiskErr, fs.ErrNotExist) {
		t.Errorf("got %v, disk %v, want not-exist", err, s.DiskErr)
	}
	if err := os.Mkdir(filepath.Join(root, "gone"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Read(&s); err != nil || s.DiskErr != nil {
		t.Errorf("the path is there now: %v, %v", err, s.DiskErr)
	}
}

// This machine, through its real /proc: the sampler's whole way.
func TestThisMachine(t *testing.T) {
	p := New(Options{Interval: MinInterval})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	n := 0
	enough := errors.New("enough")
	err := p.Watch(ctx, MinInterval, func(s Sample) error {
		if err := s.Check(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
		if n++; n == 3 {
			return enough
		}
		return nil
	})
	if err != enough {
		t.Errorf("Watch: %v (stats %+v)", err, p.Stats())
	}
	cancel()
	if err := <-done; errors.Is(err, ErrHung) {
		t.Error(err)
	}
}

package prober

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/shirou/gopsutil/v4/common"
	"github.com/shirou/gopsutil/v4/cpu"
	"github.com/shirou/gopsutil/v4/disk"
	"github.com/shirou/gopsutil/v4/load"
	"github.com/shirou/gopsutil/v4/mem"
)

// reference reads through gopsutil what machine reads by itself.
type reference struct{ ctx context.Context }

// newReference reads the tree at root, which ends in a slash.
func newReference(root string) reference {
	return reference{context.WithValue(context.Background(), common.EnvKey,
		common.EnvMap{common.HostProcEnvKey: filepath.Join(root, "proc")})}
}

func (r reference) Read(s *Sample) error {
	// Percent compares with the reading before, which is one for the process.
	pct, err := cpu.PercentWithContext(r.ctx, 0, false)
	if err != nil {
		return err
	}
	vm, err := mem.VirtualMemoryWithContext(r.ctx)
	if err != nil {
		return err
	}
	avg, err := load.AvgWithContext(r.ctx)
	if err != nil {
		return err
	}
	usage, err := disk.UsageWithContext(r.ctx, "/")
	if err != nil {
		return err
	}
	s.CPUPct, s.DiskPct = pct[0], usage.UsedPercent
	s.MemTotalBytes, s.MemBytes = vm.Total, vm.Total-vm.Available
	s.Load1, s.Load5, s.Load15 = avg.Load1, avg.Load5, avg.Load15
	return nil
}

// same fails unless both read the same, to the two decimals that are kept.
func same(t *testing.T, ours, theirs Sample) {
	t.Helper()
	if d := math.Abs(ours.CPUPct - theirs.CPUPct); d > 0.006 {
		t.Errorf("cpu_pct %v, gopsutil has %v", ours.CPUPct, theirs.CPUPct)
	}
	// Both look at the live filesystem, one after the other.
	if d := math.Abs(ours.DiskPct - theirs.DiskPct); d > 0.5 {
		t.Errorf("disk_pct %v, gopsutil has %v", ours.DiskPct, theirs.DiskPct)
	}
	ours.CPUPct, ours.DiskPct, ours.cpu = theirs.CPUPct, theirs.DiskPct, theirs.cpu
	if ours != theirs {
		t.Errorf("ours     %+v\ngopsutil %+v", ours, theirs)
	}
}

// compare reads root twice with both, and step in between.
func compare(t *testing.T, root string, step func()) {
	t.Helper()
	m := newMachine(root, "/", threeSeconds)
	defer m.Close()
	ref := newReference(root)
	var ours, theirs Sample
	for range 2 {
		if err := m.Read(&ours); err != nil {
			t.Fatal(err)
		}
		if err := ref.Read(&theirs); err != nil {
			t.Fatal(err)
		}
		step()
	}
	same(t, ours, theirs)
}

func TestSameAsGopsutil(t *testing.T) {
	// Not "container": there gopsutil's subtraction underflows to 16 EiB.
	for _, name := range []string{"pizero", "quad", "linux-3.2", "linux-2.6"} {
		t.Run(name, func(t *testing.T) {
			root := tree(t, name)
			compare(t, root, func() { later(t, root) })
		})
	}
}

// Machines beyond the fixtures: any counters, with and without MemAvailable.
func TestSameAsGopsutilOnRandomMachines(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	root := t.TempDir() + "/"
	if err := os.Mkdir(root+"proc", 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			var cpu [10]uint64
			stat := func(grow uint64) {
				for k := range cpu {
					cpu[k] += grow + rng.Uint64N(4*grow)
				}
				// guest is part of user, guest_nice of nice.
				cpu[8], cpu[9] = rng.Uint64N(cpu[0]), rng.Uint64N(cpu[1])
				text := "cpu "
				for _, v := range cpu[:8+2*rng.IntN(2)] {
					text += fmt.Sprintf(" %d", v)
				}
				write(t, root+"proc/stat", text+"\ncpu0 1 2 3\n")
			}
			stat(1000)

			total := 1 << (16 + rng.IntN(12))
			part := func() int { return rng.IntN(total / 4) }
			text := fmt.Sprintf("MemTotal: %d kB\nMemFree: %d kB\n", total, part())
			if rng.IntN(2) == 0 {
				text += fmt.Sprintf("MemAvailable: %d kB\n", 2*part())
			}
			text += fmt.Sprintf("Buffers: %d kB\nCached: %d kB\n", part(), part())
			if rng.IntN(2) == 0 {
				text += fmt.Sprintf("Active(file): %d kB\nInactive(file): %d kB\n", part(), part()/2)
			}
			if rng.IntN(2) == 0 {
				text += fmt.Sprintf("SReclaimable: %d kB\n", part())
			}
			write(t, root+"proc/meminfo", text)
			zones := "Node 0, zone DMA\n"
			if rng.IntN(2) == 0 {
				zones += fmt.Sprintf("  pages free 12\n        min 1\n        low      %d\n        high 3\n", rng.IntN(3000))
			}
			write(t, root+"proc/zoneinfo", zones)
			write(t, root+"proc/loadavg", fmt.Sprintf("%.2f %.2f %.2f 1/2 3\n",
				100*rng.Float64(), rng.Float64(), 1000*rng.Float64()))

			compare(t, root, func() { stat(10) })
		})
	}
}

// On this machine the counters move between two readings, so only what stays
// still is compared exactly, and memory loosely.
func TestSameAsGopsutilHere(t *testing.T) {
	m := newMachine("/", "/", threeSeconds)
	defer m.Close()
	var ours, theirs Sample
	if err := m.Read(&ours); err != nil {
		t.Skipf("this machine hides something: %v", err)
	}
	if err := newReference("/").Read(&theirs); err != nil {
		t.Fatal(err)
	}
	if ours.MemTotalBytes != theirs.MemTotalBytes {
		t.Errorf("mem_total_bytes %d, gopsutil has %d", ours.MemTotalBytes, theirs.MemTotalBytes)
	}
	if d := math.Abs(float64(ours.MemBytes) - float64(theirs.MemBytes)); d > 0.1*float64(ours.MemTotalBytes) {
		t.Errorf("mem_bytes %d, gopsutil has %d", ours.MemBytes, theirs.MemBytes)
	}
	if d := math.Abs(ours.DiskPct - theirs.DiskPct); d > 0.5 {
		t.Errorf("disk_pct %v, gopsutil has %v", ours.DiskPct, theirs.DiskPct)
	}
	if d := math.Abs(ours.Load15 - theirs.Load15); d > 1 {
		t.Errorf("load_15m %v, gopsutil has %v", ours.Load15, theirs.Load15)
	}
}

func TestReadingAllocates(t *testing.T) {
	m := newMachine("/", "/", threeSeconds)
	defer m.Close()
	var s Sample
	if err := m.Read(&s); err != nil {
		t.Skipf("this machine hides something: %v", err)
	}
	// statfs takes its path as a new C string each time.
	if n := testing.AllocsPerRun(100, func() {
		if err := m.Read(&s); err != nil {
			t.Fatal(err)
		}
	}); n > 1 {
		t.Errorf("%v allocations a reading, want at most 1", n)
	}
}

// BenchmarkSample is the price of one reading of this machine, ours and through
// gopsutil, in one run.
func BenchmarkSample(b *testing.B) {
	run := func(read func(*Sample) error) func(*testing.B) {
		return func(b *testing.B) {
			var s Sample
			b.ReportAllocs()
			for b.Loop() {
				if err := read(&s); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	m := newMachine("/", "/", threeSeconds)
	defer m.Close()
	b.Run("ours", run(m.Read))
	b.Run("gopsutil", run(newReference("/").Read))
}

//go:build !linux

package prober

import (
	"errors"
	"fmt"
	"time"

	"github.com/shirou/gopsutil/v4/cpu"
	"github.com/shirou/gopsutil/v4/disk"
	"github.com/shirou/gopsutil/v4/load"
	"github.com/shirou/gopsutil/v4/mem"
)

// machineSource reads any other system through gopsutil, for people who develop there:
// boards run Linux. A disk that hangs stops it altogether.
type machineSource struct {
	diskPath string
	meter    cpuMeter
}

var _ Source = (*machineSource)(nil)

func newMachine(_, diskPath string, _ func() time.Duration) Source {
	return &machineSource{diskPath: diskPath}
}

// Read uses Times, not Percent: Percent keeps its last reading in a global.
func (m *machineSource) Read(s *Sample) error {
	times, err := cpu.Times(false)
	if err == nil && len(times) == 0 {
		err = errEmpty
	}
	if err != nil {
		return fmt.Errorf("read cpu times: %w", err)
	}
	vm, err := mem.VirtualMemory()
	if err != nil {
		return fmt.Errorf("read memory: %w", err)
	}
	if vm.Available > vm.Total {
		return fmt.Errorf("read memory: %w", errMemRange)
	}
	avg, err := load.Avg()
	if err != nil {
		return fmt.Errorf("read load: %w", err)
	}
	usage, err := disk.Usage(m.diskPath)
	if err == nil && usage.Total == 0 {
		err = errors.New("this filesystem has no size")
	}
	if err != nil {
		return fmt.Errorf("read disk %s: %w", m.diskPath, err)
	}

	t := times[0]
	idle := t.Idle + t.Iowait
	busy := t.User + t.Nice + t.System + t.Irq + t.Softirq + t.Steal
	s.CPUPct, s.cpu = m.meter.add(cpuTimes{busy: uint64(busy * 100), idle: uint64(idle * 100)})
	s.MemBytes, s.MemTotalBytes = vm.Total-vm.Available, vm.Total
	s.DiskPct = round2(usage.UsedPercent)
	s.Load1, s.Load5, s.Load15 = avg.Load1, avg.Load5, avg.Load15
	return nil
}

// Close does nothing.
func (m *machineSource) Close() error { return nil }

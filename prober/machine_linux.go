package prober

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// machineSource reads a Linux machine: /proc/stat, meminfo and loadavg through descriptors
// kept open, and one statfs. A sample is three preads into buffers allocated once. Opening
// the files, and splitting lines into strings as gopsutil does, costs several times as
// much.
type machineSource struct {
	root                   string
	stat, meminfo, loadavg procFile
	zoneinfo               string
	disk                   *diskReader
	cpu                    cpuMeter
}

var _ ModuleSource = (*machineSource)(nil)

// newMachine opens nothing yet. root ends in a slash. maxDiskAge is how old a disk value
// may be used while statfs hangs.
func newMachine(root, diskPath string, maxDiskAge func() time.Duration) Source {
	return &machineSource{
		root:     root,
		stat:     newProcFile(root+"proc/stat", 512), // its first line: ten counters of 20 digits fit
		meminfo:  newProcFile(root+"proc/meminfo", 4096),
		loadavg:  newProcFile(root+"proc/loadavg", 128),
		zoneinfo: root + "proc/zoneinfo",
		disk:     newDiskReader(diskPath, unix.Statfs, maxDiskAge),
	}
}

// Read requests the disk first, so that statfs runs while the rest is read. A disk that
// does not answer leaves the other readings valid.
func (m *machineSource) Read(s *Sample) error {
	m.disk.request()

	times, err := readProc(&m.stat, parseStat)
	if err != nil {
		return err
	}
	mem, err := readProc(&m.meminfo, parseMeminfo)
	if err != nil {
		return err
	}
	used, err := mem.used(func() (uint64, bool) { return lowWatermarks(m.zoneinfo) })
	if err != nil {
		return m.meminfo.wrapErr(err)
	}
	load, err := readProc(&m.loadavg, parseLoadavg)
	if err != nil {
		return err
	}
	s.DiskErr = nil
	if s.DiskPct, err = m.disk.usage(); err != nil {
		s.DiskErr = fmt.Errorf("%w: %w", ErrDisk, err)
	}

	s.CPUPct, s.cpu = m.cpu.add(times)
	s.MemBytes, s.MemTotalBytes = used, mem.value[memTotal]
	s.Load1, s.Load5, s.Load15 = load[0], load[1], load[2]
	return nil
}

// Close closes the files and waits a moment for a statfs that is in progress.
func (m *machineSource) Close() error {
	m.stat.close()
	m.meminfo.close()
	m.loadavg.close()
	return m.disk.close()
}

package prober

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// machineSource reads a Linux machine: /proc/stat, meminfo and loadavg through
// descriptors kept open, and one statfs. A reading is three preads into buffers
// made once; opening, and gopsutil's way of splitting lines into strings, cost
// several times as much.
type machineSource struct {
	root                   string
	stat, meminfo, loadavg procFile
	zoneinfo               string
	disk                   *diskReader
	cpu                    cpuMeter
}

var _ Source = (*machineSource)(nil)

// newMachine opens nothing yet. root ends in a slash. maxDiskAge tells how old a
// disk figure may be used while statfs hangs.
func newMachine(root, diskPath string, maxDiskAge func() time.Duration) Source {
	return &machineSource{
		root: root,
		// The first line of stat is what counts; ten counters of 20 digits fit.
		stat:     procFile{path: root + "proc/stat", fd: -1, buf: make([]byte, 512)},
		meminfo:  procFile{path: root + "proc/meminfo", fd: -1, buf: make([]byte, 4096)},
		loadavg:  procFile{path: root + "proc/loadavg", fd: -1, buf: make([]byte, 128)},
		zoneinfo: root + "proc/zoneinfo",
		disk:     newDiskReader(diskPath, unix.Statfs, maxDiskAge),
	}
}

// Read asks for the disk first, so that a statfs that takes its time runs while
// the rest is read.
func (m *machineSource) Read(s *Sample) error {
	m.disk.request()

	b, err := m.stat.read()
	if err != nil {
		return err
	}
	times, err := parseStat(b)
	if err != nil {
		return m.stat.wrapErr(err)
	}
	if b, err = m.meminfo.read(); err != nil {
		return err
	}
	mem, err := parseMeminfo(b)
	if err != nil {
		return m.meminfo.wrapErr(err)
	}
	used, err := mem.used(func() (uint64, bool) { return lowWatermarks(m.zoneinfo) })
	if err != nil {
		return m.meminfo.wrapErr(err)
	}
	if b, err = m.loadavg.read(); err != nil {
		return err
	}
	load, err := parseLoadavg(b)
	if err != nil {
		return m.loadavg.wrapErr(err)
	}
	// A disk that does not answer stops nothing else.
	s.DiskErr = nil
	if s.DiskPct, err = m.disk.usage(); err != nil {
		s.DiskErr = fmt.Errorf("%w: %w", ErrDisk, err)
	}

	s.CPUPct, s.cpu = m.cpu.add(times)
	s.MemBytes, s.MemTotalBytes = used, mem.total
	s.Load1, s.Load5, s.Load15 = load[0], load[1], load[2]
	return nil
}

// Close closes the files and waits a moment for a statfs that is under way.
func (m *machineSource) Close() error {
	m.stat.close()
	m.meminfo.close()
	m.loadavg.close()
	return m.disk.close()
}

// procFile is a file under /proc that stays open. It is opened at the first read
// and again after a failed one.
type procFile struct {
	path string
	fd   int // -1 while closed
	buf  []byte
}

// read returns the start of the file, valid until the next read. One pread from
// the start makes the kernel write the text anew; a second one, to see the end of
// the file, would make it do so twice.
func (f *procFile) read() ([]byte, error) {
	if f.fd < 0 {
		fd, err := f.open()
		if err != nil {
			return nil, f.wrapErr(err)
		}
		f.fd = fd
	}
	n, err := f.pread(0)
	if err != nil {
		f.close()
		return nil, f.wrapErr(err)
	}
	return f.buf[:n], nil
}

// readAll reads as much of the file as the buffer holds, for files of which the kernel
// gives no more than a page a read.
func (f *procFile) readAll() ([]byte, error) {
	b, err := f.read()
	if err != nil {
		return nil, err
	}
	n := len(b)
	for n > 0 && n < len(f.buf) {
		more, err := f.pread(n)
		if err != nil {
			f.close()
			return nil, f.wrapErr(err)
		}
		if more == 0 {
			break
		}
		n += more
	}
	return f.buf[:n], nil
}

// pread fills the buffer from off on, once.
func (f *procFile) pread(off int) (int, error) {
	for {
		n, err := unix.Pread(f.fd, f.buf[off:], int64(off))
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func (f *procFile) open() (int, error) {
	for {
		// O_NONBLOCK: a fixture or a bind mount may be a pipe, whose open hangs.
		fd, err := unix.Open(f.path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func (f *procFile) close() {
	if f.fd >= 0 {
		unix.Close(f.fd)
		f.fd = -1
	}
}

// wrapErr says which file and what to look at.
func (f *procFile) wrapErr(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("read %s: %w; the service may not see it (ProcSubset=pid hides it), try: cat %s", f.path, err, f.path)
	}
	return fmt.Errorf("read %s: %w; try: cat %s", f.path, err, f.path)
}

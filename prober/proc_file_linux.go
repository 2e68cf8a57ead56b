package prober

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// procFile is a file under /proc or /sys that stays open. It is opened at the first read
// and again after a failed one.
type procFile struct {
	path string
	fd   int // -1 while closed
	buf  []byte
}

// newProcFile opens nothing. size is how many bytes of the file are read at most.
func newProcFile(path string, size int) procFile {
	return procFile{path: path, fd: -1, buf: make([]byte, size)}
}

// readProc reads the start of f and parses it. Errors name the file.
func readProc[T any](f *procFile, parse func([]byte) (T, error)) (v T, err error) {
	b, err := f.read()
	if err != nil {
		return v, err
	}
	if v, err = parse(b); err != nil {
		err = f.wrapErr(err)
	}
	return v, err
}

// read returns the start of the file, valid until the next read. One pread from offset 0
// makes the kernel generate the text again; a second one, to find the end of the file,
// would do so twice.
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

// readAll fills the buffer as far as the file reaches, for files of which the kernel
// returns at most a page a read.
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

// pread fills the buffer from off on, with one call.
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
		// O_NONBLOCK: a fixture or a bind mount may be a pipe, whose open would hang.
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

// wrapErr adds which file it was and what to try.
func (f *procFile) wrapErr(err error) error {
	hint := ""
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		hint = " the service may not see it (ProcSubset=pid hides it),"
	}
	return fmt.Errorf("read %s: %w;%s try: cat %s", f.path, err, hint, f.path)
}

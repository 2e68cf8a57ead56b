package audit

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"
	"time"

	"agentctl/relay/storage"
)

// maxParts bounds the older parts of a file: 16 by size, 8 by age, and some to spare.
const maxParts = 32

var (
	// errRegular refuses a link, a pipe or a directory in the place of a file.
	errRegular = errors.New("it is not a regular file; move it away")
	errLarge   = errors.New("the file cannot be rotated and has reached its bound")
	errClosed  = errors.New("the file is not open")
	errTorn    = errors.New("the file is shorter than what was written")
)

// rotatingFile is a file of lines that is rotated: when it has a sixteenth of its bound, or its
// first line an eighth of its age, it becomes PATH.1, what was PATH.1 becomes PATH.2, and so on.
//
// A rotation syncs the file, removes parts that are too old or too many (prune), moves the parts below
// the first free number up by one, so that PATH.1 is free (shift), renames the file to it, and opens a
// new one. A power cut or an error in between leaves a number free, or PATH without a file. The next
// rotation fills that number, and the next open makes the file, so no step has to be undone.
//
// No line is lost or cut by a rotation, whatever fails. A file is renamed only onto a name that is
// free, and the open file goes on taking lines until its successor is open, whatever its name is.
type rotatingFile struct {
	path      string
	maxBytes  int64 // with its older parts
	partSize  int64
	chunk     int // bytes written at once
	maxAge    time.Duration
	watch     *storage.Watch
	operation operations

	file    file      // nil: it could not be opened
	size    int64     // of the file, as this process knows it
	started time.Time // of the first line
	age     aging
	isDirty bool // something was written since the last sync
	torn    bool // the file does not end with a line
	// recheckPath: the path may lead to another file by now, because an operation failed or a sync was
	// due. The next flush compares them.
	recheckPath bool

	rotateErr error     // of the last rotation
	retryAt   time.Time // when a rotation that failed is tried again

	// A write that failed may leave off in the middle of a line. The next write continues there, unless
	// another file was opened meanwhile: open goes back to the beginning of the line.
	pending []byte // whole lines that are to be written
	off     int    // bytes of them that were written
}

// operations are what the tests let fail.
type operations struct {
	open   func(path string) (file, error)
	rename func(from, to string) error
}

// file is what a rotatingFile needs of an *os.File.
type file interface {
	Write(b []byte) (int, error)
	ReadAt(b []byte, off int64) (int, error)
	Sync() error
	Stat() (fs.FileInfo, error)
	Close() error
}

func newRotatingFile(path string, maxBytes int64, maxAge time.Duration, watch *storage.Watch) *rotatingFile {
	// Parts are removed whole, so the log loses about a sixteenth of its bound at a time.
	part := maxBytes / 16
	return &rotatingFile{path: path, maxBytes: maxBytes, partSize: part, chunk: int(min(chunkSize, part/2)), maxAge: maxAge, watch: watch,
		operation: operations{open: func(path string) (file, error) { return openRegular(path) }, rename: os.Rename}}
}

// openRegular opens a regular file for appending, and nothing else: a symbolic link would lead a
// relay that runs as root elsewhere, and a pipe would block it. O_APPEND lets commands append lines beside
// a relay that runs (appendLocal). It is opened for reading as well, for endsTorn and firstTime.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENXIO) {
		err = errRegular
	}
	if err != nil {
		return nil, fmt.Errorf("open audit log %s: %w", path, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errRegular
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("open audit log %s: %w", path, err)
	}
	return f, nil
}

// endsTorn reports whether a file ends in the middle of a line, as after a power cut.
func endsTorn(f file) (bool, error) {
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return false, err
	}
	var last [1]byte
	if _, err := f.ReadAt(last[:], st.Size()-1); err != nil {
		return false, err
	}
	return last[0] != '\n', nil
}

// open opens the path in place of the file that is open. A line that has gone into that one in
// part starts again.
func (f *rotatingFile) open() error {
	next, err := f.operation.open(f.path)
	if err != nil {
		return err
	}
	torn, err := endsTorn(next)
	var st fs.FileInfo
	if err == nil {
		st, err = next.Stat()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("open audit log %s: %w", f.path, err), next.Close())
	}
	if f.file != nil {
		_ = f.file.Close()
	} else {
		f.age = newAging(st)
	}
	f.off = bytes.LastIndexByte(f.pending[:f.off], '\n') + 1
	f.file, f.size, f.torn, f.recheckPath = next, st.Size(), torn, false
	f.started = firstTime(next, f.age.now())
	return nil
}

// firstTime is the time of the first line of a file, or now. It makes the age of a file survive a restart
// without another file that records it.
func firstTime(f file, now time.Time) time.Time {
	const prefix = `{"ts":"`
	var b [len(prefix) + len("2006-01-02T15:04:05.000Z")]byte
	if _, err := f.ReadAt(b[:], 0); err == nil && string(b[:len(prefix)]) == prefix {
		if t, err := time.Parse("2006-01-02T15:04:05.000Z", string(b[len(prefix):])); err == nil {
			return t
		}
	}
	return now
}

// isIdle reports whether nothing waits to be written.
func (f *rotatingFile) isIdle() bool { return len(f.pending) == 0 }

// pendingLines is the number of lines that are not written whole.
func (f *rotatingFile) pendingLines() int { return bytes.Count(f.pending[f.off:], []byte("\n")) }

// flush writes the pending lines; what the file does not take stays. Without any it repairs what
// failed before: it opens the file, or completes a rotation. errLarge says that a file which cannot be
// rotated has reached the bound for all parts together.
func (f *rotatingFile) flush() error {
	if f.isIdle() && f.file != nil && f.rotateErr == nil {
		return nil
	}
	f.checkPath()
	if f.file == nil {
		return f.open()
	}
	if f.isRotationDue() {
		f.rotate()
	}
	if f.isIdle() {
		return nil
	}
	if f.size >= f.maxBytes {
		return errLarge
	}
	if f.torn { // end the line that a power cut left, so that it costs no line but itself
		if _, err := f.write([]byte("\n")); err != nil {
			return err
		}
		f.torn = false
	}
	n, err := f.write(f.pending[f.off:])
	if f.off += n; err != nil {
		return err
	}
	f.pending, f.off = f.pending[:0], 0
	if cap(f.pending) > 4*chunkSize { // a minute of many refusals
		f.pending = nil
	}
	return nil
}

func (f *rotatingFile) write(b []byte) (n int, err error) {
	op := f.watch.Begin("write")
	n, err = f.file.Write(b)
	op.End(err)
	f.size += int64(n)
	f.isDirty = f.isDirty || n > 0
	f.recheckPath = f.recheckPath || err != nil
	return n, err
}

// checkPath opens the path again if it no longer leads to the open file: somebody has moved the
// file, a rotation stopped half-way, or the disk was mounted again. If that fails, the open file
// stays.
func (f *rotatingFile) checkPath() {
	if f.file == nil || f.recheckPath && !f.isAtPath() {
		_ = f.open() // tried again with the next flush
		return
	}
	f.recheckPath = false
}

// isAtPath reports whether the path leads to the open file. It assumes so if Lstat fails: a disk that
// fails must not make the log give up a file that takes lines.
func (f *rotatingFile) isAtPath() bool {
	there, err := os.Lstat(f.path)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	mine, err := f.file.Stat()
	return err == nil && os.SameFile(there, mine)
}

// sync makes what was written durable. A disk that has stored less than it said is found here.
func (f *rotatingFile) sync() error {
	if !f.isDirty {
		return nil
	}
	return f.forceSync()
}

// forceSync is sync also when nothing was written.
func (f *rotatingFile) forceSync() error {
	if f.file == nil {
		return errClosed
	}
	op := f.watch.Begin("fsync")
	err := f.file.Sync()
	if err == nil {
		err = f.checkSize()
	}
	op.End(err)
	f.isDirty = err != nil
	f.recheckPath = true // check once a second at most whether somebody has moved the file
	return err
}

// checkSize compares the size of the file with what was written; another process may have
// appended to it. A file that is shorter has lost lines that the disk had confirmed; how many is not
// known.
func (f *rotatingFile) checkSize() error {
	st, err := f.file.Stat()
	if err != nil {
		return err
	}
	expected := f.size
	f.size = st.Size()
	if st.Size() >= expected {
		return nil
	}
	if f.torn, err = endsTorn(f.file); err != nil {
		return err
	}
	return errTorn
}

// isRotationDue reports whether the file is to be rotated before the next line. In the middle of
// a line it is not: the rest of the line would begin the next file. After a rotation that failed it is
// due again a second later, whatever size the file has.
func (f *rotatingFile) isRotationDue() bool {
	if f.size == 0 || f.torn || f.off > 0 && f.pending[f.off-1] != '\n' || time.Now().Before(f.retryAt) {
		return false
	}
	if f.rotateErr != nil {
		return true
	}
	isOld := f.maxAge > 0 && f.age.now().Sub(f.started) > f.maxAge/8
	return isOld || f.size+int64(len(f.pending)-f.off) > f.partSize
}

// rotate starts a new file. After a failure the open one stays in use, and the next attempt
// continues where this one stopped. A file that is no longer at the path is not renamed: somebody, or the
// attempt before, has moved it. open then makes a new one, or opens the one that is there.
func (f *rotatingFile) rotate() {
	err := f.sync()
	op := f.watch.Begin("rotate")
	if err == nil && f.isAtPath() {
		err = f.shift()
	}
	if err == nil {
		err = f.open()
	}
	op.End(err)
	f.rotateErr, f.retryAt = err, time.Time{}
	if err != nil {
		f.recheckPath, f.retryAt = true, time.Now().Add(time.Second)
	}
}

func (f *rotatingFile) part(i int) string { return f.path + "." + strconv.Itoa(i) }

// shift renames PATH to PATH.1, after it has renamed PATH.1 to PATH.2 and so on up to the first name that
// is free.
func (f *rotatingFile) shift() error {
	f.prune()
	free := 1
	for ; free < maxParts; free++ {
		if _, err := os.Lstat(f.part(free)); errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if free == maxParts {
		if err := os.Remove(f.part(free)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for ; free > 1; free-- {
		if err := f.operation.rename(f.part(free-1), f.part(free)); err != nil {
			return err
		}
	}
	return f.operation.rename(f.path, f.part(1))
}

// prune removes the oldest parts while all are larger than the bound or they are too old. It
// leaves space for the present file to fill. The time of a part is that of its last write, so a part stays
// until its newest line is too old.
func (f *rotatingFile) prune() {
	var parts []fs.FileInfo
	var names []string
	total := f.partSize
	for i := 1; i <= maxParts; i++ {
		if st, err := os.Lstat(f.part(i)); err == nil {
			parts, names = append(parts, st), append(names, f.part(i))
			total += st.Size()
		}
	}
	for i := len(parts) - 1; i >= 0; i-- {
		isOld := f.maxAge > 0 && f.age.now().Sub(parts[i].ModTime()) > f.maxAge
		if total+f.partSize <= f.maxBytes && !isOld {
			return
		}
		if os.Remove(names[i]) == nil {
			total -= parts[i].Size()
		}
	}
}

// close closes the file.
func (f *rotatingFile) close() error {
	if f.file == nil {
		return nil
	}
	err := f.file.Close()
	f.file = nil
	return err
}

// aging is the time from which the age of files is counted: the wall clock, but not later than the
// newest file of earlier runs and the uptime since then. A wall clock that is wrong by a year for an
// hour therefore removes nothing. After a time without the relay, files are kept longer by that time.
type aging struct {
	base   time.Time // when the file was written last, before it was opened
	opened time.Time // with a monotonic reading
}

func newAging(st fs.FileInfo) aging {
	a := aging{base: time.Now(), opened: time.Now()}
	if st.Size() > 0 {
		a.base = st.ModTime()
	}
	return a
}

func (a aging) now() time.Time {
	now := time.Now()
	if latest := a.base.Add(time.Since(a.opened)); latest.Before(now) {
		return latest
	}
	return now
}

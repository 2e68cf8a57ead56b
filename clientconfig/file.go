package clientconfig

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/diff"

	"agentctl/atomicfile"
)

// maxFile bounds a client's file, bytes. Claude Code keeps its history in the same file, which therefore
// grows; a file is in memory a few times during an edit: its text, its tree and its decoded content.
const maxFile = 16 << 20

// backupSuffix is what the name of a backup ends in. There is one backup: the next Write replaces it.
const backupSuffix = ".agentctl-backup"

// Reasons of a FileError beyond those of the file system and of edits.
var (
	ErrTooLarge   = fmt.Errorf("the file is larger than %d MiB", maxFile>>20)
	ErrNotRegular = errors.New("it is not a regular file")
	ErrReadOnly   = errors.New("the file is read-only")
	ErrChanged    = errors.New("another program changed the file meanwhile")
	ErrWritten    = errors.New("it is written") // all other errors leave the file as it was
)

// FileError reports a file that was not read or not written. The file is as it was, unless the error is
// ErrWritten: the disk failed after the rename, while its directory was synced. Path is the one that the caller gave, also where a
// symbolic link leads elsewhere: a person knows that one.
type FileError struct {
	Path string
	Err  error // one of the above, ErrSyntax or ErrShape, or an error of the file system
}

func (e *FileError) Error() string { return e.Path + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

// File is a client's file as it was read. It keeps nothing open and locks nothing: clients know no lock of
// ours, so Write compares the content instead.
type File struct {
	Path  string // as given
	Data  []byte // nil: there is none yet
	IsNew bool   // there was no file at Path when it was read

	target string      // Path with its symbolic links followed
	mode   fs.FileMode // the permission bits, which Write keeps
}

// Read reads a file that may not exist. A symbolic link is followed, so that it stays one: people keep their
// settings in a repository and link to them. A link that leads nowhere is an error and not a new file, because
// the place that it names may be a disk that is not mounted.
func Read(path string) (*File, error) {
	f := &File{Path: path, target: path, mode: 0o600}
	link, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		f.IsNew = true
		return f, nil
	}
	if err != nil {
		return nil, &FileError{path, errors.Unwrap(err)}
	}
	if link.Mode()&fs.ModeSymlink != 0 {
		if f.target, err = filepath.EvalSymlinks(path); err != nil {
			return nil, &FileError{path, fmt.Errorf("it is a symbolic link that leads nowhere: %w", err)}
		}
	}
	if f.Data, f.mode, err = f.read(); err != nil {
		return nil, &FileError{path, err}
	}
	return f, nil
}

// read returns the content and the mode of the file.
func (f *File) read() ([]byte, fs.FileMode, error) {
	info, err := os.Stat(f.target)
	switch {
	case err != nil:
		return nil, 0, errors.Unwrap(err)
	case !info.Mode().IsRegular(): // to open a named pipe would block
		return nil, 0, ErrNotRegular
	case info.Size() > maxFile:
		return nil, 0, ErrTooLarge
	}
	r, err := os.Open(f.target)
	if err != nil {
		return nil, 0, errors.Unwrap(err)
	}
	defer func() { _ = r.Close() }()
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1)) // it may grow after Stat
	if err == nil && len(data) > maxFile {
		err = ErrTooLarge
	}
	return data, info.Mode().Perm(), err
}

// BackupPath returns where Write keeps what the file held before.
func (f *File) BackupPath() string { return f.target + backupSuffix }

// Write replaces the content and keeps the one before at BackupPath, both with the mode of the
// file. A new file, and directories that it needs, are for the user only. A reader finds the
// old or the new content. Write refuses a file that has changed since Read.
func (f *File) Write(data []byte) error {
	if err := f.write(data); err != nil {
		return &FileError{f.Path, err}
	}
	return nil
}

// write replaces the file in an order that loses nothing: check, backup, rename. Between the check and the
// rename another program can still write the file, and its change is lost; the window is that of writing two
// files. A failure after the backup leaves the file as it was and the backup equal to it, unless it is
// ErrWritten.
func (f *File) write(data []byte) error {
	if f.IsNew { // a file that appears meanwhile is not replaced
		if err := os.MkdirAll(filepath.Dir(f.target), 0o700); err != nil {
			return err
		}
		err := atomicfile.Create(f.target, data)
		if errors.Is(err, fs.ErrExist) {
			return ErrChanged
		}
		return written(err)
	}
	if f.mode&0o200 == 0 { // a rename would replace it all the same
		return ErrReadOnly
	}
	now, _, err := f.read()
	if err != nil {
		return err
	}
	if !bytes.Equal(now, f.Data) {
		return ErrChanged
	}
	if err := atomicfile.ReplaceMode(f.BackupPath(), f.Data, f.mode); err != nil {
		return fmt.Errorf("write the backup %s: %w", f.BackupPath(), err)
	}
	return written(atomicfile.ReplaceMode(f.target, data, f.mode))
}

// written adds ErrWritten to the error of a file that has its new content.
func written(err error) error {
	if errors.Is(err, atomicfile.ErrNotDurable) {
		return fmt.Errorf("%w, but %w", ErrWritten, err)
	}
	return err
}

// maxDiffLine bounds a line of a diff in characters: some clients keep whole conversations on one line.
const maxDiffLine = 160

// Diff returns the change to data in the unified format; "" for none. Long lines are cut. It is for people:
// line ends of Windows are not shown. The caller replaces what could control a terminal.
func (f *File) Diff(data []byte) string {
	// The diff needs lines that end in \n only.
	lf := func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n")) }
	text := string(diff.Diff(f.Path, lf(f.Data), f.Path+" (after)", lf(data)))
	_, text, _ = strings.Cut(text, "\n") // the line of the command "diff"
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if r := []rune(line); len(r) > maxDiffLine {
			lines[i] = string(r[:maxDiffLine]) + "…"
		}
	}
	return strings.Join(lines, "\n")
}

package sqlitefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// ReadOnly returns the DSN of a connection that changes nothing on disk, neither in the database
// nor in the files that SQLite keeps beside it, and takes no lock that another process waits for.
// How it does that depends on the files beside the database:
//
//   - An index of a write-ahead log (-shm), while a process has the database open or after it was
//     killed: SQLite reads it without writing (readonly_shm), and makes its own index in memory if no
//     process uses the database.
//   - A log without an index, as in a copy of the files: SQLite would have to write the index, so
//     the files are copied into a private temporary directory.
//   - Neither: the file is complete, and is opened as immutable, without a lock. If a process
//     begins to write meanwhile, reads may fail.
//
// done removes the copy, if there is one; call it after the connection is closed.
func ReadOnly(path, query string) (dsn string, done func() error, err error) {
	done = func() error { return nil }
	if query != "" {
		query = "&" + query
	}
	if _, err := os.Stat(path + "-shm"); err == nil {
		return DSN(path, "mode=ro&readonly_shm=1&_query_only=1"+query), done, nil
	}
	if info, err := os.Stat(path + "-wal"); err != nil || info.Size() == 0 {
		return DSN(path, "mode=ro&immutable=1&_query_only=1"+query), done, nil
	}
	dir, err := os.MkdirTemp("", "agentctl-read-*")
	if err != nil {
		return "", done, err
	}
	done = func() error { return os.RemoveAll(dir) }
	to := filepath.Join(dir, filepath.Base(path))
	for _, suffix := range []string{"", "-wal"} {
		if err := CopyFile(path+suffix, to+suffix); err != nil {
			return "", done, errors.Join(fmt.Errorf("copy %s to read it: %w", path+suffix, err), done())
		}
	}
	// Without mode=ro, so that SQLite can write the index of the copied log.
	return DSN(to, "_query_only=1"+query), done, nil
}

// CopyFile copies a regular file to a new one of mode 0600, and syncs it. After an error the caller
// removes what was copied.
func CopyFile(from, to string) (err error) {
	info, err := os.Lstat(from)
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: from, Err: errors.New("not a regular file")}
	}
	if err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

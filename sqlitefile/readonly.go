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
// Which way that is possible depends on what is there:
//
//   - No write-ahead log, or an empty one: the file is complete. It is opened as immutable,
//     without a lock. A process that begins to write meanwhile may make reads fail; whoever
//     needs to know compares State before and after.
//   - A log and its index (-shm), as while a process has the database open, or after it was
//     killed: the index is only read (readonly_shm). If no process uses the database, SQLite makes
//     an index in memory.
//   - A log without an index, as in a copy of the files: SQLite would have to make the index, so
//     the files are copied into a private temporary directory.
//
// done removes the copy; call it after the connection is closed.
func ReadOnly(path, query string) (dsn string, done func() error, err error) {
	done = func() error { return nil }
	if query != "" {
		query = "&" + query
	}
	if fileSize(path+"-wal") == 0 {
		return DSN(path, "mode=ro&immutable=1&_query_only=1"+query), done, nil
	}
	if _, err := os.Stat(path + "-shm"); err == nil {
		return DSN(path, "mode=ro&readonly_shm=1&_query_only=1"+query), done, nil
	}
	dir, err := os.MkdirTemp("", "agentctl-read-*")
	if err != nil {
		return "", done, err
	}
	done = func() error { return os.RemoveAll(dir) }
	to := filepath.Join(dir, filepath.Base(path))
	for _, suffix := range []string{"", "-wal"} {
		if err := copyFile(path+suffix, to+suffix); err != nil {
			return "", done, errors.Join(fmt.Errorf("copy %s to read it: %w", path+suffix, err), done())
		}
	}
	return DSN(to, "_query_only=1"+query), done, nil
}

// State identifies the content of a database's files, as far as sizes and times show it.
func State(path string) string {
	s := ""
	for _, suffix := range []string{"", "-wal"} {
		if info, err := os.Stat(path + suffix); err == nil {
			s += fmt.Sprintf("%d %d;", info.Size(), info.ModTime().UnixNano())
		}
	}
	return s
}

func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

func copyFile(from, to string) (err error) {
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
	return errors.Join(err, out.Close())
}

package enroll

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"agentctl/atomicfile"
)

// lockFile is the file that a daemon locks for as long as it runs.
const lockFile = "daemon.lock"

// InUseError reports a state directory that another daemon uses.
type InUseError struct {
	Dir string
	PID int // of the other daemon; 0: not known
}

func (e *InUseError) Error() string {
	holder := "another daemon"
	if e.PID > 0 {
		holder = fmt.Sprintf("another daemon, process %d,", e.PID)
	}
	return fmt.Sprintf("%s uses the state directory %s", holder, e.Dir)
}

// Lock keeps other daemons from using a state directory until the process ends or release is
// called: two daemons with one identity would take the link from each other. The error is an
// *InUseError when another daemon has the lock. The kernel releases it with the process, so
// that the file itself means nothing and stays.
//
// Where no file can be made or locked, as on a full or read-only disk, Lock returns another
// error, with which a daemon may go on.
func Lock(stateDir string) (release func(), err error) {
	path := filepath.Join(stateDir, lockFile)
	f, err := atomicfile.Open(path, 0o600)
	if err != nil {
		if f, err = openNoFollow(path); err != nil { // a read-only disk: there may be a file already
			return nil, fmt.Errorf("lock the state directory: %w", err)
		}
	}
	if isBusy, err := tryLock(f); isBusy || err != nil {
		// The number may be missing or, right after the start of the other daemon, of one before it.
		defer func() { _ = f.Close() }()
		if err != nil {
			return nil, fmt.Errorf("lock the state directory %s: %w", stateDir, err)
		}
		b, _ := io.ReadAll(io.LimitReader(f, 32))
		pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		return nil, &InUseError{stateDir, pid}
	}
	// For the message of another daemon only: failures cost the number in it.
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return func() { _ = f.Close() }, nil
}

package audit

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"agentctl/atomicfile"
	"agentctl/relay/kernel"
)

// LocalChange makes a change that a command of the relay's machine makes in the state directory
// itself, whether the relay runs or not. As for changes over HTTP, a line that says so is on the disk
// before the change is made (decision begin), and another one with its outcome and the same trace id
// afterwards. The actor is local:UID, of the user who typed the command.
//
// It returns the error of change. While the first line cannot be written, nothing is changed. An
// outcome that cannot be written is reported to unrecorded, since the change is made. So a begin without
// an outcome means that the process was killed or the disk failed, and that the change may be made.
func LocalChange(dir string, r kernel.Record, change func(*kernel.Record) error, unrecorded func(error)) error {
	return LocalChanges(dir, r, func(r *kernel.Record) ([]Subject, error) { return nil, change(r) }, unrecorded)
}

// Subject is what one change of several is about.
type Subject struct{ NodeID, Target string }

// LocalChanges is LocalChange for a change of several subjects, such as many new tokens. The outcome has
// one line for each that change returns; without any it has one line, with what the record says.
func LocalChanges(dir string, r kernel.Record, change func(*kernel.Record) ([]Subject, error), unrecorded func(error)) error {
	r.Actor, r.TraceID, r.Decision = localActor(), newTraceID(), kernel.Begun
	if err := appendLocal(dir, r); err != nil {
		return fmt.Errorf("nothing was changed, because the audit log cannot be written: %w", err)
	}
	subjects, err := change(&r)
	if r.Decision = kernel.Allowed; err != nil {
		r.Decision = kernel.Failed
	}
	if len(subjects) == 0 {
		subjects = []Subject{{r.NodeID, r.Target}}
	}
	outcome := make([]kernel.Record, len(subjects))
	for i, s := range subjects {
		outcome[i] = r
		outcome[i].NodeID, outcome[i].Target = s.NodeID, s.Target
	}
	if e := appendLocal(dir, outcome...); e != nil {
		unrecorded(e)
	}
	return err
}

// RecordLocal writes the line of such a change after it was made: of one that replaces what is in the
// state directory. A line before the change would go into a file that is about to be replaced. The change
// is made even if the line cannot be written; the caller reports that error.
func RecordLocal(dir string, r kernel.Record) error {
	r.Actor, r.TraceID, r.Decision = localActor(), newTraceID(), kernel.Allowed
	return appendLocal(dir, r)
}

func localActor() string { return "local:" + strconv.Itoa(os.Getuid()) }

func newTraceID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// appendLocal appends a line for each record and syncs them. A relay that runs appends to the same file: each
// writes whole lines with one write, at the end (O_APPEND). One that rotates it between the opening and the
// write has the lines in the part before.
func appendLocal(dir string, records ...kernel.Record) (err error) {
	path := filepath.Join(dir, FileName)
	_, statErr := os.Lstat(path)
	f, err := openRegular(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if errors.Is(statErr, fs.ErrNotExist) {
		if err := atomicfile.OwnLike(f, dir); err != nil { // the relay is going to append to it
			return fmt.Errorf("give %s to the owner of %s: %w", path, dir, err)
		}
	}
	torn, err := endsTorn(f)
	if err != nil {
		return err
	}
	var lines []byte
	if torn { // as after a power cut
		lines = append(lines, '\n')
	}
	now := time.Now().UnixNano()
	for _, r := range records {
		lines = appendLine(lines, &entry{record: r, unixNano: now})
	}
	if _, err := f.Write(lines); err != nil {
		return err
	}
	return f.Sync()
}

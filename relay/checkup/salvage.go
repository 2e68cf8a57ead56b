package checkup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile"
)

// SalvageResult is what Salvage did.
type SalvageResult struct {
	*eventlog.SalvageReport
	Replaced string `json:"replaced"` // the directory with the old files, "" if the log was not replaced
}

// Salvage makes a new event log in the directory to, from what can be read of the log in a state
// directory (eventlog.Salvage). With replace, a copy of the new log also takes the place of the old
// one, whose files are moved into a directory beside it; all of that happens, or nothing
// (auth.Exclusive.Swap). No relay may run on the state directory: the error is auth.ErrInUse with replace,
// otherwise the one that the lock of the log gives. A log in to that is there already is fs.ErrExist.
//
// After a crash, to has no events.db or a whole one, and the old log is untouched or in the directory
// beside it. The next attempt removes temporary files that are left in to.
func Salvage(ctx context.Context, stateDir, to string, replace bool, now time.Time) (_ *SalvageResult, err error) {
	o := eventlog.SalvageOptions{From: filepath.Join(stateDir, eventlog.FileName), To: filepath.Join(to, eventlog.FileName)}
	if _, err := os.Stat(o.From); err != nil {
		return nil, err
	}
	if record, err := auth.ReadRelayFile(stateDir); err == nil { // without it, the log itself must say which one it is
		o.ID, o.Last = record.EventLog.ID, record.EventLog.LastSeq
	}
	var x *auth.Exclusive
	// eventlog.Salvage releases its lock of the log at its end. This lock is held until the exchange: a
	// relay that started in between would append to the log that is about to be replaced.
	if replace {
		if x, err = auth.LockStateDir(stateDir); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, x.Close()) }()
	}
	if err := os.MkdirAll(to, 0o700); err != nil {
		return nil, err
	}
	result := &SalvageResult{}
	if result.SalvageReport, err = eventlog.Salvage(ctx, o); err != nil || !replace {
		return result, err
	}
	// Staging is inside the state directory, so that Swap can rename; to may be on another file system.
	staging, err := x.Staging()
	if err != nil {
		return nil, err
	}
	if err := sqlitefile.CopyFile(o.To, filepath.Join(staging, eventlog.FileName)); err != nil {
		return nil, err
	}
	aside := auth.AsideName(now)
	// The write-ahead log and its index go with the old log: SQLite would apply them to the new one.
	if err := x.Swap(aside, []string{eventlog.FileName, eventlog.FileName + "-wal", eventlog.FileName + "-shm"}); err != nil {
		return nil, err
	}
	result.Replaced = filepath.Join(stateDir, aside)
	return result, nil
}

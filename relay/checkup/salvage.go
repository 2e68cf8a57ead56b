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
// (auth.Exclusive.Swap). No relay may run on the state directory.
func Salvage(ctx context.Context, stateDir, to string, replace bool, now time.Time) (_ *SalvageResult, err error) {
	o := eventlog.SalvageOptions{From: filepath.Join(stateDir, eventlog.FileName), To: filepath.Join(to, eventlog.FileName)}
	if _, err := os.Stat(o.From); err != nil {
		return nil, err
	}
	if record, err := auth.ReadRelayFile(stateDir); err == nil { // without it, the log itself must say which one it is
		o.ID, o.Last = record.EventLog.ID, record.EventLog.LastSeq
	}
	var x *auth.Exclusive
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
	staging, err := x.Staging()
	if err != nil {
		return nil, err
	}
	if err := sqlitefile.CopyFile(o.To, filepath.Join(staging, eventlog.FileName)); err != nil {
		return nil, err
	}
	aside := auth.AsideName(now)
	if err := x.Swap(aside, []string{eventlog.FileName, eventlog.FileName + "-wal", eventlog.FileName + "-shm"}); err != nil {
		return nil, err
	}
	result.Replaced = filepath.Join(stateDir, aside)
	return result, nil
}

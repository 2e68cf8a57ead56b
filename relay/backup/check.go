package backup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// readEventLog returns id and last sequence number of an event log. It changes nothing.
func readEventLog(ctx context.Context, path string) (log auth.EventLogRecord, err error) {
	r, err := eventlog.OpenReader(path)
	if err != nil {
		return log, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if log.ID, err = r.ID(ctx); err == nil {
		log.LastSeq, err = r.LastGiven(ctx)
	}
	return log, err
}

// checkRecords compares what is recorded of the stores of a state directory with them, while the
// relay runs or not, and changes nothing. The errors are *auth.StateError, or say why a
// store cannot be read.
func checkRecords(ctx context.Context, stateDir string) (problems []error) {
	problem := func(store, what, detail string) {
		problems = append(problems, &auth.StateError{Dir: stateDir, Store: store, Problem: what, Detail: detail})
	}
	want, err := auth.ReadRelayFile(stateDir)
	if err != nil {
		problems = append(problems, err)
	}
	is, err := auth.ReadDatabase(ctx, stateDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		problem(auth.DatabaseFile, auth.StoreMissing, "a relay was set up here")
	case err != nil:
		problems = append(problems, err)
	default:
		if err := auth.CheckRecord(stateDir, is); err != nil {
			problems = append(problems, err)
		}
	}
	if is.EventLog != (auth.EventLogRecord{}) && (want.EventLog == (auth.EventLogRecord{}) || want.RelayID != is.RelayID) {
		want.EventLog = is.EventLog
	}
	if want.EventLog == (auth.EventLogRecord{}) {
		return problems
	}
	path := filepath.Join(stateDir, eventlog.FileName)
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		problem(eventlog.FileName, auth.StoreMissing, "relay.json names one")
	case err == nil && info.Size() == 0:
		problem(eventlog.FileName, auth.StoreEmpty, "relay.json names one")
	default:
		is, err := readEventLog(ctx, path)
		if err == nil {
			err = want.EventLog.Check(stateDir, is)
		}
		if err != nil {
			problems = append(problems, err)
		}
	}
	return problems
}

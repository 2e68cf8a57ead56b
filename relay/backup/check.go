package backup

import (
	"context"
	"errors"
	"fmt"
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

// CheckRecords compares what relay.json records with the stores of a state directory, while the
// relay runs or not, and changes nothing. The errors are *auth.StateError, or say why a
// store cannot be read. A directory in which no relay was set up has none.
func CheckRecords(ctx context.Context, stateDir string) (problems []error) {
	want, err := auth.ReadRelayFile(stateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		problems = append(problems, err)
	}
	problem := func(store, what, detail string) {
		problems = append(problems, &auth.StateError{Dir: stateDir, Store: store, Problem: what, Detail: detail})
	}
	path := filepath.Join(stateDir, auth.DatabaseFile)
	info, statErr := os.Lstat(path)
	switch {
	case errors.Is(statErr, fs.ErrNotExist):
		problem(auth.DatabaseFile, auth.StoreMissing, "relay.json names one")
	case statErr == nil && info.Size() == 0:
		problem(auth.DatabaseFile, auth.StoreEmpty, "relay.json names one")
	default:
		is, dbErr := auth.ReadDatabase(ctx, stateDir)
		switch {
		case dbErr != nil:
			problems = append(problems, dbErr)
		case err != nil || want.DatabaseID == "": // nothing to compare with
		case is.DatabaseID != want.DatabaseID || is.RelayID != want.RelayID:
			problem(auth.DatabaseFile, auth.StoreForeign, fmt.Sprintf("%s is recorded, this is %s", want.DatabaseID, is.DatabaseID))
		case is.Epoch < want.Epoch:
			problem(auth.DatabaseFile, auth.StoreOlder, fmt.Sprintf("it lacks %d revocations, key changes or uses of invites", want.Epoch-is.Epoch))
		}
		if want.EventLog == (auth.EventLogRecord{}) {
			want.EventLog = is.EventLog
		}
	}
	if want.EventLog == (auth.EventLogRecord{}) {
		return problems
	}
	path = filepath.Join(stateDir, eventlog.FileName)
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		problem(eventlog.FileName, auth.StoreMissing, "relay.json names one")
	case err == nil && info.Size() == 0:
		problem(eventlog.FileName, auth.StoreEmpty, "relay.json names one")
	default:
		switch is, err := readEventLog(ctx, path); {
		case err != nil:
			problems = append(problems, err)
		case want.EventLog.ID != "" && is.ID != want.EventLog.ID:
			problem(eventlog.FileName, auth.StoreForeign, fmt.Sprintf("%s is recorded, this is %s", want.EventLog.ID, is.ID))
		case is.LastSeq < want.EventLog.LastSeq:
			problem(eventlog.FileName, auth.StoreOlder, fmt.Sprintf("its last event is %d, it had %d", is.LastSeq, want.EventLog.LastSeq))
		}
	}
	return problems
}

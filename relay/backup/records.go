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

// The ids of a relay's stores and its epoch are recorded in relay.json, in relay.db and in the copy of
// relay.json in keys/ (package auth). A state directory whose stores are others is not backed up: with
// Options.Keep, the backup would replace one of the right state.

// readEventLog returns the id and the last sequence number of an event log. It changes nothing on disk.
func readEventLog(ctx context.Context, path string) (log auth.EventLogRecord, err error) {
	r, err := eventlog.OpenReader(path)
	if err != nil {
		return log, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if log.ID, err = r.ID(ctx); err == nil {
		// Not the seq of the newest event in the log, which retention may have removed.
		log.LastSeq, err = r.LastGiven(ctx)
	}
	return log, err
}

// checkRecords compares the stores of a state directory with what relay.json and relay.db record of
// them. It changes nothing, and works whether the relay runs or not. Each error is an
// *auth.StateError, or says why a store cannot be read.
func checkRecords(ctx context.Context, stateDir string) (problems []error) {
	add := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	file, err := auth.ReadRelayFile(stateDir)
	add(err)
	db, err := auth.ReadDatabase(ctx, stateDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		add(&auth.StateError{Dir: stateDir, Store: auth.DatabaseFile, Problem: auth.StoreMissing, Detail: "a relay was set up here"})
	case err != nil:
		add(err)
	default:
		add(auth.CheckRecord(stateDir, db))
	}
	add(checkEventLog(ctx, stateDir, recordedEventLog(file, db)))
	return problems
}

// recordedEventLog returns which event log the relay had: as relay.json says, or as relay.db says if
// relay.json has no record of it or is of another relay. The zero value is none.
func recordedEventLog(file, db auth.Record) auth.EventLogRecord {
	none := auth.EventLogRecord{}
	if db.EventLog != none && (file.EventLog == none || file.RelayID != db.RelayID) {
		return db.EventLog
	}
	return file.EventLog
}

// checkEventLog compares the event log of a state directory with what was recorded of it.
func checkEventLog(ctx context.Context, stateDir string, recorded auth.EventLogRecord) error {
	if recorded == (auth.EventLogRecord{}) {
		return nil
	}
	path := filepath.Join(stateDir, eventlog.FileName)
	problem := func(what string) error {
		return &auth.StateError{Dir: stateDir, Store: eventlog.FileName, Problem: what, Detail: "relay.json names one"}
	}
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		return problem(auth.StoreMissing)
	case err == nil && info.Size() == 0:
		return problem(auth.StoreEmpty)
	}
	log, err := readEventLog(ctx, path)
	if err != nil {
		return err
	}
	return recorded.Check(stateDir, log)
}

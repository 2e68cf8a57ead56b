package backup

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile"
)

// readEventLog returns id and last sequence number of an event log. It changes nothing.
func readEventLog(ctx context.Context, path string) (r auth.EventLogRecord, err error) {
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, "mode=ro&_busy_timeout=5000"))
	if err != nil {
		return r, err
	}
	defer func() { _ = db.Close() }()
	var isV2 bool
	if err := db.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'log')").Scan(&isV2); err != nil {
		return r, fmt.Errorf("event log %s: %w", path, err)
	}
	query := "SELECT '', max(mark - 1, coalesce((SELECT max(seq) FROM events), 0), 0) FROM retention"
	if isV2 {
		query = "SELECT name, max(last, coalesce((SELECT max(last) FROM chains), 0)) FROM log"
	}
	if err := db.QueryRowContext(ctx, query).Scan(&r.ID, &r.LastSeq); err != nil {
		return r, fmt.Errorf("event log %s: %w", path, err)
	}
	return r, nil
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

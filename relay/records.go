package relay

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// relay.json records which event log the relay has, and how far it was (auth.EventLogRecord).
// A log that is not that one is refused: tickets, approvals and the directory would be gone
// without a word, and clients would resume at numbers that never were.

// checkEventLogFile refuses an event log that is missing or empty although one is recorded.
// eventlog.Open would make a new one.
func (r *Relay) checkEventLogFile() error {
	if (r.store.EventLog() == auth.EventLogRecord{}) {
		return nil
	}
	path := filepath.Join(r.opt.StateDir, eventlog.FileName)
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r.eventLogError(auth.StoreMissing, "relay.json names one")
	case err == nil && info.Size() == 0:
		return r.eventLogError(auth.StoreEmpty, "relay.json names one")
	}
	return nil
}

// checkEventLog refuses an event log that is another one than recorded, or an older copy of it.
func (r *Relay) checkEventLog() error {
	want, is := r.store.EventLog(), r.eventLogRecord()
	switch {
	case want.ID != "" && want.ID != is.ID:
		return r.eventLogError(auth.StoreForeign, fmt.Sprintf("%s is recorded, this is %s", want.ID, is.ID))
	case want.LastSeq > is.LastSeq:
		return r.eventLogError(auth.StoreOlder, fmt.Sprintf("its last event is %d, it had %d", is.LastSeq, want.LastSeq))
	}
	return nil
}

func (r *Relay) eventLogError(problem, detail string) error {
	return &auth.StateError{Dir: r.opt.StateDir, Store: eventlog.FileName, Problem: problem, Detail: detail}
}

// eventLogRecord describes the event log as it is now. Its last event is durable.
func (r *Relay) eventLogRecord() auth.EventLogRecord {
	var id string
	if log, ok := any(r.events).(interface{ ID() string }); ok {
		id = log.ID()
	}
	return auth.EventLogRecord{ID: id, LastSeq: r.events.Last()}
}

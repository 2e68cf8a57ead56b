package relay

import (
	"errors"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// expectedEventLog is what relay.json records of the event log. A log that is not that one is
// refused: tickets, approvals and the directory would be gone unnoticed, and clients would
// resume at numbers that never were.
func (r *Relay) expectedEventLog() eventlog.Expect {
	log := r.store.EventLog()
	return eventlog.Expect{Exists: log != auth.EventLogRecord{}, ID: log.ID, Last: log.LastSeq}
}

// eventLogError makes a *auth.StateError of a log that is not the expected one.
func (r *Relay) eventLogError(err error) error {
	for cause, problem := range map[error]string{
		eventlog.ErrMissing: auth.StoreMissing, eventlog.ErrEmpty: auth.StoreEmpty, eventlog.ErrOlder: auth.StoreOlder, eventlog.ErrForeign: auth.StoreForeign,
	} {
		if errors.Is(err, cause) {
			return &auth.StateError{Dir: r.opt.StateDir, Store: eventlog.FileName, Problem: problem, Detail: err.Error()}
		}
	}
	return err
}

// eventLogRecord describes the event log as it is now. Its last event is durable.
func (r *Relay) eventLogRecord() auth.EventLogRecord {
	return auth.EventLogRecord{ID: r.events.ID(), LastSeq: r.events.Last()}
}

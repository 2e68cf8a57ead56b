package checkup

import (
	"context"
	"errors"
	"fmt"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// checkEventLog checks events.db with the hashes of its events, and that it is the one that
// relay.json names.
//
// Each step finds what the others cannot: the hashes an event that was changed (Verify), CheckSchema a
// view or a trigger that is missing, EventLogRecord.Check a log that is older than the relay's, or of
// another relay. Only the last problem needs a backup. For the others a salvage keeps all events that can
// be read.
func (c *checker) checkEventLog(ctx context.Context) (state, detail string) {
	recorded := auth.EventLogRecord(c.record.Stores.EventsDB)
	if !c.checkSQLite(ctx, eventlog.FileName, recorded.ID != "", RepairSalvage) {
		if !c.hasProblems(eventlog.FileName) {
			return Absent, ""
		}
		return "", ""
	}
	path := c.path(eventlog.FileName)
	fail := func(err error, repair Repair) { c.fail(eventlog.FileName, path, err, repair) }
	r, err := eventlog.OpenReader(path)
	if err != nil {
		fail(err, RepairSalvage)
		return "", ""
	}
	defer func() { _ = r.Close() }()
	id, err := r.ID(ctx)
	if err != nil {
		fail(err, RepairSalvage)
		return "", ""
	}
	if last, err := r.LastGiven(ctx); err != nil {
		fail(err, RepairSalvage)
	} else if err := recorded.Check(c.dir, auth.EventLogRecord{ID: id, LastSeq: last}); err != nil {
		fail(err, RepairRestore) // another log, or an older one: nothing in it is damaged
	}
	if err := r.CheckSchema(ctx); err != nil {
		fail(err, RepairSalvage)
	}
	// The result has the faults found so far, also with an error. Run returns the error of ctx itself.
	result, err := r.Verify(ctx, eventlog.VerifyOptions{})
	if err != nil && !errors.Is(err, ctx.Err()) {
		fail(err, RepairSalvage)
	}
	for _, f := range result.Faults {
		c.add(Problem{Store: eventlog.FileName, Path: path, Where: fmt.Sprintf("event %d, %s of tenant %q", f.Seq, f.Class, f.Tenant), What: f.Problem, Repair: RepairSalvage})
	}
	if id == "" {
		return "", fmt.Sprintf("pages, write-ahead log, %d events; an older agentctl wrote it without hashes: the relay adds them when it starts", result.Rows)
	}
	return "", fmt.Sprintf("pages, write-ahead log, and the hashes of %d events", result.Rows)
}

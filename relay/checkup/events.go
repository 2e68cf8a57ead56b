package checkup

import (
	"context"
	"errors"
	"fmt"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// checkEventLog checks events.db with the hashes of its events, and that it is the one of
// relay.json.
func (c *checker) checkEventLog(ctx context.Context) (state, detail string) {
	want := auth.EventLogRecord(c.record.Stores.EventsDB)
	if !c.checkFile(ctx, eventlog.FileName, want.ID != "", RepairSalvage) {
		if c.count[eventlog.FileName] == 0 {
			return Absent, ""
		}
		return "", ""
	}
	path := c.path(eventlog.FileName)
	r, err := eventlog.OpenReader(path)
	if err != nil {
		c.fail(eventlog.FileName, path, err, RepairSalvage)
		return "", ""
	}
	defer func() { _ = r.Close() }()
	id, err := r.ID(ctx)
	if err != nil {
		c.fail(eventlog.FileName, path, err, RepairSalvage)
		return "", ""
	}
	last, err := r.LastGiven(ctx)
	if err != nil {
		c.fail(eventlog.FileName, path, err, RepairSalvage)
	} else if err := want.Check(c.dir, auth.EventLogRecord{ID: id, LastSeq: last}); err != nil {
		c.fail(eventlog.FileName, path, err, RepairRestore)
	}
	if err := r.CheckSchema(ctx); err != nil {
		c.fail(eventlog.FileName, path, err, RepairSalvage)
	}
	result, err := r.Verify(ctx, eventlog.VerifyOptions{})
	if err != nil && !errors.Is(err, ctx.Err()) {
		c.fail(eventlog.FileName, path, err, RepairSalvage)
	}
	for _, f := range result.Faults {
		c.add(Problem{Store: eventlog.FileName, Path: path, Where: fmt.Sprintf("event %d, %s of tenant %q", f.Seq, f.Class, f.Tenant), What: f.Problem, Repair: RepairSalvage})
	}
	if id == "" {
		return "", fmt.Sprintf("pages, write-ahead log, %d events; an older agentctl wrote it without hashes: the relay adds them when it starts", result.Rows)
	}
	return "", fmt.Sprintf("pages, write-ahead log, and the hashes of %d events", result.Rows)
}

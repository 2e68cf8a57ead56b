package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"math"

	"agentctl/relay/kernel"
)

// NewestQuery selects events for SelectNewest: those of Query, the newest first.
type NewestQuery struct {
	Query         // To is the seq to begin at; 0: the newest
	SinceMS int64 // nothing that was created before it, Unix ms; 0: no bound
	MaxRows int   // rows of the log to read, whether they are selected or not; rounded up to whole pages
}

// clockSlack is how far the clock may have been set back without hiding events from SelectNewest,
// which stops reading at the first page that is older than SinceMS by more than that, in ms.
const clockSlack = 3600_000

// SelectNewest calls fn with the events that q selects, the newest first, until fn returns false. Unlike
// Select it does not report events that retention removes meanwhile: callers want the newest ones. It
// reads the rows of the query's classes in pages from the end of the log, MaxRows at most: there is
// no index, and a type may be rare. fn runs while a page's read transaction is open, so it must be
// quick. next is the To of the call that continues; 0: there are no more events.
func (r *Reader) SelectNewest(ctx context.Context, q NewestQuery, fn func(kernel.Event) bool) (next uint64, err error) {
	if err := q.check(); err != nil {
		return 0, err
	}
	p := &pager{r: r, q: q.Query, tables: r.tables(&q.Query)}
	p.clause, p.args = p.q.where()
	if q.SinceMS > 0 {
		p.clause, p.args = p.clause+" AND created_at >= ?", append(p.args, q.SinceMS)
	}
	to := q.To
	if to == 0 || to > math.MaxInt64 {
		to = math.MaxInt64
	}
	if q.After >= to {
		return 0, nil
	}
	for rows := 0; rows < q.MaxRows; rows += maxPageRows {
		from, isLast, err := p.pageBelow(ctx, to, q.SinceMS)
		if err != nil {
			return 0, explain(r.path, err)
		}
		stopped, err := p.readDown(ctx, from, to, fn)
		if err != nil {
			return 0, explain(r.path, err)
		}
		if stopped > 0 {
			return stopped - 1, nil
		}
		if isLast {
			return 0, nil
		}
		to = from
	}
	return to, nil
}

// pageBelow returns the seq below which the page that ends at `to` begins. isLast: the page begins at
// After, or its oldest row is older than what is wanted. As in pager.next, a page is bounded by the rows
// that it scans, not by those it finds.
func (p *pager) pageBelow(ctx context.Context, to uint64, sinceMS int64) (from uint64, isLast bool, err error) {
	query, args := p.union("SELECT seq, created_at FROM TABLE WHERE seq > ? AND seq <= ?", []any{int64(p.q.After), int64(to)})
	var createdMS int64
	err = p.r.db.QueryRowContext(ctx, query+" DESC LIMIT 1 OFFSET ?", append(args, maxPageRows-1)...).Scan(&from, &createdMS)
	if errors.Is(err, sql.ErrNoRows) {
		return p.q.After, true, nil
	}
	return from - 1, createdMS < sinceMS-clockSlack, err
}

// readDown calls fn with the selected rows above from and up to `to`, in descending order. stopped is
// the seq at which fn returned false, 0 if it did not.
func (p *pager) readDown(ctx context.Context, from, to uint64, fn func(kernel.Event) bool) (stopped uint64, err error) {
	query, args := p.union("SELECT seq, tenant, type, aggregate_id, payload, created_at FROM VIEW WHERE seq > ? AND seq <= ?"+p.clause,
		append([]any{int64(from), int64(to)}, p.args...))
	rows, err := p.r.db.QueryContext(ctx, query+" DESC", args...)
	if err != nil {
		return 0, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var e kernel.Event
		if err := rows.Scan(&e.Seq, &e.Tenant, &e.Type, &e.Aggregate, (*[]byte)(&e.Payload), &e.CreatedMS); err != nil {
			return 0, err
		}
		if !fn(e) {
			return e.Seq, nil
		}
	}
	return 0, rows.Err()
}

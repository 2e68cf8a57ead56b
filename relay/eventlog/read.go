package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
)

// A replay reads the log in pages, each in its own read transaction, and calls back between
// them. A slow reader therefore holds no lock, and no more than a page in memory.
const (
	maxPageRows  = 1024
	maxPageBytes = 1 << 20 // of payload; exceeded by at most one event
)

// maxPatterns bounds each list of a Query.
const maxPatterns = 64

// Query selects events. The zero value selects all.
type Query struct {
	After  uint64 // events above this seq
	To     uint64 // up to this one; 0: up to the newest when the query begins
	Tenant string // of this tenant; "" of all

	// Types and Aggregates select events of one of these types, and of one of these
	// aggregates; empty selects all. A name that ends in * matches every name with that
	// prefix: "ticket.*". At most 64 each.
	Types      []string
	Aggregates []string
}

// check bounds the lists, which become terms of an SQL statement.
func (q *Query) check() error {
	if len(q.Types) > maxPatterns || len(q.Aggregates) > maxPatterns {
		return fmt.Errorf("eventlog: a query has at most %d types and %d aggregates", maxPatterns, maxPatterns)
	}
	return nil
}

// matches reports whether the query selects e, its seq aside.
func (q *Query) matches(e kernel.Event) bool {
	return (q.Tenant == "" || q.Tenant == e.Tenant) && anyMatches(q.Types, e.Type) && anyMatches(q.Aggregates, e.Aggregate)
}

// anyMatches reports whether a name matches one of the patterns; no patterns match all.
func anyMatches(patterns []string, name string) bool {
	return len(patterns) == 0 || slices.ContainsFunc(patterns, func(p string) bool {
		prefix, isPrefix := strings.CutSuffix(p, "*")
		return p == name || isPrefix && strings.HasPrefix(name, prefix)
	})
}

// where is matches in SQL. Values are parameters, never parts of the text. It compares prefixes
// with substr and not with LIKE, which ignores the case of letters and has wildcards.
func (q *Query) where() (clause string, args []any) {
	if q.Tenant != "" {
		clause, args = " AND tenant = ?", []any{q.Tenant}
	}
	for _, f := range []struct {
		column   string
		patterns []string
	}{{"type", q.Types}, {"aggregate_id", q.Aggregates}} {
		var or []string
		for _, p := range f.patterns {
			or = append(or, f.column+" = ?")
			args = append(args, p)
			if prefix, isPrefix := strings.CutSuffix(p, "*"); isPrefix {
				or = append(or, "substr("+f.column+", 1, length(?)) = ?")
				args = append(args, prefix, prefix)
			}
		}
		if or != nil {
			clause += " AND (" + strings.Join(or, " OR ") + ")"
		}
	}
	return clause, args
}

// Reader reads an event log. A Store is one; OpenReader makes one for another process.
type Reader struct {
	path string
	db   *sql.DB
}

// OpenReader opens the log read-only. A relay may write it at the same time: in WAL mode
// neither waits for the other. The error is fs.ErrNotExist when there is no log.
func OpenReader(path string) (*Reader, error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no event log %s: %w; a relay makes it in its state directory", path, err)
	} else if err != nil {
		return nil, explain(path, err)
	}
	r, err := newReader(path, "mode=ro&_query_only=1")
	if err != nil {
		return nil, explain(path, err)
	}
	isNew, err := checkFormat(context.Background(), r.db)
	if err == nil && isNew {
		err = errors.New("it is empty; a relay must have run first: agentctl relay")
	}
	if err != nil {
		_ = r.Close()
		return nil, explain(path, err)
	}
	return r, nil
}

// newReader opens connections for reading, maxReaders at most; one stays open between queries. A
// query beyond that waits for a connection. _query_only makes SQLite refuse writes.
func newReader(path, options string) (*Reader, error) {
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, fmt.Sprintf("%s&_busy_timeout=%d", options, busyTimeoutMS)))
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(maxReaders)
	db.SetMaxIdleConns(1)
	return &Reader{path: path, db: db}, nil
}

// Close closes the reader.
func (r *Reader) Close() error { return r.db.Close() }

// Bounds returns the oldest and the newest seq that are kept, 0 for none.
func (r *Reader) Bounds(ctx context.Context) (first, last uint64, err error) {
	err = r.db.QueryRowContext(ctx, "SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM events").Scan(&first, &last)
	return first, last, explain(r.path, err)
}

// Replay implements kernel.Log. It does not return events that are appended meanwhile;
// Follow does. ErrRemoved: retention removed events that were not read yet.
func (r *Reader) Replay(ctx context.Context, after uint64, fn func(kernel.Event) error) error {
	return r.Select(ctx, Query{After: after}, fn)
}

// Select calls fn with the events of q in the order of seq, and returns its error. Like
// Replay it has a stable end. Events that were removed before it began are no error: call
// CanResume first to detect them.
func (r *Reader) Select(ctx context.Context, q Query, fn func(kernel.Event) error) error {
	if err := q.check(); err != nil {
		return err
	}
	_, last, err := r.Bounds(ctx)
	if err != nil {
		return err
	}
	mark, err := r.mark(ctx)
	if err != nil {
		return err
	}
	if q.To == 0 || q.To > last {
		q.To = last
	}
	p := pager{r: r, q: q, pos: q.After}
	if mark > p.pos {
		p.pos = mark - 1
	}
	p.clause, p.args = q.where()
	for p.pos < q.To {
		page, err := p.next(ctx)
		if err != nil {
			return err
		}
		for _, e := range page {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := fn(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// mark returns the retention mark.
func (r *Reader) mark(ctx context.Context) (mark uint64, err error) {
	err = r.db.QueryRowContext(ctx, "SELECT mark FROM retention").Scan(&mark)
	return mark, explain(r.path, err)
}

// pager is one replay.
type pager struct {
	r      *Reader
	q      Query
	pos    uint64 // every event up to here has been read
	clause string // q.where
	args   []any
}

// next reads the next page, and moves pos to its end.
func (p *pager) next(ctx context.Context) ([]kernel.Event, error) {
	from, to := p.pos, p.q.To
	// A page is bounded by the rows it scans, not by those it finds: a query with few
	// matches must not hold its read transaction for the whole log.
	err := p.r.db.QueryRowContext(ctx, "SELECT seq FROM events WHERE seq > ? AND seq < ? ORDER BY seq LIMIT 1 OFFSET ?", from, to, maxPageRows-1).Scan(&to)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, explain(p.r.path, err)
	}
	page, err := p.read(ctx, from, to)
	if err != nil {
		return nil, explain(p.r.path, err)
	}
	// The mark moves in the transaction that deletes the rows below it. If the mark,
	// read after the page, is not beyond where the page began, the page is complete.
	mark, err := p.r.mark(ctx)
	if err == nil && mark > from+1 {
		err = ErrRemoved
	}
	return page, err
}

// read reads the rows above from and up to to that the query selects. It stops early when
// the page is full, and moves pos to what it has read.
func (p *pager) read(ctx context.Context, from, to uint64) (page []kernel.Event, err error) {
	args := append([]any{from, to}, p.args...)
	rows, err := p.r.db.QueryContext(ctx, "SELECT seq, tenant, type, aggregate_id, payload, created_at FROM events WHERE seq > ? AND seq <= ?"+p.clause+" ORDER BY seq", args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	p.pos = to
	for size := 0; rows.Next(); {
		var e kernel.Event
		if err := rows.Scan(&e.Seq, &e.Tenant, &e.Type, &e.Aggregate, (*[]byte)(&e.Payload), &e.CreatedMS); err != nil {
			return nil, err
		}
		page = append(page, e)
		if size += len(e.Payload) + eventOverhead; size >= maxPageBytes {
			p.pos = e.Seq
			break
		}
	}
	return page, rows.Err()
}

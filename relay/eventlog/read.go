package eventlog

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"math"
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

	Tenants []string // of one of these tenants, "" being the relay itself; empty: of all. At most 64
	Class   Class    // of this class; "" of both

	// Types and Aggregates select events of one of these types, and of one of these
	// aggregates; empty selects all. A name that ends in * matches every name with that
	// prefix: "ticket.*". At most 64 each.
	Types      []string
	Aggregates []string
}

// check bounds the lists, which become terms of an SQL statement.
func (q *Query) check() error {
	if len(q.Types) > maxPatterns || len(q.Aggregates) > maxPatterns || len(q.Tenants) > maxPatterns {
		return fmt.Errorf("eventlog: a query has at most %d types, aggregates and tenants", maxPatterns)
	}
	return nil
}

// matches reports whether the query selects e, its seq aside.
func (q *Query) matches(e kernel.Event) bool {
	return q.selectsChain(e.Tenant, classOf(e.Type)) && kernel.MatchesType(q.Types, e.Type) && kernel.MatchesType(q.Aggregates, e.Aggregate)
}

// selectsChain reports whether the query can select events of a class of a tenant.
func (q *Query) selectsChain(tenant string, class Class) bool {
	return (q.Tenant == "" || q.Tenant == tenant) && (len(q.Tenants) == 0 || slices.Contains(q.Tenants, tenant)) && q.selectsClass(class)
}

func (q *Query) selectsClass(class Class) bool {
	state, calls := classesOf(q.Types)
	return (q.Class == "" || q.Class == class) && (state && class == ClassState || calls && class == ClassCalls)
}

// where is matches in SQL, without the class, for which there are tables. Values are parameters and not
// parts of the text. It compares prefixes with substr and not with LIKE, which ignores the case of letters
// and has wildcards.
func (q *Query) where() (clause string, args []any) {
	if q.Tenant != "" {
		clause, args = " AND tenant = ?", []any{q.Tenant}
	}
	if len(q.Tenants) > 0 {
		clause += " AND tenant IN (?" + strings.Repeat(", ?", len(q.Tenants)-1) + ")"
		for _, tenant := range q.Tenants {
			args = append(args, tenant)
		}
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

// Reader reads an event log. A Store is one; OpenReader makes one for another process. Its methods may be
// called from any goroutine. A replay holds a connection during each query only, not from page to page.
type Reader struct {
	path   string
	db     *sql.DB
	format int          // of the file, 1 or 2
	damage error        // of the write-ahead log: events are missing at the end
	done   func() error // called by Close, after the database is closed
}

// OpenReader opens the log read-only, and changes nothing on disk. A relay may write it at the same
// time: in WAL mode neither waits for the other. The error is fs.ErrNotExist when there is no log.
// The events before damage can be read: Select returns the error after them. It reads both formats; in
// the first one all events are in one table, and Query.Class is ignored.
func OpenReader(path string) (*Reader, error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no event log %s: %w; a relay makes it in its state directory", path, err)
	} else if err != nil {
		return nil, explain(path, err)
	}
	damage := sqlitefile.ScanWAL(path)
	if damage != nil && !isDamage(damage) {
		return nil, explain(path, damage)
	}
	dsn, done, err := sqlitefile.ReadOnly(path, fmt.Sprintf("_busy_timeout=%d", busyTimeoutMS))
	if err != nil {
		return nil, explain(path, err)
	}
	r, err := newReader(path, dsn, 0)
	if err != nil {
		return nil, explain(path, errors.Join(err, done()))
	}
	r.damage, r.done = damage, done
	r.format, err = checkFormat(context.Background(), r.db)
	if err == nil && r.format == 0 {
		err = errors.New("it is empty; a relay must have run first: agentctl relay")
	}
	if err != nil {
		_ = r.Close()
		return nil, explain(path, err)
	}
	return r, nil
}

// newReader opens connections for reading, maxReaders at most; one stays open between queries. A
// query beyond that waits for a connection. This bounds the memory when many subscribers replay at once,
// since each connection has a page cache.
func newReader(path, dsn string, format int) (*Reader, error) {
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(maxReaders)
	db.SetMaxIdleConns(1)
	return &Reader{path: path, db: db, format: format, done: func() error { return nil }}, nil
}

// Close closes the reader.
func (r *Reader) Close() error { return errors.Join(r.db.Close(), r.done()) }

// ID returns the id of the log, "" for a log that an older agentctl wrote.
func (r *Reader) ID(ctx context.Context) (id string, err error) {
	if r.format == 1 {
		return "", nil
	}
	err = r.db.QueryRowContext(ctx, "SELECT name FROM log").Scan(&id)
	return id, explain(r.path, err)
}

// Bounds returns the oldest and the newest seq that are kept, 0 for none, over all chains. In between,
// retention may have removed events of some chains.
func (r *Reader) Bounds(ctx context.Context) (first, last uint64, err error) {
	return r.bounds(ctx, r.tables(&Query{}))
}

func (r *Reader) bounds(ctx context.Context, tables []string) (first, last uint64, err error) {
	for _, t := range tables {
		var low, high uint64
		if err := r.db.QueryRowContext(ctx, "SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM "+t).Scan(&low, &high); err != nil {
			return 0, 0, explain(r.path, err)
		}
		if first == 0 || low > 0 && low < first {
			first = low
		}
		last = max(last, high)
	}
	return first, last, nil
}

// LastGiven returns the newest seq that the log has given, also when its event was removed.
func (r *Reader) LastGiven(ctx context.Context) (last uint64, err error) {
	query := lastQuery
	if r.format == 1 {
		query = "SELECT max(mark - 1, coalesce((SELECT max(seq) FROM events), 0), 0) FROM retention"
	}
	err = r.db.QueryRowContext(ctx, query).Scan(&last)
	return last, explain(r.path, err)
}

// tables returns the tables that can have rows of the query.
func (r *Reader) tables(q *Query) (tables []string) {
	if r.format == 1 {
		return []string{"events"}
	}
	for _, class := range []Class{ClassState, ClassCalls} {
		if q.selectsClass(class) {
			tables = append(tables, string(class))
		}
	}
	return tables
}

// Replay implements kernel.Log. It does not return events that are appended meanwhile;
// Follow does. ErrRemoved: retention removed events that were not read yet.
func (r *Reader) Replay(ctx context.Context, after uint64, fn func(kernel.Event) error, types ...string) error {
	return r.Select(ctx, Query{After: after, Types: types}, fn)
}

// Select calls fn with the events of q in the order of seq, and returns its error. Like
// Replay it has a stable end. Events that were removed before it began are no error: call
// CanResume first to detect them. Of a damaged log it calls fn with the events before the damage, as
// far as SQLite finds them, and returns an ErrDamaged; Salvage finds the others.
func (r *Reader) Select(ctx context.Context, q Query, fn func(kernel.Event) error) error {
	if err := q.check(); err != nil {
		return err
	}
	p, err := r.newPager(ctx, q)
	if err != nil {
		return err
	}
	// If a page has damage, fn gets the events before it, then the damage is returned.
	for p.pos < p.q.To {
		page, damage := p.next(ctx)
		if damage != nil && !isDamage(damage) {
			return damage
		}
		for _, e := range page {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := fn(e); err != nil {
				return err
			}
		}
		if damage != nil {
			return damage
		}
	}
	return explain(r.path, cmp.Or(p.damage, r.damage))
}

// pager is one replay.
type pager struct {
	r      *Reader
	q      Query
	pos    uint64           // every event up to here has been read
	tables []string         // that have the rows
	clause string           // q.where
	args   []any            // of clause
	marks  map[int64]uint64 // the retention marks when the replay began, by chain
	damage error            // why the end is not known; the replay ends at it
}

// newPager begins a replay. Its end is fixed now, at the newest seq of the tables that have its rows; if
// damage hides that seq, the replay ends at the damage.
func (r *Reader) newPager(ctx context.Context, q Query) (*pager, error) {
	p := &pager{r: r, q: q, pos: q.After, tables: r.tables(&q)}
	p.clause, p.args = q.where()
	_, last, err := r.bounds(ctx, p.tables)
	if isDamage(err) {
		last, p.damage = math.MaxInt64, err
	} else if err != nil {
		return nil, err
	}
	if p.q.To == 0 || p.q.To > last {
		p.q.To = last
	}
	p.marks, err = p.readMarks(ctx, 0)
	return p, explain(r.path, err)
}

// readMarks returns the retention marks above a seq, of the chains that the query may select.
func (p *pager) readMarks(ctx context.Context, above uint64) (map[int64]uint64, error) {
	query := "SELECT id, tenant, class, mark FROM chains WHERE mark > ?"
	if p.r.format == 1 {
		query = "SELECT id, '', '', mark FROM retention WHERE mark > ?"
	}
	rows, err := p.r.db.QueryContext(ctx, query, int64(above))
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	marks := make(map[int64]uint64)
	for rows.Next() {
		var id int64
		var tenant, class string
		var mark uint64
		if err := rows.Scan(&id, &tenant, &class, &mark); err != nil {
			return nil, err
		}
		if p.r.format == 1 || p.q.selectsChain(tenant, Class(class)) {
			marks[id] = mark
		}
	}
	return marks, rows.Err()
}

// union repeats a query for each table, and orders the rows by seq. SQLite merges the tables row
// by row, since each is in that order.
func (p *pager) union(query string, args []any) (string, []any) {
	var parts []string
	var all []any
	for _, t := range p.tables {
		view := map[string]string{"events": "events", string(ClassState): "state_events", string(ClassCalls): "call_events"}[t]
		parts = append(parts, strings.NewReplacer("TABLE", t, "VIEW", view).Replace(query))
		all = append(all, args...)
	}
	return strings.Join(parts, " UNION ALL ") + " ORDER BY seq", all
}

// next reads the next page, and moves pos to its end. It runs three queries in separate transactions:
// where the page ends, its rows, and the marks. Only retention can change rows below To in between, and
// the marks show that it did.
func (p *pager) next(ctx context.Context) ([]kernel.Event, error) {
	from, to := p.pos, p.q.To
	// A page is bounded by the rows it scans, not by those it finds: a query with few
	// matches must not hold its read transaction for the whole log.
	query, args := p.union("SELECT seq FROM TABLE WHERE seq > ? AND seq < ?", []any{int64(from), int64(to)})
	err := p.r.db.QueryRowContext(ctx, query+" LIMIT 1 OFFSET ?", append(args, maxPageRows-1)...).Scan(&to)
	if err != nil && !errors.Is(err, sql.ErrNoRows) && !isDamage(err) { // read finds what is before damage
		return nil, explain(p.r.path, err)
	}
	page, err := p.read(ctx, from, to)
	if err != nil {
		return page, explain(p.r.path, err)
	}
	// A mark moves in the transaction that deletes the rows below it. If no mark that has
	// moved, read after the page, is beyond where the page began, the page is complete.
	marks, err := p.readMarks(ctx, from+1)
	if err != nil {
		return nil, explain(p.r.path, err)
	}
	for id, mark := range marks {
		if p.marks[id] != mark {
			return page, ErrRemoved
		}
	}
	return page, nil
}

// read reads the rows above from and up to to that the query selects. It stops early when
// the page is full, and moves pos to what it has read.
func (p *pager) read(ctx context.Context, from, to uint64) (page []kernel.Event, err error) {
	query, args := p.union("SELECT seq, tenant, type, aggregate_id, payload, created_at FROM VIEW WHERE seq > ? AND seq <= ?"+p.clause,
		append([]any{int64(from), int64(to)}, p.args...))
	rows, err := p.r.db.QueryContext(ctx, query, args...)
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

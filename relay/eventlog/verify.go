package eventlog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// Bounds of the check that a Store makes in the background.
const (
	verifyInterval = 24 * time.Hour
	verifyRate     = 8 << 20 // bytes of rows a second
	maxFaults      = 64      // that a Verification lists
)

// A check reads the rows of each class in the order of seq, and keeps for each chain the hash and the seq
// of its newest row so far. Each row must have the hash that follows from these. At the end they must be
// those in the table chains, so that rows missing at the end of a chain are noticed as well. The check
// reads page by page, and includes what is appended meanwhile.

// Verification is the result of a check of the chains (docs/eventlog.md).
type Verification struct {
	Began, Ended time.Time // Ended is zero while it runs; both are zero before the first one
	Rows         int64     // that were read
	Faults       []Fault   // the first of each chain, at most maxFaults
	Err          string    // why the check could not be finished; "" when it was
}

// Fault is the first place at which a chain is broken.
type Fault struct {
	Tenant  string `json:"tenant"`
	Class   Class  `json:"class"`
	Seq     uint64 `json:"seq"`     // of the first event that does not fit; events before it do
	Problem string `json:"problem"` // one line
}

// Error is the fault as an error.
func (f *Fault) Error() string {
	return fmt.Sprintf("%s of tenant %q, event %d: %s", f.Class, f.Tenant, f.Seq, f.Problem)
}

// Unwrap makes a Fault an ErrDamaged.
func (f *Fault) Unwrap() error { return ErrDamaged }

// VerifyOptions select what Verify reads.
type VerifyOptions struct {
	Class Class // one class only; "" for both
	Rate  int   // bytes of rows a second; 0: no limit
}

// verifyFile is Verify for the log in a file, which may be in use.
func verifyFile(ctx context.Context, path string, o VerifyOptions) (Verification, error) {
	r, err := OpenReader(path)
	if err != nil {
		return Verification{}, err
	}
	defer func() { _ = r.Close() }()
	return r.Verify(ctx, o)
}

// Verify checks all rows against the hashes of their chains. The faults are not an error: the error
// says that the check could not be made. A log of an older agentctl has no hashes: it is only read.
func (r *Reader) Verify(ctx context.Context, o VerifyOptions) (Verification, error) {
	v := newVerifier(r, o)
	err := v.run(ctx)
	v.result.Ended = time.Now()
	if err != nil {
		v.result.Err = err.Error()
	}
	return v.result, err
}

// verifier is one check.
type verifier struct {
	r      *Reader
	opts   VerifyOptions
	result Verification
	hash   hasher
	chains map[int64]*chain // last and head are those of the rows so far
	bad    map[int64]bool   // chains with a fault: the rest of them is not checked
}

func newVerifier(r *Reader, o VerifyOptions) *verifier {
	return &verifier{r: r, opts: o, result: Verification{Began: time.Now()}, chains: make(map[int64]*chain), bad: make(map[int64]bool)}
}

func (v *verifier) run(ctx context.Context) error {
	if v.r.format == 1 {
		return v.r.Select(ctx, Query{}, func(kernel.Event) error { v.result.Rows++; return nil })
	}
	if err := v.r.db.QueryRowContext(ctx, "SELECT name FROM log").Scan(new(string)); err != nil {
		return explain(v.r.path, err)
	}
	for _, class := range []Class{ClassState, ClassCalls} {
		if v.opts.Class != "" && v.opts.Class != class {
			continue
		}
		for pos, atEnd := uint64(0), false; !atEnd; {
			began, next, size := time.Now(), pos, 0
			var err error
			next, size, atEnd, err = v.page(ctx, class, pos)
			// Rows behind a page that cannot be read are not found by seq, so the check goes on with
			// the other class.
			if err != nil && ctx.Err() != nil {
				return ctx.Err()
			} else if isDamage(err) {
				v.fault("", class, next+1, "cannot be read: "+err.Error())
				break
			} else if err != nil {
				return explain(v.r.path, err)
			}
			pos = next
			if v.opts.Rate > 0 && !atEnd {
				pause := time.Duration(size)*time.Second/time.Duration(v.opts.Rate) - time.Since(began)
				if err := sleep(ctx, pause); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// sleep waits, or returns why ctx ended.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(max(d, 0))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// verifyRows select all rows, also those without chain or words, which the views leave out.
var verifyRows = map[Class]string{
	ClassState: "SELECT seq, chain, type, aggregate_id, payload, created_at, hash FROM state WHERE seq > ? ORDER BY seq LIMIT ?",
	ClassCalls: "SELECT k.seq, k.chain, w.type, w.aggregate_id, w.text || a.text || lower(hex(k.trace)) || k.rest, k.created_at, k.hash " +
		"FROM calls k LEFT JOIN words w ON w.id = k.kind LEFT JOIN words a ON a.id = k.actor WHERE k.seq > ? ORDER BY k.seq LIMIT ?",
}

// page checks the rows of a class after pos, and returns the seq of the last one. It reads the chains
// and the rows in one transaction, since retention moves the marks. At the end of the class it checks that
// no chain lacks its newest rows.
func (v *verifier) page(ctx context.Context, class Class, pos uint64) (next uint64, size int, atEnd bool, err error) {
	next = pos
	tx, err := v.r.db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return next, 0, false, err
	}
	defer func() { _ = tx.Rollback() }()
	now, err := readChains(ctx, tx)
	if err != nil {
		return next, 0, false, err
	}
	v.follow(class, now)
	rows, err := tx.QueryContext(ctx, verifyRows[class], int64(pos), maxPageRows)
	if err != nil {
		return next, 0, false, err
	}
	defer func() { _ = rows.Close() }()
	n := 0
	for atEnd = true; rows.Next(); {
		var e kernel.Event
		var id int64
		var eventType, aggregate sql.NullString
		var hash []byte
		if err := rows.Scan(&e.Seq, &id, &eventType, &aggregate, (*[]byte)(&e.Payload), &e.CreatedMS, &hash); err != nil {
			return next, size, false, err
		}
		e.Type, e.Aggregate = eventType.String, aggregate.String
		v.row(class, id, &e, hash)
		v.result.Rows++
		next, size = e.Seq, size+len(e.Payload)+rowOverhead
		if n++; n == maxPageRows || size >= maxPageBytes {
			atEnd = false
			break
		}
	}
	if err := rows.Err(); err != nil || !atEnd {
		return next, size, false, err
	}
	v.end(class, now)
	return next, size, true, nil
}

// follow begins with the chains of a class that are new, and skips the rows that retention has removed
// meanwhile: for these the anchor is trusted. So a row that was changed, and removed before the check
// came to it, is not noticed.
func (v *verifier) follow(class Class, now []*chain) {
	for _, c := range now {
		if c.class != class {
			continue
		}
		if old := v.chains[c.id]; old == nil || c.mark > old.last+1 {
			v.chains[c.id] = &chain{id: c.id, tenant: c.tenant, class: c.class, last: max(c.mark, 1) - 1, head: c.anchor}
		}
	}
}

// end checks, behind the last row of a class, that no chain lacks its newest rows.
func (v *verifier) end(class Class, now []*chain) {
	for _, c := range now {
		if c.class != class || v.bad[c.id] {
			continue
		}
		if got := v.chains[c.id]; c.last != 0 && (c.mark <= c.last && got.last != c.last || got.head != c.head) {
			v.chainFault(c, got.last+1, fmt.Sprintf("the newest events up to %d are missing", c.last))
		}
	}
}

// row checks the next row of a class. After the first fault of a chain it ignores the chain's other rows,
// since their hashes depend on the row that does not fit.
func (v *verifier) row(class Class, id int64, e *kernel.Event, hash []byte) {
	c := v.chains[id]
	switch {
	case c == nil:
		v.fault("", class, e.Seq, "it belongs to no chain")
	case v.bad[id]:
	case len(hash) != hashSize || e.Seq <= c.last:
		v.chainFault(c, e.Seq, "the row is not of this chain")
	default:
		e.Tenant = c.tenant
		want := v.hash.next(c.head, e)
		if want != rowHash(hash) {
			v.chainFault(c, e.Seq, "its hash does not fit: it was changed, or events before it are missing")
		}
		c.last, c.head = e.Seq, want
	}
}

// chainFault records the first fault of a chain.
func (v *verifier) chainFault(c *chain, seq uint64, problem string) {
	v.bad[c.id] = true
	v.fault(c.tenant, c.class, seq, problem)
}

func (v *verifier) fault(tenant string, class Class, seq uint64, problem string) {
	if len(v.result.Faults) < maxFaults {
		v.result.Faults = append(v.result.Faults, Fault{tenant, class, seq, problem})
	}
}

// firstFault returns the first fault, nil if there is none.
func (v *verifier) firstFault() error {
	if len(v.result.Faults) == 0 {
		return nil
	}
	return &v.result.Faults[0]
}

// verifyState checks the events that a start replays, before they are replayed: in the pages of the
// file, and if they do not fit with SQLite, which decides.
func (s *Store) verifyState() error {
	if s.openStateTable() {
		return nil
	}
	result, err := s.Verify(context.Background(), VerifyOptions{Class: ClassState})
	if err != nil {
		return err
	}
	if len(result.Faults) > 0 {
		return &result.Faults[0]
	}
	return nil
}

// verifyLoop checks the whole log at each start and once a day, until ctx ends. A fault does not
// stop the log: Stats shows it. verifyRate leaves most of a slow disk to others; at that rate 256 MiB
// take half a minute.
func (s *Store) verifyLoop(ctx context.Context) {
	for {
		s.mu.Lock()
		s.stats.Verification = Verification{Began: time.Now(), Faults: s.stats.Verification.Faults}
		s.mu.Unlock()
		result, err := s.Verify(ctx, VerifyOptions{Rate: verifyRate})
		if ctx.Err() != nil {
			return
		}
		switch {
		case err != nil:
			s.log.Error("event log: it could not be checked", zap.Error(err))
		case len(result.Faults) > 0:
			s.opts.Watch.Report("chain", storage.Problem{Kind: storage.Damaged, Warning: true,
				Detail: result.Faults[0].Error() + "; see all with: agentctl relay check"})
			s.log.Error("event log: damaged or changed", zap.Error(explain(s.opts.Path, errors.Join(faultErrors(result.Faults)...))))
		default:
			s.opts.Watch.Resolve("chain")
			s.log.Info("event log: checked", zap.Int64("events", result.Rows), zap.Duration("after", result.Ended.Sub(result.Began)))
		}
		s.mu.Lock() // last: who sees that a check has ended also sees the problem that it found
		s.stats.Verification = result
		s.mu.Unlock()
		if sleep(ctx, verifyInterval) != nil {
			return
		}
	}
}

// faultErrors are the first four faults as errors. They become one line of the service log.
func faultErrors(faults []Fault) (errs []error) {
	for _, f := range faults[:min(len(faults), 4)] {
		errs = append(errs, &f)
	}
	return slices.Clip(errs)
}

// CheckSchema compares the tables, views and triggers with those that a new log gets. A damaged view
// hides events, and without its triggers a log is not append-only. Verify notices neither: it reads the
// tables themselves. A log of the first format passes, since it is converted at the next start.
func (r *Reader) CheckSchema(ctx context.Context) error {
	if r.format == 1 {
		return nil
	}
	fresh, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		return err
	}
	defer func() { _ = fresh.Close() }()
	fresh.SetMaxOpenConns(1)
	if _, err := fresh.ExecContext(ctx, schema); err != nil {
		return err
	}
	want, err := readSchema(ctx, fresh)
	if err != nil {
		return err
	}
	got, err := readSchema(ctx, r.db)
	if err != nil {
		return explain(r.path, err)
	}
	for name, text := range want {
		if got[name] != text {
			return fmt.Errorf("%w: %s is not as a new log has it", ErrDamaged, name)
		}
	}
	if len(got) != len(want) {
		return fmt.Errorf("%w: it has %d tables, views and triggers, and a new log has %d", ErrDamaged, len(got), len(want))
	}
	return nil
}

// readSchema returns the text of each object of a database.
func readSchema(ctx context.Context, db queryer) (map[string]string, error) {
	rows, err := db.QueryContext(ctx, "SELECT type || ' ' || name, tbl_name || ' ' || coalesce(sql, '') FROM sqlite_schema")
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	objects := make(map[string]string)
	for rows.Next() {
		var name, text string
		if err := rows.Scan(&name, &text); err != nil {
			return nil, err
		}
		objects[name] = text
	}
	return objects, rows.Err()
}

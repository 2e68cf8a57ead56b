package eventlog

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unicode/utf8"

	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
)

// A salvage reads what can be read of a log that SQLite cannot read, and makes a new log of it:
//
//  1. sqlitefile reads the rows page by page, from the database and from its write-ahead log, also
//     behind damage. They go into a temporary database, since their order is not that of seq.
//  2. In the order of seq, each row is checked against the hash of the row before it in its chain. Of
//     two rows with one seq the one that fits is taken.
//  3. The new log gets the events with their seq, in chains of the old log's id with new hashes, and
//     one event that says what is lost.
//
// Then the hashes of the new log are checked, and it is synced and renamed to To, which therefore exists
// only if it is sound. The .recover command of SQLite's shell would not do: it reads the write-ahead log
// up to the damage only, and cannot tell which of two copies of a row is right.

// SalvageOptions say what to read and where to write.
type SalvageOptions struct {
	From string // the log
	To   string // the new log; must not exist
	// ID and Last are what the relay has recorded of the log, "" and 0 for nothing. The
	// new log is not behind them.
	ID   string
	Last uint64
}

// SalvageReport is the result of Salvage.
type SalvageReport struct {
	From       string      `json:"from"`
	To         string      `json:"to"`
	Format     int         `json:"format"` // of the old log
	ID         string      `json:"id"`
	Pages      uint32      `json:"pages"`      // of the old log
	WAL        string      `json:"wal"`        // the damage of its write-ahead log, "" for none
	Events     int64       `json:"events"`     // in the new log
	Verified   int64       `json:"verified"`   // of these, those whose hash fits to the event before
	Unverified int64       `json:"unverified"` // of these, the others: next to damage, or changed
	First      uint64      `json:"first"`      // seq, 0 for none
	Last       uint64      `json:"last"`
	Unreadable int64       `json:"unreadable"` // rows that were found but are not whole
	Lost       []LostRange `json:"lost"`       // at most 256
	LostMore   int         `json:"lost_more"`  // ranges that are not in Lost
}

// LostRange is where events are missing between two that were found.
type LostRange struct {
	Tenant string `json:"tenant"` // with Class "": of any tenant
	Class  Class  `json:"class"`  // "": of any class, in a log without hashes
	From   uint64 `json:"from"`   // seq; both ends are included
	To     uint64 `json:"to"`
	AtMost uint64 `json:"at_most"` // events that are missing

	chain *oldChain // nil: a log without hashes
}

const (
	maxLostRanges = 256
	salvageSuffix = ".salvage" // of the temporary database beside the new log
	salvageBatch  = 256        // events of one transaction

	// salvagedType is the type of the event that ends a salvaged log. Its payload has the counts of
	// the SalvageReport and up to 32 lost ranges.
	salvagedType = "log.salvaged"
)

// Salvage makes a new log of every event that can be read of a damaged one, of either format. The
// old files are not changed. The caller's process must not have the log open, and no relay may
// run on it: its lock is taken meanwhile. It needs free space for about twice the size of the log: for a
// temporary database and the new log.
func Salvage(ctx context.Context, o SalvageOptions) (*SalvageReport, error) {
	s := &salvage{opts: o, report: SalvageReport{From: o.From, To: o.To, Lost: []LostRange{}}, chains: map[int64]*oldChain{}}
	if err := s.run(ctx); err != nil {
		return nil, fmt.Errorf("salvage event log %s: %w", o.From, err)
	}
	return &s.report, nil
}

// salvage is one run.
type salvage struct {
	opts   SalvageOptions
	report SalvageReport
	conn   *sql.Conn // the temporary database
	insert *sql.Stmt // of a row of found
	word   *sql.Stmt // of a row of words

	// What was found of the old log.
	logID        string // "": its row of the table log is lost
	logLast      uint64 // log.last; in the first format the mark less one
	mark         uint64 // in the first format
	headerFormat int    // that the header of the database names, 0 if it is damaged
	oldEvents    int64  // rows of the first format
	chains       map[int64]*oldChain
	hash         hasher
}

// oldChain is what is known of a chain of the old log. Its row of the table chains may be lost; tenant
// and class can then be in the index of that table.
type oldChain struct {
	hasName bool // tenant and class are known
	tenant  string
	class   Class

	hasRow     bool // the row of the table chains was found, so the next four are known
	mark, last uint64
	anchor     rowHash
	rows       int64

	// Of the event that was taken last, while the events are chosen.
	hasPrev bool
	prev    rowHash
	prevSeq uint64

	found int64 // events that were taken
	isNew bool  // the new log does not have it yet
}

// run takes the lock if there is a lock file. It does not make one, since the directory may be a copy that
// this user cannot write. It first removes what a killed salvage left beside To.
func (s *salvage) run(ctx context.Context) (err error) {
	if _, err := os.Lstat(s.opts.To); err == nil {
		return fmt.Errorf("%w: %s; name another directory", fs.ErrExist, s.opts.To)
	}
	if _, err := os.Lstat(s.opts.From + ".lock"); err == nil {
		lock, err := lockFile(s.opts.From + ".lock")
		if err != nil && !errors.Is(err, fs.ErrPermission) { // a read-only copy has no relay
			return err
		}
		if lock != nil {
			defer func() { _ = lock.Close() }()
		}
	}
	temporary, target := s.opts.To+salvageSuffix, s.opts.To+migrationSuffix
	for _, name := range []string{temporary, target} {
		if err := errors.Join(removeDatabase(name), createFile(name)); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, removeDatabase(temporary), removeDatabase(target)) }()
	if err := s.collect(ctx, temporary); err != nil {
		return err
	}
	if err := s.write(ctx, temporary, target); err != nil {
		return err
	}
	if v, err := verifyFile(ctx, target, VerifyOptions{}); err != nil {
		return err
	} else if len(v.Faults) > 0 {
		return fmt.Errorf("the new log is not sound: %w", &v.Faults[0])
	}
	return replaceFile(target, s.opts.To)
}

// salvageSchema has the rows as they were found. Their kind: 1 is a row of the first
// format, 2 of state, 3 of calls. The columns have no types, so that nothing is converted. collect makes
// the index by seq after all rows are inserted, which is faster than keeping one up to date.
const salvageSchema = `
	PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192;
	CREATE TABLE found (seq, kind, chain, tenant, type, aggregate_id, payload, created_at, hash, word, actor, trace);
	CREATE TABLE words (id INTEGER PRIMARY KEY, type, aggregate_id, text);`

// openScratch opens a database that nobody needs if this process ends, with one connection, to which the
// settings of script belong.
func openScratch(ctx context.Context, path, script string) (conn *sql.Conn, closeBoth func() error, err error) {
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, ""))
	if err != nil {
		return nil, nil, err
	}
	conn, err = db.Conn(ctx)
	if err != nil {
		return nil, nil, errors.Join(err, db.Close())
	}
	closeBoth = func() error { return errors.Join(conn.Close(), db.Close()) }
	if _, err := conn.ExecContext(ctx, script); err != nil {
		return nil, nil, errors.Join(err, closeBoth())
	}
	return conn, closeBoth, nil
}

// collect reads all rows of the old log into the temporary database, in one transaction. It works without
// the header of the database: the format then shows in the rows.
func (s *salvage) collect(ctx context.Context, temporary string) (err error) {
	old, err := sqlitefile.OpenFile(s.opts.From)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, old.Close()) }()
	if d := old.Damage(); d != nil {
		s.report.WAL = d.Error()
	}
	if id := old.ApplicationID(); id == applicationID1 || id == applicationID {
		s.headerFormat = int(id & 0xff)
	}
	conn, closeConn, err := openScratch(ctx, temporary, salvageSchema+"BEGIN")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeConn()) }()
	if s.insert, err = conn.PrepareContext(ctx, "INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.insert.Close()) }()
	if s.word, err = conn.PrepareContext(ctx, "INSERT OR IGNORE INTO words VALUES (?, ?, ?, ?)"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.word.Close()) }()
	stats, err := old.Records(func(r *sqlitefile.Record) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return s.record(ctx, r)
	})
	if err != nil {
		return err
	}
	s.report.Pages = stats.Pages
	_, err = conn.ExecContext(ctx, "COMMIT; CREATE INDEX found_seq ON found (seq)")
	return err
}

// Shapes of rows: the storage class of each column. The first column is the INTEGER PRIMARY KEY, which
// a record has as null.
var (
	shapeOldEvent  = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Text, sqlitefile.Text, sqlitefile.Text, sqlitefile.Text, sqlitefile.Integer}
	shapeRetention = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Integer}
	shapeLog       = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Text, sqlitefile.Integer}
	shapeChain     = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Text, sqlitefile.Text, sqlitefile.Integer, sqlitefile.Blob, sqlitefile.Integer, sqlitefile.Blob, sqlitefile.Integer, sqlitefile.Integer}
	shapeChainName = []sqlitefile.Kind{sqlitefile.Text, sqlitefile.Text, sqlitefile.Integer} // the index of the table chains
	shapeState     = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Integer, sqlitefile.Text, sqlitefile.Text, sqlitefile.Text, sqlitefile.Integer, sqlitefile.Blob}
	shapeCall      = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Integer, sqlitefile.Integer, sqlitefile.Integer, sqlitefile.Blob, sqlitefile.Text, sqlitefile.Integer, sqlitefile.Blob}
	shapeWord      = []sqlitefile.Kind{sqlitefile.Null, sqlitefile.Integer, sqlitefile.Integer, sqlitefile.Text, sqlitefile.Text, sqlitefile.Text}
)

// hasShape reports whether the columns of a record have these storage classes. A page does not say which
// table it belongs to, but no two tables have the same shape.
func hasShape(r *sqlitefile.Record, shape []sqlitefile.Kind) bool {
	if len(r.Values) != len(shape) {
		return false
	}
	for i, k := range shape {
		if r.Values[i].Kind != k {
			return false
		}
	}
	return true
}

// record stores what one record means. The shape of a record shows its table; a record of no such
// shape is ignored. Damaged bytes can have any shape, so values with a fixed form are checked here, and the
// texts of events when they are chosen (checkSalvaged).
func (s *salvage) record(ctx context.Context, r *sqlitefile.Record) (err error) {
	v := r.Values
	text := func(i int) string { return string(v[i].Bytes) }
	switch {
	case r.Index:
		if hasShape(r, shapeChainName) && isClass(text(1)) {
			if c := s.chain(v[2].Int); c != nil && !c.hasName {
				c.tenant, c.class, c.hasName = text(0), Class(text(1)), true
			}
		}
	case r.RowID <= 0:
	case hasShape(r, shapeLog) && r.RowID == 1 && isLogID(text(1)) && v[2].Int >= 0:
		if last := uint64(v[2].Int); s.logID == "" || last > s.logLast {
			s.logID, s.logLast = text(1), last
		}
	case hasShape(r, shapeChain) && isClass(text(2)) && len(v[4].Bytes) == hashSize && len(v[6].Bytes) == hashSize && v[3].Int >= 0 && v[5].Int >= 0 && v[3].Int <= v[5].Int+1:
		// Of several copies the one with the newest event is the latest, then the one with the highest mark.
		c := s.chain(r.RowID)
		if mark, last := uint64(v[3].Int), uint64(v[5].Int); c != nil && (!c.hasRow || last > c.last || last == c.last && mark > c.mark) {
			c.tenant, c.class, c.hasName, c.hasRow = text(1), Class(text(2)), true, true
			c.mark, c.last, c.anchor, c.rows = mark, last, rowHash(v[4].Bytes), v[7].Int
		}
	case hasShape(r, shapeRetention) && r.RowID == 1 && v[1].Int >= 0:
		s.mark = max(s.mark, uint64(v[1].Int))
	case hasShape(r, shapeWord):
		_, err = s.word.ExecContext(ctx, r.RowID, text(3), text(4), text(5))
	case hasShape(r, shapeOldEvent):
		s.oldEvents++
		_, err = s.insert.ExecContext(ctx, r.RowID, 1, 0, text(1), text(2), text(3), text(4), v[5].Int, nil, 0, 0, nil)
	case hasShape(r, shapeState) && len(v[6].Bytes) == hashSize:
		_, err = s.insert.ExecContext(ctx, r.RowID, 2, v[1].Int, "", text(2), text(3), text(4), v[5].Int, v[6].Bytes, 0, 0, nil)
	case hasShape(r, shapeCall) && len(v[7].Bytes) == hashSize:
		_, err = s.insert.ExecContext(ctx, r.RowID, 3, v[1].Int, "", "", "", text(5), v[6].Int, v[7].Bytes, v[2].Int, v[3].Int, v[4].Bytes)
	}
	return err
}

func isClass(s string) bool { return s == string(ClassState) || s == string(ClassCalls) }

// chain returns the chain with an id. It returns nil beyond twice maxChains, since damaged rows can claim
// any number of ids; twice, because chains that were dropped may still be in free pages.
func (s *salvage) chain(id int64) *oldChain {
	c := s.chains[id]
	if c == nil && len(s.chains) < 2*maxChains {
		c = &oldChain{isNew: true}
		s.chains[id] = c
	}
	return c
}

// checkSalvaged checks an event as Append does.
func checkSalvaged(e *kernel.Event) bool {
	return e.Check() == nil && isText(e.Tenant) && isText(e.Aggregate) && utf8.Valid(e.Payload) && json.Valid(e.Payload)
}

// newID returns the id of the new log: that of the old one, by which the relay knows it. If the relay has
// recorded another id, it is that one, because the relay would refuse any other.
func (s *salvage) newID() string {
	switch {
	case s.logID != "" && (!isLogID(s.opts.ID) || s.opts.ID == s.logID):
		return s.logID
	case isLogID(s.opts.ID):
		return s.opts.ID
	}
	return newLogID()
}

// salvagedEvent is the last event of the new log.
func (s *salvage) salvagedEvent(seq uint64, createdMS int64) kernel.Event {
	r := &s.report
	payload, _ := json.Marshal(map[string]any{ // cannot fail
		"events": r.Events, "verified": r.Verified, "unverified": r.Unverified, "unreadable": r.Unreadable,
		"lost": r.Lost[:min(len(r.Lost), 32)], "lost_ranges": len(r.Lost) + r.LostMore, "from": filepath.Base(s.opts.From),
	})
	return kernel.Event{Seq: seq, Type: salvagedType, Aggregate: "eventlog", Payload: payload, CreatedMS: createdMS}
}

package auth

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"go.uber.org/zap"
)

// relay.json and its copy are compared with relay.db and the event log, and written if they are
// behind: when a directory is opened (Store.load), after each transaction that has changed
// revocations or keys (saveRecordAfter), every recordInterval (Store.Run) and by Close.

// recordInterval is how often Run writes to relay.json how far the event log is. A change of
// the epoch by a revocation or a key is written at once, and takes the rest along.
//
// A write costs a flash disk about 20 KiB, so that a busy relay writes 6 MB a day. What is not
// noticed is an event log that is put back by less than this.
const recordInterval = 5 * time.Minute

// Problems of a store.
const (
	StoreMissing = "missing"
	StoreEmpty   = "empty"
	StoreOlder   = "older"   // than what is recorded: a copy or a backup was put in its place
	StoreForeign = "foreign" // of another relay, or a new one
)

// StateError refuses a state directory in which a store is not the one that the relay had. To
// go on would bring revoked tokens back to life or drop tickets.
type StateError struct {
	Dir     string // the state directory
	Store   string // relay.db, events.db or relay.json
	Problem string // StoreMissing, StoreEmpty, StoreOlder or StoreForeign
	Detail  string // what shows it
}

// withoutStore says what a relay lacks without a store.
var withoutStore = map[string]string{
	dbFile:      "without it every revoked token would work again, and nobody that has joined is known",
	relayFile:   "without it every token is refused",
	"events.db": "without it all tickets and the history are gone",
}

func (e *StateError) Error() string {
	text := map[string]string{
		StoreMissing: "%s is missing in %s (%s); %s",
		StoreEmpty:   "%s in %s is empty (%s); %s",
		StoreOlder:   "%s in %s is older than the record of it (%s); with the right one missing: %s",
		StoreForeign: "%s in %s is not the one that is recorded (%s); with the right one missing: %s",
	}[e.Problem]
	if e.Store == relayFile && e.Problem == StoreForeign {
		return fmt.Sprintf("%s in %s is another relay's (%s); it can be made anew from %s, and nothing is lost", e.Store, e.Dir, e.Detail, dbFile)
	}
	return fmt.Sprintf(text, e.Store, e.Dir, e.Detail, withoutStore[e.Store])
}

// EventLog returns what relay.json records of the event log, the zero value for none.
func (s *Store) EventLog() EventLogRecord { return s.relay.Stores.EventsDB }

// FollowEventLog records the event log that record describes, now, every recordInterval while
// Run runs and at Close. What record returns must be durable already: a record ahead of the log
// would refuse the next start. It is called before Run. An error is of the first record; the
// later ones go on, and a record that is behind is no reason not to start.
func (s *Store) FollowEventLog(record func() EventLogRecord) error {
	s.eventLog = record
	return s.saveRecord(context.Background())
}

func (s *Store) warnNotRecorded(err error) {
	s.log.Warn(relayFile+" is behind: it guards less well against an older "+dbFile+" or event log", zap.Error(explain(s.dir.path, err)))
}

// ForgetEventLog removes the record of the event log: the next one is taken as it is.
func (s *Store) ForgetEventLog(ctx context.Context) error {
	s.eventLog = nil
	err := s.db.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.Exec("UPDATE relay SET events_id = '', events_seq = 0")
		return err
	}, nil)
	if err == nil {
		err = s.saveRecord(ctx)
	}
	return err
}

// saveRecord writes relay.json, see saveRecordTx.
func (s *Store) saveRecord(ctx context.Context) error {
	return s.db.write(ctx, s.saveRecordTx, nil)
}

// saveRecordAfter writes relay.json after a transaction that has changed revocations or keys. The
// caller holds the write slot. A failure is logged: the change itself is durable in relay.db.
func (s *Store) saveRecordAfter() {
	disk, op := s.db.watch.Begin("save "+relayFile), &writeOp{exec: s.saveRecordTx}
	err := errors.Join(s.db.runBatch([]*writeOp{op}), op.err)
	disk.End(err)
	if err != nil {
		s.warnNotRecorded(err)
	}
}

// checkWAL refuses a write-ahead log that belongs to another database than the relay.db beside it: SQLite
// would write pages of the one into the other. It reads the id of relay.db without its log, and
// compares it with the id in relay.json or its copy, which is that of the log.
func (d *stateDir) checkWAL() error {
	if info, err := d.root.Lstat(dbFile + "-wal"); err != nil || info.Size() == 0 {
		return nil
	}
	db, err := d.openSQL(readCacheKiB, "mode=ro&immutable=1")
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	var id string
	if db.QueryRow("SELECT db_id FROM relay").Scan(&id) != nil {
		return nil // a new or an old one: its record is in the log, or nowhere
	}
	var want string
	for _, name := range []string{relayFile, recordCopy} {
		info, err := readRelayInfo(d, name)
		if err == nil && info.Stores.RelayDB.ID == id {
			return nil
		}
		want = cmp.Or(want, info.Stores.RelayDB.ID)
	}
	if want == "" {
		return nil
	}
	return &StateError{d.path, dbFile, StoreForeign, fmt.Sprintf("it is %s, and %s-wal continues %s", id, dbFile, want)}
}

// checkNotSetUp returns a *StateError with a problem of relay.db if other files show that a relay was set
// up in the directory. A new database beside them would accept every token that was revoked.
//
// The order of the first start makes this safe: relay.db has its tables before any of these files
// exists. The caller looks at relay.db afterwards, or holds its write lock.
func (d *stateDir) checkNotSetUp(problem string) error {
	found := ""
	for _, name := range []string{relayFile, authorityFile, serverFile} {
		if _, err := d.root.Lstat(name); err == nil {
			found = name
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if found == "" {
		kids, err := listKIDs(d)
		switch {
		case len(kids) > 0:
			found = keyFile(kids[0])
		case err == nil || errors.Is(err, fs.ErrNotExist):
			return nil
		default:
			return err
		}
	}
	return &StateError{d.path, dbFile, problem, found + " shows that a relay was set up here"}
}

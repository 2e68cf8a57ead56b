package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"time"

	sqlite3 "modernc.org/sqlite/lib"

	"agentctl/relay/storage"
	"agentctl/sqlitefile"
)

const (
	busyTimeout = 5 * time.Second // for the write lock of another process
	maxBatch    = 512             // operations of one transaction

	// maxTransaction bounds a transaction, the wait for the write lock included. Another process
	// waits busyTimeout for the lock, so a transaction should take much less.
	maxTransaction = 2 * busyTimeout

	maxQueued = 16384 // operations that wait for their transaction; more are refused
)

// errSlowTransaction reports a transaction that was rolled back because its time was over.
var errSlowTransaction = &storage.Error{Store: dbFile, Kind: storage.Slow,
	Err: fmt.Errorf("a write to %s took longer than %s and was undone; see whether this machine or its disk is overloaded, and do it again", dbFile, maxTransaction)}

// createMu serializes creation of the file by two Stores of one process: POSIX drops all
// of a process's locks on a file when any of its descriptors is closed, so closing the
// new file would take the locks of the other Store's connection.
var createMu sync.Mutex

// database holds the two connections to relay.db. In WAL mode the reader does not wait
// for a writer.
//
// Writes use group commit. A caller appends its operation to the queue and waits. The goroutine of
// runWriter, which lives while there is something to write, commits batches from the front of the
// queue. Since it is a separate goroutine, callers can give up on a disk that hangs.
type database struct {
	dir             *stateDir
	writeDB, readDB *sql.DB
	writeSlot       chan struct{} // capacity 1: a goroutine that has sent may use writeDB, until it receives
	watch           *storage.Watch
	writeTimeout    time.Duration // Options.WriteTimeout

	// onRevoke is called with the write slot held, after a transaction that has changed
	// revocations or keys and before its callers return. nil until load has set it.
	onRevoke func()
	// revision is the sum of the counters of revocations and keys after the last transaction;
	// savedRevision is that of the last call of onRevoke. The holder of the write slot uses them.
	revision, savedRevision int64

	mu      sync.Mutex // protects the fields below
	queue   []*writeOp
	writing bool // runWriter runs
}

// writeOp is one write that shares a transaction, and so an fsync, with others. err belongs
// to the holder of the write slot until done is closed.
type writeOp struct {
	exec     func(*sql.Tx) error
	onCommit func() // called in the order of the operations; may be nil
	err      error
	done     chan struct{}
}

// openDatabase opens both connections. It makes the file itself, because SQLite would make
// it readable by everyone; not if it is missing where a relay was set up, unless startOver.
func openDatabase(d *stateDir, startOver bool) (*database, error) {
	setUpErr := d.checkNotSetUp(StoreMissing)
	if _, err := d.root.Lstat(dbFile); errors.Is(err, fs.ErrNotExist) && setUpErr != nil && !startOver {
		return nil, setUpErr
	}
	createMu.Lock()
	err := d.create(dbFile)
	createMu.Unlock()
	if err != nil {
		return nil, err
	}
	if info, err := d.root.Lstat(dbFile); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file; move it away", dbFile)
	}
	if err := sqlitefile.ScanWAL(filepath.Join(d.path, dbFile)); err != nil {
		return nil, err // SQLite would ignore the transactions behind the damage: revoked tokens would work again
	}
	if err := d.checkWAL(); err != nil && !startOver {
		return nil, err
	}
	db := &database{dir: d, writeSlot: make(chan struct{}, 1)}
	if db.writeDB, err = d.openSQL(writeCacheKiB, "_journal_mode=WAL&_synchronous=FULL&_txlock=immediate&_defensive=1"); err != nil {
		return nil, err
	}
	if db.readDB, err = d.openSQL(readCacheKiB, "_query_only=1"); err != nil {
		db.writeDB.Close()
		return nil, err
	}
	return db, nil
}

// writeCacheKiB and readCacheKiB are the page caches of the connections. Rows are read and written
// here and there, and what is read often is in memory (registry), so larger ones would only take
// memory: a page of 4 KiB takes 8, since the driver's allocator rounds up to a power of two.
const (
	writeCacheKiB = 256
	readCacheKiB  = 128
)

// openSQL opens one connection to relay.db. Of the options that openDatabase gives it:
//
//	_txlock=immediate   a transaction takes the write lock when it begins; at its first write, SQLite
//	                    would fail at once if another process has written in between
//	_query_only=1       the reader cannot write, whatever a query says
//	_defensive=1        no SQL can damage the file, for instance by writing to the schema
func (d *stateDir) openSQL(cacheKiB int, options string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", sqlitefile.DSN(filepath.Join(d.path, dbFile), fmt.Sprintf("_busy_timeout=%d&_pragma=cache_size(-%d)&%s", busyTimeout.Milliseconds(), cacheKiB, options)))
	if err == nil {
		db.SetMaxOpenConns(1)
	}
	return db, err
}

// closeTimeout bounds how long close waits for a transaction.
const closeTimeout = 3 * time.Second

// close closes the reader first: the last connection to close removes the write-ahead log. If
// a transaction hangs on the disk, the connections stay open until the process ends.
func (db *database) close() error {
	select {
	case db.writeSlot <- struct{}{}:
		return errors.Join(db.readDB.Close(), db.writeDB.Close())
	case <-time.After(closeTimeout):
		return storage.TimedOut(dbFile, fmt.Errorf("close %s: a write has not ended: %w", dbFile, context.DeadlineExceeded))
	}
}

// setUp migrates the schema and runs fn, in one transaction: two processes that open a
// new directory at once agree on one relay id and one key. isNew reports whether the database
// was empty before.
func (db *database) setUp(fn func(tx *sql.Tx, isNew bool) error) error {
	deadline := time.Now().Add(busyTimeout)
	for {
		err := db.migrate(fn)
		// Switching a new file to WAL fails at once when the file is locked, whatever the
		// busy timeout says.
		if sqlitefile.Code(err) != sqlite3.SQLITE_BUSY || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// migrate is one try of setUp. A database of a newer agentctl is refused and not changed. All steps of
// the schema and fn are one transaction, so that an upgrade that is interrupted leaves the old schema.
func (db *database) migrate(fn func(*sql.Tx, bool) error) error {
	tx, err := db.writeDB.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var version int
	if err := tx.QueryRow("PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > len(migrations) {
		return fmt.Errorf("%s has schema %d, this agentctl knows up to %d: a newer agentctl wrote it; run that one (agentctl version)",
			dbFile, version, len(migrations))
	}
	isNew := version == 0
	for ; version < len(migrations); version++ {
		if _, err := tx.Exec(migrations[version] + fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
			return err
		}
	}
	if err := fn(tx, isNew); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	// SQLite gives -wal and -shm the owner of the database; a database that root
	// restored from a backup is given to the owner of the directory here.
	for _, name := range []string{dbFile, dbFile + "-wal", dbFile + "-shm"} {
		if err := db.dir.chownToOwner(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// write runs exec in a transaction and onCommit after its commit. It shares the
// transaction with concurrent writers: a thousand boards that announce themselves at
// once cost a few fsyncs.
//
// When ctx ends before the transaction began, exec does not run; after that, a caller whose
// ctx was canceled gets the result, and one whose time is over gets an error although the
// write may be stored. What exec has captured is then still in use: after an error the caller
// reads none of it.
func (db *database) write(ctx context.Context, exec func(*sql.Tx) error, onCommit func()) error {
	if err := db.watch.Stuck(storage.HungAfter); err != nil {
		return err // the queue does not move
	}
	op := &writeOp{exec: exec, onCommit: onCommit, done: make(chan struct{})}
	db.mu.Lock()
	if len(db.queue) >= maxQueued {
		db.mu.Unlock()
		return &storage.Error{Store: dbFile, Kind: storage.Slow, Err: errors.New("too many writes wait for the relay's database; check its disk")}
	}
	db.queue = append(db.queue, op)
	if !db.writing {
		db.writing = true
		go db.runWriter()
	}
	db.mu.Unlock()

	var timeout <-chan time.Time // never, without a timeout
	if db.writeTimeout > 0 {
		timer := time.NewTimer(db.writeTimeout)
		defer timer.Stop()
		timeout = timer.C
	}
	var err error
	select {
	case <-op.done:
		return op.err
	case <-ctx.Done():
		err = ctx.Err()
	case <-timeout:
		err = context.DeadlineExceeded
	}
	if db.cancelQueued(op) {
		return storage.TimedOut(dbFile, err)
	}
	if db.writeTimeout == 0 { // a transaction's time is bounded, unless the disk hangs
		<-op.done
		return op.err
	}
	if errors.Is(err, context.Canceled) {
		select {
		case <-op.done:
			return op.err
		case <-timeout:
			err = context.DeadlineExceeded
		}
	}
	return storage.TimedOut(dbFile, fmt.Errorf("the write to %s has begun, and may be stored later: %w", dbFile, err))
}

// runWriter commits the queue in batches until it is empty. One goroutine runs it at a time,
// while there is something to write: on a disk that hangs, it is the one that is stuck.
func (db *database) runWriter() {
	db.writeSlot <- struct{}{}
	defer func() { <-db.writeSlot }()
	for {
		batch := db.takeBatch()
		if len(batch) == 0 {
			return
		}
		db.commitBatch(batch)
	}
}

// cancelQueued removes an operation whose transaction has not begun, and reports whether it
// did.
func (db *database) cancelQueued(op *writeOp) bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	i := slices.Index(db.queue, op)
	if i >= 0 {
		db.queue = slices.Delete(db.queue, i, i+1)
	}
	return i >= 0
}

// takeBatch removes the oldest operations from the queue. If there is none, runWriter has to end: the
// next write starts another one. The caller holds the write slot.
func (db *database) takeBatch() []*writeOp {
	db.mu.Lock()
	defer db.mu.Unlock()
	n := min(len(db.queue), maxBatch)
	db.writing = n > 0
	batch := slices.Clone(db.queue[:n])
	db.queue = slices.Delete(db.queue, 0, n)
	return batch
}

// commitBatch runs a batch in one transaction and gives each operation its result: that of the commit,
// or the error of the operation if it alone was rolled back. Callers return after onRevoke, so that
// relay.json normally has a revocation before its caller gets the result.
func (db *database) commitBatch(batch []*writeOp) {
	commit := db.watch.Begin("commit")
	err := explain(db.dir.path, db.runBatch(batch))
	fault := err
	for _, op := range batch {
		switch {
		case op.err == nil, errors.Is(op.err, sql.ErrTxDone): // maxTransaction was over
			op.err = err
		case sqlitefile.Code(op.err) != 0:
			op.err = explain(db.dir.path, op.err)
			if fault == nil && storage.Classify(op.err) != "" {
				fault = op.err // damage that only this operation has met
			}
		}
		if op.err == nil && op.onCommit != nil {
			op.onCommit()
		}
	}
	commit.End(fault)
	if err == nil && db.revision != db.savedRevision && db.onRevoke != nil {
		db.savedRevision = db.revision
		db.onRevoke()
	}
	for _, op := range batch {
		close(op.done)
	}
}

// runBatch runs each operation behind a savepoint: one that fails rolls back its own
// changes only. An error is one of the whole transaction.
func (db *database) runBatch(batch []*writeOp) (err error) {
	// Not the context of one caller: its end must not fail the others' writes.
	ctx, cancel := context.WithTimeout(context.Background(), maxTransaction)
	defer cancel()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = errSlowTransaction
		}
	}()
	tx, err := db.writeDB.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, op := range batch {
		if _, err := tx.Exec("SAVEPOINT op"); err != nil {
			return err
		}
		end := "RELEASE op"
		if op.err = op.exec(tx); op.err != nil {
			end = "ROLLBACK TO op; RELEASE op"
		}
		if _, err := tx.Exec(end); err != nil {
			return err
		}
	}
	if err := tx.QueryRow("SELECT revocations + keys FROM changes").Scan(&db.revision); err != nil {
		return err
	}
	return tx.Commit()
}

// forEachRow calls fn for each row of a query until it returns an error. errStopRows
// ends the query without an error.
func forEachRow(ctx context.Context, q querier, fn func(scan func(...any) error) error, query string, args ...any) error {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows.Scan); err != nil {
			if errors.Is(err, errStopRows) {
				return nil
			}
			return err
		}
	}
	return rows.Err()
}

// errStopRows ends forEachRow early.
var errStopRows = errors.New("stop")

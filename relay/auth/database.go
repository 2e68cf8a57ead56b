package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// The database. Two processes may hold it, so every write is one IMMEDIATE
// transaction, and `changes` tells the other process what to read again:
//
//	tokens       what was minted; jti and claims, never a token
//	revocations  the deny list; a row by subject, node or tenant stops the tokens issued
//	             up to `at`, so that a new one can be minted
//	nodes, seen  the node registry; last-seen apart, because it is written each minute
//	changes      counters that move with revocations and nodes (not with seen)
var migrations = []string{
	`CREATE TABLE tokens (
		jti    TEXT PRIMARY KEY,
		class  TEXT NOT NULL,
		tenant TEXT NOT NULL,
		sub    TEXT NOT NULL,
		node   TEXT NOT NULL,
		scopes TEXT NOT NULL,
		iat    INTEGER NOT NULL,
		exp    INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE INDEX tokens_sub ON tokens (sub);
	CREATE INDEX tokens_node ON tokens (node) WHERE node <> '';
	CREATE INDEX tokens_tenant ON tokens (tenant);
	CREATE INDEX tokens_exp ON tokens (exp);
	CREATE TABLE revocations (
		kind  TEXT NOT NULL CHECK (kind IN ('jti', 'sub', 'node', 'tenant')),
		value TEXT NOT NULL,
		at    INTEGER NOT NULL,
		until INTEGER NOT NULL,
		PRIMARY KEY (kind, value)
	) STRICT, WITHOUT ROWID;
	CREATE TABLE nodes (
		id         INTEGER PRIMARY KEY,
		node_id    TEXT NOT NULL UNIQUE,
		tenant     TEXT NOT NULL,
		name       TEXT NOT NULL,
		want       TEXT NOT NULL,
		manifest   TEXT NOT NULL,
		sum        BLOB NOT NULL,
		created_ms INTEGER NOT NULL,
		change     INTEGER NOT NULL,
		UNIQUE (tenant, name)
	) STRICT;
	CREATE INDEX nodes_change ON nodes (change);
	CREATE TABLE seen (
		id INTEGER PRIMARY KEY,
		ms INTEGER NOT NULL
	) STRICT;
	CREATE TABLE changes (
		id          INTEGER PRIMARY KEY CHECK (id = 1),
		revocations INTEGER NOT NULL,
		nodes       INTEGER NOT NULL
	) STRICT;
	INSERT INTO changes VALUES (1, 0, 0);`,
}

const (
	busyTimeout = 5 * time.Second
	maxBatch    = 512   // operations of one transaction
	maxQueued   = 16384 // operations that may wait for their transaction
)

// createMu keeps two Stores of one process from making the database file at once: the
// close of the one's descriptor would take the POSIX locks of the other's connection.
var createMu sync.Mutex

// database is the two connections to relay.db. The reader never waits for a writer (WAL).
type database struct {
	dir             *stateDir
	writeDB, readDB *sql.DB
	writeSlot       chan struct{} // whoever fills it runs the next transaction

	mu    sync.Mutex // protects waiting
	queue []*writeOp
}

// writeOp is one write that shares a transaction, and so an fsync, with others.
type writeOp struct {
	exec     func(*sql.Tx) error
	onCommit func() // after the commit; in the order of the operations
	err      error
	done     bool
}

func openDatabase(d *stateDir) (*database, error) {
	createMu.Lock()
	err := d.create(dbFile)
	createMu.Unlock()
	if err != nil {
		return nil, err
	}
	path := filepath.Join(d.path, dbFile)
	if info, err := d.root.Lstat(dbFile); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file; move it away", path)
	}
	busy := fmt.Sprintf("_busy_timeout=%d", busyTimeout.Milliseconds())
	w, err := sql.Open("sqlite", dsn(path, busy+"&_journal_mode=WAL&_synchronous=FULL&_txlock=immediate&_defensive=1"))
	if err != nil {
		return nil, explain(d.path, err)
	}
	r, err := sql.Open("sqlite", dsn(path, busy+"&_query_only=1"))
	if err != nil {
		w.Close()
		return nil, explain(d.path, err)
	}
	w.SetMaxOpenConns(1)
	r.SetMaxOpenConns(1)
	return &database{dir: d, writeDB: w, readDB: r, writeSlot: make(chan struct{}, 1)}, nil
}

func dsn(path, query string) string {
	return (&url.URL{Scheme: "file", OmitHost: true, Path: filepath.ToSlash(path), RawQuery: query}).String()
}

func (db *database) close() error { return errors.Join(db.readDB.Close(), db.writeDB.Close()) }

// setUp migrates the schema and runs fn, in one transaction: two processes that open
// a fresh directory agree on one relay id and one key.
func (db *database) setUp(fn func() error) error {
	deadline := time.Now().Add(busyTimeout)
	for {
		err := db.migrate(fn)
		// The switch of a fresh file to WAL does not wait for its lock as writes do.
		if sqliteCode(err) != sqliteBusy || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (db *database) migrate(fn func() error) error {
	tx, err := db.writeDB.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var have int
	if err := tx.QueryRow("PRAGMA user_version").Scan(&have); err != nil {
		return err
	}
	if have > len(migrations) {
		return fmt.Errorf("%s has schema %d, this agentctl knows up to %d: a newer agentctl wrote it; run that one (agentctl version)",
			filepath.Join(db.dir.path, dbFile), have, len(migrations))
	}
	for i := have; i < len(migrations); i++ {
		if _, err := tx.Exec(migrations[i]); err != nil {
			return err
		}
	}
	if have < len(migrations) {
		if _, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", len(migrations))); err != nil {
			return err
		}
	}
	if err := fn(); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	return db.chownFiles()
}

// chownFiles gives the database's files to the owner of the directory. SQLite does this
// for -wal and -shm by itself; a database restored by root is given here.
func (db *database) chownFiles() error {
	for _, name := range []string{dbFile, dbFile + "-wal", dbFile + "-shm"} {
		if err := db.dir.chownToOwner(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return explain(db.dir.path, err)
		}
	}
	return nil
}

// write runs do in a transaction, and then after its commit. Writers that come while
// a transaction is being synced share the next one: a thousand boards that announce
// themselves at once cost a few fsyncs. When ctx ends first, do was not run or its
// result is returned.
func (db *database) write(ctx context.Context, do func(*sql.Tx) error, then func()) error {
	op := &writeOp{exec: do, onCommit: then}
	db.mu.Lock()
	if len(db.queue) >= maxQueued {
		db.mu.Unlock()
		return errors.New("too many writes wait for the relay's database; check its disk")
	}
	db.queue = append(db.queue, op)
	db.mu.Unlock()

	select {
	case db.writeSlot <- struct{}{}:
	case <-ctx.Done():
		if db.cancelQueued(op) {
			return ctx.Err()
		}
		db.writeSlot <- struct{}{} // its transaction is running, and is bounded
	}
	defer func() { <-db.writeSlot }()
	for !op.done {
		db.commitBatch(db.takeBatch())
	}
	return op.err
}

func (db *database) cancelQueued(op *writeOp) bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	i := slices.Index(db.queue, op)
	if i < 0 {
		return false
	}
	db.queue = slices.Delete(db.queue, i, i+1)
	return true
}

func (db *database) takeBatch() []*writeOp {
	db.mu.Lock()
	defer db.mu.Unlock()
	n := min(len(db.queue), maxBatch)
	batch := slices.Clone(db.queue[:n])
	db.queue = slices.Delete(db.queue, 0, n)
	return batch
}

// commitBatch commits a batch. An operation that fails takes back its own changes only.
func (db *database) commitBatch(batch []*writeOp) {
	err := db.runBatch(batch)
	for _, op := range batch {
		op.done = true
		if op.err == nil {
			op.err = err
		}
		if op.err == nil && op.onCommit != nil {
			op.onCommit()
		}
	}
}

func (db *database) runBatch(batch []*writeOp) error {
	// Not the ctx of one caller: the others' writes must not fail with it.
	ctx, cancel := context.WithTimeout(context.Background(), 2*busyTimeout)
	defer cancel()
	tx, err := db.writeDB.BeginTx(ctx, nil)
	if err != nil {
		return explain(db.dir.path, err)
	}
	defer tx.Rollback()
	for _, op := range batch {
		if _, err := tx.Exec("SAVEPOINT op"); err != nil {
			return explain(db.dir.path, err)
		}
		if op.err = op.exec(tx); op.err != nil {
			if sqliteCode(op.err) != 0 {
				op.err = explain(db.dir.path, op.err)
			}
			if _, err := tx.Exec("ROLLBACK TO op"); err != nil {
				return explain(db.dir.path, err)
			}
		}
		if _, err := tx.Exec("RELEASE op"); err != nil {
			return explain(db.dir.path, err)
		}
	}
	return explain(db.dir.path, tx.Commit())
}

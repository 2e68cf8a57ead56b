package auth

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"agentctl/manifest"
	"agentctl/sqlitefile"
)

// This file is for the packages backup and checkup, which read a state directory without opening a
// Store, and make another one from a copy of relay.db.

// Names of the files of this package in a state directory.
const (
	DatabaseFile = dbFile
	RelayFile    = relayFile
	KeysDir      = keysDir
)

// Record is what relay.json and relay.db each know about a relay's stores.
type Record struct {
	RelayID    string
	Audience   string
	DatabaseID string // "": of an agentctl that recorded nothing
	Epoch      int64
	EventLog   EventLogRecord
}

func (i *relayInfo) record() Record {
	return Record{i.RelayID, i.Audience, i.Stores.RelayDB.ID, i.Stores.RelayDB.Epoch, i.Stores.EventsDB}
}

// Record returns the present record of the relay's stores.
func (s *Store) Record(ctx context.Context) (r Record, err error) {
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		info, _, err := readRelayRow(tx)
		r = info.record()
		return err
	}, nil)
	return r, err
}

// ReadRelayFile returns what relay.json of a directory records. It changes nothing.
func ReadRelayFile(dir string) (Record, error) {
	d, err := readOnlyDir(dir)
	if err != nil {
		return Record{}, err
	}
	defer func() { _ = d.close() }()
	info, err := readRelayInfo(d, relayFile)
	if err != nil {
		return Record{}, fmt.Errorf("%s in %s: %w", relayFile, dir, err)
	}
	return info.record(), nil
}

// ReadRecord is ReadRelayFile with the copy of relay.json in keys/: the greater epoch counts, and the
// copy alone if relay.json cannot be read. The copy has no record of the event log.
func ReadRecord(dir string) (Record, error) {
	r, err := ReadRelayFile(dir)
	d, dirErr := readOnlyDir(dir)
	if dirErr != nil {
		return r, err
	}
	defer func() { _ = d.close() }()
	switch copied, copyErr := readRelayInfo(d, recordCopy); {
	case copyErr != nil:
	case err != nil:
		return copied.record(), nil
	case copied.RelayID == r.RelayID:
		r.Epoch = max(r.Epoch, copied.Stores.RelayDB.Epoch)
	}
	return r, err
}

// CheckRecord compares relay.db, as ReadDatabase describes it, with what relay.json and its copy record
// of it. The error is a *StateError.
func CheckRecord(dir string, db Record) error {
	d, err := readOnlyDir(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.close() }()
	if err := d.checkWAL(); err != nil {
		return err
	}
	if db.DatabaseID == "" {
		return checkRecord(d, nil)
	}
	return checkRecord(d, &relayInfo{RelayID: db.RelayID, Stores: storeRecords{RelayDB: databaseRecord{db.DatabaseID, db.Epoch}}})
}

// Check compares an event log with r, which was recorded of it. The error is a *StateError.
func (r EventLogRecord) Check(dir string, is EventLogRecord) error {
	const store = "events.db"
	switch {
	case r.ID != "" && is.ID != r.ID:
		return &StateError{dir, store, StoreForeign, fmt.Sprintf("%s is recorded, this is %s", r.ID, cmp.Or(is.ID, "one of an older agentctl"))}
	case is.LastSeq < r.LastSeq:
		return &StateError{dir, store, StoreOlder, fmt.Sprintf("its last event is %d, it had %d", is.LastSeq, r.LastSeq)}
	}
	return nil
}

// ReadDatabase returns what relay.db of a directory records: nothing if an earlier agentctl wrote it. The
// error is a *StateError if it has no tables although a relay was set up. Nothing on disk changes.
func ReadDatabase(ctx context.Context, dir string) (r Record, err error) {
	d, err := readOnlyDir(dir)
	if err != nil {
		return r, err
	}
	defer func() { _ = d.close() }()
	if _, err := d.root.Lstat(dbFile); err != nil {
		return r, err
	}
	dsn, done, err := sqlitefile.ReadOnly(filepath.Join(d.path, dbFile), fmt.Sprintf("_busy_timeout=%d", busyTimeout.Milliseconds()))
	if err != nil {
		return r, explain(dir, err)
	}
	defer func() { err = errors.Join(err, done()) }()
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return r, err
	}
	defer func() { _ = db.Close() }()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return r, explain(dir, err)
	}
	defer func() { _ = tx.Rollback() }()
	var version int
	switch err := tx.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); {
	case err != nil:
		return r, explain(dir, err)
	case version == 0:
		return r, d.checkNotSetUp(StoreEmpty)
	case version < recordVersion:
		return r, nil
	}
	info, _, err := readRelayRow(tx)
	return info.record(), explain(dir, err)
}

// recordVersion is the schema that has the table relay.
var recordVersion = slices.Index(migrations, recordSchema) + 1

// FinishCopy makes a state directory of a directory that has a copy of relay.db: it records the event
// log there, and writes relay.json. The epoch of the copy becomes minEpoch at least. With newID the copy
// gets another id, so that a relay does not mistake it for the database that it was copied from, or
// the reverse.
func FinishCopy(ctx context.Context, dir string, log EventLogRecord, newID bool, minEpoch int64) (r Record, err error) {
	d, db, err := openCopy(dir)
	if err != nil {
		return r, explain(dir, err)
	}
	defer func() { err = errors.Join(err, closeCopy(d, db)) }()
	s := &Store{dir: d, db: db, eventLog: nil}
	op := &writeOp{exec: func(tx *sql.Tx) error {
		if _, err := tx.Exec("UPDATE relay SET events_id = ?, events_seq = ?", log.ID, int64(log.LastSeq)); err != nil {
			return err
		}
		if _, err := tx.Exec("UPDATE changes SET epoch = max(epoch, ?)", minEpoch); err != nil {
			return err
		}
		if newID {
			if _, err := tx.Exec("UPDATE relay SET db_id = ?", manifest.NewULID()); err != nil {
				return err
			}
		}
		info, ok, err := readRelayRow(tx)
		if err == nil && !ok {
			err = fmt.Errorf("%s has no copy of %s", dbFile, relayFile)
		}
		r = info.record()
		if err == nil {
			err = s.saveRecordTx(tx)
		}
		return err
	}}
	err = errors.Join(db.runBatch([]*writeOp{op}), op.err)
	return r, explain(dir, err)
}

// openCopy opens the copy of relay.db in a directory, and migrates it to the present schema. It takes no
// lock of the directory, because no other process uses it.
func openCopy(dir string) (*stateDir, *database, error) {
	d, err := readOnlyDir(dir)
	if err != nil {
		return nil, nil, err
	}
	db, err := openDatabase(d, true)
	if err == nil {
		if err = db.setUp(func(*sql.Tx, bool) error { return nil }); err != nil {
			_ = db.close()
		}
	}
	if err != nil {
		_ = d.close()
		return nil, nil, err
	}
	return d, db, nil
}

// closeCopy closes a copy, and leaves it as one file without a write-ahead log.
func closeCopy(d *stateDir, db *database) error {
	_, err := db.writeDB.Exec("PRAGMA wal_checkpoint(TRUNCATE)")
	return errors.Join(err, db.close(), d.close())
}

// Carried is what CarryOver took from the state that a backup replaces.
type Carried struct {
	Revocations  int      `json:"revocations"`   // that the backup did not have, or not as late
	Invites      int      `json:"invites"`       // used or revoked since
	NodesRemoved []string `json:"nodes_removed"` // node ids
	KeysDropped  []string `json:"keys_dropped"`  // kids that verify nothing any more
	Keys         []string `json:"-"`             // kids whose files are needed
}

// CarryOver updates the copy of relay.db in dir, a backup, from a newer database of the same relay in
// the directory from. What was taken away since the backup stays away: revocations, removed nodes,
// dropped keys, used and revoked invites. What was given since is added: tokens, boards and agents
// that joined, nodes, keys. If the database in from is older than the backup, only its revocations
// are added. The caller deletes from, which is migrated to the present schema.
func CarryOver(ctx context.Context, dir, from string) (c *Carried, err error) {
	if err := migrateCopy(from); err != nil {
		return nil, explain(from, err)
	}
	d, db, err := openCopy(dir)
	if err != nil {
		return nil, explain(dir, err)
	}
	defer func() { err = errors.Join(err, closeCopy(d, db)) }()
	if _, err := db.writeDB.ExecContext(ctx, "ATTACH ? AS old", filepath.Join(from, dbFile)); err != nil {
		return nil, explain(from, err)
	}
	tx, err := db.writeDB.BeginTx(ctx, nil)
	if err != nil {
		return nil, explain(dir, err)
	}
	defer func() { _ = tx.Rollback() }()
	if c, err = carryOverTx(ctx, tx); err == nil {
		err = tx.Commit()
	}
	return c, explain(dir, err)
}

func migrateCopy(dir string) error {
	d, db, err := openCopy(dir)
	if err != nil {
		return err
	}
	return closeCopy(d, db)
}

// carryOverTx is CarryOver inside a transaction. What old lacks was taken away, a node removed or a key
// dropped, but only if old is the newer database, which its epoch shows. Revocations are taken in any
// case: none is withdrawn. A database without keys is of an agentctl that recorded none.
func carryOverTx(ctx context.Context, tx *sql.Tx) (*Carried, error) {
	c := &Carried{NodesRemoved: []string{}, KeysDropped: []string{}}
	var newer, hasKeys bool
	err := tx.QueryRow(`SELECT (SELECT epoch FROM old.changes) >= (SELECT epoch FROM main.changes), EXISTS (SELECT 1 FROM old.keys),
		(SELECT count(*) FROM old.revocations o LEFT JOIN main.revocations m ON m.kind = o.kind AND m.value = o.value WHERE m.at IS NULL OR o.at > m.at),
		(SELECT count(*) FROM old.invites o JOIN main.invites m ON m.code = o.code WHERE o.used > m.used OR o.revoked > m.revoked)`).
		Scan(&newer, &hasKeys, &c.Revocations, &c.Invites)
	if err != nil {
		return nil, err
	}
	statements := []string{carryRevocations}
	if newer {
		if c.NodesRemoved, err = column(ctx, tx, "SELECT node_id FROM main.nodes WHERE node_id NOT IN (SELECT node_id FROM old.nodes)"); err != nil {
			return nil, err
		}
		statements = append(statements, carryInvites, carryJoined, carryNodes)
		if hasKeys {
			if c.KeysDropped, err = column(ctx, tx, "SELECT kid FROM main.keys WHERE kid NOT IN (SELECT kid FROM old.keys)"); err != nil {
				return nil, err
			}
			statements = append(statements, "DELETE FROM main.keys; INSERT INTO main.keys SELECT * FROM old.keys")
		}
	}
	for _, stmt := range append(statements, carryCounters) {
		if _, err := tx.ExecContext(ctx, stmt); err != nil {
			return nil, err
		}
	}
	c.Keys, err = column(ctx, tx, "SELECT kid FROM main.keys")
	return c, err
}

// column returns the texts of a query of one column.
func column(ctx context.Context, tx *sql.Tx, query string) ([]string, error) {
	list := []string{}
	err := forEachRow(ctx, tx, func(scan func(...any) error) error {
		var v string
		err := scan(&v)
		list = append(list, v)
		return err
	}, query)
	return list, err
}

// The statements of CarryOver: main is the backup, old the newer database.
const (
	carryRevocations = `
	INSERT INTO main.revocations (kind, value, at, until) SELECT kind, value, at, until FROM old.revocations WHERE true
		ON CONFLICT DO UPDATE SET at = max(at, excluded.at), until = max(until, excluded.until)`

	// An invite that the newer database does not have any more has ended.
	carryInvites = `
	UPDATE main.invites SET used = max(main.invites.used, o.used), revoked = max(main.invites.revoked, o.revoked) FROM old.invites o WHERE o.code = main.invites.code;
	UPDATE main.invites SET revoked = 1 WHERE revoked = 0 AND code NOT IN (SELECT code FROM old.invites);
	INSERT OR IGNORE INTO main.invites (code, prefix, class, tenant, name, tags, scopes, topics, uses, used, creator, creator_jti, created, expires, revoked)
		SELECT code, prefix, class, tenant, name, tags, scopes, topics, uses, used, creator, creator_jti, created, expires, revoked FROM old.invites ORDER BY id`

	// The newest key of an identity has the greatest id (enrolledByProof), so that the order is copied.
	carryJoined = `
	INSERT OR IGNORE INTO main.tokens SELECT * FROM old.tokens;
	DELETE FROM main.enrollments;
	INSERT INTO main.enrollments SELECT * FROM old.enrollments`

	// Nodes of both keep the name and the attributes of the backup. One that is new keeps its own,
	// unless the backup has given the name to another: then it registers itself again.
	carryNodes = `
	DELETE FROM main.seen WHERE id IN (SELECT id FROM main.nodes WHERE node_id NOT IN (SELECT node_id FROM old.nodes));
	DELETE FROM main.attributes WHERE id IN (SELECT id FROM main.nodes WHERE node_id NOT IN (SELECT node_id FROM old.nodes));
	DELETE FROM main.served WHERE id IN (SELECT id FROM main.nodes WHERE node_id NOT IN (SELECT node_id FROM old.nodes));
	DELETE FROM main.nodes WHERE node_id NOT IN (SELECT node_id FROM old.nodes);
	DELETE FROM main.removed WHERE node_id IN (SELECT node_id FROM old.nodes);
	INSERT OR REPLACE INTO main.removed SELECT * FROM old.removed WHERE node_id NOT IN (SELECT node_id FROM old.nodes);
	CREATE TEMP TABLE new_nodes AS SELECT node_id FROM old.nodes WHERE node_id NOT IN (SELECT node_id FROM main.nodes);
	INSERT OR IGNORE INTO main.nodes (node_id, tenant, name, want, manifest, sum, created_ms, change)
		SELECT node_id, tenant, name, want, manifest, sum, created_ms, change FROM old.nodes WHERE node_id IN (SELECT node_id FROM new_nodes);
	INSERT INTO main.attributes (id, name_set, tags, description) SELECT n.id, a.name_set, a.tags, a.description
		FROM old.attributes a JOIN old.nodes o ON o.id = a.id JOIN main.nodes n ON n.node_id = o.node_id WHERE o.node_id IN (SELECT node_id FROM new_nodes);
	INSERT OR REPLACE INTO main.served (id, boot_id, clone_ms) SELECT n.id, s.boot_id, s.clone_ms
		FROM old.served s JOIN old.nodes o ON o.id = s.id JOIN main.nodes n ON n.node_id = o.node_id;
	INSERT OR REPLACE INTO main.seen (id, ms) SELECT n.id, s.ms
		FROM old.seen s JOIN old.nodes o ON o.id = s.id JOIN main.nodes n ON n.node_id = o.node_id;
	DROP TABLE new_nodes`

	carryCounters = `
	UPDATE main.changes SET (revocations, nodes, keys) = (SELECT max(main.changes.revocations, o.revocations) + 1,
		max(main.changes.nodes, o.nodes) + 1, max(main.changes.keys, o.keys) + 1 FROM old.changes o);
	UPDATE main.changes SET epoch = max(main.changes.epoch, (SELECT epoch FROM old.changes)) + 1`
)

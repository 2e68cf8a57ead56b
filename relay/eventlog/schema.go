package eventlog

import "fmt"

// Formats of the file: application_id is "age" and the version of the schema.
const (
	applicationID1 = 'a'<<24 | 'g'<<16 | 'e'<<8 | 1 // one table, see migrate.go
	applicationID  = 'a'<<24 | 'g'<<16 | 'e'<<8 | 2
)

// pageSize of the database, bytes: SQLite's default.
const pageSize = 4096

// newFilePragmas are set before a new file has tables; auto_vacuum cannot be changed later.
var newFilePragmas = fmt.Sprintf("PRAGMA page_size = %d; PRAGMA auto_vacuum = INCREMENTAL", pageSize)

// schema of the file (docs/eventlog.md):
//
//	log     one row: the id of this log
//	chains  one row for each tenant and class: which of its rows are kept, and its hashes
//	state   events that change state, one row each
//	calls   events about calls, one compact row each
//	words   texts that many rows of calls share
//	events  a view of state and calls, with the columns that readers know
//
// created_at is Unix ms. A payload of calls is words.text of kind, words.text of actor, trace
// in hexadecimal, and rest; type and aggregate_id are those of kind. hash is described at
// rowHash.
//
// The columns are INTEGER (Postgres: BIGINT), TEXT and BLOB (BYTEA) only. STRICT makes SQLite
// enforce the types, as Postgres does. A payload is TEXT and not JSONB: a replay returns its
// bytes unchanged. CROSS JOIN keeps SQLite from searching rows by their chain.
//
// The triggers make the log append-only for every program that opens the file:
//
//	*_insert         seq only grows; also stops INSERT OR REPLACE, which would remove a row
//	                 without its delete trigger
//	*_update         no row changes
//	*_delete         only rows below the mark of their chain can be deleted
//	chains_update    marks and last only grow; the hashes change with them only
//	chains_delete    a chain that has rows cannot be deleted, nor one that was not recorded in
//	                 log.last
//	words_delete     only words of rows that are gone
//
// The triggers of state do not read calls, so that damage there does not stop it.
//
// A tool with write access could drop the triggers; they guard against mistakes. The hashes
// show what was changed around them. For each row of a commit they cost a few searches by primary key.
//
// The text is a part of the format: CheckSchema compares it with the file byte for byte, so after a change
// here every existing log would count as damaged.
const schema = `
CREATE TABLE log (
  id   INTEGER PRIMARY KEY CHECK (id = 1),
  name TEXT    NOT NULL,
  last INTEGER NOT NULL
) STRICT;
CREATE TABLE chains (
  id     INTEGER PRIMARY KEY,
  tenant TEXT    NOT NULL,
  class  TEXT    NOT NULL CHECK (class IN ('state', 'calls')),
  mark   INTEGER NOT NULL,
  anchor BLOB    NOT NULL,
  last   INTEGER NOT NULL,
  head   BLOB    NOT NULL,
  rows   INTEGER NOT NULL,
  bytes  INTEGER NOT NULL,
  UNIQUE (tenant, class)
) STRICT;
CREATE TABLE state (
  seq          INTEGER PRIMARY KEY,
  chain        INTEGER NOT NULL,
  type         TEXT    NOT NULL,
  aggregate_id TEXT    NOT NULL,
  payload      TEXT    NOT NULL,
  created_at   INTEGER NOT NULL,
  hash         BLOB    NOT NULL
) STRICT;
CREATE TABLE calls (
  seq          INTEGER PRIMARY KEY,
  chain        INTEGER NOT NULL,
  kind         INTEGER NOT NULL,
  actor        INTEGER NOT NULL,
  trace        BLOB    NOT NULL,
  rest         TEXT    NOT NULL,
  created_at   INTEGER NOT NULL,
  hash         BLOB    NOT NULL
) STRICT;
CREATE TABLE words (
  id           INTEGER PRIMARY KEY,
  chain        INTEGER NOT NULL,
  epoch        INTEGER NOT NULL,
  type         TEXT    NOT NULL,
  aggregate_id TEXT    NOT NULL,
  text         TEXT    NOT NULL
) STRICT;
CREATE INDEX words_epoch ON words (chain, epoch);

CREATE VIEW state_events AS
  SELECT s.seq, c.tenant, s.type, s.aggregate_id, s.payload, s.created_at
  FROM state s CROSS JOIN chains c WHERE c.id = s.chain;
CREATE VIEW call_events AS
  SELECT k.seq, c.tenant, w.type, w.aggregate_id, CAST(w.text || a.text || lower(hex(k.trace)) || k.rest AS TEXT) AS payload, k.created_at
  FROM calls k CROSS JOIN chains c CROSS JOIN words w CROSS JOIN words a
  WHERE c.id = k.chain AND w.id = k.kind AND a.id = k.actor;
CREATE VIEW events AS
  SELECT seq, tenant, type, aggregate_id, payload, created_at FROM state_events
  UNION ALL
  SELECT seq, tenant, type, aggregate_id, payload, created_at FROM call_events;

CREATE TRIGGER log_insert BEFORE INSERT ON log
WHEN EXISTS (SELECT 1 FROM log)
BEGIN SELECT RAISE(ABORT, 'log has one row'); END;

CREATE TRIGGER log_update BEFORE UPDATE ON log
WHEN NEW.id <> OLD.id OR NEW.name <> OLD.name OR NEW.last < OLD.last
BEGIN SELECT RAISE(ABORT, 'the id of the log stays, and last only grows'); END;

CREATE TRIGGER log_delete BEFORE DELETE ON log
BEGIN SELECT RAISE(ABORT, 'log has one row'); END;

CREATE TRIGGER state_insert BEFORE INSERT ON state
WHEN NEW.seq <= (SELECT coalesce(max(seq), 0) FROM state)
  OR NEW.seq <= coalesce((SELECT max(last, mark - 1) FROM chains WHERE id = NEW.chain AND class = 'state'), NEW.seq)
BEGIN SELECT RAISE(ABORT, 'events is append-only: seq must be above the last'); END;

CREATE TRIGGER state_update BEFORE UPDATE ON state
BEGIN SELECT RAISE(ABORT, 'events is append-only: no UPDATE'); END;

CREATE TRIGGER state_delete BEFORE DELETE ON state
WHEN OLD.seq >= coalesce((SELECT mark FROM chains WHERE id = OLD.chain), 0)
BEGIN SELECT RAISE(ABORT, 'events is append-only: no DELETE at or above the retention mark'); END;

CREATE TRIGGER calls_insert BEFORE INSERT ON calls
WHEN NEW.seq <= (SELECT coalesce(max(seq), 0) FROM calls)
  OR EXISTS (SELECT 1 FROM state WHERE seq = NEW.seq)
  OR NEW.seq <= coalesce((SELECT max(last, mark - 1) FROM chains WHERE id = NEW.chain AND class = 'calls'), NEW.seq)
BEGIN SELECT RAISE(ABORT, 'events is append-only: seq must be above the last'); END;

CREATE TRIGGER calls_update BEFORE UPDATE ON calls
BEGIN SELECT RAISE(ABORT, 'events is append-only: no UPDATE'); END;

CREATE TRIGGER calls_delete BEFORE DELETE ON calls
WHEN OLD.seq >= coalesce((SELECT mark FROM chains WHERE id = OLD.chain), 0)
BEGIN SELECT RAISE(ABORT, 'events is append-only: no DELETE at or above the retention mark'); END;

CREATE TRIGGER words_insert BEFORE INSERT ON words
WHEN NEW.id <= (SELECT coalesce(max(id), 0) FROM words)
BEGIN SELECT RAISE(ABORT, 'words is append-only: id must be above the last'); END;

CREATE TRIGGER words_update BEFORE UPDATE ON words
BEGIN SELECT RAISE(ABORT, 'words is append-only: no UPDATE'); END;

CREATE TRIGGER words_delete BEFORE DELETE ON words
WHEN NOT EXISTS (SELECT 1 FROM chains WHERE id = OLD.chain AND mark > last)
  AND NOT EXISTS (SELECT 1 FROM words w, chains c WHERE c.id = OLD.chain AND w.chain = OLD.chain AND w.epoch > OLD.epoch AND w.epoch <= c.mark)
BEGIN SELECT RAISE(ABORT, 'words is append-only: no DELETE of a word that is in use'); END;

CREATE TRIGGER chains_insert BEFORE INSERT ON chains
WHEN EXISTS (SELECT 1 FROM chains WHERE id = NEW.id OR tenant = NEW.tenant AND class = NEW.class)
BEGIN SELECT RAISE(ABORT, 'there is such a chain'); END;

CREATE TRIGGER chains_update BEFORE UPDATE ON chains
WHEN NEW.id <> OLD.id OR NEW.tenant <> OLD.tenant OR NEW.class <> OLD.class
  OR NEW.mark < OLD.mark OR NEW.mark > NEW.last + 1 OR NEW.last < OLD.last
  OR NEW.mark = OLD.mark AND NEW.anchor <> OLD.anchor OR NEW.last = OLD.last AND NEW.head <> OLD.head
BEGIN SELECT RAISE(ABORT, 'the retention mark only grows, up to one above the last event'); END;

CREATE TRIGGER chains_delete BEFORE DELETE ON chains
WHEN OLD.mark <= OLD.last OR OLD.last > (SELECT last FROM log)
BEGIN SELECT RAISE(ABORT, 'a chain that has events cannot be deleted'); END;
`

package eventlog

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
)

// Between Open and Run no process writes to the file, so the rows of state are read from its pages
// without SQLite, which takes several times as long: the start of a relay would take longer the
// older its log is. Open checks all rows once. A replay then reads only the pages that have events of
// its types. The price is a second implementation of SQLite's format (sqlitefile.Table). Open checks its
// rows against the hashes of their chains before a replay may use them.

// stateTable is the table of state between Open and Run. Nothing changes it once Open has checked it, so
// several replays read it at the same time, each with a separate sqlitefile.Table (Only).
type stateTable struct {
	rows   *sqlitefile.Table
	chains map[int64]*chain
	leafIndex
}

// errNotState says that a row is not one of state.
var errNotState = errors.New("eventlog: not a row of state")

// openStateTable checks all rows of state, and keeps their table for Replay. It returns false if
// the file does not hold everything that was committed, or anything does not fit. The caller then checks
// with SQLite, which decides whether the log is damaged: a bug of package sqlitefile must not keep a relay
// from starting.
func (s *Store) openStateTable() bool {
	// Copies the write-ahead log into the file, unless a reader of another process prevents it.
	var busy, frames, copied int
	if s.queryRow("PRAGMA wal_checkpoint(PASSIVE)").Scan(&busy, &frames, &copied) != nil || busy != 0 || frames != copied {
		return false
	}
	var root uint32
	if s.queryRow("SELECT rootpage FROM sqlite_schema WHERE type = 'table' AND name = 'state'").Scan(&root) != nil {
		return false
	}
	rows, err := sqlitefile.NewTable(s.file, root)
	t := &stateTable{rows: rows, chains: s.w.byID}
	if err == nil {
		err = t.verify(min(runtime.GOMAXPROCS(0), maxTableParts, 1+rows.Leaves()/minPartLeaves))
	}
	if err != nil {
		s.log.Info("event log: SQLite checks it, which takes longer", zap.Error(err))
		return false
	}
	s.table = t
	return true
}

// parseState reads a row of state. The texts of the event are those of the record.
func parseState(r *sqlitefile.Record) (e kernel.Event, chain int64, hash []byte, err error) {
	v := r.Values
	if len(v) != 7 || r.RowID <= 0 || v[0].Kind != sqlitefile.Null || v[1].Kind != sqlitefile.Integer || v[2].Kind != sqlitefile.Text ||
		v[3].Kind != sqlitefile.Text || v[4].Kind != sqlitefile.Text || v[5].Kind != sqlitefile.Integer || v[6].Kind != sqlitefile.Blob {
		return e, 0, nil, errNotState
	}
	e = kernel.Event{Seq: uint64(r.RowID), Type: stringOf(v[2].Bytes), Aggregate: stringOf(v[3].Bytes), Payload: v[4].Bytes, CreatedMS: v[5].Int}
	return e, v[1].Int, v[6].Bytes, nil
}

// stringOf returns b as a string without a copy. It changes with b, so clone what has to outlive the record.
func stringOf(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// Replay implements kernel.Log. Before Run, events of state come from the table that Open has checked.
func (s *Store) Replay(ctx context.Context, after uint64, fn func(kernel.Event) error, types ...string) error {
	if _, calls := classesOf(types); calls {
		return s.Reader.Replay(ctx, after, fn, types...)
	}
	return s.replayState(ctx, after, fn, types, func(t *stateTable) []int { return t.leavesOf(types) })
}

// ReplayPresence implements kernel.PresenceReplayer. Before Run it reads the leaves only that have the
// newest events.
func (s *Store) ReplayPresence(ctx context.Context, fn func(kernel.Event) error) error {
	return s.replayState(ctx, 0, fn, kernel.PresenceTypes, (*stateTable).presenceLeaves)
}

// replayState is Replay for types of state. If there is a table it reads the leaves that the function
// selects. It holds tableMu while it calls fn, so that Run does not begin meanwhile.
func (s *Store) replayState(ctx context.Context, after uint64, fn func(kernel.Event) error, types []string, leaves func(*stateTable) []int) error {
	s.tableMu.RLock()
	defer s.tableMu.RUnlock()
	if s.table != nil {
		last, err := s.table.replay(ctx, after, fn, types, leaves(s.table))
		if !errors.Is(err, sqlitefile.ErrNotSound) {
			return err
		}
		after = last // SQLite reads the rest, or says why it cannot
	}
	return s.Reader.Replay(ctx, after, fn, types...)
}

// leavesOf returns the leaves that hold events of some types.
func (t *stateTable) leavesOf(types []string) (leaves []int) {
	for name, list := range t.types {
		if kernel.MatchesType(types, name) {
			leaves = append(leaves, list.leaves...)
		}
	}
	return leaves
}

// presenceLeaves returns the leaves that hold the newest events about presence.
func (t *stateTable) presenceLeaves() (leaves []int) {
	if t.presence == nil {
		return t.leavesOf(kernel.PresenceTypes)
	}
	for _, leaf := range t.presence {
		leaves = append(leaves, *leaf)
	}
	return leaves
}

// replay calls fn with the events of some types in leaves behind a seq, and returns the last one. An
// sqlitefile.ErrNotSound says that the pages have changed: the caller reads on with SQLite after the last
// event that fn got.
func (t *stateTable) replay(ctx context.Context, after uint64, fn func(kernel.Event) error, types []string, leaves []int) (last uint64, err error) {
	names := make(map[string]string) // of the types, so that each event does not need a copy
	for name := range t.types {
		if kernel.MatchesType(types, name) {
			names[name] = name
		}
	}
	slices.Sort(leaves)
	rows := t.rows.Only(slices.Compact(leaves))
	last = after
	for i := range rows.Leaves() {
		var fnErr error
		err := rows.Rows(i, func(r *sqlitefile.Record) error {
			e, id, _, err := parseState(r)
			name, ok := names[e.Type]
			if err != nil || !ok || e.Seq <= last {
				return err
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			e.Type, e.Tenant = name, t.chains[id].tenant
			e.Aggregate, e.Payload = strings.Clone(e.Aggregate), slices.Clone(e.Payload)
			last, fnErr = e.Seq, fn(e)
			return fnErr
		})
		switch {
		case fnErr != nil || ctx.Err() != nil:
			return last, err
		case err != nil:
			return last, fmt.Errorf("%w: %w", sqlitefile.ErrNotSound, err)
		}
	}
	return last, ctx.Err()
}

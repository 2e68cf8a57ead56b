package history

import (
	"database/sql/driver"
	"path/filepath"
	"testing"
	"time"

	"modernc.org/sqlite"
)

// SQLite compiles a statement again if it planned with the value of a parameter that has changed since, as
// it does for LIMIT ?. An export of a day would do that some 300 times. A compilation allocates
// dozens of times, an execution hardly.
func TestStatementsAreCompiledOnce(t *testing.T) {
	s, c := open(t, Options{Path: filepath.Join(t.TempDir(), "history.db")})
	for i := range 10 {
		c.step(time.Second)
		s.Add(c.sample(i), reading(keyNames[0], 1))
	}
	flush(t, s)
	const executions, maxAllocations = 100, 5 // the second of each execution
	for _, table := range tables {
		first, last := table.first(epoch), table.last(epoch+3600_000)
		tests := []struct {
			name, query string
			args        []driver.Value
		}{
			{"scan", table.scan, []driver.Value{first, last}},
			{"reverse", table.reverse, []driver.Value{first, last}},
			{"nth", table.nth, []driver.Value{first, last, int64(1)}},
		}
		for _, tt := range tests {
			var allocations int
			err := s.withDB(func(d *db) error {
				for i := range executions + 1 {
					if i == 1 { // it is compiled now
						allocated(t, d)
					}
					found := false
					if err := d.each(tt.query, func([]driver.Value) bool { found = true; return false }, tt.args...); err != nil || !found {
						t.Errorf("%s: a row: %v, %v", tt.name, found, err)
					}
				}
				allocations = allocated(t, d)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if allocations > executions*maxAllocations {
				t.Errorf("%s: %d allocations in %d executions of %s", tt.name, allocations, executions, tt.query)
			}
		}
	}
}

// allocated returns how often the connection allocated since the last call.
func allocated(t *testing.T, d *db) (n int) {
	t.Helper()
	for _, op := range []sqlite.DBStatusOp{sqlite.DBStatusLookasideHit, sqlite.DBStatusLookasideMissSize, sqlite.DBStatusLookasideMissFull} {
		_, events, err := d.conn.(sqlite.DBStatus).Status(op, true)
		if err != nil {
			t.Fatal(err)
		}
		n += events
	}
	return n
}

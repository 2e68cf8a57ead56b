package eventlog

import (
	"context"
	"fmt"
)

// probe asks Run for a durable write that changes nothing, so that the monitor of the disk
// learns that a fault is over while nothing is being appended. The monitor calls it only
// while a fault lasts.
func (s *Store) probe(ctx context.Context) error {
	done := make(chan error, 1) // buffered, so that Run does not wait for a monitor that gave up
	select {
	case s.probes <- done:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// writeProbe sets a number of the file's header to the value that it has: SQLite writes the page and
// syncs it. This takes the same steps as the commit of an event, but adds nothing to the log. Only Run
// calls it.
func (s *Store) writeProbe() error {
	return explain(s.opts.Path, s.tx(func() error {
		var version int
		if err := s.queryRow("PRAGMA user_version").Scan(&version); err != nil {
			return err
		}
		return s.exec(fmt.Sprintf("PRAGMA user_version = %d", version))
	}))
}

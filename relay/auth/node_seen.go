package auth

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"
)

// SeenInterval is how often last-seen times are written: often enough for a person,
// rarely enough for an SD card.
const SeenInterval = time.Minute

// MarkSeen records that nodes are alive now. The times are written in batches
// (SeenInterval), so a crash may lose the last minute. Unknown nodes are ignored.
func (s *Store) MarkSeen(nodeIDs ...string) {
	now := s.now().UnixMilli()
	s.registry.mu.RLock()
	defer s.registry.mu.RUnlock()
	for _, id := range nodeIDs {
		if n := s.registry.byID[id]; n != nil {
			n.seenMS.Store(now)
		}
	}
	s.seenRevision.Add(1)
}

// upsertSeenSQL never moves a time back: two relays may share the directory.
// A node that was removed meanwhile gets no row.
const upsertSeenSQL = "INSERT INTO seen (id, ms) SELECT id, ?2 FROM nodes WHERE id = ?1 ON CONFLICT DO UPDATE SET ms = max(ms, excluded.ms)"

// flushSeen writes what MarkSeen recorded since the last flush. Run and Close call it,
// one at a time (flushMu).
func (s *Store) flushSeen(ctx context.Context) error {
	s.flushMu.Lock()
	defer s.flushMu.Unlock()
	type row struct {
		n  *node
		ms int64
	}
	var due []row
	s.registry.mu.RLock()
	for _, n := range s.registry.byID {
		if ms := n.seenMS.Load(); ms > n.savedMS {
			due = append(due, row{n, ms})
		}
	}
	s.registry.mu.RUnlock()
	// The rows are written without registry.mu, which each call needs to look up its board.
	for batch := range slices.Chunk(due, maxSeenBatch) {
		err := s.db.write(ctx, func(tx *sql.Tx) error {
			upsert, err := tx.Prepare(upsertSeenSQL)
			if err != nil {
				return err
			}
			defer upsert.Close()
			for _, r := range batch {
				if _, err := upsert.Exec(r.n.rowID, r.ms); err != nil {
					return err
				}
			}
			return nil
		}, nil)
		if err != nil {
			return fmt.Errorf("save when nodes were last seen: %w", err)
		}
		s.registry.mu.Lock()
		for _, r := range batch {
			r.n.savedMS = max(r.n.savedMS, r.ms)
		}
		s.registry.mu.Unlock()
	}
	return nil
}

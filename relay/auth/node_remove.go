package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"go.uber.org/zap"
)

// maxRemoved bounds the table of removed nodes; the oldest rows go first. A row is needed
// until the links that were open at the time have ended, which takes seconds.
const maxRemoved = MaxNodes

// RemoveNode forgets a node of a tenant and revokes its tokens: its link ends, and it does
// not come back until it gets a new token. It returns how many live tokens it stopped.
// ErrNoNode also when the node is another tenant's.
func (s *Store) RemoveNode(ctx context.Context, tenant, nodeID string, dryRun bool) (live int, err error) {
	var deny *denyList
	var change int64
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
		if live, change, err = removeNodeTx(tx, tenant, nodeID, s.now().Unix()); err != nil {
			return err
		}
		if dryRun {
			return errDryRun
		}
		deny, err = loadDenyList(context.Background(), tx)
		return err
	}, func() {
		s.installDenyList(deny)
		s.registry.remove(nodeID, change)
	})
	switch {
	case errors.Is(err, errDryRun):
		return live, nil
	case err != nil:
		return 0, fmt.Errorf("remove a node: %w", err)
	}
	s.log.Info("node removed", zap.String("node_id", nodeID), zap.String("tenant", tenant), zap.Int("live_tokens", live))
	return live, nil
}

// removeNodeTx is RemoveNode inside a transaction. The row's id may be used again, so that
// nothing may stay that refers to it.
func removeNodeTx(tx *sql.Tx, tenant, nodeID string, now int64) (live int, change int64, err error) {
	var rowID int64
	err = tx.QueryRow("DELETE FROM nodes WHERE node_id = ? AND tenant = ? RETURNING id", nodeID, tenant).Scan(&rowID)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, 0, ErrNoNode
	}
	if err != nil {
		return 0, 0, err
	}
	for _, table := range []string{"seen", "attributes", "served"} {
		if _, err := tx.Exec("DELETE FROM "+table+" WHERE id = ?", rowID); err != nil {
			return 0, 0, err
		}
	}
	if live, err = addRevocation(tx, "node", nodeID, now, maxRevocations); err != nil {
		return 0, 0, err
	}
	if err := tx.QueryRow("UPDATE changes SET nodes = nodes + 1 RETURNING nodes").Scan(&change); err != nil {
		return 0, 0, err
	}
	if _, err := tx.Exec("INSERT OR REPLACE INTO removed (node_id, change) VALUES (?, ?)", nodeID, change); err != nil {
		return 0, 0, err
	}
	_, err = tx.Exec("DELETE FROM removed WHERE change <= (SELECT change FROM removed ORDER BY change DESC LIMIT 1 OFFSET ?)", maxRemoved)
	return live, change, err
}

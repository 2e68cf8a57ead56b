package auth

import (
	"context"
	"database/sql"
	"fmt"
	"sync"

	"agentctl/enrollment"
	"agentctl/manifest"
)

// A board that has a device token may join and keep its node. Its earlier tokens work until its
// first link with its key is ready:
//
//	tokenToMigrate   verifies the token that the enrollment names
//	newBoardTx       keeps the node, and marks the key as migrating (enroll.go)
//	FinishMigration  revokes the node's tokens that are not bound to a key

// joining remembers, so that a link need not ask the database, which nodes have enrolled with
// an earlier token and not linked with their key since. It is as large as the number of
// boards that are in the middle of that.
type joining struct {
	mu        sync.Mutex // protects the field below
	migrating map[string]struct{}
}

// tokenToMigrate verifies the token of a board whose node is to be kept. A token that is
// bound to a key is refused: without that key it is worth nothing, here as on a link.
func (s *Store) tokenToMigrate(req *enrollment.EnrollRequest) (*Identity, error) {
	id, err := s.Verify(req.Token, ClassDevice)
	if err != nil || !id.Has(manifest.ScopeDeviceConnect) || id.KeyThumbprint != "" || !id.BoundTo(req.InstanceID) {
		return nil, errTokenToMigrate
	}
	return id, nil
}

// loadMigrating reads which nodes are migrating. Open calls it.
func (s *Store) loadMigrating(ctx context.Context) error {
	s.joining.migrating = make(map[string]struct{})
	return forEachRow(ctx, s.db.readDB, func(scan func(...any) error) error {
		var id string
		err := scan(&id)
		s.joining.migrating[id] = struct{}{}
		return err
	}, "SELECT sub FROM enrollments WHERE migrating")
}

// IsMigrating reports whether a node has enrolled with an earlier token that still works. It
// reads memory.
func (s *Store) IsMigrating(nodeID string) bool {
	s.joining.mu.Lock()
	defer s.joining.mu.Unlock()
	_, ok := s.joining.migrating[nodeID]
	return ok
}

// FinishMigration revokes the tokens of a node that are not bound to a key. The caller knows
// that the node is linked with its key: it does not need them any more.
func (s *Store) FinishMigration(ctx context.Context, nodeID string) error {
	var deny *denyList
	err := s.db.write(ctx, func(tx *sql.Tx) error {
		var jtis []string
		err := forEachRow(context.Background(), tx, func(scan func(...any) error) error {
			var jti string
			err := scan(&jti)
			jtis = append(jtis, jti)
			return err
		}, "SELECT jti FROM tokens WHERE node = ?1 AND exp > ?2 AND jti NOT IN (SELECT jti FROM enrollments WHERE sub = ?1)", nodeID, s.now().Unix()-leewaySeconds)
		if err != nil {
			return err
		}
		for _, jti := range jtis {
			if _, err := addRevocation(tx, "jti", jti, s.now().Unix(), maxRevocations); err != nil {
				return err
			}
		}
		if _, err := tx.Exec("UPDATE enrollments SET migrating = 0 WHERE sub = ?", nodeID); err != nil {
			return err
		}
		deny, err = loadDenyList(context.Background(), tx)
		return err
	}, func() {
		s.installDenyList(deny)
		s.joining.mu.Lock()
		defer s.joining.mu.Unlock()
		delete(s.joining.migrating, nodeID)
	})
	if err != nil {
		return fmt.Errorf("revoke the tokens that a node had before it joined: %w", err)
	}
	return nil
}

package auth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// UpsertNode registers a node that has proved its identity, or updates its entry, marks it
// seen and returns the name it goes by. A wanted name that another node of the tenant
// has gets a suffix. An empty name or manifest leaves the present one. Nothing is
// written when nothing changed, so a fleet that reconnects costs no disk. ErrForeignNode
// when the node belongs to another tenant, ErrRemoved when an operator removed it.
func (s *Store) UpsertNode(ctx context.Context, tenant, nodeID, wantName string, manifestJSON []byte) (name string, err error) {
	switch {
	case !manifest.ValidTenant(tenant) || !manifest.ValidNodeID(nodeID):
		return "", errors.New("register a node: the tenant or the node id is malformed")
	case wantName != "" && !manifest.ValidNodeName(wantName):
		return "", errors.New("register a node: a name is 1 to 32 of a-z, 0-9 and -, not starting with -")
	case len(manifestJSON) > MaxManifest || len(manifestJSON) > 0 && !jsontext.Value(manifestJSON).IsValid():
		return "", fmt.Errorf("register a node: the manifest is not JSON of at most %d bytes", MaxManifest)
	}
	if n := s.registry.get(nodeID); n != nil && n.tenant == tenant && (wantName == "" || wantName == n.wantedName) &&
		(len(manifestJSON) == 0 || sha256.Sum256(manifestJSON) == n.manifestSum) {
		n.seenMS.Store(s.now().UnixMilli())
		s.seenRevision.Add(1)
		return n.name, nil
	}
	var n *node
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
		// An operator may have removed the node while its link was opened.
		var removed bool
		if err := tx.QueryRow("SELECT EXISTS (SELECT 1 FROM removed WHERE node_id = ?)", nodeID).Scan(&removed); err != nil {
			return err
		}
		if removed {
			return ErrRemoved
		}
		if n, err = s.upsertNodeTx(tx, tenant, nodeID, wantName, manifestJSON); err != nil {
			return err
		}
		// In the same transaction: after a crash, a registered board must not look like
		// one that never connected.
		n.savedMS = s.now().UnixMilli()
		_, err = tx.Exec(upsertSeenSQL, n.rowID, n.savedMS)
		return err
	}, func() {
		n.seenMS.Store(n.savedMS)
		s.registry.put([]*node{n})
	})
	if err != nil {
		return "", fmt.Errorf("register a node: %w", err)
	}
	return n.name, nil
}

// upsertNodeTx inserts the row of a node, or updates it if the name or the manifest has
// changed. A node that was removed is registered again.
func (s *Store) upsertNodeTx(tx *sql.Tx, tenant, nodeID, want string, manifestJSON []byte) (*node, error) {
	n, err := scanNode(tx.QueryRow(selectNodeSQL+"n.node_id = ?", nodeID).Scan)
	isNew := errors.Is(err, sql.ErrNoRows)
	switch {
	case isNew:
		// The greatest row id bounds the count from above and is found at once; to count the
		// rows takes longer with each node of a fleet that is registered.
		var count int
		err := tx.QueryRow("SELECT CASE WHEN coalesce(max(id), 0) < ?1 THEN 0 ELSE (SELECT count(*) FROM nodes) END FROM nodes", MaxNodes).Scan(&count)
		if err != nil {
			return nil, err
		}
		if count >= MaxNodes {
			return nil, fmt.Errorf("%w: %d nodes", ErrFull, count)
		}
		if _, err := tx.Exec("DELETE FROM removed WHERE node_id = ?", nodeID); err != nil {
			return nil, err
		}
		n = &node{nodeID: nodeID, tenant: tenant, attributes: noAttributes}
	case err != nil:
		return nil, err
	case n.tenant != tenant:
		return nil, ErrForeignNode
	}
	sum := sha256.Sum256(manifestJSON)
	newName := isNew || want != "" && want != n.wantedName
	newManifest := isNew || len(manifestJSON) > 0 && sum != n.manifestSum
	if !newName && !newManifest {
		return n, nil
	}
	if newName {
		n.wantedName = want
	}
	if newName && !n.attributes.Value().nameSet { // a board's name never replaces an operator's
		if n.name, err = uniqueName(tx, tenant, cmp.Or(want, defaultName(nodeID)), nodeID, ""); err != nil {
			return nil, err
		}
	}
	if newManifest {
		n.manifestSum = sum
	}
	if err := tx.QueryRow("UPDATE changes SET nodes = nodes + 1 RETURNING nodes").Scan(&n.change); err != nil {
		return nil, err
	}
	err = tx.QueryRow(`INSERT INTO nodes (node_id, tenant, name, want, manifest, sum, created_ms, change) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
		ON CONFLICT (node_id) DO UPDATE SET name = ?3, want = ?4, manifest = iif(?9, ?5, manifest), sum = ?6, change = ?8 RETURNING id`,
		nodeID, tenant, n.name, n.wantedName, string(manifestJSON), n.manifestSum[:], s.now().UnixMilli(), n.change, newManifest).Scan(&n.rowID)
	return n, err
}

// defaultName is the name of a node that proposes none.
func defaultName(nodeID string) string { return "node-" + nodeID[manifest.ULIDLen-6:] }

// uniqueName returns want, or want with a suffix that no other node of the tenant has: a
// small number first, then the end of the node id, which a fleet that shares one name
// soon reaches. The name reserved is not returned; empty reserves none.
func uniqueName(tx *sql.Tx, tenant, want, nodeID, reserved string) (string, error) {
	tail := func(n int) string { return "-" + nodeID[manifest.ULIDLen-n:] }
	for _, suffix := range []string{"", "-2", "-3", "-4", tail(4), tail(8), tail(16), tail(manifest.ULIDLen)} {
		name := want[:min(len(want), manifest.MaxNameLen-len(suffix))] + suffix
		var taken bool
		err := tx.QueryRow("SELECT EXISTS (SELECT 1 FROM nodes WHERE tenant = ? AND name = ? AND node_id <> ?)", tenant, name, nodeID).Scan(&taken)
		if err != nil || !taken && name != reserved {
			return name, err
		}
	}
	return "", errors.New("no free name for the node; start it with another name")
}

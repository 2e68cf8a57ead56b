package auth

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// Bounds of the registry.
const (
	MaxNodes    = 100_000
	MaxManifest = 256 << 10 // bytes of the JSON kept for a node: the bound of an announce

	maxPageBytes = 4 << 20 // of manifests, after which a page of Nodes ends
)

// SeenInterval is how often last-seen times are written: often enough for a person,
// rarely enough for an SD card.
const SeenInterval = time.Minute

// Node is a node that the relay knows, connected or not.
type Node struct {
	NodeID     string          `json:"node_id"`
	Tenant     string          `json:"tenant"`
	Name       string          `json:"name"` // unique in its tenant
	Manifest   json.RawMessage `json:"manifest,omitempty"`
	CreatedMS  int64           `json:"created_ms"`
	LastSeenMS int64           `json:"last_seen_ms"` // Unix ms by the relay's clock; 0 is never
}

// node is what memory holds of a node: what each refused call and each reconnect asks.
type node struct {
	rowID       int64 // row
	nodeID      string
	tenant      string
	name        string
	wantedName  string            // the name it asked for last; name may have a suffix
	manifestSum [sha256.Size]byte // of its manifest
	change      int64

	seenMS  atomic.Int64
	savedMS int64 // as of the database; only the flusher's
}

// registry is the nodes in memory. Entries are replaced, not changed, but for seenMS.
type registry struct {
	mu         sync.RWMutex // protects the fields below
	byID       map[string]*node
	lastChange int64 // rows up to here were read
}

func (r *registry) get(nodeID string) *node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.byID[nodeID]
}

// put adds or replaces entries, unless a later state of a node is there.
func (r *registry) put(list []*node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range list {
		old := r.byID[n.nodeID]
		if old != nil {
			if old.change > n.change {
				continue
			}
			n.seenMS.Store(max(n.seenMS.Load(), old.seenMS.Load()))
			n.savedMS = max(n.savedMS, old.savedMS)
			n.tenant = old.tenant // share the string
		}
		r.byID[n.nodeID] = n
	}
}

// NodeTenant tells the tenant of a node. It answers from memory, in about 20 ns; a node
// that another process registered is known after a poll.
func (s *Store) NodeTenant(nodeID string) (tenant string, ok bool) {
	n := s.registry.get(nodeID)
	if n == nil {
		return "", false
	}
	return n.tenant, true
}

// MarkSeen notes that nodes are alive now. It is written to disk in batches (SeenInterval),
// so a crash may lose the last minute of it. Unknown nodes are ignored.
func (s *Store) MarkSeen(nodeIDs ...string) {
	now := s.now().UnixMilli()
	s.registry.mu.RLock()
	defer s.registry.mu.RUnlock()
	for _, id := range nodeIDs {
		if n := s.registry.byID[id]; n != nil {
			n.seenMS.Store(now)
		}
	}
}

// UpsertNode registers a node that has proved its identity, or brings its entry up to
// date, and returns the name it goes by. A wanted name that another node of the tenant
// has gets a suffix; an empty one leaves the name as it is; an empty manifest leaves
// the manifest as it is. Nothing is written when nothing changed, so a fleet that
// reconnects costs no disk. It counts as MarkSeen. ErrForeignNode when the node belongs to
// another tenant.
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
		return n.name, nil
	}
	var n *node
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		fresh, err := s.upsertNodeTx(tx, tenant, nodeID, wantName, manifestJSON)
		if err != nil {
			return err
		}
		// With the manifest: after a crash a board that was here is not one that never came.
		n = fresh
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

const nodeColumns = "id, node_id, tenant, name, want, sum, change, coalesce((SELECT ms FROM seen WHERE seen.id = nodes.id), 0)"

func scanNode(row interface{ Scan(...any) error }) (*node, error) {
	n := new(node)
	var sum []byte
	var seen int64
	if err := row.Scan(&n.rowID, &n.nodeID, &n.tenant, &n.name, &n.wantedName, &sum, &n.change, &seen); err != nil {
		return nil, err
	}
	copy(n.manifestSum[:], sum)
	n.seenMS.Store(seen)
	n.savedMS = seen
	return n, nil
}

// upsertNodeTx inserts or updates the row of a node.
func (s *Store) upsertNodeTx(tx *sql.Tx, tenant, nodeID, want string, manifestJSON []byte) (*node, error) {
	n, err := scanNode(tx.QueryRow("SELECT "+nodeColumns+" FROM nodes WHERE node_id = ?", nodeID))
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return s.insertNode(tx, tenant, nodeID, want, manifestJSON)
	case err != nil:
		return nil, err
	case n.tenant != tenant:
		return nil, ErrForeignNode
	}
	rename := want != "" && want != n.wantedName
	sum := sha256.Sum256(manifestJSON)
	if !rename && (len(manifestJSON) == 0 || sum == n.manifestSum) {
		return n, nil
	}
	if rename {
		if n.name, err = uniqueName(tx, tenant, want, nodeID); err != nil {
			return nil, err
		}
		n.wantedName = want
	}
	if n.change, err = nextChangeNumber(tx); err != nil {
		return nil, err
	}
	if len(manifestJSON) == 0 {
		_, err = tx.Exec("UPDATE nodes SET name = ?, want = ?, change = ? WHERE id = ?", n.name, n.wantedName, n.change, n.rowID)
		return n, err
	}
	n.manifestSum = sum
	_, err = tx.Exec("UPDATE nodes SET name = ?, want = ?, change = ?, manifest = ?, sum = ? WHERE id = ?",
		n.name, n.wantedName, n.change, string(manifestJSON), sum[:], n.rowID)
	return n, err
}

func (s *Store) insertNode(tx *sql.Tx, tenant, nodeID, want string, manifestJSON []byte) (*node, error) {
	var count int
	if err := tx.QueryRow("SELECT count(*) FROM nodes").Scan(&count); err != nil {
		return nil, err
	}
	if count >= MaxNodes {
		return nil, fmt.Errorf("%w: %d nodes", ErrFull, count)
	}
	n := &node{nodeID: nodeID, tenant: tenant, wantedName: want, manifestSum: sha256.Sum256(manifestJSON)}
	name := want
	if name == "" {
		name = "node-" + nodeID[manifest.ULIDLen-6:]
	}
	var err error
	if n.name, err = uniqueName(tx, tenant, name, nodeID); err != nil {
		return nil, err
	}
	if n.change, err = nextChangeNumber(tx); err != nil {
		return nil, err
	}
	res, err := tx.Exec("INSERT INTO nodes (node_id, tenant, name, want, manifest, sum, created_ms, change) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
		nodeID, tenant, n.name, want, string(manifestJSON), n.manifestSum[:], s.now().UnixMilli(), n.change)
	if err != nil {
		return nil, err
	}
	n.rowID, err = res.LastInsertId()
	return n, err
}

func nextChangeNumber(tx *sql.Tx) (n int64, err error) {
	err = tx.QueryRow("UPDATE changes SET nodes = nodes + 1 RETURNING nodes").Scan(&n)
	return n, err
}

// uniqueName is want, or want with a suffix that no other node of the tenant has: a small
// number first, then the end of the node id, which a fleet of equal names reaches soon.
func uniqueName(tx *sql.Tx, tenant, want, nodeID string) (string, error) {
	tail := func(n int) string { return "-" + nodeID[manifest.ULIDLen-n:] }
	for _, suffix := range []string{"", "-2", "-3", "-4", tail(4), tail(8), tail(16), tail(manifest.ULIDLen)} {
		name := want[:min(len(want), manifest.MaxNameLen-len(suffix))] + suffix
		var taken bool
		err := tx.QueryRow("SELECT EXISTS (SELECT 1 FROM nodes WHERE tenant = ? AND name = ? AND node_id <> ?)", tenant, name, nodeID).Scan(&taken)
		if err != nil {
			return "", err
		}
		if !taken {
			return name, nil
		}
	}
	return "", errors.New("no free name for the node; start it with another --name")
}

const selectNodesSQL = `SELECT n.node_id, n.tenant, n.name, n.manifest, n.created_ms, coalesce(s.ms, 0)
	FROM nodes n LEFT JOIN seen s ON s.id = n.id WHERE `

// Nodes lists the nodes of a tenant whose ids come after a given one, in the order of the
// ids: at most limit of them, and fewer where their manifests are large. more tells that
// others follow.
func (s *Store) Nodes(ctx context.Context, tenant, after string, limit int) (list []Node, more bool, err error) {
	size := 0
	err = s.forEachNode(ctx, func(n *Node) bool {
		if more = len(list) == limit || size >= maxPageBytes; more {
			return false
		}
		size += len(n.Manifest)
		list = append(list, *n)
		return true
	}, selectNodesSQL+"n.tenant = ? AND n.node_id > ? ORDER BY n.node_id LIMIT ?", tenant, after, limit+1)
	return list, more, err
}

// Node finds one node of a tenant by its id, its name, or a prefix of its id that no
// other node of the tenant has. ErrNoNode also when it is another tenant's.
func (s *Store) Node(ctx context.Context, tenant, ref string) (Node, error) {
	ref = strings.ToLower(ref)
	if ref == "" || len(ref) > manifest.MaxNameLen {
		return Node{}, ErrNoNode
	}
	list, err := s.selectNodes(ctx, selectNodesSQL+"n.tenant = ?1 AND (n.node_id = ?2 OR n.name = ?2) ORDER BY n.node_id = ?2 DESC LIMIT 1", tenant, ref)
	if err == nil && len(list) == 0 {
		list, err = s.selectNodes(ctx, selectNodesSQL+"n.tenant = ? AND n.node_id >= ? AND n.node_id < ? LIMIT 2", tenant, ref, ref+"~")
	}
	switch {
	case err != nil:
		return Node{}, err
	case len(list) == 0:
		return Node{}, ErrNoNode
	case len(list) > 1:
		return Node{}, ErrAmbiguous
	}
	return list[0], nil
}

// selectNodes is forEachNode for a query of few.
func (s *Store) selectNodes(ctx context.Context, query string, args ...any) (list []Node, err error) {
	err = s.forEachNode(ctx, func(n *Node) bool { list = append(list, *n); return true }, query, args...)
	return list, err
}

// forEachNode calls fn with the nodes of a query until it returns false.
func (s *Store) forEachNode(ctx context.Context, fn func(*Node) bool, query string, args ...any) error {
	rows, err := s.db.readDB.QueryContext(ctx, query, args...)
	if err != nil {
		return explain(s.dir.path, err)
	}
	defer rows.Close()
	for rows.Next() {
		var n Node
		if err := rows.Scan(&n.NodeID, &n.Tenant, &n.Name, (*[]byte)(&n.Manifest), &n.CreatedMS, &n.LastSeenMS); err != nil {
			return explain(s.dir.path, err)
		}
		if mem := s.registry.get(n.NodeID); mem != nil {
			n.LastSeenMS = max(n.LastSeenMS, mem.seenMS.Load())
		}
		if !fn(&n) {
			return nil
		}
	}
	return explain(s.dir.path, rows.Err())
}

// nodeByIDOrName finds a node for the operator, who sees all tenants. A well-formed id
// need not be registered.
func (s *Store) nodeByIDOrName(ctx context.Context, ref string) (string, error) {
	if manifest.ValidNodeID(ref) {
		return ref, nil
	}
	list, err := s.selectNodes(ctx, selectNodesSQL+"n.name = ? LIMIT 2", ref)
	switch {
	case err != nil:
		return "", err
	case len(list) == 0:
		return "", fmt.Errorf("--node %q: no node has this id or name; see: agentctl token ls", ref)
	case len(list) > 1:
		return "", fmt.Errorf("--node %q: %w (in several tenants); give the node id", ref, ErrAmbiguous)
	}
	return list[0].NodeID, nil
}

// loadNodes reads the rows that changed since the last time.
func (s *Store) loadNodes(ctx context.Context, q querier) error {
	s.registry.mu.RLock()
	since := s.registry.lastChange
	s.registry.mu.RUnlock()
	rows, err := q.QueryContext(ctx, "SELECT "+nodeColumns+" FROM nodes WHERE change > ? ORDER BY change", since)
	if err != nil {
		return err
	}
	defer rows.Close()
	var list []*node
	tenants := map[string]string{}
	for rows.Next() {
		n, err := scanNode(rows)
		if err != nil {
			return err
		}
		if t, ok := tenants[n.tenant]; ok {
			n.tenant = t
		}
		tenants[n.tenant] = n.tenant
		since = n.change
		list = append(list, n)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	s.registry.put(list)
	s.registry.mu.Lock()
	s.registry.lastChange = max(s.registry.lastChange, since)
	s.registry.mu.Unlock()
	return nil
}

// maxSeenBatch bounds a transaction of last-seen rows, so that a mint need not wait long.
const maxSeenBatch = 1000

const upsertSeenSQL = "INSERT INTO seen (id, ms) VALUES (?, ?) ON CONFLICT DO UPDATE SET ms = max(ms, excluded.ms)"

// flushSeen writes what MarkSeen noted since the last flush.
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
	for len(due) > 0 {
		chunk := due[:min(len(due), maxSeenBatch)]
		due = due[len(chunk):]
		err := s.db.write(ctx, func(tx *sql.Tx) error {
			put, err := tx.Prepare(upsertSeenSQL)
			if err != nil {
				return err
			}
			defer put.Close()
			for _, r := range chunk {
				if _, err := put.Exec(r.n.rowID, r.ms); err != nil {
					return err
				}
			}
			return nil
		}, nil)
		if err != nil {
			return fmt.Errorf("save when nodes were last seen: %w", err)
		}
		s.registry.mu.Lock()
		for _, r := range chunk {
			r.n.savedMS = max(r.n.savedMS, r.ms)
		}
		s.registry.mu.Unlock()
	}
	return nil
}

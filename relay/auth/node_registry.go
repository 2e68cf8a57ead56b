package auth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unique"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// Bounds of the registry.
const (
	MaxNodes    = 100_000
	MaxManifest = 256 << 10 // bytes of the JSON kept for a node: the bound of an announce

	maxPageBytes = 4 << 20 // bytes of manifests after which a page of Nodes ends
	maxSeenBatch = 1000    // last-seen rows of one transaction, so that a Mint need not wait long
)

// SeenInterval is how often last-seen times are written: often enough for a person,
// rarely enough for an SD card.
const SeenInterval = time.Minute

// Node is a node that the relay has registered, connected or not.
type Node struct {
	NodeID string `json:"node_id"`
	Tenant string `json:"tenant"`
	NodeAttributes
	Manifest   json.RawMessage `json:"manifest,omitempty"`
	CreatedMS  int64           `json:"created_ms"`
	LastSeenMS int64           `json:"last_seen_ms"` // Unix ms by the relay's clock; 0 is never
}

// node is the part of a node's record that stays in memory: the fields that calls and
// reconnects need. Manifests stay on disk. All fields but the last three are immutable.
type node struct {
	rowID       int64
	nodeID      string
	tenant      string
	name        string
	wantedName  string            // the name it last asked for; name may have a suffix
	manifestSum [sha256.Size]byte // empty manifests have one too
	attributes  unique.Handle[attributes]
	change      int64 // value of changes.nodes that wrote the row

	seenMS  atomic.Int64
	savedMS int64  // seenMS as the database has it; registry.mu protects it
	served  Served // registry.mu protects it
}

// registry holds the nodes in memory: all of them, since a refused call and a reconnect
// must not cost a query. A node that changed gets a new entry, so readers need no lock
// once they have one.
type registry struct {
	mu         sync.RWMutex // protects the fields below
	byID       map[string]*node
	lastChange int64 // rows up to this change have been read
}

// get returns the present entry of a node, nil for an unknown one.
func (r *registry) get(nodeID string) *node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.byID[nodeID]
}

// put adds or replaces entries, unless a later state of a node is there: a row read
// before another process's change must not undo it.
func (r *registry) put(list []*node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range list {
		if old := r.byID[n.nodeID]; old != nil {
			if old.change > n.change {
				continue
			}
			n.seenMS.Store(max(n.seenMS.Load(), old.seenMS.Load()))
			n.savedMS = max(n.savedMS, old.savedMS)
			n.served = old.served // of what this process has saved, the row may be older
			n.tenant = old.tenant // share the string
		}
		r.byID[n.nodeID] = n
	}
}

// remove drops the entry of a node, unless a later state of it is there.
func (r *registry) remove(nodeID string, change int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.byID[nodeID]; n != nil && n.change < change {
		delete(r.byID, nodeID)
	}
}

// NodeTenant returns the tenant of a node. It reads memory, in about 20 ns. A node that
// another process registered is found after the next Refresh.
func (s *Store) NodeTenant(nodeID string) (tenant string, ok bool) {
	n := s.registry.get(nodeID)
	if n == nil {
		return "", false
	}
	return n.tenant, true
}

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
}

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
		return n.name, nil
	}
	var n *node
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
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

// selectNodeSQL is completed by a condition; scanNode reads its columns. want and sum are
// those of the last UpsertNode: they decide whether the next one changes anything.
const selectNodeSQL = `SELECT n.id, n.node_id, n.tenant, n.name, n.want, n.sum, n.change, coalesce(s.ms, 0),
	coalesce(a.name_set, 0), coalesce(a.tags, ''), coalesce(a.description, ''), coalesce(b.boot_id, ''), coalesce(b.clone_ms, 0)
	FROM nodes n LEFT JOIN seen s ON s.id = n.id LEFT JOIN attributes a ON a.id = n.id LEFT JOIN served b ON b.id = n.id WHERE `

func scanNode(scan func(...any) error) (*node, error) {
	n := new(node)
	var sum []byte
	var a attributes
	err := scan(&n.rowID, &n.nodeID, &n.tenant, &n.name, &n.wantedName, &sum, &n.change, &n.savedMS, &a.nameSet, &a.tags, &a.description,
		&n.served.BootID, &n.served.CloneMS)
	copy(n.manifestSum[:], sum)
	n.attributes = unique.Make(a)
	n.seenMS.Store(n.savedMS)
	return n, err
}

// upsertNodeTx inserts the row of a node, or updates it if the name or the manifest has
// changed. A node that was removed is registered again.
func (s *Store) upsertNodeTx(tx *sql.Tx, tenant, nodeID, want string, manifestJSON []byte) (*node, error) {
	n, err := scanNode(tx.QueryRow(selectNodeSQL+"n.node_id = ?", nodeID).Scan)
	isNew := errors.Is(err, sql.ErrNoRows)
	switch {
	case isNew:
		var count int
		if err := tx.QueryRow("SELECT count(*) FROM nodes").Scan(&count); err != nil {
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

// selectNodesSQL is completed by a condition; forEachNode reads its columns.
const selectNodesSQL = `SELECT n.node_id, n.tenant, n.name, n.manifest, n.created_ms, coalesce(s.ms, 0),
	coalesce(a.name_set, 0), coalesce(a.tags, ''), coalesce(a.description, '')
	FROM nodes n LEFT JOIN seen s ON s.id = n.id LEFT JOIN attributes a ON a.id = n.id WHERE `

// NodeQuery selects nodes of one tenant. Empty fields select all of them.
type NodeQuery struct {
	Tenant string
	Name   string   // exact
	Tags   []string // a node has all of them; at most MaxTags
	After  string   // only nodes whose ids come after this one
	Limit  int      // nodes of one page
}

// Nodes lists the nodes that a query selects, in the order of the ids: at most q.Limit of
// them, and fewer where their manifests are large. more reports that others follow.
func (s *Store) Nodes(ctx context.Context, q NodeQuery) (list []Node, more bool, err error) {
	where, args := "n.tenant = ? AND n.node_id > ?", []any{q.Tenant, q.After}
	if q.Name != "" {
		where, args = where+" AND n.name = ?", append(args, q.Name)
	}
	if len(q.Tags) > MaxTags {
		return nil, false, nil // no node has as many
	}
	for _, tag := range q.Tags {
		where, args = where+" AND instr(' ' || a.tags || ' ', ?) > 0", append(args, " "+tag+" ")
	}
	size, limit := 0, q.Limit
	err = s.forEachNode(ctx, func(n Node) error {
		if more = len(list) == limit || size >= maxPageBytes; more {
			return errStopRows
		}
		size += len(n.Manifest)
		list = append(list, n)
		return nil
	}, where+" ORDER BY n.node_id LIMIT ?", append(args, limit+1)...)
	return list, more, err
}

// Node finds one node of a tenant by its id, its name, or a prefix of its id that no
// other node of the tenant has, in this order. ErrNoNode also when it is another tenant's.
func (s *Store) Node(ctx context.Context, tenant, ref string) (Node, error) {
	if tenant == "" {
		return Node{}, ErrNoNode
	}
	return s.FindNode(ctx, tenant, ref)
}

// FindNode is Node for the operator of the machine: an empty tenant searches all of them,
// and a name that several tenants use is ErrAmbiguous. Never pass a caller's text as tenant.
func (s *Store) FindNode(ctx context.Context, tenant, ref string) (Node, error) {
	ref = strings.ToLower(ref)
	if !manifest.ValidNodeName(ref) { // which every id and every prefix of one is
		return Node{}, ErrNoNode
	}
	where, args := "", []any(nil)
	if tenant != "" {
		where, args = "n.tenant = ? AND ", []any{tenant}
	}
	n, err := s.oneNode(ctx, where+"n.node_id = ?", append(args, ref)...)
	if errors.Is(err, ErrNoNode) {
		n, err = s.oneNode(ctx, where+"n.name = ? LIMIT 2", append(args, ref)...)
	}
	if errors.Is(err, ErrNoNode) {
		n, err = s.oneNode(ctx, where+"n.node_id >= ? AND n.node_id < ? LIMIT 2", append(args, ref, ref+"~")...)
	}
	return n, err
}

// oneNode returns the node that a condition selects, ErrNoNode or ErrAmbiguous.
func (s *Store) oneNode(ctx context.Context, where string, args ...any) (Node, error) {
	var list []Node
	err := s.forEachNode(ctx, func(n Node) error { list = append(list, n); return nil }, where, args...)
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

// forEachNode calls fn with the nodes that a condition selects. A last-seen time in memory
// is newer than that on disk, by up to SeenInterval.
func (s *Store) forEachNode(ctx context.Context, fn func(Node) error, where string, args ...any) error {
	return s.query(ctx, func(scan func(...any) error) error {
		var n Node
		var tags string
		err := scan(&n.NodeID, &n.Tenant, &n.Name, (*[]byte)(&n.Manifest), &n.CreatedMS, &n.LastSeenMS, &n.NameSet, &tags, &n.Description)
		if err != nil {
			return err
		}
		n.Tags = strings.Fields(tags)
		if mem := s.registry.get(n.NodeID); mem != nil {
			n.LastSeenMS = max(n.LastSeenMS, mem.seenMS.Load())
		}
		return fn(n)
	}, selectNodesSQL+where, args...)
}

// nodeByIDOrName finds a node for the operator, who sees all tenants. A well-formed id
// need not be registered.
func (s *Store) nodeByIDOrName(ctx context.Context, ref string) (string, error) {
	if manifest.ValidNodeID(ref) {
		return ref, nil
	}
	n, err := s.FindNode(ctx, "", ref)
	switch {
	case errors.Is(err, ErrNoNode):
		return "", fmt.Errorf("no node has this id, name or id prefix: %q; see: agentctl token ls", ref)
	case errors.Is(err, ErrAmbiguous):
		return "", fmt.Errorf("node %q: %w; give the node id", ref, err)
	}
	return n.NodeID, err
}

// loadNodes reads what has changed since the last call: changes of another process, and
// once more those of this one, which change nothing.
func (s *Store) loadNodes(ctx context.Context) error {
	s.registry.mu.RLock()
	since := s.registry.lastChange
	s.registry.mu.RUnlock()
	// One snapshot: a change that only one of the two queries sees would be lost.
	tx, err := s.db.readDB.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	last := since
	var list []*node
	tenants := map[string]string{} // nodes of a tenant share one string
	err = forEachRow(ctx, tx, func(scan func(...any) error) error {
		n, err := scanNode(scan)
		if err != nil {
			return err
		}
		n.tenant = cmp.Or(tenants[n.tenant], n.tenant)
		tenants[n.tenant] = n.tenant
		list, last = append(list, n), max(last, n.change)
		return nil
	}, selectNodeSQL+"n.change > ? ORDER BY n.change", since)
	if err != nil {
		return err
	}
	removed := map[string]int64{}
	err = forEachRow(ctx, tx, func(scan func(...any) error) error {
		var nodeID string
		var change int64
		err := scan(&nodeID, &change)
		removed[nodeID], last = change, max(last, change)
		return err
	}, "SELECT node_id, change FROM removed WHERE change > ?", since)
	if err != nil || last == since {
		return err
	}
	s.registry.put(list)
	for nodeID, change := range removed {
		s.registry.remove(nodeID, change)
	}
	s.registry.mu.Lock()
	s.registry.lastChange = max(s.registry.lastChange, last)
	s.registry.mu.Unlock()
	return nil
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

package auth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"sync"
	"sync/atomic"
	"unique"
)

// Bounds of the registry.
const (
	MaxNodes    = 100_000
	MaxManifest = 256 << 10 // bytes of the JSON kept for a node: the bound of an announce

	maxPageBytes = 4 << 20 // bytes of manifests after which a page of Nodes ends
	maxSeenBatch = 1000    // last-seen rows of one transaction, so that a Mint need not wait long
)

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
	byName     map[nodeName]*node
	lastChange int64 // rows up to this change have been read
}

// nodeName is the key of registry.byName.
type nodeName struct{ tenant, name string }

func (n *node) nodeName() nodeName { return nodeName{n.tenant, n.name} }

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
			r.dropName(old)
		}
		r.byID[n.nodeID], r.byName[n.nodeName()] = n, n
	}
}

// remove drops the entry of a node, unless a later state of it is there.
func (r *registry) remove(nodeID string, change int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.byID[nodeID]; n != nil && n.change < change {
		delete(r.byID, nodeID)
		r.dropName(n)
	}
}

// dropName removes the name of an entry, unless another node has it by now. The caller holds mu.
func (r *registry) dropName(n *node) {
	if r.byName[n.nodeName()] == n {
		delete(r.byName, n.nodeName())
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

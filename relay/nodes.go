package relay

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/directory"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// Boards over HTTP. NODE is an id, a name or a unique prefix of an id, in the tenant of the token.
//
//	GET    /v1/nodes               nodes        scope tools:list or tools:call:read_only
//	PATCH  /v1/nodes/NODE          patchNode    scope nodes:write, as the next two
//	DELETE /v1/nodes/NODE          removeNode
//	POST   /v1/nodes/NODE/revoke   revokeNode
//
// Removing and revoking change relay.db only. The sweep of the hub then finds the grant of the
// board's link revoked and closes the link with 4401, as after `agentctl token revoke` in another
// process.

// Rows of one page of GET /v1/nodes. A row has the board's capabilities, typically some 600
// bytes, so the largest page is about 3 MB.
const (
	defaultNodesPage = 1000
	maxNodesPage     = 5000
)

// nodeRow is one board of GET /v1/nodes. Capabilities are those that it announced last, as
// it sent them; [] if it never connected.
type nodeRow struct {
	NodeID string `json:"node_id"`
	auth.NodeAttributes
	Online       bool            `json:"online"`
	LastSeenMS   int64           `json:"last_seen_ms"`
	Capabilities json.RawMessage `json:"capabilities"`
	// Suspect: online, but silent for 5 s or more after something was sent to it.
	Suspect bool `json:"suspect"`
	// CloneSuspected: two installations use this identity.
	CloneSuspected bool `json:"clone_suspected"`
}

// nodes lists the boards of the caller's tenant by node id, offline ones included.
// ?name=NAME and ?tag=TAG, repeated for several, select among them. ?after=NODE_ID and
// ?limit=N page through them. A page may end early where its rows are large; `next` is the
// after of the next page, absent on the last one. ?node=REF selects the
// board that commands mean by REF, without paging.
func (r *Relay) nodes(w http.ResponseWriter, req *http.Request) {
	c, err := r.httpCaller(req)
	if err != nil {
		r.writeDenied(w, req, err)
		return
	}
	if !c.Has(manifest.ScopeToolsList) && !c.Has(manifest.ScopeCallReadOnly) {
		r.fail(w, req, http.StatusForbidden, manifest.SafetyDenied, "the token lacks the scope tools:list")
		return
	}
	q, problem := readNodeQuery(req.URL.Query())
	if problem != "" {
		r.fail(w, req, http.StatusBadRequest, manifest.BadRequest, problem)
		return
	}
	body, err := r.nodesPage(w, req, c.Tenant, q)
	switch h := w.Header(); {
	case err != nil:
		h.Del("ETag")
		trace, _ := edge.TraceID(req)
		r.writeError(w, http.StatusInternalServerError, manifest.AsError(err), trace)
	case body != nil:
		h.Set("Content-Type", "application/json")
		writeWhole(w, edge.Compress(h, req, body))
	}
}

// nodesTag is the ETag of every page of GET /v1/nodes of a tenant. It is read before the page:
// what changes in between gives the next tag. It shows nothing of other tenants but that there may
// have been a change.
func (r *Relay) nodesTag(ctx context.Context, tenant string) (string, error) {
	changes, seen, err := r.store.NodesRevision(ctx)
	sum := sha256.Sum256(fmt.Appendf(nil, "%s|%d|%d|%d|%s", r.listSecret, changes, seen, r.hub.Revision(), tenant))
	return fmt.Sprintf(`"%x"`, sum[:16]), err
}

// nodesPage returns the body of GET /v1/nodes, nil when it has answered that the client has it.
func (r *Relay) nodesPage(w http.ResponseWriter, req *http.Request, tenant string, q nodeQuery) ([]byte, error) {
	var nodes []auth.Node
	var more bool
	var err error
	if q.byRef { // less work than an ETag
		w.Header().Set("Cache-Control", "no-store")
		nodes, err = r.matchNodes(req.Context(), tenant, q.ref)
	} else {
		w.Header().Set("Cache-Control", "private, no-cache") // a client may keep it, if it asks each time whether it changed
		var etag string
		if etag, err = r.nodesTag(req.Context(), tenant); err != nil || edge.NotModified(w, req, etag) {
			return nil, err
		}
		q.Tenant = tenant
		nodes, more, err = r.store.Nodes(req.Context(), q.NodeQuery)
	}
	if err != nil {
		return nil, err
	}
	body := struct {
		Nodes []nodeRow `json:"nodes"`
		Next  string    `json:"next,omitempty"`
	}{Nodes: make([]nodeRow, 0, len(nodes))}
	// The page is cut by the size of its manifests as well (auth.Store.Nodes), so the last row and
	// not the limit says where the next one begins.
	if more {
		body.Next = nodes[len(nodes)-1].NodeID
	}
	for _, n := range nodes {
		s := r.hub.Status(n.NodeID)
		row := nodeRow{NodeID: n.NodeID, NodeAttributes: n.NodeAttributes, Online: s.Ready, LastSeenMS: n.LastSeenMS, Capabilities: n.Manifest,
			Suspect: s.Suspect, CloneSuspected: s.CloneSuspected}
		if len(row.Capabilities) == 0 {
			row.Capabilities = json.RawMessage("[]")
		}
		body.Nodes = append(body.Nodes, row)
	}
	b, err := json.Marshal(body)
	return append(b, '\n'), err
}

// matchNodes finds the boards that ref means. Memory has all of a linked board that is not named by a
// prefix, so such a call reads nothing from the disk.
func (r *Relay) matchNodes(ctx context.Context, tenant, ref string) ([]auth.Node, error) {
	if n, ok := r.store.LookupNode(tenant, ref); ok {
		if n.Manifest = r.hub.Manifest(n.NodeID); n.Manifest != nil {
			return []auth.Node{n}, nil
		}
	}
	return r.store.MatchNodes(ctx, tenant, ref)
}

// nodeQuery are the parameters of GET /v1/nodes.
type nodeQuery struct {
	auth.NodeQuery
	byRef bool   // ref is given, and NodeQuery selects nothing
	ref   string // an id, a name, or a unique prefix of an id
}

// readNodeQuery reads the parameters of GET /v1/nodes. Keyset paging: a board that is added or
// removed meanwhile does not shift the pages.
func readNodeQuery(v url.Values) (q nodeQuery, problem string) {
	if q.byRef, q.ref = v.Has("node"), v.Get("node"); q.byRef {
		if len(v["node"]) > 1 || v.Has("name") || v.Has("tag") {
			return q, "node is one board: give neither a second node nor name or tag"
		}
		return q, ""
	}
	q.NodeQuery = auth.NodeQuery{Name: v.Get("name"), Tags: v["tag"], After: v.Get("after"), Limit: defaultNodesPage}
	if s := v.Get("limit"); s != "" {
		var err error
		if q.Limit, err = strconv.Atoi(s); err != nil || q.Limit < 1 || q.Limit > maxNodesPage {
			return q, "limit is a number from 1 to 5000"
		}
	}
	switch {
	case len(v["name"]) > 1 || v.Has("name") && !manifest.ValidNodeName(q.Name):
		return q, "name is one name: 1 to 32 of a-z, 0-9 and -, not starting with -"
	case len(q.Tags) > auth.MaxTags:
		return q, "a node has at most 16 tags"
	}
	for _, t := range q.Tags {
		if !auth.ValidTag(t) {
			return q, "a tag is 1 to 32 of a-z, 0-9 and -, not starting with -"
		}
	}
	return q, ""
}

// nodePatch is the body of PATCH /v1/nodes/NODE: these keys and no others, at least one.
type nodePatch struct {
	Name        *string  `json:"name"` // "" returns to the name that the board proposes
	AddTags     []string `json:"add_tags"`
	RemoveTags  []string `json:"remove_tags"`
	Description *string  `json:"description"` // "" removes it
}

// patchNode serves PATCH /v1/nodes/NODE: it changes the attributes of a node.
func (r *Relay) patchNode(a *adminCall) (adminChange, error) {
	var p nodePatch
	if err := strictjson.Unmarshal(a.body, &p); err != nil || p.Name == nil && p.Description == nil && len(p.AddTags)+len(p.RemoveTags) == 0 {
		return nil, badRequest("body", `the body must be strict JSON with one or more of "name", "add_tags", "remove_tags", "description", and no other keys`)
	}
	n, err := r.ownNode(a, strings.TrimPrefix(a.req.URL.Path, nodesPath))
	if err != nil {
		return nil, err
	}
	change := auth.Attributes{Name: p.Name, AddTags: p.AddTags, RemoveTags: p.RemoveTags, Description: p.Description}
	return func() (any, error) {
		done, err := r.store.SetNodeAttributes(a.req.Context(), a.caller.Tenant, n.NodeID, change, a.dryRun)
		switch bad := (*auth.AttributeError)(nil); {
		case errors.As(err, &bad):
			return nil, badRequest(bad.Field, bad.Error())
		case errors.Is(err, auth.ErrNameTaken):
			return nil, badRequest("name_taken", "another node has this name; give that one another name first, or choose another")
		case errors.Is(err, auth.ErrNoNode): // removed meanwhile
			return nil, kernel.NodeDenied()
		case err != nil:
			return nil, err
		}
		if !a.dryRun { // titles have the name
			isRenamed := p.Name != nil
			r.kernel.NotifyChange(a.caller.Tenant, kernel.Change{Tools: isRenamed, Resources: isRenamed, Updated: []string{directory.URI}})
		}
		return done, nil
	}, nil
}

// nodeStopped answers a revocation or a removal.
type nodeStopped struct {
	NodeID        string `json:"node_id"`
	Name          string `json:"name"`
	NameSet       bool   `json:"name_set"`
	RevokedTokens int    `json:"revoked_tokens"`
}

// removeNode serves DELETE /v1/nodes/NODE: it forgets a node and revokes its tokens.
func (r *Relay) removeNode(a *adminCall) (adminChange, error) {
	if err := a.checkNoBody(); err != nil {
		return nil, err
	}
	n, err := r.ownNode(a, strings.TrimPrefix(a.req.URL.Path, nodesPath))
	if err != nil {
		return nil, err
	}
	return func() (any, error) {
		count, err := r.store.RemoveNode(a.req.Context(), a.caller.Tenant, n.NodeID, a.dryRun)
		if errors.Is(err, auth.ErrNoNode) {
			err = kernel.NodeDenied()
		}
		if err != nil {
			return nil, err
		}
		if !a.dryRun {
			r.kernel.NotifyChange(a.caller.Tenant, kernel.Change{Updated: []string{directory.URI}})
		}
		return nodeStopped{n.NodeID, n.Name, n.NameSet, count}, nil
	}, nil
}

// revokeNode serves POST /v1/nodes/NODE/revoke: it revokes the tokens of a node, which stays
// registered with its name and its history.
func (r *Relay) revokeNode(a *adminCall) (adminChange, error) {
	if err := a.checkNoBody(); err != nil {
		return nil, err
	}
	n, err := r.ownNode(a, strings.TrimSuffix(strings.TrimPrefix(a.req.URL.Path, nodesPath), "/revoke"))
	if err != nil {
		return nil, err
	}
	return func() (any, error) {
		count, err := r.store.Revoke(a.req.Context(), auth.RevokeRequest{Node: n.NodeID, DryRun: a.dryRun})
		return nodeStopped{n.NodeID, n.Name, n.NameSet, count}, err
	}, nil
}

// ownNode finds a node of the caller's tenant by its id, its name or a unique prefix of its
// id. A node of another tenant gets the answer of one that does not exist.
func (r *Relay) ownNode(a *adminCall, ref string) (auth.Node, error) {
	n, err := r.store.Node(a.req.Context(), a.caller.Tenant, ref)
	switch {
	case errors.Is(err, auth.ErrNoNode):
		return n, kernel.NodeDenied()
	case errors.Is(err, auth.ErrAmbiguous):
		return n, badRequest("ambiguous", "more than one node id begins with this; give more of it")
	}
	a.record.NodeID = n.NodeID
	return n, err
}

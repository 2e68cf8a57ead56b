package relay

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/transport/edge"
	"agentctl/transport/link"
)

// metadataPath is where RFC 9728 puts a protected resource's metadata.
const metadataPath = "/.well-known/oauth-protected-resource"

// routes is the whole HTTP surface of the relay. /metrics has a listener of its own.
func (r *Relay) routes() http.Handler {
	mux := http.NewServeMux()
	door := func(open *atomic.Bool, h http.HandlerFunc) http.Handler { return r.gate(open, h) }
	mux.Handle("POST /mcp/tools/call", door(&r.endpoints.http, r.toolsCall)) // unary calls and metric streams
	mux.Handle("/mcp", door(&r.endpoints.mcp, r.mcp.ServeHTTP))              // MCP, both eras
	mux.Handle("GET "+link.Path, door(&r.endpoints.link, r.deviceLink))      // device links
	mux.HandleFunc("GET /v1/nodes", r.nodes)                                 // the tenant's fleet
	mux.HandleFunc("GET /schemas/", r.schemas)                               // schema registry
	mux.HandleFunc("GET "+metadataPath, r.resourceMeta)                      // RFC 9728
	mux.HandleFunc("GET "+metadataPath+"/", r.resourceMeta)                  // the same for /mcp
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { edge.WriteText(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", r.readyz)
	return r.checkRequests(mux)
}

// checkRequests runs before every route: path and method, Host (DNS rebinding), Origin (browsers).
func (r *Relay) checkRequests(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		edge.SetBodyDeadline(w, req, edge.BodyTimeout)
		preflight := edge.IsPreflight(req)
		if h, pattern := mux.Handler(req); !preflight && (pattern == "" || !methodAllowed(pattern, req.Method)) {
			r.noRoute(w, req, h, pattern)
			return
		}
		if err := r.guard.Check(req); err != nil {
			r.refuse(w, req, http.StatusForbidden, err.Error())
			return
		}
		cors.SetHeaders(w.Header(), req)
		if preflight {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		mux.ServeHTTP(w, req)
	})
}

// methodAllowed: /mcp takes three methods under one pattern.
func methodAllowed(pattern, method string) bool {
	return pattern != "/mcp" || method == http.MethodGet || method == http.MethodPost || method == http.MethodDelete
}

// noRoute answers a path or a method that is not served, h being what the mux would say.
func (r *Relay) noRoute(w http.ResponseWriter, req *http.Request, h http.Handler, pattern string) {
	if pattern != "" {
		w.Header().Set("Allow", "GET, POST, DELETE")
		r.refuse(w, req, http.StatusMethodNotAllowed, "this path does not take this method")
		return
	}
	said := &statusRecorder{header: make(http.Header)}
	h.ServeHTTP(said, req)
	if allow := said.header.Get("Allow"); said.status == http.StatusMethodNotAllowed && allow != "" {
		w.Header().Set("Allow", allow)
		r.refuse(w, req, http.StatusMethodNotAllowed, "this path does not take this method")
		return
	}
	r.refuse(w, req, http.StatusNotFound, "nothing is served at this path")
}

// statusRecorder is a ResponseWriter that only listens.
type statusRecorder struct {
	header http.Header
	status int
}

func (h *statusRecorder) Header() http.Header         { return h.header }
func (h *statusRecorder) WriteHeader(status int)      { h.status = status }
func (h *statusRecorder) Write(b []byte) (int, error) { return len(b), nil }

func (r *Relay) refuse(w http.ResponseWriter, req *http.Request, status int, message string) {
	code := manifest.BadRequest
	if status == http.StatusForbidden {
		code = manifest.SafetyDenied
	}
	trace, _ := edge.TraceID(req)
	r.writeError(w, status, manifest.E(code, message), trace)
}

// cors is what pages of allowed origins may send and read.
var cors = edge.CORS{
	Methods: "GET, POST, DELETE, OPTIONS",
	Headers: "Authorization, Content-Type, Accept, Last-Event-ID, MCP-Protocol-Version, Mcp-Session-Id, Mcp-Method, Mcp-Name, Traceparent, Agentctl-Meta",
	Expose:  "Mcp-Session-Id, WWW-Authenticate, Agentctl-Meta",
}

func (r *Relay) deviceLink(w http.ResponseWriter, req *http.Request) {
	if !r.ready.Load() {
		http.Error(w, "draining", http.StatusServiceUnavailable)
		return
	}
	conn, err := link.Upgrade(r.upgrader, w, req)
	if err != nil {
		return // answered by the upgrader
	}
	r.hub.Attach(conn)
}

func (r *Relay) readyz(w http.ResponseWriter, _ *http.Request) {
	if !r.ready.Load() {
		edge.WriteText(w, http.StatusServiceUnavailable, "draining\n")
		return
	}
	edge.WriteText(w, http.StatusOK, "ready\n")
}

// schemas serves the registry: an index at /schemas/, one schema at /schemas/NAME@VERSION.
func (r *Relay) schemas(w http.ResponseWriter, req *http.Request) {
	name := strings.TrimPrefix(req.URL.Path, "/schemas/")
	h := w.Header()
	if name == "" {
		type row struct {
			Ref string `json:"ref"`
			URL string `json:"url"`
		}
		rows := []row{}
		for _, ref := range manifest.SchemaNames() {
			rows = append(rows, row{ref, r.base() + "/schemas/" + strings.TrimPrefix(ref, "mcp://schemas/")})
		}
		h.Set("Cache-Control", "public, max-age=300")
		writeJSON(w, map[string]any{"schemas": rows})
		return
	}
	s, ok := manifest.Schema(name)
	if !ok {
		r.refuse(w, req, http.StatusNotFound, "no schema has this name; GET /schemas/ lists them")
		return
	}
	h.Set("Content-Type", "application/schema+json")
	h.Set("Cache-Control", "public, max-age=86400, immutable") // a version never changes
	writeWhole(w, s)
}

// resourceMeta is RFC 9728 metadata of /mcp.
func (r *Relay) resourceMeta(w http.ResponseWriter, req *http.Request) {
	switch strings.TrimPrefix(req.URL.Path, metadataPath) {
	case "", "/mcp":
	default:
		r.refuse(w, req, http.StatusNotFound, "no such resource")
		return
	}
	writeJSON(w, map[string]any{
		"resource":                 r.base() + "/mcp",
		"bearer_methods_supported": []string{"header"},
		"scopes_supported":         []string{manifest.ScopeCallReadOnly, manifest.ScopeToolsList},
		"resource_name":            "agentctl relay",
	})
}

// Bounds of GET /v1/nodes.
const (
	defaultNodesPage = 1000
	maxNodesPage     = 5000
)

// nodeRow is one board of GET /v1/nodes.
type nodeRow struct {
	NodeID       string          `json:"node_id"`
	Name         string          `json:"name"`
	Online       bool            `json:"online"`
	LastSeenMS   int64           `json:"last_seen_ms"`
	Capabilities json.RawMessage `json:"capabilities"`
}

// nodes lists the boards of the caller's tenant, offline ones included, by node id.
// ?after=NODE_ID and ?limit=N page, and a page ends early where its rows are large; `next`
// names the next page's after.
func (r *Relay) nodes(w http.ResponseWriter, req *http.Request) {
	c, err := r.httpCaller(req)
	if err != nil {
		r.writeDenied(w, req, err)
		return
	}
	if !c.Has(manifest.ScopeToolsList) && !c.Has(manifest.ScopeCallReadOnly) {
		r.refuse(w, req, http.StatusForbidden, "the token lacks the scope tools:list")
		return
	}
	q := req.URL.Query()
	limit, after := defaultNodesPage, q.Get("after")
	if s := q.Get("limit"); s != "" {
		if limit, err = strconv.Atoi(s); err != nil || limit < 1 || limit > maxNodesPage {
			r.refuse(w, req, http.StatusBadRequest, "limit is a number from 1 to 5000")
			return
		}
	}
	nodes, more, err := r.store.Nodes(req.Context(), c.Tenant, after, limit)
	if err != nil {
		trace, _ := edge.TraceID(req)
		r.writeError(w, http.StatusInternalServerError, manifest.AsError(err), trace)
		return
	}
	body := struct {
		Nodes []nodeRow `json:"nodes"`
		Next  string    `json:"next,omitempty"`
	}{Nodes: make([]nodeRow, 0, len(nodes))}
	if more {
		body.Next = nodes[len(nodes)-1].NodeID
	}
	for _, n := range nodes {
		row := nodeRow{NodeID: n.NodeID, Name: n.Name, Online: r.hub.IsReady(n.NodeID), LastSeenMS: n.LastSeenMS, Capabilities: json.RawMessage(n.Manifest)}
		if len(row.Capabilities) == 0 {
			row.Capabilities = json.RawMessage("[]")
		}
		body.Nodes = append(body.Nodes, row)
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, body)
}

func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil { // only if our own types are broken
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	writeWhole(w, append(b, '\n'))
}

// writeTimeout bounds the writing of one whole answer.
const writeTimeout = 30 * time.Second

// writeWhole writes a body that may be large to a reader that may be slow.
func writeWhole(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, _ = w.Write(b)
	_ = rc.Flush()
	_ = rc.SetWriteDeadline(time.Time{}) // the connection may serve another request
}

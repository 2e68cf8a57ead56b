package relay

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/relay/storage"
	"agentctl/transport/edge"
	"agentctl/transport/link"
)

// metadataPath is where RFC 9728 puts the metadata of a protected resource.
const metadataPath = "/.well-known/oauth-protected-resource"

// routes is the whole HTTP surface of the relay's main listener. /metrics and the event
// gateway have separate listeners, so that they can be bound to another network.
//
// Who authenticates: the two /mcp routes, /v1/nodes, /v1/self, /v1/tokens and /v1/invites take a bearer
// token in the header, the device link takes one in its first message, /v1/enroll and /v1/token
// check an invite code and the proof of a key, and the others are public.
func (r *Relay) routes() http.Handler {
	mux := http.NewServeMux()
	e := &r.endpoints
	mux.Handle("POST /mcp/tools/call", r.gate(&e.http, r.toolsCall)) // unary calls and metric streams
	mux.Handle("/mcp", r.gate(&e.mcp, r.mcp.ServeHTTP))              // MCP, both eras
	mux.Handle("GET "+link.Path, r.gate(&e.link, r.deviceLink))      // device links
	mux.HandleFunc("GET /v1/nodes", r.nodes)                         // the tenant's boards
	mux.HandleFunc("GET /v1/self", r.self)                           // whose token it is, and what it may do
	r.adminRoutes(mux)                                               // changes of nodes and tokens
	r.joinRoutes(mux)                                                // invites, enrollment, refresh
	mux.HandleFunc("GET /schemas/", r.schemas)                       // schema registry
	mux.HandleFunc("GET "+metadataPath, r.resourceMetadata)          // RFC 9728
	mux.HandleFunc("GET "+metadataPath+"/", r.resourceMetadata)      // the same for /mcp
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { edge.WriteText(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", r.readyz)
	return r.checkRequests(mux)
}

// checkRequests runs before every route: path and method, Host and Origin, then CORS. A
// request that it refuses reaches no route and needs no token.
//
// On a loopback listener Host is checked against DNS rebinding: a page of another site whose
// name resolves to 127.0.0.1 could otherwise use a relay on the reader's machine. Origin is
// checked on GET as well, which can open a stream or a device link.
func (r *Relay) checkRequests(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header()["X-Content-Type-Options"] = noSniff
		if edge.ConnOf(req).IsLastRequest() {
			w.Header().Set("Connection", "close")
		}
		edge.SetBodyDeadline(w, req, edge.BodyTimeout)
		preflight := edge.IsPreflight(req)
		h, pattern := mux.Handler(req)
		if !preflight && (pattern == "" || !methodAllowed(pattern, req.Method)) {
			r.noRoute(w, req, h, pattern)
			return
		}
		if err := r.guard.Check(req); err != nil {
			r.fail(w, req, http.StatusForbidden, manifest.SafetyDenied, err.Error())
			return
		}
		cors.SetHeaders(w.Header(), req)
		if preflight {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		h.ServeHTTP(w, req) // not mux.ServeHTTP, which would match again; no handler reads a wildcard
	})
}

// answersInPlace is edge.Server.Direct: it selects the calls.
func answersInPlace(path string) bool {
	return path == "/mcp" || path == "/mcp/tools/call"
}

// methodAllowed completes the mux for /mcp, which takes three methods under one pattern
// and, unlike a GET pattern of the mux, not HEAD.
func methodAllowed(pattern, method string) bool {
	return pattern != "/mcp" || slices.Contains([]string{http.MethodGet, http.MethodPost, http.MethodDelete}, method)
}

// noRoute answers a path or a method that is not served, with the envelope. h is what the
// mux would answer, which knows the methods of the path.
func (r *Relay) noRoute(w http.ResponseWriter, req *http.Request, h http.Handler, pattern string) {
	allow := "GET, POST, DELETE" // of /mcp
	if pattern == "" {
		rec := &statusRecorder{header: make(http.Header)}
		h.ServeHTTP(rec, req)
		if allow = rec.header.Get("Allow"); rec.status != http.StatusMethodNotAllowed || allow == "" {
			r.fail(w, req, http.StatusNotFound, manifest.BadRequest, "nothing is served at this path")
			return
		}
	}
	w.Header().Set("Allow", allow)
	r.fail(w, req, http.StatusMethodNotAllowed, manifest.BadRequest, "this path does not take this method")
}

// statusRecorder is a ResponseWriter that keeps status and headers and sends nothing: the
// mux writes its own 404 and 405 as plain text, and clients of this API expect the envelope.
type statusRecorder struct {
	header http.Header
	status int
}

func (s *statusRecorder) Header() http.Header         { return s.header }
func (s *statusRecorder) WriteHeader(status int)      { s.status = status }
func (s *statusRecorder) Write(b []byte) (int, error) { return len(b), nil }

// cors is what pages of other origins may send and read. Which origins those are is the
// guard's decision; the browser asks with a preflight before it sends a header listed here.
var cors = edge.CORS{
	Methods: "GET, POST, PATCH, DELETE, OPTIONS",
	Headers: "Authorization, Content-Type, Accept, Last-Event-ID, MCP-Protocol-Version, Mcp-Session-Id, Mcp-Method, Mcp-Name, Traceparent, Agentctl-Meta",
	Expose:  "Mcp-Session-Id, WWW-Authenticate, Agentctl-Meta",
}

// deviceLink upgrades a request to a device link and hands it to the hub. The token comes
// in the link's first message, not in a header (RFC-0002).
func (r *Relay) deviceLink(w http.ResponseWriter, req *http.Request) {
	if !r.ready.Load() {
		http.Error(w, "draining", http.StatusServiceUnavailable)
		return
	}
	client := r.clientAddr(req)
	slot := r.hub.Reserve(req.Context(), client, edge.AddressKey(client), edge.ConnOf(req).MarkKnown)
	if slot == nil {
		trace, _ := edge.TraceID(req)
		w.Header().Set("Connection", "close")
		r.writeError(w, http.StatusTooManyRequests, edge.Exhausted("too many links of this address are in their handshake; try again", time.Second), trace)
		return
	}
	conn, err := link.Upgrade(r.upgrader, w, req)
	if err != nil {
		slot.Release()
		return // answered by the upgrader
	}
	r.hub.AttachReserved(conn, slot)
}

// readyz is for load balancers: 503 as soon as the relay drains, while its clock cannot be
// right and while a store does not work, with the reasons. /healthz stays 200. A degraded relay
// is ready, and says that it is degraded: an operator wants it to serve boards.
func (r *Relay) readyz(w http.ResponseWriter, _ *http.Request) {
	if !r.ready.Load() {
		edge.WriteText(w, http.StatusServiceUnavailable, "draining\n")
		return
	}
	status, text := http.StatusOK, ""
	if problem := r.clock.check(); problem != "" {
		status, text = http.StatusServiceUnavailable, "clock: "+problem+"\n"
	}
	now := time.Now()
	for _, h := range r.storage.Health() {
		if !h.OK() {
			status = http.StatusServiceUnavailable
		}
		for _, p := range h.Problems {
			text += "storage: " + storage.Describe(h.Store, p, now) + "\n"
		}
	}
	if r.degraded != nil {
		text = "degraded: this relay runs without its event log\n" + text
	}
	if status == http.StatusOK {
		text = "ready\n" + text // then warnings
	}
	edge.WriteText(w, status, text)
}

// schemas serves the registry: an index at /schemas/, and one schema at
// /schemas/NAME@VERSION. It needs no token: the schemas are public.
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
			rows = append(rows, row{ref, r.URL() + "/schemas/" + strings.TrimPrefix(ref, "mcp://schemas/")})
		}
		h.Set("Cache-Control", "public, max-age=300")
		b, err := json.Marshal(map[string]any{"schemas": rows})
		if err != nil {
			http.Error(w, "internal error", http.StatusInternalServerError)
			return
		}
		h.Set("Content-Type", "application/json")
		writeWhole(w, edge.Compress(h, req, append(b, '\n')))
		return
	}
	s, ok := manifest.Schema(name)
	if !ok {
		r.fail(w, req, http.StatusNotFound, manifest.BadRequest, "no schema has this name; GET /schemas/ lists them")
		return
	}
	h.Set("Content-Type", "application/schema+json")
	h.Set("Cache-Control", "public, max-age=86400, immutable") // a version never changes
	writeWhole(w, edge.Compress(h, req, s))
}

// resourceMetadata shows a client without a token where and how /mcp takes one (RFC 9728).
func (r *Relay) resourceMetadata(w http.ResponseWriter, req *http.Request) {
	if p := strings.TrimPrefix(req.URL.Path, metadataPath); p != "" && p != "/mcp" {
		r.fail(w, req, http.StatusNotFound, manifest.BadRequest, "no such resource")
		return
	}
	writeJSON(w, map[string]any{
		"resource":                 r.URL() + "/mcp",
		"bearer_methods_supported": []string{"header"},
		"scopes_supported":         []string{manifest.ScopeCallReadOnly, manifest.ScopeToolsList},
		"resource_name":            "agentctl relay",
	})
}

// writeJSON answers with v, a value of this package that json.Marshal takes.
func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	writeWhole(w, append(b, '\n'))
}

// writeTimeout bounds the writing of one whole body.
const writeTimeout = 30 * time.Second

// writeWhole writes a body that may be large to a client that may be slow. The server has no
// write timeout, which would cut streams, so the deadline is set for this body alone. A
// client that misses it finds fewer bytes than Content-Length promised.
func writeWhole(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, _ = w.Write(b)
	_ = rc.Flush()
	_ = rc.SetWriteDeadline(time.Time{}) // the connection may serve a stream next
}

package gateway

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/strictjson"
)

// Codes of the error envelope (docs/protocol.md, "Errors").
const (
	codeBadRequest = "E_BAD_REQUEST"
	codeDenied     = "E_SAFETY_DENIED"
	codeRate       = "E_RATE_LIMITED"
	codeInternal   = "E_INTERNAL"
)

// routes is the whole surface.
func (g *Gateway) routes() http.Handler {
	routes := map[string]struct {
		methods string
		serve   http.HandlerFunc
	}{
		StreamPath:  {"GET, HEAD", g.subscribe},
		IngestPath:  {"POST", g.ingest},
		TicketPath:  {"POST", g.ticket},
		MetricsPath: {"GET, HEAD", g.metrics},
		"/healthz":  {"GET, HEAD", func(w http.ResponseWriter, _ *http.Request) { plain(w, http.StatusOK, "ok\n") }},
		"/readyz":   {"GET, HEAD", g.readyz},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		if r.ContentLength != 0 {
			// net/http waits without end for a body that nobody has read.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(10 * time.Second))
		}
		route, ok := routes[r.URL.Path]
		if !ok {
			g.fail(w, r, http.StatusNotFound, codeBadRequest, "nothing is served at this path; the stream is "+StreamPath)
			return
		}
		origin := r.Header.Get("Origin")
		preflight := r.Method == http.MethodOptions && origin != "" && r.Header.Get("Access-Control-Request-Method") != ""
		if !preflight && !slices.Contains(strings.Split(route.methods, ", "), r.Method) {
			h.Set("Allow", route.methods)
			g.fail(w, r, http.StatusMethodNotAllowed, codeBadRequest, "this path takes "+route.methods)
			return
		}
		if !g.hostAllowed(r.Host) {
			g.fail(w, r, http.StatusForbidden, codeDenied, "this Host is not served by a gateway that is open on loopback")
			return
		}
		if origin != "" && !sameOrigin(origin, r.Host) {
			if !slices.Contains(g.opts.AllowOrigins, origin) {
				g.fail(w, r, http.StatusForbidden, codeDenied, "this Origin may not use the gateway; the operator can admit it with MCP_SSE_ALLOW_ORIGINS")
				return
			}
			h.Set("Access-Control-Allow-Origin", origin)
			h.Add("Vary", "Origin")
			h.Set("Access-Control-Expose-Headers", "WWW-Authenticate, Retry-After")
		}
		if preflight {
			h.Set("Access-Control-Allow-Methods", route.methods)
			h.Set("Access-Control-Allow-Headers", "Authorization, Content-Type, Last-Event-ID, Cache-Control")
			h.Set("Access-Control-Max-Age", "600")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		route.serve(w, r)
	})
}

// hostAllowed keeps a web page that resolves its own name to 127.0.0.1 away from an open
// gateway. Elsewhere tokens do that.
func (g *Gateway) hostAllowed(host string) bool {
	if g.opts.guarded() || g.opts.Insecure {
		return true
	}
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return loopbackName(strings.Trim(host, "[]"))
}

func sameOrigin(origin, host string) bool {
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, host)
}

// largeData is how many bytes of data cost an identity as much as an event of its own: the
// log is everybody's, and who fills it pushes the others' events out.
const largeData = 4 << 10

// ingest takes one event. 202 means that it is in the ring, and durable if there is a log.
func (g *Gateway) ingest(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength > maxBody {
		g.tooLarge(w, r)
		return
	}
	id, err := g.identify(r, ScopeIngest)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	rate := g.opts.IngestRate
	if id.open {
		rate = g.opts.OpenIngestRate
	}
	key := id.Tenant + "\n" + id.Subject
	if wait := g.limits.take(key, rate, time.Now()); wait > 0 {
		g.rateLimited.Add(1)
		g.slowDown(w, r, wait, "too many events of this identity")
		return
	}
	var large *http.MaxBytesError
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if errors.As(err, &large) {
		g.tooLarge(w, r)
		return
	}
	if err != nil {
		g.fail(w, r, http.StatusBadRequest, codeBadRequest, "the body could not be read")
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	var in struct {
		Topic string         `json:"topic"`
		Data  strictjson.Raw `json:"data"`
	}
	if err := strictjson.Unmarshal(body, &in); err != nil {
		g.fail(w, r, http.StatusBadRequest, codeBadRequest, `the body is {"topic":"a/b","data":<JSON>}: `+err.Error())
		return
	}
	if in.Topic == "" {
		g.fail(w, r, http.StatusBadRequest, codeBadRequest, `the body lacks "topic"`)
		return
	}
	data, err := normalizeEvent(in.Topic, in.Data, g.opts.MaxData)
	switch {
	case errors.Is(err, ErrTooLarge):
		g.tooLarge(w, r)
		return
	case err != nil:
		g.fail(w, r, http.StatusBadRequest, codeBadRequest, err.Error())
		return
	case adminTopic(in.Topic) && !id.Scopes.Has(ScopeAdmin):
		g.fail(w, r, http.StatusForbidden, codeDenied, "the topics audit and kernel need the scope "+ScopeAdmin)
		return
	case slices.Contains(g.opts.RelayTopics, in.Topic) && !id.Scopes.Has(ScopeAdmin):
		g.fail(w, r, http.StatusForbidden, codeDenied, "this topic is the relay's own: what it tells happened here; choose another, or one below it")
		return
	case !patterns(id.Topics).match(in.Topic):
		g.fail(w, r, http.StatusForbidden, codeDenied, "the token does not cover this topic")
		return
	}
	if !g.running() {
		g.unavailable(w, r, "the gateway is stopping; try again")
		return
	}
	if !id.open {
		g.limits.charge(key, float64(len(data)/largeData))
	}
	n, err := g.publish(r.Context(), Event{Tenant: id.Tenant, Topic: in.Topic, Data: data})
	switch {
	case errors.Is(err, ErrBusy):
		g.rateLimited.Add(1)
		g.slowDown(w, r, time.Second, "too many events wait for the disk")
	case errors.Is(err, ErrStopped):
		g.unavailable(w, r, "the gateway is stopping; the event may have been kept")
	case err != nil:
		g.fail(w, r, http.StatusInternalServerError, codeInternal, err.Error())
	default:
		writeJSON(w, http.StatusAccepted, strconv.AppendUint([]byte(`{"id":`), n, 10))
	}
}

func (g *Gateway) running() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.serving
}

func (g *Gateway) readyz(w http.ResponseWriter, _ *http.Request) {
	if !g.running() {
		plain(w, http.StatusServiceUnavailable, "draining\n")
		return
	}
	plain(w, http.StatusOK, "ready\n")
}

// metrics has the six names of the source document and no labels: it needs no token.
func (g *Gateway) metrics(w http.ResponseWriter, _ *http.Request) {
	st := g.Stats()
	var b bytes.Buffer
	for _, m := range [...]struct {
		name, kind, help string
		value            uint64
	}{
		{"mcp_sse_clients", "gauge", "Subscribers now.", uint64(st.Subscribers)},
		{"mcp_sse_total_connections", "counter", "Streams opened since the start.", st.Connections},
		{"mcp_sse_events_ingested", "counter", "Events accepted since the start.", st.Ingested},
		{"mcp_sse_events_delivered", "counter", "Events given to subscribers, replayed ones included.", st.Delivered},
		{"mcp_sse_events_dropped", "counter", "Events that subscribers lost because they did not read.", st.Dropped},
		{"mcp_sse_bytes_sent", "counter", "Bytes of event streams written to subscribers.", st.Bytes},
	} {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n%s %d\n", m.name, m.help, m.name, m.kind, m.name, m.value)
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(b.Bytes())
}

func plain(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// writeJSON completes and writes an object that lacks its last brace.
func writeJSON(w http.ResponseWriter, status int, b []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, "}\n"...))
}

// fail answers with the error envelope.
func (g *Gateway) fail(w http.ResponseWriter, r *http.Request, status int, code, message string) {
	g.failAfter(w, r, status, code, message, 0)
}

func (g *Gateway) failAfter(w http.ResponseWriter, r *http.Request, status int, code, message string, after time.Duration) {
	var body struct {
		Code         string `json:"code"`
		Message      string `json:"message"`
		Retryable    bool   `json:"retryable"`
		RetryAfterMS int64  `json:"retry_after_ms,omitempty"`
		TraceID      string `json:"trace_id"`
	}
	body.Code, body.Message, body.RetryAfterMS, body.TraceID = code, message, after.Milliseconds(), traceID(r)
	body.Retryable = code == codeRate || code == codeInternal
	b, _ := json.Marshal(body) // strings and numbers: cannot fail
	writeJSON(w, status, append([]byte(`{"error":`), b...))
}

func (g *Gateway) tooLarge(w http.ResponseWriter, r *http.Request) {
	g.fail(w, r, http.StatusRequestEntityTooLarge, codeBadRequest, fmt.Sprintf("an event's data has at most %d bytes, and the whole body %d", g.opts.MaxData, maxBody))
}

func (g *Gateway) slowDown(w http.ResponseWriter, r *http.Request, wait time.Duration, message string) {
	w.Header().Set("Retry-After", strconv.Itoa(int((wait+time.Second-1)/time.Second)))
	g.failAfter(w, r, http.StatusTooManyRequests, codeRate, message, wait)
}

func (g *Gateway) unavailable(w http.ResponseWriter, r *http.Request, message string) {
	w.Header().Set("Retry-After", "1")
	g.failAfter(w, r, http.StatusServiceUnavailable, codeInternal, message, time.Second)
}

// traceID is that of the caller's traceparent, or a new one.
func traceID(r *http.Request) string {
	if p := r.Header.Get("Traceparent"); len(p) == 55 && p[:3] == "00-" && p[35] == '-' {
		if id := p[3:35]; strings.Trim(id, "0123456789abcdef") == "" && strings.Trim(id, "0") != "" {
			return id
		}
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

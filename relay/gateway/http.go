package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
	"agentctl/transport/edge"
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
		"/healthz":  {"GET, HEAD", func(w http.ResponseWriter, _ *http.Request) { edge.WriteText(w, http.StatusOK, "ok\n") }},
		"/readyz":   {"GET, HEAD", g.readyz},
	}
	guard := edge.NewGuard(edge.GuardOptions{
		CheckHost: !g.opts.guarded() && !g.opts.Insecure, // open on loopback: nothing but the Host keeps a page away
		Origins:   g.opts.AllowOrigins,
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		edge.SetBodyDeadline(w, r, edge.BodyTimeout)
		route, ok := routes[r.URL.Path]
		if !ok {
			g.fail(w, r, http.StatusNotFound, manifest.BadRequest, "nothing is served at this path; the stream is "+StreamPath)
			return
		}
		preflight := edge.IsPreflight(r)
		if !preflight && !slices.Contains(strings.Split(route.methods, ", "), r.Method) {
			h.Set("Allow", route.methods)
			g.fail(w, r, http.StatusMethodNotAllowed, manifest.BadRequest, "this path takes "+route.methods)
			return
		}
		if err := guard.Check(r); err != nil {
			g.fail(w, r, http.StatusForbidden, manifest.SafetyDenied, err.Error())
			return
		}
		cors := edge.CORS{
			Methods: route.methods,
			Headers: "Authorization, Content-Type, Last-Event-ID, Cache-Control",
			Expose:  "WWW-Authenticate, Retry-After",
		}
		cors.SetHeaders(h, r)
		if preflight {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		route.serve(w, r)
	})
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
	if wait := g.limits.Take(key, rate, burst(rate), time.Now()); wait > 0 {
		g.rateLimited.Add(1)
		g.slowDown(w, r, wait, "too many events of this identity")
		return
	}
	var large *http.MaxBytesError
	body, err := edge.ReadBody(w, r, maxBody)
	if errors.As(err, &large) {
		g.tooLarge(w, r)
		return
	}
	if err != nil {
		g.fail(w, r, http.StatusBadRequest, manifest.BadRequest, "the body could not be read")
		return
	}
	var in struct {
		Topic string         `json:"topic"`
		Data  strictjson.Raw `json:"data"`
	}
	if err := strictjson.Unmarshal(body, &in); err != nil {
		g.fail(w, r, http.StatusBadRequest, manifest.BadRequest, `the body is {"topic":"a/b","data":<JSON>}: `+err.Error())
		return
	}
	if in.Topic == "" {
		g.fail(w, r, http.StatusBadRequest, manifest.BadRequest, `the body lacks "topic"`)
		return
	}
	data, err := normalizeEvent(in.Topic, in.Data, g.opts.MaxData)
	switch {
	case errors.Is(err, ErrTooLarge):
		g.tooLarge(w, r)
		return
	case err != nil:
		g.fail(w, r, http.StatusBadRequest, manifest.BadRequest, err.Error())
		return
	case adminTopic(in.Topic) && !id.Scopes.Has(ScopeAdmin):
		g.fail(w, r, http.StatusForbidden, manifest.SafetyDenied, "the topics audit and kernel need the scope "+ScopeAdmin)
		return
	case slices.Contains(g.opts.RelayTopics, in.Topic) && !id.Scopes.Has(ScopeAdmin):
		g.fail(w, r, http.StatusForbidden, manifest.SafetyDenied, "this topic is the relay's own: what it tells happened here; choose another, or one below it")
		return
	case !patterns(id.Topics).match(in.Topic):
		g.fail(w, r, http.StatusForbidden, manifest.SafetyDenied, "the token does not cover this topic")
		return
	}
	if !g.running() {
		g.unavailable(w, r, "the gateway is stopping; try again")
		return
	}
	if !id.open {
		g.limits.Charge(key, len(data)/largeData, time.Now())
	}
	n, err := g.publish(r.Context(), Event{Tenant: id.Tenant, Topic: in.Topic, Data: data})
	switch {
	case errors.Is(err, ErrBusy):
		g.rateLimited.Add(1)
		g.slowDown(w, r, time.Second, "too many events wait for the disk")
	case errors.Is(err, ErrStopped):
		g.unavailable(w, r, "the gateway is stopping; the event may have been kept")
	case err != nil:
		g.fail(w, r, http.StatusInternalServerError, manifest.Internal, err.Error())
	default:
		edge.WriteJSON(w, http.StatusAccepted, fmt.Appendf(nil, `{"id":%d}`, n))
	}
}

func (g *Gateway) running() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.serving
}

func (g *Gateway) readyz(w http.ResponseWriter, _ *http.Request) {
	if !g.running() {
		edge.WriteText(w, http.StatusServiceUnavailable, "draining\n")
		return
	}
	edge.WriteText(w, http.StatusOK, "ready\n")
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

// fail answers with the error envelope.
func (g *Gateway) fail(w http.ResponseWriter, r *http.Request, status int, code manifest.Code, message string) {
	g.failAfter(w, r, status, code, message, 0)
}

func (g *Gateway) failAfter(w http.ResponseWriter, r *http.Request, status int, code manifest.Code, message string, retryAfter time.Duration) {
	trace, _ := edge.TraceID(r)
	edge.WriteError(w, status, &manifest.Error{Code: code, Message: message, RetryAfterMS: retryAfter.Milliseconds()}, trace)
}

func (g *Gateway) tooLarge(w http.ResponseWriter, r *http.Request) {
	g.fail(w, r, http.StatusRequestEntityTooLarge, manifest.BadRequest, fmt.Sprintf("an event's data has at most %d bytes, and the whole body %d", g.opts.MaxData, maxBody))
}

func (g *Gateway) slowDown(w http.ResponseWriter, r *http.Request, wait time.Duration, message string) {
	g.failAfter(w, r, http.StatusTooManyRequests, manifest.RateLimited, message, wait)
}

func (g *Gateway) unavailable(w http.ResponseWriter, r *http.Request, message string) {
	g.failAfter(w, r, http.StatusServiceUnavailable, manifest.Internal, message, time.Second)
}

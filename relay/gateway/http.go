package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// handler answers a request, or returns an error that writeError turns into the response.
type handler func(w http.ResponseWriter, r *http.Request) error

// route is an endpoint and the methods that it accepts, as in the Allow header.
type route struct {
	methods string
	handler handler
}

// corsHeaders are the request headers that a web page may send.
const corsHeaders = "Authorization, Content-Type, Last-Event-ID, Cache-Control"

// routes returns the handler of all endpoints. It checks path, method, Host and Origin, in
// this order; each endpoint checks the token.
func (g *Gateway) routes() http.Handler {
	routes := map[string]route{
		StreamPath:  {"GET, HEAD", g.subscribe},
		IngestPath:  {"POST", g.ingest},
		TicketPath:  {"POST", g.issueTicket},
		MetricsPath: {"GET, HEAD", g.metrics},
		"/healthz":  {"GET, HEAD", healthz},
		"/readyz":   {"GET, HEAD", g.readyz},
	}
	// Without tokens, Host is all that stops DNS rebinding: on an open gateway, and for the metrics
	// of one on loopback.
	isOpen := !g.opts.needsToken() && !g.opts.Insecure
	host, _, _ := net.SplitHostPort(g.opts.Listen)
	guard := edge.NewGuard(edge.GuardOptions{CheckHost: isOpen, Hosts: g.opts.Hosts, Origins: g.opts.AllowOrigins})
	metricsGuard := edge.NewGuard(edge.GuardOptions{CheckHost: isOpen || edge.IsLoopback(host), Hosts: g.opts.Hosts, Origins: g.opts.AllowOrigins})
	g.guards = []*edge.Guard{guard, metricsGuard}
	serve := func(w http.ResponseWriter, r *http.Request) error {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		edge.SetBodyDeadline(w, r, edge.BodyTimeout)
		route, ok := routes[r.URL.Path]
		if !ok {
			return refuse(http.StatusNotFound, manifest.BadRequest, "nothing is served at this path; the stream is "+StreamPath)
		}
		isPreflight := edge.IsPreflight(r)
		if !isPreflight && !slices.Contains(strings.Split(route.methods, ", "), r.Method) {
			w.Header().Set("Allow", route.methods)
			return refuse(http.StatusMethodNotAllowed, manifest.BadRequest, "this path takes "+route.methods)
		}
		guard := guard
		if r.URL.Path == MetricsPath {
			guard = metricsGuard
		}
		if err := guard.Check(r); err != nil {
			return denied(err.Error())
		}
		cors := edge.CORS{Methods: route.methods, Headers: corsHeaders, Expose: "WWW-Authenticate, Retry-After"}
		cors.SetHeaders(w.Header(), r)
		if isPreflight {
			w.WriteHeader(http.StatusNoContent)
			return nil
		}
		return route.handler(w, r)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := serve(w, r); err != nil && !errors.Is(err, sse.ErrPeerClosed) { // then there is no connection to answer on
			writeError(w, r, err)
		}
	})
}

// largeData is the number of bytes of data that count as another event in an identity's
// rate: all identities share the log, and one that fills it evicts the events of the others.
const largeData = 4 << 10

// ingest publishes one event. 202 means that it is in the ring, and durable if there is a
// log. The rate is checked before the body is read, and charged for its size afterwards:
// an identity that sends large events waits before its next request.
//
//	202  published; the body is {"id":N}
//	400  malformed, or not a valid topic      401, 403  the token or its topics
//	413  too large                            429  the identity's rate, or the disk is behind
//	503  the gateway is stopping: the event may have been kept, so a retry may publish twice
func (g *Gateway) ingest(w http.ResponseWriter, r *http.Request) error {
	if r.ContentLength > maxBody {
		return g.eventTooLarge()
	}
	id, err := g.identify(r, ScopeIngest)
	if err != nil {
		return unauthorized(err)
	}
	rate := g.opts.IngestRate
	if id.isShared {
		rate = g.opts.OpenIngestRate
	}
	if wait := g.limits.Take(id.key(), rate, burst(rate), time.Now()); wait > 0 {
		g.rateLimited.Add(1)
		return rateLimited("too many events of this identity", wait)
	}
	e, err := g.readEvent(w, r, id)
	if err != nil {
		return err
	}
	if err := g.checkIngest(id, e.Topic); err != nil {
		return err
	}
	if !g.isServing() {
		return unavailable("the gateway is stopping; try again")
	}
	if !id.isShared {
		g.limits.Charge(id.key(), len(e.Data)/largeData, time.Now())
	}
	e.Tenant = id.Tenant
	n, err := g.publish(r.Context(), e)
	switch {
	case errors.Is(err, ErrBusy):
		g.rateLimited.Add(1)
		return rateLimited("too many events wait for the disk", time.Second)
	case errors.Is(err, ErrStopped):
		return unavailable("the gateway is stopping; the event may have been kept")
	case err != nil:
		return err
	}
	edge.WriteJSON(w, http.StatusAccepted, fmt.Appendf(nil, `{"id":%d}`, n))
	return nil
}

// readEvent reads the body of an ingest request. It sets Topic and Data, and leaves the
// rest to the gateway, so that a client cannot choose its tenant or id.
func (g *Gateway) readEvent(w http.ResponseWriter, r *http.Request, id Identity) (e Event, err error) {
	holder := edge.Identity{Tenant: id.Tenant, Subject: id.Subject}
	body, held, err := g.opts.Bodies.Read(w, r, holder, maxBody)
	defer g.opts.Bodies.Release(holder, held) // decoded by then
	if large := (*http.MaxBytesError)(nil); errors.As(err, &large) {
		return e, g.eventTooLarge()
	}
	if share := (*manifest.Error)(nil); errors.As(err, &share) {
		return e, &httpError{status: edge.Status(share.Code), body: share}
	}
	if err != nil {
		return e, badRequest("the body could not be read")
	}
	defer strictjson.AcquireSlot(len(body))()
	var in struct {
		Topic string         `json:"topic"`
		Data  strictjson.Raw `json:"data"`
	}
	if err := strictjson.Unmarshal(body, &in); err != nil {
		return e, badRequest(`the body is {"topic":"a/b","data":<JSON>}: ` + err.Error())
	}
	if in.Topic == "" {
		return e, badRequest(`the body lacks "topic"`)
	}
	data, err := normalizeEvent(in.Topic, in.Data, g.opts.MaxData)
	switch {
	case errors.Is(err, ErrTooLarge):
		return e, g.eventTooLarge()
	case err != nil:
		return e, badRequest(err.Error())
	}
	return Event{Topic: in.Topic, Data: data}, nil
}

// checkIngest refuses topics that the identity may not publish to: those of the audit log
// and the kernel, those on which the relay reports its own observations, and those that its
// token does not cover.
func (g *Gateway) checkIngest(id Identity, topic string) error {
	isAdmin := id.Scopes.Has(ScopeAdmin)
	switch {
	case isAdminTopic(topic) && !isAdmin:
		return errAdminTopic
	case g.opts.RelayTopics != nil && g.opts.RelayTopics.Match(topic) && !isAdmin:
		return denied("only the relay publishes to this topic; choose another, or one below it")
	case !id.Topics.Match(topic):
		return errTopicNotGranted(id.Topics)
	}
	return nil
}

func (g *Gateway) eventTooLarge() error {
	return refuse(http.StatusRequestEntityTooLarge, manifest.BadRequest,
		fmt.Sprintf("an event's data has at most %d bytes, and the whole body %d", g.opts.MaxData, maxBody))
}

func (g *Gateway) isServing() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.serving
}

func healthz(w http.ResponseWriter, _ *http.Request) error {
	edge.WriteText(w, http.StatusOK, "ok\n")
	return nil
}

// readyz answers 503 as soon as the gateway refuses new requests, so that a load balancer
// stops sending them.
func (g *Gateway) readyz(w http.ResponseWriter, _ *http.Request) error {
	if g.isServing() {
		edge.WriteText(w, http.StatusOK, "ready\n")
	} else {
		edge.WriteText(w, http.StatusServiceUnavailable, "draining\n")
	}
	return nil
}

// metrics answers with the six metrics of docs/events.md. They have no labels, so it needs
// no token.
func (g *Gateway) metrics(w http.ResponseWriter, _ *http.Request) error {
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
	return nil
}

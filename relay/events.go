package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/transport/edge"
)

// Parts of a relay that can be left out (Options.Only).
const (
	PartMCP = "mcp" // boards, tools, streams, MCP
	PartSSE = "sse" // the event gateway
)

// eventTopic is the type of the log's events that came in as topic events: the topic is
// their aggregate, because it may hold what no type may.
const eventTopic = "event"

// topicName is the gateway's topic of an event of the log; "" for what is not told.
func topicName(e *kernel.Event) string {
	switch group, _, _ := strings.Cut(e.Type, "."); group {
	case eventTopic:
		return e.Aggregate
	case "call":
		return "audit"
	case "ticket", "presence", "alert", "kernel":
		if e.Type == "ticket.snapshot" || e.Type == "ticket.comments" || e.Type == "presence.snapshot" {
			return "" // what retention writes down again is no news
		}
		return group
	}
	return ""
}

// relayTopics are those of topicName that a token for ingest must not fill: an alert is a
// board's, a ticket was made here. (audit and kernel are the gateway's business.)
var relayTopics = []string{"ticket", "presence", "alert"}

// gatewayLog is the event log as the gateway sees it: one id space, every event that has
// a topic.
type gatewayLog struct{ store *eventlog.Store }

// NewGatewayLog joins an event log to a gateway.
func NewGatewayLog(store *eventlog.Store) gateway.Log { return gatewayLog{store} }

// topicPayload is the payload of an event with a topic of its own; the log takes objects only.
type topicPayload struct {
	Data json.RawMessage `json:"data"`
}

// MaxTopicData bounds the data of a topic event that goes into the log, bytes: it leaves
// room for the wrapping.
const MaxTopicData = kernel.MaxPayload - 16

// eventData is what the gateway tells of the product's own events.
type eventData struct {
	Type      string          `json:"type"`
	Aggregate string          `json:"aggregate_id"`
	CreatedAt int64           `json:"created_at"`
	Payload   json.RawMessage `json:"payload"`
}

func toTopicEvent(e *kernel.Event) (gateway.Event, bool) {
	topic := topicName(e)
	if topic == "" {
		return gateway.Event{}, false
	}
	g := gateway.Event{ID: e.Seq, Tenant: e.Tenant, Topic: topic, TimeMS: e.CreatedMS}
	var err error
	if e.Type == eventTopic {
		var w topicPayload
		err = json.Unmarshal(e.Payload, &w)
		g.Data = w.Data
	} else {
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		err = enc.Encode(eventData{e.Type, e.Aggregate, e.CreatedMS, e.Payload})
		g.Data = bytes.TrimSpace(b.Bytes())
	}
	return g, err == nil && len(g.Data) > 0 && len(g.Data) <= gateway.MaxData
}

func toLogEvent(e *gateway.Event) kernel.Event {
	payload := append(append([]byte(`{"data":`), e.Data...), '}') // as it is: json.Marshal would escape it
	return kernel.Event{Tenant: e.Tenant, Type: eventTopic, Aggregate: e.Topic, Payload: payload, CreatedMS: e.TimeMS}
}

// Append implements gateway.Log.
func (l gatewayLog) Append(ctx context.Context, e gateway.Event) (uint64, error) {
	id, err := l.store.Append(ctx, toLogEvent(&e))
	if errors.Is(err, kernel.ErrLogFull) {
		err = gateway.ErrBusy
	}
	return id, err
}

// Offer implements gateway.Log.
func (l gatewayLog) Offer(e gateway.Event) bool {
	return l.store.Offer(toLogEvent(&e))
}

// Follow implements gateway.Log.
func (l gatewayLog) Follow(ctx context.Context, after uint64, fn func(gateway.Event) error) error {
	return l.store.Follow(ctx, eventlog.Query{After: after}, topicEventsOnly(fn))
}

// Select implements gateway.Log.
func (l gatewayLog) Select(ctx context.Context, after, to uint64, fn func(gateway.Event) error) error {
	return l.store.Select(ctx, eventlog.Query{After: after, To: to}, topicEventsOnly(fn))
}

func topicEventsOnly(fn func(gateway.Event) error) func(kernel.Event) error {
	return func(k kernel.Event) error {
		if g, ok := toTopicEvent(&k); ok {
			return fn(g)
		}
		return nil
	}
}

// CanResume implements gateway.Log.
func (l gatewayLog) CanResume(after uint64) bool { return l.store.CanResume(after) }

// Last implements gateway.Log. The number behind it is the next one that is given.
func (l gatewayLog) Last() uint64 { return max(l.store.Last(), l.store.StartSeq()-1) }

// gatewayAuth lets the relay's tokens into the gateway.
type gatewayAuth struct{ r *Relay }

// Authenticate implements gateway.Authenticator.
func (i gatewayAuth) Authenticate(req *http.Request) (gateway.Identity, error) {
	token, _ := edge.Bearer(req)
	id, err := i.r.store.Verify(token, auth.ClassAgent)
	switch {
	case errors.Is(err, auth.ErrMissing):
		return gateway.Identity{}, gateway.ErrNoToken
	case errors.Is(err, auth.ErrInvalid):
		return gateway.Identity{}, err
	case err != nil: // a good token that may not do this, or no more
		return gateway.Identity{}, fmt.Errorf("%w: %w", gateway.ErrForbidden, err)
	}
	return gateway.Identity{Tenant: id.Tenant, Subject: id.Subject, Scopes: id.Scopes, Active: func() error { return i.r.store.Active(id) }}, nil
}

// openGateway makes the gateway and takes its port.
func (r *Relay) openGateway() (err error) {
	var o gateway.Options
	if r.opt.SSE != nil {
		o = *r.opt.SSE
	}
	o.Log, o.Identities, o.Logger = NewGatewayLog(r.events), gatewayAuth{r}, r.log.Named("sse")
	if o.MaxData == 0 || o.MaxData > MaxTopicData {
		o.MaxData = MaxTopicData
	}
	o.RelayTopics = relayTopics
	o.Insecure = o.Insecure || r.opt.Insecure
	if r.tls != nil && o.TLS == nil {
		o.TLS = r.tls.config()
	}
	if host, port, err := net.SplitHostPort(o.Listen); err == nil && host == "" && o.SubscribeToken == "" {
		// Where nobody said otherwise it is reachable from where the relay is.
		if host, _, err = net.SplitHostPort(r.opt.Listen); err == nil {
			o.Listen = net.JoinHostPort(host, port)
		}
	}
	r.refusals = rate.NewLimiter(refusalsPerSecond, 2*refusalsPerSecond)
	if r.gateway, err = gateway.New(o); err != nil {
		return optionError{err}
	}
	if r.gatewayListener, err = gateway.Listen(o); err != nil {
		return err
	}
	return nil
}

// SSEURL is where the gateway's stream is served; "" when there is none.
func (r *Relay) SSEURL() string {
	if r.gatewayListener == nil {
		return ""
	}
	scheme := "http"
	if r.tls != nil {
		scheme = "https"
	}
	host, port, err := net.SplitHostPort(r.gatewayListener.Addr().String())
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if r.public != nil {
			host = r.public.Hostname()
		}
	}
	return scheme + "://" + net.JoinHostPort(host, port) + gateway.StreamPath
}

// Backoff of the supervisor.
const (
	minRestartDelay = 100 * time.Millisecond
	maxRestartDelay = 10 * time.Second
	steadyAfter     = time.Minute // a part that ran this long has no crashes behind it
)

// supervise keeps a part up: it is begun again when it returns early or panics, at most
// max times in a row, with backoff. Then the error says that it was given up.
func supervise(ctx context.Context, log *zap.Logger, name string, maxRestarts int, run func(context.Context) error) error {
	for crashes := 0; ; {
		begin := time.Now()
		err := runRecovered(ctx, run)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(begin) >= steadyAfter {
			crashes = 0
		}
		if crashes >= maxRestarts {
			return fmt.Errorf("the part %s was given up after %d restarts: %w; --max-restarts allows more", name, crashes, err)
		}
		wait := min(minRestartDelay<<min(crashes, 16), maxRestartDelay) // no shift beyond 63 bits
		wait = wait/2 + rand.N(wait/2)
		crashes++
		log.Error("part crashed and is started again", zap.String("part", name), zap.Int("restart", crashes), zap.Duration("after", wait), zap.Error(err))
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

// runRecovered turns a panic and a return that nobody asked for into errors.
func runRecovered(ctx context.Context, run func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	if err = run(ctx); err == nil {
		err = errors.New("it ended by itself")
	}
	return err
}

// runGateway serves the gateway until ctx ends; a part that is given up ends the relay.
func (r *Relay) runGateway(ctx context.Context, wg *sync.WaitGroup, failed chan<- error) {
	if r.gateway == nil {
		return
	}
	first := r.gatewayListener
	wg.Go(func() {
		err := supervise(ctx, r.log, PartSSE, r.opt.MaxRestarts, func(ctx context.Context) error {
			ln := first
			if first = nil; ln == nil { // it was closed with the crash
				var err error
				if ln, err = net.Listen("tcp", r.gatewayListener.Addr().String()); err != nil {
					return err
				}
			}
			return r.gateway.Serve(ctx, ln)
		})
		if err != nil {
			failed <- err
		}
	})
}

func newLogLevel(r *Relay) control.Level {
	if r.opt.Level == nil {
		return nil
	}
	return logLevel{r}
}

// refusalsPerSecond bounds how many refused and failed calls are told under the topic audit: each
// is an event of the log, and whoever holds a token can cause as many as it likes. The
// audit log has all of them.
const refusalsPerSecond = 10

// publishRefusal tells of a call that was refused or failed. (A call of a board that
// succeeded is an event of the log already; other plugins log what they do.)
func (r *Relay) publishRefusal(rec *kernel.Record) {
	if r.gateway == nil || rec.Tenant == "" || (rec.Decision != kernel.Denied && rec.Decision != kernel.Failed) || !r.refusals.Allow() {
		return
	}
	r.gateway.Emit(rec.Tenant, "audit", struct {
		Decision kernel.Decision `json:"decision"`
		Code     manifest.Code   `json:"code"`
		Reason   string          `json:"reason,omitempty"`
		Actor    string          `json:"actor"`
		Tool     string          `json:"tool,omitempty"`
		NodeID   string          `json:"node_id,omitempty"`
		TraceID  string          `json:"trace_id"`
	}{rec.Decision, rec.Code, rec.Reason, rec.Actor, rec.Tool, rec.NodeID, rec.TraceID})
}

// logLevel is the service log's level, for the control plane.
type logLevel struct{ r *Relay }

// Level implements control.Level.
func (l logLevel) Level() string { return l.r.opt.Level.Level().String() }

// SetLevel implements control.Level, and tells subscribers of log/level.
func (l logLevel) SetLevel(to string) error {
	var lv zapcore.Level
	if lv.UnmarshalText([]byte(to)) != nil || lv < zapcore.DebugLevel || lv > zapcore.ErrorLevel {
		return manifest.E(manifest.BadRequest, "the levels are debug, info, warn and error")
	}
	previous := l.Level()
	l.r.opt.Level.SetLevel(lv)
	if l.r.gateway != nil && previous != to {
		l.r.gateway.Emit("", "log/level", map[string]string{"previous": previous, "current": to})
	}
	return nil
}

// Package gateway publishes topic events to subscribers over SSE: ingest over HTTP,
// subscription by topic, and resume after a lost connection.
//
//	g, err := gateway.New(gateway.Options{Log: log})
//	go g.Run(ctx)                                     // the listener and the delivery
//	g.Emit(tenant, "log/level", map[string]string{…}) // never blocks, never fails its caller
//
// Wire (docs/events.md; it is an event feed, not MCP's HTTP+SSE transport):
//
//	GET  /model_context_protocol/2024-11-05/sse?topics=a,log/*   Last-Event-ID: N
//	     : stream start id=<next>
//	     id: N       event: <topic>   data: <JSON>               [data: {"sig","ts","d"}]
//	     event: heartbeat             data: {"ts":ms}            no id, not in the ring
//	     event: gateway/reset         data: {"requested":N,"oldest":M[,"dropped":K]}
//	POST /model_context_protocol/2024-11-05/events  {"topic","data"} -> 202 {"id":N}
//	POST /model_context_protocol/2024-11-05/ticket  -> {"ticket","expires_at"}
//	GET  /metrics/sse, /healthz, /readyz
//
// The path of an event:
//
//	ingest, Emit ─► Log (durable) ─► follow ─► insert: ring, then each shard ─► subscribers
//	            └──────── without a Log ───────►┘
//
// An event is encoded once and its bytes are shared. A few goroutines, the shards, write
// it to all subscribers with writes that never wait (sse.Writer, policy Drop), so a
// subscriber that keeps up has no goroutine and no buffer. One that does not gets a bounded
// queue; events that exceed it are dropped for that subscriber alone, counted, and reported
// with gateway/reset once it reads again.
//
// Goroutines: Serve starts the shards, the poller of their connections, the follower of
// the log and the HTTP server, and waits for all of them. A request's goroutine sends the
// missed events up to the end of the ring (resume.go) and then hands the stream to a shard.
//
// Lock order: Gateway.mu comes before the locks inside sse. quotas.mu, tickets.mu and
// signer.mu are held for a few statements; signer.mu is taken under Gateway.mu.
package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/topic"
	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// Paths of the endpoints.
const (
	StreamPath  = "/model_context_protocol/2024-11-05/sse"
	IngestPath  = "/model_context_protocol/2024-11-05/events"
	TicketPath  = "/model_context_protocol/2024-11-05/ticket"
	MetricsPath = "/metrics/sse"
)

// Defaults and bounds.
const (
	DefaultPort  = 39300
	MaxData      = 64 << 10  // bytes of an event's compact data
	maxBody      = 128 << 10 // bytes of an ingest request
	maxRing      = 100_000   // events
	maxRingBytes = 64 << 20  // bytes of all events in the ring

	// maxBacklog bounds the events that are queued for a shard. When a shard's queue is
	// full, publishers wait, and Emit drops the event.
	maxBacklog = 1024
	// maxChunk bounds the bytes that are joined into one write. When a connection takes a
	// write in part, the remainder is kept for that subscriber, so it must be small.
	maxChunk = 16 << 10
	// maxQueued bounds the bytes that may wait for one subscriber.
	maxQueued = 256 << 10
	// maxPage bounds the bytes of the ring that are written at a time before join.
	maxPage = 64 << 10
	// stallTimeout is how long a subscriber may accept nothing before its stream ends.
	stallTimeout = 5 * time.Minute
)

// Reasons for a refused event.
var (
	ErrTopic    = errors.New("gateway: a topic begins with a letter, a digit or _, and has up to 128 characters of A-Z a-z 0-9 _ . / -")
	ErrReserved = errors.New("gateway: heartbeat and gateway/... are reserved for the gateway; choose another topic")
	ErrTooLarge = errors.New("gateway: an event's data has at most 64 KiB")
	ErrBusy     = errors.New("gateway: too many events are queued; try again")
	ErrStopped  = errors.New("gateway: stopping")
)

// Options of a Gateway. The zero value is an open gateway on loopback: it needs no token.
type Options struct {
	Listen   string      // host:port; default port 39300 of loopback, or of every address when subscribers need a token
	Insecure bool        // may be open on addresses that others reach
	TLS      *tls.Config // nil: plain HTTP
	// TrustedProxies are the proxies whose X-Forwarded-For is believed.
	TrustedProxies edge.TrustedProxies
	Heartbeat      time.Duration // default 15 s; 10 ms to 1 h
	Ring           int           // events kept for resume; default 500, at most 100,000 (and 64 MiB)

	SubscribeToken string         // bearer token of subscribers, tenant "default"
	IngestToken    string         // bearer token of ingest; default SubscribeToken
	Identities     Authenticator  // of other tokens; nil: there are none
	HMACSecret     []byte         // signs each event; nil: unsigned
	RelayTopics    topic.Patterns // published by Emit and the log; ingest into them needs kernel:admin
	AllowOrigins   []string       // web origins that may subscribe and publish, as https://host:port
	Hosts          []string       // names without port that a proxy on this machine may pass on as Host

	// IngestRate is the events per second that one identity may publish, with a burst of two
	// seconds; default 1,000. OpenIngestRate is that of all requests with a configured
	// token, or of all requests of an open gateway; default 10,000.
	IngestRate, OpenIngestRate float64

	MaxSubscribers int           // of which one identity may have half; default 16,384
	TicketTTL      time.Duration // lifetime of a ticket; default 60 s
	MaxData        int           // bytes of data; less than the constant when the log wraps them
	Shards         int           // delivering goroutines; default one per core, at most 4
	// Bodies bounds the memory of request bodies, and Conns the connections; a relay's gateway
	// shares the relay's. Default: its own.
	Bodies *edge.Bodies
	Conns  *edge.Conns
	Log    Log         // where events are durable; nil: in the ring alone
	Logger *zap.Logger // default none
}

func (o *Options) setDefaults() error {
	o.IngestToken = cmp.Or(o.IngestToken, o.SubscribeToken)
	o.Heartbeat = cmp.Or(o.Heartbeat, 15*time.Second)
	if o.Heartbeat < 10*time.Millisecond || o.Heartbeat > time.Hour {
		return fmt.Errorf("gateway: heartbeat %s: 10 ms to 1 h", o.Heartbeat)
	}
	o.Ring = cmp.Or(o.Ring, 500)
	if o.Ring < 1 || o.Ring > maxRing {
		return fmt.Errorf("gateway: ring of %d events: 1 to %d", o.Ring, maxRing)
	}
	o.IngestRate = cmp.Or(o.IngestRate, 1000)
	o.OpenIngestRate = cmp.Or(o.OpenIngestRate, 10_000)
	o.MaxSubscribers = cmp.Or(o.MaxSubscribers, 16_384)
	o.TicketTTL = cmp.Or(o.TicketTTL, time.Minute)
	o.MaxData = cmp.Or(o.MaxData, MaxData)
	o.Shards = cmp.Or(o.Shards, min(runtime.GOMAXPROCS(0), 4))
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	if o.Bodies == nil {
		o.Bodies = edge.NewBodies()
	}
	if o.Conns == nil {
		o.Conns = edge.NewConns(edge.ConnOptions{MaxOpen: edge.MaxOpenConns(), Proxies: o.TrustedProxies})
	}
	return o.checkListen()
}

// Gateway is one event gateway. Its methods may be called from any goroutine.
type Gateway struct {
	opts    Options
	handler http.Handler
	signer  *signer
	access  atomic.Pointer[Access] // see SetAccess
	guards  []*edge.Guard
	tickets *tickets
	limits  *edge.Limiter
	onReady func(addr string)

	quotas      *quotas
	replaySlots *slots
	subscribers atomic.Int64
	engine      *sse.Engine
	shards      []*shard

	ingested, emitted, emitLost, rateLimited, refusedStreams atomic.Uint64

	mu           sync.Mutex // protects the fields below, and the lists of the shards
	ring         ring
	nextShard    int             // index of the next stream's shard, modulo their number
	serving      bool            // Serve runs and accepts streams
	stopping     bool            // Serve has ended every wait for the ring or a shard
	ctx          context.Context // of Serve, nil while it does not run
	replays      sync.WaitGroup  // requests that are starting a stream
	ringGrew     chan struct{}   // closed when the ring grows; nil: nothing waits
	backlogTaken chan struct{}   // closed when a shard takes its backlog; nil: nothing waits
}

// New makes a gateway. It starts nothing; Emit may be called before Run or Serve.
func New(o Options) (*Gateway, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	g := &Gateway{
		opts: o, signer: newSigner(o.HMACSecret),
		limits: edge.NewLimiter(maxLimited, false), tickets: newTickets(o.TicketTTL),
		quotas: newQuotas(maxTotalQueued), replaySlots: newSlots(maxReplays),
		engine: sse.NewEngine(),
	}
	// Without a log, ids must be above those of an earlier process: they start at the clock,
	// which leaves 4,096 ids per millisecond and stays below 2^53, the largest exact integer
	// of JavaScript, until 2039.
	g.ring = newRing(o.Ring, uint64(time.Now().UnixMilli())<<12)
	for range o.Shards {
		g.shards = append(g.shards, newShard(g))
	}
	g.handler = g.routes()
	g.access.Store(&Access{o.SubscribeToken, o.IngestToken, o.AllowOrigins})
	return g, nil
}

// Handler returns the endpoints, for a caller with its own HTTP server; Serve without a
// listener then runs the delivery. A server with TLS needs an sse.Listener below it.
func (g *Gateway) Handler() http.Handler { return g.handler }

// OnReady sets fn to be called once the gateway listens. Call it before Run.
func (g *Gateway) OnReady(fn func(addr string)) { g.onReady = fn }

// Stats are counters since New, except the present numbers of Subscribers and of the ring.
type Stats struct {
	Subscribers int
	Connections uint64 // streams opened
	Ingested    uint64 // events put into the ring, from ingest, Emit or the log
	Delivered   uint64 // events given to a subscriber's connection or queue, replayed ones included
	Dropped     uint64 // events that a subscriber lost because it did not read
	Bytes       uint64 // written to subscribers, without HTTP heads and TLS
	Emitted     uint64 // events given to Emit
	EmitLost    uint64 // of those, not published: malformed, too large, too many
	RateLimited uint64 // ingest requests refused with 429
	RingEvents  int
	LastID      uint64
}

// SubscriberPool returns the figures of the streams.
func (g *Gateway) SubscriberPool() edge.PoolStats {
	return edge.PoolStats{InUse: g.subscribers.Load(), Limit: int64(g.opts.MaxSubscribers), Refused: g.refusedStreams.Load()}
}

// Stats returns the counters. While nothing is being delivered, Delivered + Dropped is
// the sum over all events of the subscribers that they matched.
func (g *Gateway) Stats() Stats {
	st := Stats{
		Subscribers: int(g.subscribers.Load()), Ingested: g.ingested.Load(),
		Emitted: g.emitted.Load(), EmitLost: g.emitLost.Load(), RateLimited: g.rateLimited.Load(),
	}
	for _, s := range g.shards {
		streams := s.streams.Stats()
		st.Connections += streams.Opened
		st.Delivered += streams.Frames
		st.Dropped += streams.Dropped
		st.Bytes += streams.Bytes
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	st.RingEvents, st.LastID = g.ring.n, g.ring.last
	return st
}

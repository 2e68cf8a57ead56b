// Package relay is the server half of agentctl: it puts hub, kernel, plugins, MCP handler
// and event gateway together and serves them over HTTP.
//
//	r, err := relay.Open(relay.Options{StateDir: dir})   // state, keys, listeners
//	err = r.Run(ctx)                                     // serves until ctx ends
//
// routes.go is the whole HTTP surface. options.go is what an operator can choose, and
// wiring.go connects the packages: a connected board is a plugin of the kernel
// (device_plugin.go), and the kernel's event log is what the gateway publishes (topics.go).
//
// # Source files
//
//	life of a relay      relay (Open, Run, Close), options, wiring, supervise, reload, memory (heap), maxfiles
//	HTTP                 routes, endpoints (those that can be disabled), errors, tls
//	calls                call (POST /mcp/tools/call), accept (its Accept header), stream (metric streams)
//	administration       admin (what its routes share), nodes, tokens, invites, auditing
//	joining              join
//	boards               device_link (callbacks of the hub), device_plugin, offline, device_alert,
//	                     registry_retry, clock (whether boards may link)
//	boards by name       board_label (errors and titles), fleet, fleet_events
//	events               topics, gateway, standalone_gateway
//	external plugins     plugins, bus (what they may use of the relay)
//	state on disk        event_log_record (whether the log is the right one), degraded, disk_space
//	for operators        metrics, transports, log_level, status, status_socket
//	replay of the log    live_state, verify_replay
//
// # Concurrency
//
// A request runs in the goroutine of its connection, an idle link has none, and a stream is served by a
// shard (sse.Engine). The locks of this package are leaves and held for a few statements, except
// Certificate.mu, which is held while files are read. The hub calls onDeviceReady, onDeviceGone and
// others under its callbackMu, and they call the kernel: see package hub.
package relay

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"agentctl/relay/audit"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/eventqueue"
	"agentctl/relay/gateway"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/process"
	"agentctl/relay/plugins/tickets"
	"agentctl/relay/stages"
	"agentctl/relay/storage"
	"agentctl/transport/edge"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

// Relay is an opened relay. What changes after Run has begun to serve is atomic or has a
// lock; the other fields are read without one.
//
// The life of a Relay:
//
//	Open ──> Run ── ctx ends, or a part fails ──> drain ──> Close
//	     └─> Close, when Run is not called
//
// The steps of Open make closures that use fields of later steps. Such a closure runs after Open, or
// checks the field for nil.
type Relay struct {
	opt       Options
	log       *zap.Logger
	logFilter *stages.LogFilter // removes secrets from the lines of log
	started   time.Time

	// State on disk, and what watches it.
	storage *storage.Monitor
	store   *auth.Store
	audit   *audit.Log
	events  *eventlog.Store // nil: degraded says why
	// queue is where every part of the relay appends events. It passes them on to events, and
	// keeps them in memory while the disk fails.
	queue    *eventqueue.Queue
	degraded error                            // why the relay runs without its event log, else nil
	sizes    atomic.Pointer[map[string]int64] // bytes of each store on disk; nil before they were read

	// The packages that it composes.
	kernel    *kernel.Kernel
	stages    *stages.Manager
	hub       *hub.Hub
	mcp       *mcp.Handler
	gateway   *gateway.Gateway // nil: not served
	control   *control.Plugin
	tickets   *tickets.Plugin // nil: disabled
	builtins  map[string]builtinPlugin
	processes *process.Host
	bus       *process.Bus
	clock     *clockGuard

	// Devices as plugins of the kernel.
	upgrader     *link.Upgrader
	capabilities capabilityCache
	devices      sync.Map // *hub.Node to *device
	offline      *offlineQueue
	registry     registryRetries
	sessions     linkedSessions // the hub, as joining uses it; tests replace it

	join *joinEndpoints

	// Metric streams.
	streams       sse.Streams
	streamEngine  *sse.Engine
	streamPool    *edge.Pool
	tenantStreams tenantStreams

	// The path of an HTTP request: guard checks Host and Origin, endpoints whether the
	// route is enabled.
	guard       *edge.Guard
	guards      []*edge.Guard // those that Reload changes: guard and that of /metrics
	conns       *edge.Conns
	bodies      *edge.Bodies
	endpoints   endpoints
	metrics     *counters
	refusals    *rate.Limiter // bounds publishRefusal
	adminLimits *edge.Limiter // bounds each administrator's requests, see admin.go
	strangers   *edge.Limiter // bounds log lines about each address, see mayLogStranger
	listSecret  string        // random, so that ETags of an earlier run do not match, see nodesTag

	listener, metricsListener, gatewayListener net.Listener               // nil: not served
	metricsConns                               atomic.Pointer[edge.Conns] // of metricsListener, once it serves

	tls          *tls.Config            // nil: plain HTTP
	certificate  *Certificate           // nil: not TLSFiles
	fileOrigins  []string               // what Options.AllowOriginFile has; set by Open and Reload only
	authority    *auth.Authority        // nil: not TLSOwn
	listenURL    atomic.Pointer[string] // URL of listener, see updateListenURL; nil without one
	public       *url.URL               // Options.Public; nil: clients use the listener's address
	loopback     bool                   // Options.Listen is a loopback address
	ready        atomic.Bool            // serving; else /readyz fails and device links are refused
	readingState atomic.Bool            // a liveState is in progress
	abandoned    atomic.Bool            // the disk hung when Run ended: files are not closed
	onReady      func()
}

// Open prepares a relay: state directory, keys, listeners, plugins. The steps are in the
// order of what they need: each uses only what an earlier one made. It starts no goroutine
// and serves nothing before Run. The caller calls Close if it does not call Run. An error
// of the options themselves is an *OptionError.
func Open(opt Options) (*Relay, error) {
	r, err := open(opt, nil)
	if opt.StartDegraded && opt.Listener == nil && CanStartDegraded(err) { // damage that only the replay found
		return open(opt, err)
	}
	return r, err
}

// open is Open; damage, if it is not nil, is why the event log is not opened.
func open(opt Options, damage error) (r *Relay, err error) {
	opt.setDefaults()
	logFilter := new(stages.LogFilter)
	opt.Logger = logFilter.Wrap(opt.Logger)
	r = &Relay{
		opt: opt, log: opt.Logger, logFilter: logFilter, started: time.Now(), listener: opt.Listener, degraded: damage,
		storage: storage.New(storage.Options{Logger: opt.Logger}), offline: newOfflineQueue(), join: newJoinEndpoints(), listSecret: rand.Text(),
		streamEngine: sse.NewEngine(), streamPool: edge.NewPool(maxStreams),
		conns:  edge.NewConns(edge.ConnOptions{MaxOpen: edge.MaxOpenConns(), Proxies: opt.TrustedProxies}),
		bodies: edge.NewBodies(), adminLimits: edge.NewLimiter(maxAdminCallers, true), strangers: edge.NewLimiter(maxStrangerAddresses, false),
	}
	// Handlers of streams do not block, so that more shards than cores would gain nothing.
	for range min(runtime.GOMAXPROCS(0), 4) {
		r.streamEngine.AddShard(nil)
	}
	for _, step := range []func() error{
		r.checkOptions, // these three before anything is created
		r.readOrigins,
		r.checkPlugins,
		r.listen,
		r.openState,
		r.openAuthority,
		r.newKernel,
		r.newFrontEnd,
		r.openGateway,
		r.loadPlugins,
	} {
		if err := step(); err != nil {
			_ = r.Close()
			return nil, err
		}
	}
	return r, nil
}

// listen takes the ports early, so that a taken one is reported before state is touched.
func (r *Relay) listen() (err error) {
	if r.opt.TLS == TLSFiles {
		if r.certificate, err = LoadCertificate(r.opt.TLSCert, r.opt.TLSKey); err != nil {
			return err
		}
		r.tls = r.certificate.ServerTLS()
	}
	if r.listener == nil && r.partEnabled(PartMCP) {
		if r.listener, err = edge.Listen(r.opt.Listen); err != nil {
			return fmt.Errorf("listen on %s: %w", r.opt.Listen, err)
		}
	}
	if r.opt.MetricsListen != "" {
		if r.metricsListener, err = edge.Listen(r.opt.MetricsListen); err != nil {
			return fmt.Errorf("listen on %s for /metrics: %w", r.opt.MetricsListen, err)
		}
	}
	return nil
}

// URL is the base URL that clients use, without a trailing slash: Options.Public, or the
// listener's. A relay that listens on every address names the one that other machines are most
// likely to reach.
func (r *Relay) URL() string {
	if r.public != nil {
		return strings.TrimRight(r.public.String(), "/")
	}
	if u := r.listenURL.Load(); u != nil {
		return *u
	}
	return ""
}

// OnReady sets what Run calls once, when it serves. It is called before Run.
func (r *Relay) OnReady(fn func()) { r.onReady = fn }

// MetricsURL is where /metrics is served; "" if nowhere.
func (r *Relay) MetricsURL() string {
	if r.metricsListener == nil {
		return ""
	}
	return "http://" + r.metricsListener.Addr().String() + "/metrics"
}

// Logger returns the relay's log, from which the stage redact removes secrets.
func (r *Relay) Logger() *zap.Logger { return r.log }

// Store returns the relay's identities.
func (r *Relay) Store() *auth.Store { return r.store }

// maxMetricsConns bounds the connections of the metrics listener, which needs no token.
const maxMetricsConns = 1024

// drainTimeout bounds an orderly shutdown; what is still open then is cut.
const drainTimeout = 5 * time.Second

// diskGrace is how long goroutines that use the disk may take to end once the drain's time is
// over and a store does not answer; maxDiskWait bounds their time in any case.
const (
	diskGrace   = 500 * time.Millisecond
	maxDiskWait = 30 * time.Second
)

// waitForDisk waits for a group of goroutines that use the disk: until drain ends, and then
// for as long as the stores answer. It returns false when the group has not ended; the
// goroutine that waits for it is then left behind with it.
func (r *Relay) waitForDisk(drain context.Context, wg *sync.WaitGroup) bool {
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-drain.Done():
	}
	for range maxDiskWait / diskGrace {
		select {
		case <-done:
			return true
		case <-time.After(diskGrace):
		}
		if r.storage.Stuck(storage.SlowAfter) != nil {
			return false
		}
	}
	return false
}

// Run serves until ctx ends or a part fails, and waits for the goroutines that it has
// started. It returns nil when ctx has ended, else the error of the part. It may be called
// once, since it closes the Relay at the end.
//
// Each group of goroutines has a separate context, because they end in an order:
//
//  1. streams and the gateway, whose clients get a close event (1000), and calls over MCP, which
//     have a second to end and are then answered with their outcome
//  2. device links, which get a close code (4503) and may still end their streams
//  3. HTTP requests in progress
//  4. components around the kernel, whose last events go into the log
//  5. the queue of events, and the event log, which makes them durable
func (r *Relay) Run(ctx context.Context) error {
	defer func() { _ = r.Close() }()
	if !r.opt.NoMemoryTuning {
		tuneGC()
	}
	tuneScheduler()
	// ctx ends none of these: the drain below cancels them in the order above. Each is derived from
	// what it needs, so that a component has ended before the queue, and the queue before the log.
	logCtx, stopLog := context.WithCancel(context.WithoutCancel(ctx))
	queueCtx, stopQueue := context.WithCancel(logCtx)
	components, stopComponents := context.WithCancel(queueCtx)
	streams, stopStreams := context.WithCancel(components)
	links, stopLinks := context.WithCancel(components)
	defer stopLog()
	defer stopQueue()
	defer stopComponents()
	defer stopStreams()
	defer stopLinks()

	// One group for each context above: what a context ends, its group waits for.
	var logging, queueing, background, linked, serving sync.WaitGroup
	if r.events != nil {
		logging.Go(func() { _ = r.events.Run(logCtx) })
		<-r.events.Started() // no request is served before the log takes events
	}
	queueing.Go(func() { _ = r.queue.Run(queueCtx) })
	r.runComponents(components, &background)
	background.Go(func() { _ = r.mcp.Run(streams) })
	failed := make(chan error, 5) // one for each goroutine that sends to it
	background.Go(func() {
		if err := r.streamEngine.Run(streams); streams.Err() == nil {
			failed <- err
		}
	})
	linked.Go(func() {
		if err := r.hub.Run(links); links.Err() == nil {
			failed <- err
		}
	})
	r.runGateway(streams, &background, failed)
	<-r.mcp.Started()
	srv, metricsSrv := r.serveHTTP(&serving, failed)
	r.setReady()

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	// /readyz fails from here on, so that a load balancer sends clients elsewhere while the
	// streams end. The whole drain has one budget, not one for each step.
	r.ready.Store(false)
	stopStreams()
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	_ = r.streams.Drain(drain)
	select { // calls over MCP still need the links
	case <-r.mcp.Drained():
	case <-drain.Done():
	}
	// The hub bounds its wait itself (hub.DrainTimeout): a device may be slow to close.
	stopLinks()
	linked.Wait()
	if srv.Shutdown(drain) != nil {
		_ = srv.Close()
	}
	_ = metricsSrv.Close()
	serving.Wait()
	// What is left uses the disk. The goroutines that wait for a disk that hangs never end: they
	// are left behind, and the process ends.
	stopComponents()
	stuck := !r.waitForDisk(drain, &background)
	stopQueue()
	stuck = !r.waitForDisk(drain, &queueing) || stuck
	stopLog()
	if stuck = !r.waitForDisk(drain, &logging) || stuck; stuck {
		r.abandoned.Store(true)
		r.log.Error("the disk does not answer: what was not stored yet is lost", zap.Duration("waited", drainTimeout), zap.Int("events", r.queue.Stats().Waiting))
	}
	if n := r.queue.Stats().Unreported; n > 0 {
		r.log.Error("events are missing in the event log, and no log.gap in it says so, because the relay stopped", zap.Uint64("events", n))
	}
	r.log.Info("relay stopped")
	return err
}

// serveHTTP starts the HTTP servers, each of which sends to failed when it ends.
func (r *Relay) serveHTTP(wg *sync.WaitGroup, failed chan<- error) (srv, metricsSrv *edge.Server) {
	// net/http writes errors of single connections here: failed TLS handshakes, panics.
	errorLog := zap.NewStdLog(r.log.Named("http"))
	srv = edge.NewServer(r.routes(), errorLog)
	srv.Direct = answersInPlace
	if r.listener != nil {
		// From the outside in: TLS, then the count of unacknowledged bytes by which a stalled
		// stream is found, then the bounds of connections, which refuse before TLS costs anything.
		var ln net.Listener = sse.NewListener(r.conns.Listener(r.listener, r.tls == nil))
		if r.tls != nil {
			ln = tls.NewListener(ln, r.conns.PaceTLS(r.tls))
		}
		wg.Go(func() { failed <- srv.Serve(ln) })
	}
	metricsSrv = edge.NewServer(r.metricsRoutes(), errorLog)
	metricsSrv.ReadTimeout, metricsSrv.WriteTimeout = edge.BodyTimeout, writeTimeout
	if r.metricsListener != nil {
		// Its connections have separate bounds: a flood elsewhere does not keep a monitor out.
		metricsConns := edge.NewConns(edge.ConnOptions{MaxOpen: maxMetricsConns})
		r.metricsConns.Store(metricsConns)
		ln := metricsConns.Listener(r.metricsListener, true)
		wg.Go(func() { failed <- metricsSrv.Serve(ln) })
	}
	return srv, metricsSrv
}

// setReady makes /readyz succeed, and says so.
func (r *Relay) setReady() {
	r.clock.check() // for the log
	r.ready.Store(true)
	if r.onReady != nil {
		r.onReady()
	}
	if r.opt.Insecure && !r.loopback && len(r.opt.TrustedProxies) == 0 {
		r.log.Warn("plain HTTP beyond loopback without a trusted proxy: limits by address count all clients of a proxy as one")
	}
	r.log.Info("relay ready", zap.String("url", r.URL()), zap.String("state_dir", r.opt.StateDir))
}

// Close releases listeners and state; after Run, or twice, it does nothing. It also cleans up
// after an Open that failed half-way, so any field may be nil.
func (r *Relay) Close() error {
	var errs []error
	for _, l := range []net.Listener{r.listener, r.metricsListener, r.gatewayListener} {
		if l != nil {
			if err := l.Close(); !errors.Is(err, net.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	if r.abandoned.Load() {
		return errors.Join(errs...)
	}
	closed := make(chan error, 1)
	go func() { closed <- r.closeStores() }() // not waited for if the disk hangs
	select {
	case err := <-closed:
		errs = append(errs, err)
	case <-time.After(closeTimeout):
		r.abandoned.Store(true)
		err := errors.New("the disk does not answer: files are left open; what was acknowledged is stored")
		r.log.Error(err.Error(), zap.Duration("waited", closeTimeout))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// closeTimeout bounds how long Close waits for the disk: a checkpoint of each database, and an
// unfinished write of another process.
const closeTimeout = 5 * time.Second

func (r *Relay) closeStores() error {
	var errs []error
	if r.audit != nil {
		errs = append(errs, r.audit.Close())
	}
	if r.events != nil {
		errs = append(errs, r.events.Close())
	}
	if r.store != nil {
		errs = append(errs, r.store.Close())
	}
	return errors.Join(errs...)
}

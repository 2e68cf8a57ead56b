// Package relay is the cloud side's front door: it joins the relay's rooms and serves
// them over HTTP.
//
//	r, err := relay.Open(relay.Options{StateDir: dir})   // state, keys, listeners
//	err = r.Run(ctx)                                     // serves until ctx ends
//
// routes.go is the whole HTTP surface.
package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/gateway"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/relay/pipeline"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/directory"
	"agentctl/relay/plugins/process"
	"agentctl/relay/plugins/tickets"
	"agentctl/relay/stages"
	"agentctl/transport/edge"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

// Options configure a relay.
type Options struct {
	StateDir        string
	Listen          string                               // HOST:PORT; default 127.0.0.1:8460
	Listener        net.Listener                         // served instead of Listen when not nil; Open takes it over
	MetricsListen   string                               // HOST:PORT of /metrics; "" serves none
	TLSCert         string                               // PEM files; both or none. Read again when they change
	TLSKey          string                               //
	Public          string                               // URL that clients use, when it is not the listener's
	Audience        string                               // see auth.Options
	AllowOrigin     []string                             // origins of browsers that may call; none by default
	Insecure        bool                                 // plain HTTP beyond loopback, behind a TLS proxy
	Anonymous       bool                                 // loopback only: no token needed
	Plugins         []func(*kernel.Kernel) kernel.Plugin // loaded at the start
	PluginDir       string                               // of plugins in processes of their own; default STATE/plugins
	ExternalPlugins []string                             // of these, started at the start
	Parts           []string                             // parts to run: PartMCP, PartSSE; none: PartMCP, and PartSSE when SSE is set
	SSE             *gateway.Options                     // of the event gateway; nil: there is none
	MaxRestarts     int                                  // of a part that crashes, in a row; then the relay ends
	Level           *zap.AtomicLevel                     // of Logger; nil: it cannot be changed while the relay runs
	DisabledPlugins []string                             // built-in plugins that are not loaded: PluginTickets, PluginDirectory
	// StreamQuota is the number of streams of one tenant above which a counter grows;
	// with EnforceQuota further ones are closed with 4429. 0: no quota.
	StreamQuota    int
	EnforceQuota   bool
	ScopelessUntil time.Time // see auth.Options
	Version        string
	Logger         *zap.Logger
}

// DefaultListen is where a relay listens unless told otherwise.
const DefaultListen = "127.0.0.1:8460"

// Relay is an opened relay.
type Relay struct {
	opt      Options
	log      *zap.Logger
	store    *auth.Store
	audit    *auditLog
	events   *eventlog.Store
	kernel   *kernel.Kernel
	stages   *stages.Manager
	hub      *hub.Hub
	mcp      *mcp.Handler
	streams  sse.Streams
	upgrader *link.Upgrader
	metrics  *counters
	devices  sync.Map // *hub.Node -> *device
	offline  *offlineQueue

	capabilities capabilityCache

	endpoints endpoints
	control   *control.Plugin
	gateway   *gateway.Gateway // nil: none
	refusals  *rate.Limiter
	tickets   *tickets.Plugin   // nil: left out
	directory *directory.Plugin // nil: left out
	processes *process.Host

	listener, metricsListener net.Listener
	gatewayListener           net.Listener
	tls                       *certificate // nil: plain
	public                    *url.URL
	loopback                  bool
	guard                     *edge.Guard
	ready                     atomic.Bool
	onReady                   func()
	openStreams               openStreams
}

// Open prepares a relay: state directory, keys, listeners. Nothing is served before Run.
// Close must be called when Run is not.
func Open(opt Options) (r *Relay, err error) {
	if opt.Listener != nil {
		opt.Listen = opt.Listener.Addr().String()
	} else if opt.Listen == "" {
		opt.Listen = DefaultListen
	}
	if opt.Logger == nil {
		opt.Logger = zap.NewNop()
	}
	r = &Relay{opt: opt, log: opt.Logger, offline: newOfflineQueue(), listener: opt.Listener}
	defer func() {
		if err != nil {
			_ = r.Close()
		}
	}()
	if err = r.checkOptions(); err != nil {
		return r, optionError{err}
	}
	if opt.TLSCert != "" {
		if r.tls, err = loadCertificate(opt.TLSCert, opt.TLSKey); err != nil {
			return r, err
		}
	}
	if r.listener == nil && r.partEnabled(PartMCP) {
		if r.listener, err = net.Listen("tcp", opt.Listen); err != nil {
			return r, fmt.Errorf("listen on %s: %w; choose another address with --listen", opt.Listen, err)
		}
	}
	if opt.MetricsListen != "" {
		if r.metricsListener, err = net.Listen("tcp", opt.MetricsListen); err != nil {
			return r, fmt.Errorf("listen on %s for /metrics: %w; choose another address with --metrics-listen", opt.MetricsListen, err)
		}
	}
	if r.store, err = auth.Open(auth.Options{StateDir: opt.StateDir, Audience: opt.Audience, ScopelessUntil: opt.ScopelessUntil, Logger: opt.Logger}); err != nil {
		return r, err
	}
	if r.audit, err = openAudit(opt.StateDir); err != nil {
		return r, err
	}
	if err = r.openEventLog(); err != nil {
		return r, err
	}
	if err = r.build(); err != nil {
		return r, err
	}
	if r.partEnabled(PartSSE) {
		if err = r.openGateway(); err != nil {
			return r, err
		}
	}
	return r, r.loadPlugins()
}

// ErrOptions is what an error of Open is (errors.Is) when the Options cannot be served.
var ErrOptions = errors.New("relay: bad options")

type optionError struct{ error }

func (optionError) Is(target error) bool { return target == ErrOptions }

// partEnabled tells whether a part is served.
func (r *Relay) partEnabled(part string) bool {
	if len(r.opt.Parts) > 0 {
		return slices.Contains(r.opt.Parts, part)
	}
	return part == PartMCP || r.opt.SSE != nil
}

func (r *Relay) checkOptions() error {
	o := &r.opt
	for _, part := range o.Parts {
		if part != PartMCP && part != PartSSE {
			return fmt.Errorf("--only %s: the parts are %s and %s", part, PartMCP, PartSSE)
		}
	}
	if o.MaxRestarts < 0 {
		return errors.New("--max-restarts cannot be below 0")
	}
	host, _, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return fmt.Errorf("--listen %s is not HOST:PORT", o.Listen)
	}
	r.loopback = edge.IsLoopback(host)
	if (o.TLSCert == "") != (o.TLSKey == "") {
		return errors.New("--tls-cert and --tls-key go together")
	}
	switch {
	case !r.loopback && o.TLSCert == "" && !o.Insecure:
		return fmt.Errorf("refusing plain HTTP on %s: tokens would cross the network in the clear; give --tls-cert and --tls-key, or --insecure behind a TLS proxy", o.Listen)
	case o.Anonymous && !r.loopback:
		return fmt.Errorf("--anonymous is for loopback only, not for %s", o.Listen)
	}
	if o.Public != "" {
		u, err := url.Parse(o.Public)
		if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
			return fmt.Errorf("--public %s is not an http or https URL", o.Public)
		}
		r.public = u
	}
	for _, a := range o.AllowOrigin {
		u, err := url.Parse(a)
		if err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" {
			return fmt.Errorf("--allow-origin %s is not of the form https://HOST[:PORT]", a)
		}
	}
	return nil
}

// build builds the rooms; the order is the order of dependence.
func (r *Relay) build() error {
	r.metrics = newCounters()
	if err := r.newKernel(); err != nil {
		return err
	}
	r.hub = hub.New(hub.Options{
		Authenticate:       r.authenticateDevice,
		ValidateCapability: r.capabilities.validate,
		CheckResult:        manifest.CheckResult,
		CheckSample:        manifest.CheckFrame,
		EncodeSSE:          encodeFrame,
		OnAnnounce:         r.onDeviceAnnounce,
		OnReady:            r.onDeviceReady,
		OnGone:             r.onDeviceGone,
		SaveLastSeen:       func(ids []string) { r.store.MarkSeen(ids...) },
		OnPing:             r.onDevicePing,
		GrantRevision:      r.store.Revision,
		OnDeviceEvent:      r.onDeviceEvent,
		Audit:              r.auditDevice,
	})
	var hosts []string
	if r.public != nil { // a proxy on this machine may pass the public name on
		hosts = append(hosts, r.public.Hostname())
	}
	r.guard = edge.NewGuard(edge.GuardOptions{CheckHost: r.loopback, Hosts: hosts, Origins: r.opt.AllowOrigin})
	r.mcp = mcp.New(mcp.Options{
		Kernel: r.kernel, Authenticate: r.mcpCaller, OnDenied: r.writeDenied, Version: r.opt.Version, Logger: r.log,
		Guard:           r.guard,
		OnSessionClosed: func(id string) { r.stages.Forget(pipeline.Scope{Kind: pipeline.Connection, Name: id}) },
	})
	r.upgrader = link.NewUpgrader(r.guard.OriginAllowed)
	return nil
}

// URL is the base URL that clients use: Public, or the listener's.
func (r *Relay) URL() string { return r.base() }

func (r *Relay) base() string {
	if r.public != nil {
		s := r.public.String()
		for len(s) > 0 && s[len(s)-1] == '/' {
			s = s[:len(s)-1]
		}
		return s
	}
	if r.listener == nil {
		return ""
	}
	scheme := "http"
	if r.tls != nil {
		scheme = "https"
	}
	return scheme + "://" + r.listener.Addr().String()
}

// OnReady sets what Run calls once, when it serves. It is set before Run.
func (r *Relay) OnReady(fn func()) { r.onReady = fn }

// MetricsURL is where /metrics is served; "" if nowhere.
func (r *Relay) MetricsURL() string {
	if r.metricsListener == nil {
		return ""
	}
	return "http://" + r.metricsListener.Addr().String() + "/metrics"
}

// Store gives the relay's identities, for the demo and tests.
func (r *Relay) Store() *auth.Store { return r.store }

// Run serves until ctx ends, then closes in order: streams (1000), device links (4503),
// HTTP. It returns nil after a clean end.
func (r *Relay) Run(ctx context.Context) error {
	defer func() { _ = r.Close() }()
	tuneGC()
	srv := r.server(r.routes())
	// The log outlives the rooms, whose last events it keeps; they outlive ctx until the
	// streams and links have been closed properly.
	logging, stopLog := context.WithCancel(context.WithoutCancel(ctx))
	rooms, stopRooms := context.WithCancel(logging)
	streams, stopStreams := context.WithCancel(rooms)
	links, stopLinks := context.WithCancel(rooms)
	defer stopLog()
	defer stopRooms()
	defer stopStreams()
	defer stopLinks()
	r.openStreams.ctx = streams

	var log, background, linked sync.WaitGroup
	log.Go(func() { _ = r.events.Run(logging) })
	<-r.events.Started() // nobody is served before the log takes events
	r.runComponents(rooms, &background)
	background.Go(func() { _ = r.mcp.Run(streams) })
	background.Go(func() { _ = r.store.Run(rooms) })
	background.Go(func() { r.audit.run(rooms) })
	background.Go(func() { newMemoryTuner(func() uint64 { return r.hub.Stats().Accepted }).run(rooms) })
	background.Go(func() { r.openStreams.closeRevoked(rooms) })
	failed := make(chan error, 4)
	linked.Go(func() {
		if err := r.hub.Run(links); links.Err() == nil {
			failed <- err
		}
	})
	var serving sync.WaitGroup
	if r.listener != nil {
		var ln net.Listener = sse.NewListener(r.listener)
		if r.tls != nil {
			ln = tls.NewListener(ln, r.tls.config())
		}
		serving.Go(func() { failed <- srv.Serve(ln) })
	}
	r.runGateway(streams, &background, failed)
	ms := r.server(r.metricsRoutes())
	ms.ReadTimeout, ms.WriteTimeout = edge.BodyTimeout, writeTimeout
	if r.metricsListener != nil {
		serving.Go(func() { failed <- ms.Serve(r.metricsListener) })
	}
	r.ready.Store(true)
	if r.onReady != nil {
		r.onReady()
	}
	r.log.Info("relay ready", zap.String("url", r.base()), zap.String("state_dir", r.opt.StateDir))

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	r.ready.Store(false)
	stopStreams()
	drain, cancel := context.WithTimeout(rooms, drainTimeout)
	_ = r.streams.Drain(drain)
	stopLinks()
	linked.Wait()
	if e := srv.Shutdown(drain); e != nil {
		_ = srv.Close()
	}
	_ = ms.Close()
	serving.Wait()
	cancel()
	stopRooms()
	background.Wait()
	stopLog()
	log.Wait()
	r.log.Info("relay stopped")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// drainTimeout bounds the polite part of a shutdown.
const drainTimeout = 5 * time.Second

func (r *Relay) server(h http.Handler) *http.Server {
	return edge.NewServer(h, zap.NewStdLog(r.log.Named("http")))
}

// Close gives the listeners and the state back; after Run it does nothing.
func (r *Relay) Close() error {
	var errs []error
	for _, l := range []net.Listener{r.listener, r.metricsListener, r.gatewayListener} {
		if l != nil {
			if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	if r.audit != nil {
		errs = append(errs, r.audit.close())
	}
	if r.events != nil {
		errs = append(errs, r.events.Close())
	}
	if r.store != nil {
		errs = append(errs, r.store.Close())
	}
	return errors.Join(errs...)
}

// recordDecision receives the kernel's records.
func (r *Relay) recordDecision(rec kernel.Record) {
	r.audit.write(&rec)
	r.metrics.countDecision(&rec)
	r.publishRefusal(&rec)
}

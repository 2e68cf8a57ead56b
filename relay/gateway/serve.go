package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// ErrOpenToOthers refuses an address that other machines can reach while subscribers need no
// token, unless Options.Insecure allows it.
var ErrOpenToOthers = errors.New("others reach this address and subscribers need no token: set MCP_SSE_AUTH_TOKEN or listen on 127.0.0.1")

// needsToken reports whether subscribers need a token.
func (o *Options) needsToken() bool { return o.SubscribeToken != "" || o.Identities != nil }

// checkListen completes Listen. An empty host is every address, or loopback when no token
// is needed. An address that other machines can reach is refused when no token is needed.
func (o *Options) checkListen() error {
	o.Listen = cmp.Or(o.Listen, ":"+strconv.Itoa(DefaultPort))
	isOpen := !o.needsToken() && !o.Insecure
	host, port, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return fmt.Errorf("gateway: listen address %q: %w", o.Listen, err)
	}
	if host == "" && isOpen {
		o.Listen, host = net.JoinHostPort("127.0.0.1", port), "127.0.0.1"
	}
	if isOpen && !edge.IsLoopback(host) {
		return fmt.Errorf("gateway: listen on %s: %w", o.Listen, ErrOpenToOthers)
	}
	return nil
}

// Listen listens on the port of a gateway with these options, for a caller that checks early
// whether the port is free. Pass the listener to Serve.
func Listen(o Options) (net.Listener, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	ln, err := edge.Listen(o.Listen)
	// The default port is within Linux's range of ephemeral ports, so any client on this
	// machine may hold it by chance. Say how to find out.
	if errors.Is(err, syscall.EADDRINUSE) {
		_, port, _ := net.SplitHostPort(o.Listen)
		return nil, fmt.Errorf("gateway: %s is in use: another gateway, or a client's own port (39300 is among those that Linux hands out); "+
			"see who: ss -tanp 'sport = :%s'; take another: MCP_SSE_PORT=40000: %w", o.Listen, port, err)
	}
	if err != nil {
		return nil, fmt.Errorf("gateway: listen on %s: %w", o.Listen, err)
	}
	return ln, nil
}

// Run listens and serves until ctx ends. It waits for all goroutines that it started.
func (g *Gateway) Run(ctx context.Context) error {
	ln, err := Listen(g.opts)
	if err != nil {
		return err
	}
	return g.Serve(ctx, ln)
}

// Serve is Run on an open listener, which it closes. ln is nil when the caller serves Handler
// itself. Serve returns nil when ctx ended, else the error that stopped it. It may be called
// again afterwards and continues with the same ring.
//
// It ends in this order: new requests are refused; requests under way are answered, for 5 s
// at most; waits for the ring or a shard end; streams that are starting end; the shards
// close the open streams; last, the follower and the listener end.
func (g *Gateway) Serve(ctx context.Context, ln net.Listener) error {
	if ln != nil {
		defer func() { _ = ln.Close() }()
	}
	streams, endStreams := context.WithCancelCause(context.WithoutCancel(ctx))
	defer endStreams(nil)
	after, err := g.begin(streams)
	if err != nil {
		return err
	}
	engine, endEngine := context.WithCancel(context.WithoutCancel(ctx))
	defer endEngine()
	var others sync.WaitGroup
	failed := make(chan error, 3)
	goOrFail := func(run func() error) {
		others.Go(func() {
			if err := run(); err != nil {
				failed <- err
			}
		})
	}
	goOrFail(func() error { return g.engine.Run(engine) })
	if g.opts.Log != nil {
		goOrFail(func() error { return g.follow(streams, after) })
	}
	srv := edge.NewServer(g.handler, stdlog.New(io.Discard, "", 0)) // it would log failed handshakes and port scans
	if ln != nil {
		goOrFail(func() error {
			if err := srv.Serve(g.wrap(ln)); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("gateway: %w", err)
			}
			return nil
		})
		g.announce(ln.Addr().String())
	}
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	g.refuseNew()
	wait, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	if srv.Shutdown(wait) != nil {
		_ = srv.Close()
	}
	done()
	g.stop()
	endStreams(ErrStopped)
	g.replays.Wait()
	endEngine()
	others.Wait()
	return err
}

// announce logs that the gateway listens, and calls OnReady.
func (g *Gateway) announce(addr string) {
	g.opts.Logger.Info("event gateway ready", zap.String("listen", addr), zap.Bool("token", g.opts.needsToken()), zap.Bool("log", g.opts.Log != nil))
	if g.onReady != nil {
		g.onReady(addr)
	}
}

// begin accepts streams, which end with ctx, and returns the position from which to follow
// the log.
func (g *Gateway) begin(ctx context.Context) (after uint64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx != nil {
		return 0, errors.New("gateway: it is running already")
	}
	if g.opts.Log != nil && g.ring.n == 0 {
		g.ring.restart(g.opts.Log.Last())
	}
	g.ctx, g.serving, g.stopping = ctx, true, false
	return g.ring.last, nil
}

// refuseNew refuses new streams and events; requests under way are answered.
func (g *Gateway) refuseNew() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.serving = false
}

// stop ends every wait for the ring or for a shard.
func (g *Gateway) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopping, g.ctx = true, nil
	broadcastLocked(&g.ringGrew)
	broadcastLocked(&g.backlogTaken)
}

// wrap puts TLS above the counting listener. It offers HTTP/1.1 alone, since a stream takes
// its connection over.
func (g *Gateway) wrap(ln net.Listener) net.Listener {
	ln = sse.NewListener(g.opts.Conns.Listener(ln, g.opts.TLS == nil))
	if g.opts.TLS == nil {
		return ln
	}
	cfg := g.opts.Conns.PaceTLS(g.opts.TLS)
	cfg.NextProtos = []string{"http/1.1"}
	return tls.NewListener(ln, cfg)
}

package gateway

import (
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

// needsToken reports whether subscribers need a token.
func (o *Options) needsToken() bool { return o.SubscribeToken != "" || o.Identities != nil }

// checkListen completes Listen. An empty host is loopback for an open gateway and every
// address for a guarded one; an open one beyond loopback is refused.
func (o *Options) checkListen() error {
	if o.Listen == "" {
		o.Listen = ":" + strconv.Itoa(DefaultPort)
	}
	host, port, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return fmt.Errorf("gateway: listen address %q: %w", o.Listen, err)
	}
	if host == "" && !o.needsToken() && !o.Insecure {
		o.Listen, host = net.JoinHostPort("127.0.0.1", port), "127.0.0.1"
	}
	if !edge.IsLoopback(host) && !o.needsToken() && !o.Insecure {
		return fmt.Errorf("gateway: %s is reachable by others and subscribers need no token: set MCP_SSE_AUTH_TOKEN, listen on 127.0.0.1, or pass --insecure", o.Listen)
	}
	return nil
}

// Listen takes the port that New with the same options would serve, for a caller who
// wants to know early that it is free. Hand it to Serve.
func Listen(o Options) (net.Listener, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", o.Listen)
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

// Run listens and serves until ctx ends; it waits for all that it started.
func (g *Gateway) Run(ctx context.Context) error {
	ln, err := Listen(g.opts)
	if err != nil {
		return err
	}
	return g.Serve(ctx, ln)
}

// Serve is Run on a listener that is open; it closes it. Nil: the handler is served
// elsewhere. It may be called again after it has returned, and then goes on with its
// ring. It returns nil when ctx ended, or why it cannot go on.
func (g *Gateway) Serve(ctx context.Context, ln net.Listener) error {
	if ln != nil {
		defer func() { _ = ln.Close() }()
	}
	poller, err := sse.NewPoller()
	if err != nil {
		return err
	}
	inner, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // ends after the requests
	polling, endPolling := context.WithCancel(context.WithoutCancel(ctx))
	after, err := g.begin(inner)
	if err != nil {
		cancel(err)
		endPolling()
		_ = poller.Run(polling) // closes it
		return err
	}
	var shards, others sync.WaitGroup
	failed := make(chan error, 3)
	for _, s := range g.shards {
		shards.Go(func() { s.run(inner, poller) })
	}
	others.Go(func() {
		if err := poller.Run(polling); polling.Err() == nil {
			failed <- err
		}
	})
	if g.opts.Log != nil {
		others.Go(func() {
			if err := g.follow(inner, after); err != nil {
				failed <- err
			}
		})
	}
	var srv *http.Server
	if ln != nil {
		srv = edge.NewServer(g.handler, stdlog.New(io.Discard, "", 0)) // it would log handshakes and scanners
		others.Go(func() {
			if err := srv.Serve(g.wrap(ln)); !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("gateway: %w", err)
			}
		})
		addr := ln.Addr().String()
		g.addr.Store(&addr)
		g.log.Info("event gateway ready", zap.String("listen", addr), zap.Bool("token", g.opts.needsToken()), zap.Bool("log", g.opts.Log != nil))
		if g.onReady != nil {
			g.onReady(addr)
		}
	}
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	g.mu.Lock()
	g.serving = false // no new subscribers or events; requests under way are answered
	g.mu.Unlock()
	if srv != nil {
		wait, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		if srv.Shutdown(wait) != nil {
			_ = srv.Close()
		}
		done()
	}
	g.stop()
	cancel(ErrStopped)
	g.replays.Wait()
	shards.Wait()
	endPolling()
	others.Wait()
	return err
}

// begin lets clients in and says from where the log is to be followed.
func (g *Gateway) begin(ctx context.Context) (after uint64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx != nil {
		return 0, errors.New("gateway: it runs already")
	}
	if g.opts.Log != nil && g.ring.n == 0 {
		g.ring.restart(g.opts.Log.Last())
	}
	g.ctx, g.serving, g.stopping = ctx, true, false
	return g.ring.last, nil
}

// stop lets go of all that waits in here.
func (g *Gateway) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopping, g.ctx = true, nil
	broadcastLocked(&g.ringGrew)
	broadcastLocked(&g.backlogTaken)
}

// wrap puts TLS above the counting listener. HTTP/1.1 only: a stream is a connection.
func (g *Gateway) wrap(ln net.Listener) net.Listener {
	ln = sse.NewListener(ln)
	if g.opts.TLS == nil {
		return ln
	}
	cfg := g.opts.TLS.Clone()
	cfg.NextProtos = []string{"http/1.1"}
	return tls.NewListener(ln, cfg)
}

package relay

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"

	"agentctl/relay/eventlog"
	"agentctl/relay/gateway"
)

// ServeGateway runs an event gateway without a relay until ctx ends. With a directory it
// keeps events there, so that they are on the disk before they are accepted; without, they
// are in memory only. onReady is called with the gateway's URL for a client on this machine, and the gateway.
// An error of the options is an *OptionError.
//
// The log outlives the gateway, since what was accepted must still get to the disk: deferred
// calls stop it after Run has returned, and then close its file. When the log fails, the
// gateway ends with the log's error.
func ServeGateway(ctx context.Context, o gateway.Options, dir string, onReady func(baseURL string, g *gateway.Gateway)) (err error) {
	gatewayCtx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	if dir != "" {
		store, err := eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName), Logger: o.Logger.Named("events")})
		if err != nil {
			return err
		}
		defer func() { _ = store.Close() }()
		o.Log, o.MaxData = NewGatewayLog(store), MaxTopicData
		defer runStore(store, fail)()
	}
	g, err := gateway.New(o)
	if err != nil {
		return &OptionError{"SSE", err}
	}
	g.OnReady(func(addr string) { onReady(baseURL(reachableAddr(addr, "127.0.0.1"), o.TLS != nil), g) })
	if err = g.Run(gatewayCtx); err == nil && ctx.Err() == nil {
		err = context.Cause(gatewayCtx)
	}
	return err
}

// runStore runs the event log until stop is called, and calls fail when it ends before. It
// returns once the log takes events: the gateway would otherwise refuse its first ones.
func runStore(store *eventlog.Store, fail func(error)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := store.Run(ctx); ctx.Err() == nil {
			fail(fmt.Errorf("the event log stopped: %w", err))
		}
	})
	<-store.Started()
	return func() {
		cancel()
		wg.Wait()
	}
}

// baseURL is the URL of a listener's address, without a trailing slash.
func baseURL(addr string, isTLS bool) string {
	if isTLS {
		return "https://" + addr
	}
	return "http://" + addr
}

// reachableAddr is addr with host in place of an unspecified address (0.0.0.0, ::), to which
// a client cannot connect everywhere.
func reachableAddr(addr, host string) string {
	h, port, _ := net.SplitHostPort(addr)
	if ip := net.ParseIP(h); h != "" && !ip.IsUnspecified() {
		host = h
	}
	return net.JoinHostPort(host, port)
}

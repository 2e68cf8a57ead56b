package main

import (
	"context"
	"crypto/tls"
	"errors"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// deviceOptions describe one device of this process: the machine itself or a mock board.
type deviceOptions struct {
	Relay      string // "" works alone
	TLS        *tls.Config
	Token      func() (string, error)
	Name       string
	InstanceID string
	Source     prober.Source // nil: the machine
	Interval   time.Duration
	DiskPath   string        // "": /
	Modules    []string      // of the prober
	Dialing    chan struct{} // when not nil, bounds how many dial at a time
	OnReady    func(link.AuthOK)
	Logger     *zap.Logger
}

// device is a prober, its handlers and the link to the relay.
type device struct {
	prober *prober.Prober
	clock  *clock.Clock
	mux    *handlers.Mux

	mu     sync.Mutex         // protects the fields below
	client *link.Client       // nil without a relay
	unlink context.CancelFunc // ends the client that runs
}

// newDevice builds a device; floor is the moment that has surely passed.
func newDevice(o deviceOptions, floor time.Time) (*device, error) {
	d := &device{clock: clock.New(floor)}
	d.prober = prober.New(prober.Options{
		Interval: o.Interval, Source: o.Source, Logger: o.Logger, DiskPath: o.DiskPath, Modules: o.Modules,
		Now: func() int64 {
			ms, ok := d.clock.NowMS()
			if !ok {
				return 0 // below every floor: kept here, not sent
			}
			return ms
		},
	})
	var err error
	d.mux, err = handlers.New(handlers.Options{}, handlers.NewEcho(d.clock.NowMS), handlers.NewMetrics(d.prober, d.clock.NowMS))
	if err != nil {
		return nil, err
	}
	d.client = d.newClient(o)
	return d, nil
}

// newClient makes the device's end of a link, nil without a relay.
func (d *device) newClient(o deviceOptions) *link.Client {
	if o.Relay == "" {
		return nil
	}
	if o.TLS != nil { // a board that boots in 1970 still has to check certificates
		o.TLS = o.TLS.Clone()
		o.TLS.Time = d.clock.TLSTime
	}
	return link.NewClient(link.ClientOptions{
		Dial: func(ctx context.Context) (link.Conn, error) {
			if o.Dialing != nil {
				select {
				case o.Dialing <- struct{}{}:
					defer func() { <-o.Dialing }()
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			return link.Dial(ctx, o.Relay, link.DialOptions{TLS: o.TLS})
		},
		Token: o.Token, Version: version, InstanceID: o.InstanceID, Name: o.Name,
		Handler: d.mux, Clock: d.clock, OnReady: o.OnReady, OnCall: logCall(o.Logger), OnState: logState(o.Logger), IsUntrusted: link.IsUntrustedCertificate,
	})
}

// relink puts another link in the place of the one there is.
func (d *device) relink(o deviceOptions) {
	client := d.newClient(o)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.client = client
	if d.unlink != nil {
		d.unlink()
	}
}

// link is the device's end of the link, nil without a relay.
func (d *device) link() *link.Client {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.client
}

// runLink keeps the link, and whatever comes in its place, until ctx ends.
func (d *device) runLink(ctx context.Context) error {
	for {
		round, cancel := context.WithCancel(ctx)
		d.mu.Lock()
		client := d.client
		d.unlink = cancel
		d.mu.Unlock()
		if client == nil {
			<-round.Done()
		} else if err := client.Run(round); round.Err() == nil {
			cancel()
			return err
		}
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// logCall logs calls with the caller's trace id; never arguments or results.
func logCall(log *zap.Logger) func(string, string, time.Duration, error) {
	return func(tool, traceID string, took time.Duration, err error) {
		ce := log.Check(zap.DebugLevel, "call")
		if ce == nil {
			return
		}
		fields := make([]zap.Field, 0, 4)
		if _, ok := manifest.ParseToolName(tool); ok { // else it is anybody's text
			fields = append(fields, zap.String("tool", tool))
		}
		if len(traceID) == 32 {
			fields = append(fields, zap.String("trace_id", traceID))
		}
		fields = append(fields, zap.Duration("took", took))
		if err != nil {
			fields = append(fields, zap.String("code", string(manifest.AsError(err).Code)))
		}
		ce.Write(fields...)
	}
}

// logState logs a link's changes once each, with what to do.
func logState(log *zap.Logger) func(link.Status) {
	var last link.State
	return func(s link.Status) {
		if s.State == last {
			return
		}
		last = s.State
		fields := []zap.Field{zap.String("state", string(s.State))}
		if s.State != link.StateReady && s.State != link.StateConnecting {
			fields = append(fields, zap.String("error", s.LastErr), zap.Int("close", s.LastCode), zap.String("hint", linkHint(s)))
		}
		log.Info("link", fields...)
	}
}

// linkHint is the next step for a link that is down.
func linkHint(s link.Status) string {
	switch {
	case s.State == link.StateTLSUntrusted:
		return "the relay's certificate is not trusted: pass its authority with --ca-file"
	case s.LastCode == link.CloseAuthFailed, s.LastCode == link.CloseForbidden:
		return "the relay does not accept the token: mint one with `agentctl token create --class device` and put it into --token-file"
	case strings.HasPrefix(s.LastErr, "read the token"), strings.HasPrefix(s.LastErr, "token file"):
		return "put the board's token there; it is read again before each try"
	case strings.Contains(s.LastErr, "answered HTTP 4"), strings.Contains(s.LastErr, "does not look like a TLS handshake"):
		return "what answers there is no agentctl relay, or one serves TLS and the other does not: check the relay's URL, wss:// or ws://"
	case s.LastCode == link.CloseManifestInvalid, s.LastCode == link.CloseUpgradeRequired:
		return "the relay speaks another version: update agentctl on both sides"
	case s.CloneSuspected:
		return "another install uses the same token: give every board a token of its own"
	}
	return "it is tried again by itself; check the relay's URL and network if this lasts"
}

// run serves the device until ctx ends and waits for its parts.
func (d *device) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return runAll(ctx, cancel, d.prober.Run, d.runLink)
}

// runUntil runs the device and part until either ends; the device ends after part, so
// that part's last requests find what they ask about.
func (d *device) runUntil(part func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		device, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		return runAll(ctx, cancel,
			func(context.Context) error { return d.run(device) },
			func(ctx context.Context) error { defer stop(); return part(ctx) })
	}
}

// runAll runs parts together; the first that ends ends the others. It returns the first
// error that is no cancellation.
func runAll(ctx context.Context, cancel context.CancelFunc, parts ...func(context.Context) error) error {
	errs := make(chan error, len(parts))
	for _, p := range parts {
		go func() { errs <- p(ctx) }()
	}
	var first error
	for range parts {
		err := <-errs
		cancel()
		if first == nil && err != nil && !errors.Is(err, context.Canceled) {
			first = err
		}
	}
	return first
}

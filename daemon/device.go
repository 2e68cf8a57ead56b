package daemon

import (
	"context"
	"crypto/tls"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/handlers"
	"agentctl/prober"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// deviceOptions describe one device of this process: the machine itself or a mock board.
type deviceOptions struct {
	Relay      string                 // URL; "": no relay
	TLS        *tls.Config            // nil: the system's authorities
	Token      func() (string, error) // called before each connection
	Name       string                 // shown by the relay; "": none
	Version    string
	InstanceID string        // identifies this installation, so that the relay detects copied tokens
	Source     prober.Source // nil: the machine
	Interval   time.Duration // base cadence
	DiskPath   string        // "": /
	// Synchronized reports whether the system clock is right; nil: nobody knows.
	Synchronized func() bool
	Enabled      func(capID string) bool                             // which capabilities to announce; nil: all
	Inspection   []handlers.Handler                                  // of kinds that read something of the machine
	History      handlers.Recorded                                   // what the device records; nil: it has no history to query
	DialSlots    chan struct{}                                       // its capacity bounds how many devices dial at a time; nil: no bound
	Joined       bool                                                // by a credential, which the hints for a link that is down depend on
	Sign         func(nonce, token string) (proof string, err error) // see link.ClientOptions; nil: none
	OnReady      func(link.AuthOK)
	OnState      func(link.Status) // nil: none
	Log          *zap.Logger
}

// device is a prober, the handlers of its tools and the link to the relay.
//
// prober, clock and mux are set once and safe for concurrent use. Only the client changes, when
// a reload changes the relay, the token's file or the name.
type device struct {
	prober *prober.Prober
	clock  *clock.Clock
	mux    *handlers.Mux

	mu       sync.Mutex         // protects the fields below
	client   *link.Client       // nil without a relay
	stopLink context.CancelFunc // ends the client that runs; nil before runLink
}

// newDevice builds a device. floor is a time that has certainly passed; the clock of a
// board without a battery may start before it.
func newDevice(o deviceOptions, floor time.Time) (*device, error) {
	d := &device{clock: clock.New(floor, o.Synchronized)}
	d.prober = prober.New(prober.Options{
		Interval: o.Interval, Source: o.Source, Logger: o.Log, DiskPath: o.DiskPath,
		Now: func() int64 {
			ms, ok := d.clock.NowMS()
			if !ok {
				return 0 // below every floor: the sample stays here and is not sent
			}
			return ms
		},
	})
	var err error
	served := []handlers.Handler{handlers.NewEcho(d.clock.NowMS), handlers.NewMetrics(d.prober, d.clock.NowMS)}
	if o.History != nil {
		served = append(served, handlers.NewHistory(o.History, d.clock.NowMS))
	}
	d.mux, err = handlers.New(handlers.Options{}, append(served, o.Inspection...)...)
	if err != nil {
		return nil, err
	}
	if o.Enabled != nil {
		d.mux.SetEnabled(o.Enabled)
	}
	d.client = d.newClient(o)
	return d, nil
}

// setEnabled enables the capabilities for which enabled is true, and announces them if that changed
// anything.
func (d *device) setEnabled(enabled func(capID string) bool) {
	if !d.mux.SetEnabled(enabled) {
		return
	}
	if c := d.link(); c != nil {
		c.Announce()
	}
}

// newClient makes the device's end of a link, nil without a relay.
func (d *device) newClient(o deviceOptions) *link.Client {
	if o.Relay == "" {
		return nil
	}
	if o.TLS != nil { // a board whose clock starts in 1970 must check certificates too
		o.TLS = o.TLS.Clone()
		o.TLS.Time = d.clock.TLSTime
	}
	onState := logStates(o.Log, o.Joined)
	if o.OnState != nil {
		log := onState
		onState = func(s link.Status) { log(s); o.OnState(s) }
	}
	return link.NewClient(link.ClientOptions{
		Dial: func(ctx context.Context) (link.Conn, error) {
			// The slot is held for the dial only: a fleet of mock boards would otherwise start
			// all its TLS handshakes at once.
			if o.DialSlots != nil {
				select {
				case o.DialSlots <- struct{}{}:
					defer func() { <-o.DialSlots }()
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			return link.Dial(ctx, o.Relay, link.DialOptions{TLS: o.TLS})
		},
		Token: o.Token, Version: o.Version, InstanceID: o.InstanceID, Name: o.Name,
		Handler: d.mux, Clock: d.clock, OnReady: o.OnReady, OnCall: logCalls(o.Log), Sign: o.Sign, OnState: onState, IsUntrusted: link.IsUntrustedCertificate,
	})
}

// run serves the device until ctx ends and waits for its parts.
//
// It serves mock boards. Daemon.Run starts the two parts itself, because there they have to outlive
// the services.
func (d *device) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	g := group{stop: stop}
	g.start(ctx, d.prober.Run)
	g.start(ctx, d.runLink)
	return g.wait()
}

// runLink maintains the link until ctx ends. When replaceLink ends a client, runLink runs the
// next one.
//
// replaceLink stores the next client and cancels the present one's context under one lock, so
// that runLink, which takes both under the same lock, never runs a client that was replaced.
// An end without a cancellation is an error that no reconnection repairs.
func (d *device) runLink(ctx context.Context) error {
	for ctx.Err() == nil {
		clientCtx, stop := context.WithCancel(ctx)
		d.mu.Lock()
		client := d.client
		d.stopLink = stop
		d.mu.Unlock()
		if client == nil {
			// Without a relay, wait until replaceLink opens a link or ctx ends.
			<-clientCtx.Done()
		} else if err := client.Run(clientCtx); clientCtx.Err() == nil {
			stop()
			return err
		} else if next := d.link(); next != nil && next != client {
			next.TakeEvents(client) // that the link could not write before it ended
		}
		stop()
	}
	return ctx.Err()
}

// replaceLink ends the present link and opens another, or none.
//
// It does not wait for the old link to close: the relay resolves two links of one board. Alerts
// that wait for a link go out on the new one.
func (d *device) replaceLink(o deviceOptions) {
	client := d.newClient(o)
	d.mu.Lock()
	defer d.mu.Unlock()
	if client != nil && d.client != nil {
		client.Continue(d.client)
	}
	d.client = client
	if d.stopLink != nil {
		d.stopLink()
	}
}

// wakeLink ends a wait for the next dial, because something changed that may let it succeed.
func (d *device) wakeLink() {
	if c := d.link(); c != nil {
		c.Wake()
	}
}

// link returns the device's end of the link, nil without a relay.
//
// A reload may replace it, so that callers ask again for each use.
func (d *device) link() *link.Client {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.client
}

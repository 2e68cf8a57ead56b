package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
)

// Supervision of a plugin: run connects, offers the plugin to the kernel after the first
// success, and connects again with back-off when the connection ends. The states are
//
//	starting    not offered yet: Load waits for the first connection, or fails
//	up          conn is set: calls go to it
//	down        conn is nil: calls wait up to maxRestartWait for the next connection
//
// A call in flight when the connection ends fails. It is not sent again, since the plugin may
// have acted on it. All of these calls together are one fault for the breaker.
//
// The first restart is immediate. When connections end soon again and again, the wait doubles
// from minBackoff to maxBackoff. A new socket of a server that the relay does not start ends
// the wait.
const (
	initializeTimeout = 10 * time.Second // from the start to the checked lists
	maxRestartWait    = 2 * time.Second  // of a call, for a plugin that is down
	minBackoff        = 100 * time.Millisecond
	maxBackoff        = 30 * time.Second
	stableAfter       = 10 * time.Second       // a connection of this length resets the back-off
	socketPoll        = 100 * time.Millisecond // between two checks for a new socket
)

// run keeps the plugin running until ctx ends, beginning with a connection if there is one. It
// calls offer after the first successful handshake that it makes; an error of offer ends it.
func (p *Plugin) run(ctx context.Context, c *conn, offer func() error) error {
	for attempts := 0; ; attempts++ {
		began, socket := time.Now(), p.socketID()
		var err error
		if c == nil {
			c, err = p.connect(ctx)
		}
		if err == nil && offer != nil {
			if err := offer(); err != nil {
				c.close()
				return err
			}
			offer = nil
		}
		reason := "it did not start" // for onDown: err may quote the program
		if err == nil {
			if err = p.serve(ctx, c); err != nil {
				reason = err.Error()
			}
			c = nil
		}
		// A stop or a new version is no failure: nothing is counted, logged or started again.
		if ctx.Err() != nil || p.retired.Load() {
			return ctx.Err()
		}
		if time.Since(began) >= stableAfter {
			attempts = 0
		}
		// Before the wait, so that calls know how long it is and need not wait for too long (waitConn).
		wait := backoff(attempts)
		p.setDown(err, time.Now().Add(wait))
		p.log.Warn("plugin is down", zap.Error(err), zap.Duration("next_try_in", wait))
		// A plugin that was not offered yet has no tools that anybody could miss.
		if p.onDown != nil && offer == nil {
			p.onDown(p.manifest.Name, reason)
		}
		if err := p.waitRetry(ctx, wait, socket); err != nil {
			return err
		}
	}
}

// backoff is the wait before a restart, after some attempts that did not last: none for the first
// one, then half to all of a time that doubles. It is random, so that plugins that failed
// together do not all restart together.
func backoff(attempts int) time.Duration {
	if attempts == 0 {
		return 0
	}
	// The shift is bounded against overflow: minBackoff<<12 is above maxBackoff already.
	wait := min(minBackoff<<min(attempts-1, 12), maxBackoff)
	return wait/2 + rand.N(wait/2)
}

// waitRetry waits until the time is over or the plugin has another socket than the one that was
// used.
func (p *Plugin) waitRetry(ctx context.Context, wait time.Duration, used string) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	var poll <-chan time.Time
	if p.socket != "" {
		ticker := time.NewTicker(socketPoll)
		defer ticker.Stop()
		poll = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return nil
		case <-poll:
			if now := p.socketID(); now != used && now != "" {
				return nil
			}
		}
	}
}

// serve makes calls go to a connection until it or ctx ends, or until the plugin does not answer
// (see liveness). It returns why.
func (p *Plugin) serve(ctx context.Context, c *conn) (err error) {
	p.log.Info("plugin is up", zap.String("mcp", c.server.ProtocolVersion))
	p.setUp(c)
	l := liveness{conn: c, read: c.ch.messages.Load()}
	attached := make(chan struct{})
	go func() {
		defer close(attached)
		p.watches.attach(ctx, c)
		c.bus.served()
	}()
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for err == nil && ctx.Err() == nil {
		select {
		case <-c.ended:
			err = errEnded
		case <-ctx.Done():
		case <-tick.C:
			err = l.check()
		}
	}
	isHung := err != nil && err != errEnded
	if err == nil { // the relay ends it: no fault of the plugin
		c.endReported.Store(true)
	}
	// In this order, so that no new call chooses a connection that is being closed.
	p.clearConn()
	p.watches.detach(c)
	if isHung {
		c.ch.abort() // it would not react to the end of its input
	}
	c.close()
	l.probes.Wait()
	<-attached
	if status := c.ch.stop(); err == errEnded {
		err = cmp.Or(c.fault, status, err)
	}
	return err
}

// errEnded is why serve ends if nothing better is known.
var errEnded = errors.New("its connection ended")

// connect starts the server, initializes it and compares its lists with the manifest, all
// within initializeTimeout. A process that it started outlives that context; the caller
// closes the connection.
func (p *Plugin) connect(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, initializeTimeout)
	defer cancel()
	ch, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := newConn(p, ch)
	if err = c.initialize(ctx, p.relayVersion); err == nil {
		err = p.checkServed(ctx, c)
	}
	if err != nil {
		hasEnded := c.hasEnded()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			ch.abort() // it would not react to the end of its input, for which the caller has no time
		}
		c.close()
		if status := ch.stop(); c.fault != nil {
			err = c.fault
		} else if hasEnded && status != nil {
			err = fmt.Errorf("%w (%w)", err, status)
		}
		return nil, err
	}
	// Here and not in the handshake: only the lists of a connection that is used are compared again.
	c.relisting.Go(c.followLists)
	return c, nil
}

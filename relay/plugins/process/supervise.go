package process

import (
	"context"
	"errors"
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
// have acted on it.
const (
	initializeTimeout = 10 * time.Second // from the start to the checked lists
	maxRestartWait    = 2 * time.Second  // of a call, for a plugin that is down
	minBackoff        = 100 * time.Millisecond
	maxBackoff        = 30 * time.Second
	stableAfter       = time.Minute // a connection of this length resets the back-off
)

// run keeps the plugin running until ctx ends. It calls onUp after the first successful
// handshake; an error of onUp ends it.
//
// Before each further attempt run waits half to all of the back-off, at random, so that
// plugins that failed together do not all restart together.
func (p *Plugin) run(ctx context.Context, onUp func() error) error {
	attempts, isUp := 0, false
	for {
		start := time.Now()
		c, err := p.connect(ctx)
		if err == nil && !isUp {
			if err := onUp(); err != nil {
				c.close()
				return err
			}
			isUp = true
		}
		if err == nil {
			err = p.serve(ctx, c)
		} else if !isUp && ctx.Err() == nil {
			p.setState(nil, err) // Load waits for it
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(start) >= stableAfter {
			attempts = 0
		}
		// The shift is bounded against overflow: minBackoff<<12 is above maxBackoff already.
		wait := min(minBackoff<<min(attempts, 12), maxBackoff)
		wait = wait/2 + rand.N(wait/2)
		attempts++
		p.log.Warn("plugin is down", zap.Error(err), zap.Duration("next_try_in", wait))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// serve makes calls go to a connection until it or ctx ends. It returns why.
func (p *Plugin) serve(ctx context.Context, c *conn) (err error) {
	p.log.Info("plugin is up", zap.String("mcp", c.version))
	p.setState(c, nil)
	p.watches.attach(ctx, c)
	c.bus.announce()
	select {
	case <-c.ended:
		err = errors.New("its connection ended")
	case <-ctx.Done():
	}
	// In this order, so that no new call chooses a connection that is being closed.
	p.setState(nil, err)
	p.watches.detach(c)
	c.close()
	return err
}

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
	if err = c.initialize(ctx, p.version); err == nil {
		err = p.checkServed(ctx, c)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	c.relisting.Go(c.followLists)
	return c, nil
}

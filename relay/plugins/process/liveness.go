package process

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// A plugin is alive as long as it sends anything: an answer, progress, a notification. While it
// sends nothing, it is asked every pingInterval. After maxUnanswered requests without any message it
// is killed and started again.
//
// A program with one thread cannot answer while it works. Therefore one that got a call since its
// last message has until maxUnansweredBusy, which is six times what the callers wait, unless the
// kernel says that it is stopped (SIGSTOP), which is no work.
//
// The first request is ping. Servers that do not know it and ignore what they do not know are
// alive all the same: the others are for a list that the server has answered already at its start.
const (
	// So a server that hangs is killed 20 to 25 s after its last message, or 35 to 40 s if it got a call
	// since.
	pingInterval      = 5 * time.Second
	maxUnanswered     = 3
	maxUnansweredBusy = 6
)

// liveness decides whether the server of a connection still answers. check is called every
// pingInterval, by one goroutine.
type liveness struct {
	conn       *conn
	read       int64 // messages at the last check
	unanswered int
	isAsking   atomic.Bool    // a request is out
	probes     sync.WaitGroup // the goroutine of that request
}

// check asks the server if it has sent nothing since the last check. The error says that it does
// not answer.
func (l *liveness) check() error {
	c := l.conn
	if n := c.ch.messages.Load(); n != l.read {
		l.read, l.unanswered = n, 0
		return nil
	}
	limit := maxUnanswered
	if c.readAtLastCall.Load() == l.read && !c.ch.isStopped() {
		limit = maxUnansweredBusy
	}
	if l.unanswered >= limit {
		return fmt.Errorf("it answered none of %d pings in %s and was killed", l.unanswered, time.Duration(l.unanswered)*pingInterval)
	}
	method := "ping"
	if l.unanswered > 0 {
		method = c.plugin.listMethod()
	}
	l.unanswered++
	if l.isAsking.CompareAndSwap(false, true) { // else the last one still waits to be written
		l.probes.Go(func() {
			defer l.isAsking.Store(false)
			ctx, cancel := context.WithTimeout(context.Background(), pingInterval*9/10)
			defer cancel()
			_, _ = c.rpc.Call(ctx, method, nil) // any answer counts, also a late one or an error
		})
	}
	return nil
}

// listMethod is a request that the server has answered at its start; ping if there was none.
func (p *Plugin) listMethod() string {
	switch {
	case len(p.manifest.Tools) > 0:
		return "tools/list"
	case len(p.manifest.Resources) > 0:
		return "resources/list"
	}
	return "ping"
}

package relay

import (
	"context"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
)

// A device whose link was lost keeps its place in the lists for a moment, so that a short
// reconnect is no news: its calls fail as those of any device that is offline.
const absentFor = 900 * time.Millisecond // a list is right within a second

// absent is a device plugin without its device.
type absent struct {
	manifest *kernel.Manifest
	node     *hub.Node
	until    time.Time
}

func newAbsent(d *device) *absent {
	m := *d.manifest
	m.Tools = make([]*kernel.Tool, len(d.manifest.Tools))
	for i, t := range d.manifest.Tools {
		c := *t
		c.Limit = nil
		c.CheckArguments = func([]byte) ([]byte, error) { return nil, offline() }
		m.Tools[i] = &c
	}
	return &absent{manifest: &m, node: d.node, until: time.Now().Add(absentFor)}
}

// offline is the answer for an own device that is not connected.
func offline() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", RetryAfterMS: 5000, Reason: "offline"}
}

// Manifest implements kernel.Plugin.
func (a *absent) Manifest() *kernel.Manifest { return a.manifest }

// Call implements kernel.Plugin; Check has refused before.
func (a *absent) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return nil, offline()
}

// Read implements kernel.Reader.
func (a *absent) Read(context.Context, *kernel.Caller, string) ([]byte, error) { return nil, offline() }

// Watch implements kernel.Watcher: the kernel tries again.
func (a *absent) Watch(context.Context, string, func()) error { return offline() }

var (
	_ kernel.Plugin  = (*absent)(nil)
	_ kernel.Reader  = (*absent)(nil)
	_ kernel.Watcher = (*absent)(nil)
)

// absence holds those that are away for less than absentFor, oldest first: at most as
// many as there are devices. newAbsence makes one.
type absence struct {
	mu   sync.Mutex // protects away
	away []*absent
	some chan struct{} // takes one, when away is not empty
}

func newAbsence() *absence { return &absence{some: make(chan struct{}, 1)} }

func (q *absence) add(a *absent) {
	q.mu.Lock()
	q.away = append(q.away, a)
	q.mu.Unlock()
	select {
	case q.some <- struct{}{}:
	default:
	}
}

// next takes the oldest out if its time is over; else it tells how long that lasts, or
// that there is none.
func (q *absence) next(now time.Time) (over *absent, wait time.Duration, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.away) == 0 {
		q.away = nil
		return nil, 0, false
	}
	if wait = q.away[0].until.Sub(now); wait > 0 {
		return nil, wait, true
	}
	over = q.away[0]
	q.away[0] = nil
	q.away = q.away[1:]
	return over, 0, true
}

// forgetAbsent unloads those that did not come back, until ctx ends.
func (r *Relay) forgetAbsent(ctx context.Context) {
	for {
		a, wait, ok := r.absence.next(time.Now())
		var later <-chan time.Time
		switch {
		case a != nil:
			if r.kernel.Unload(a) { // else it came back
				r.kernel.MarkOffline(a.node.Tenant(), kernel.PresenceDevice, a.node.ID())
			}
			continue
		case ok:
			later = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-later:
		case <-r.absence.some:
		}
	}
}

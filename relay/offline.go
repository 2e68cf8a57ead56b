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
const offlineGrace = 900 * time.Millisecond // a list is right within a second

// offlinePlugin is a device plugin without its device.
type offlinePlugin struct {
	manifest  *kernel.Manifest
	node      *hub.Node
	expiresAt time.Time
}

func newOfflinePlugin(d *device) *offlinePlugin {
	m := *d.manifest
	m.Tools = make([]*kernel.Tool, len(d.manifest.Tools))
	for i, t := range d.manifest.Tools {
		c := *t
		c.Limit = nil
		c.CheckArguments = func([]byte) ([]byte, error) { return nil, errOffline() }
		m.Tools[i] = &c
	}
	return &offlinePlugin{manifest: &m, node: d.node, expiresAt: time.Now().Add(offlineGrace)}
}

// errOffline is the answer for an own device that is not connected.
func errOffline() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", RetryAfterMS: 5000, Reason: "offline"}
}

// Manifest implements kernel.Plugin.
func (a *offlinePlugin) Manifest() *kernel.Manifest { return a.manifest }

// Call implements kernel.Plugin; Check has refused before.
func (a *offlinePlugin) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return nil, errOffline()
}

// Read implements kernel.Reader.
func (a *offlinePlugin) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return nil, errOffline()
}

// Watch implements kernel.Watcher: the kernel tries again.
func (a *offlinePlugin) Watch(context.Context, string, func()) error { return errOffline() }

var (
	_ kernel.Plugin  = (*offlinePlugin)(nil)
	_ kernel.Reader  = (*offlinePlugin)(nil)
	_ kernel.Watcher = (*offlinePlugin)(nil)
)

// offlineQueue holds those that are away for less than offlineGrace, oldest first: at most as
// many as there are devices. newOfflineQueue makes one.
type offlineQueue struct {
	mu       sync.Mutex // protects away
	waiting  []*offlinePlugin
	notEmpty chan struct{} // takes one, when away is not empty
}

func newOfflineQueue() *offlineQueue { return &offlineQueue{notEmpty: make(chan struct{}, 1)} }

func (q *offlineQueue) add(a *offlinePlugin) {
	q.mu.Lock()
	q.waiting = append(q.waiting, a)
	q.mu.Unlock()
	select {
	case q.notEmpty <- struct{}{}:
	default:
	}
}

// next takes the oldest out if its time is over; else it tells how long that lasts, or
// that there is none.
func (q *offlineQueue) next(now time.Time) (over *offlinePlugin, wait time.Duration, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.waiting = nil
		return nil, 0, false
	}
	if wait = q.waiting[0].expiresAt.Sub(now); wait > 0 {
		return nil, wait, true
	}
	over = q.waiting[0]
	q.waiting[0] = nil
	q.waiting = q.waiting[1:]
	return over, 0, true
}

// expireOffline unloads those that did not come back, until ctx ends.
func (r *Relay) expireOffline(ctx context.Context) {
	for {
		a, wait, ok := r.offline.next(time.Now())
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
		case <-r.offline.notEmpty:
		}
	}
}

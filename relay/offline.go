package relay

import (
	"context"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
)

// A device that lost its link stays listed for offlineGrace, so that a quick reconnect does
// not change the lists of clients. If it may resume its session, its plugin stays and calls
// wait for it; after the grace its tools are unlisted, and calls by name may still wait.
// Otherwise an offlinePlugin takes its place, whose calls fail as those of any device that is
// offline.
//
//	onDeviceLost → queued ──→ reconnect: the tools were never gone
//	                      └─→ offlineGrace over: unlistDevice; later onDeviceGone unloads it
//	onDeviceGone → offlinePlugin loaded, queued ──→ reconnect replaces it
//	                                            └─→ offlineGrace over: expireOffline unloads it

// offlineGrace is below one second, within which the lists of tools must be right. A device
// that reconnects immediately needs a few round trips, which take far less.
const offlineGrace = 900 * time.Millisecond

// offlinePlugin takes the place of a device plugin: it offers the same tools and refuses
// every call.
type offlinePlugin struct {
	manifest *kernel.Manifest
}

// waitingDevice is a device that has lost its link and whose grace runs.
type waitingDevice struct {
	node      *hub.Node
	plugin    *offlinePlugin // in its place; nil: it may resume its session
	expiresAt time.Time
}

var (
	_ kernel.Plugin  = (*offlinePlugin)(nil)
	_ kernel.Reader  = (*offlinePlugin)(nil)
	_ kernel.Watcher = (*offlinePlugin)(nil)
)

// newOfflinePlugin copies the device's manifest, so that lists stay as they are.
func newOfflinePlugin(d *device) *offlinePlugin {
	m := *d.manifest
	m.Tools = make([]*kernel.Tool, len(d.manifest.Tools))
	for i, t := range d.manifest.Tools {
		m.Tools[i] = &kernel.Tool{Name: t.Name, NodeID: t.NodeID, ToolInfo: deviceToolInfo(&d.tools[i], true)}
	}
	return &offlinePlugin{manifest: &m}
}

// errOffline is the answer for a device of the caller's that is not connected.
func errOffline() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", RetryAfterMS: 5000, Reason: "offline", Outcome: manifest.NotSent}
}

// Manifest implements kernel.Plugin.
func (p *offlinePlugin) Manifest() *kernel.Manifest { return p.manifest }

// Call implements kernel.Plugin. CheckArguments has refused before the kernel gets here.
func (p *offlinePlugin) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return nil, errOffline()
}

// Read implements kernel.Reader.
func (p *offlinePlugin) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return nil, errOffline()
}

// Watch implements kernel.Watcher. The kernel retries it.
func (p *offlinePlugin) Watch(context.Context, string, func()) error { return errOffline() }

// offlineQueue holds the devices without a link in the order in which they expire. That is the
// order of arrival, since all have the same grace, so no heap is needed. One that has come
// back stays until it expires; Unload then finds its plugin gone.
type offlineQueue struct {
	mu      sync.Mutex // protects waiting
	waiting []*waitingDevice
	added   chan struct{} // holds one element after an add
}

func newOfflineQueue() *offlineQueue { return &offlineQueue{added: make(chan struct{}, 1)} }

// add never blocks; expireOffline wakes up once for any number of adds.
func (q *offlineQueue) add(p *waitingDevice) {
	q.mu.Lock()
	q.waiting = append(q.waiting, p)
	q.mu.Unlock()
	select {
	case q.added <- struct{}{}:
	default:
	}
}

// next removes and returns the first device if it has expired. Otherwise wait is the time
// until it does, or 0 when the queue is empty.
func (q *offlineQueue) next(now time.Time) (expired *waitingDevice, wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.waiting = nil // free the array
		return nil, 0
	}
	if wait = q.waiting[0].expiresAt.Sub(now); wait > 0 {
		return nil, wait
	}
	expired = q.waiting[0]
	q.waiting[0] = nil
	q.waiting = q.waiting[1:]
	return expired, 0
}

// expireOffline unloads or unlists the devices that did not reconnect, until ctx ends.
func (r *Relay) expireOffline(ctx context.Context) {
	for {
		p, wait := r.offline.next(time.Now())
		if p != nil {
			if p.plugin == nil {
				r.unlistDevice(p.node)
			} else if r.kernel.Unload(p.plugin) { // false: it has reconnected
				r.kernel.MarkOffline(p.node.Tenant(), kernel.PresenceDevice, p.node.ID())
			}
			continue
		}
		var expiry <-chan time.Time
		if wait > 0 {
			expiry = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-expiry:
		case <-r.offline.added:
		}
	}
}

package monitor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/control"
	"agentctl/prober/alert"
)

// A connection, as Watcher serves it:
//
//	dial         events may arrive from now on; they wait in waiting
//	status       who answers: published as EventConnection, state "ready"
//	burst        when the interval asked for is shorter than the daemon's; renewed each 13 s
//	snapshot     of the modules that the daemon does not push; repeated each interval
//	release      the events that waited are sent, later ones at once
//	...          until the connection ends
//	EventConnection, state "lost"; dial again at once, then after waits of 0.2 s to 2 s
//
// Back-pressure: messages go into a channel of queueSize. When it is full, a message is
// dropped and counted, and the next one that fits is preceded by EventLost. A slow reader
// therefore never blocks the goroutine that reads the socket.

// Message is an event of the daemon or of the watcher.
type Message struct {
	Event  string
	Params []byte // a JSON object
}

// Line returns the message as one line of JSON: the members of its params after the event's
// name, as in {"event":"metrics","ts":1700000000000,"cpu":{...}}.
//
// The params are not parsed again: they are a JSON object, whose brace is replaced.
func (m Message) Line() []byte {
	line := fmt.Appendf(nil, `{"event":%q`, m.Event)
	params := strings.TrimSpace(string(m.Params))
	if len(params) <= len("{}") {
		return append(line, "}\n"...)
	}
	return append(append(append(line, ','), params[1:]...), '\n')
}

// Events of the watcher, with their params; the others are the daemon's (docs/control.md).
const (
	EventSnapshot   = "snapshot"   // a snapshot of modules that are not pushed
	EventConnection = "connection" // Connection
	EventLost       = "lost"       // {"count": messages dropped because the reader was too slow}
)

// Connection is the state of the connection to the daemon: the params of EventConnection.
// A lost one has TS and State only.
type Connection struct {
	TS            int64  `json:"ts"`
	State         string `json:"state"` // ready or lost
	ServerVersion string `json:"server_version,omitempty"`
	NodeID        string `json:"node_id,omitempty"`
	Name          string `json:"name,omitempty"`
	// Alerts were raised before the connection and are not cleared. One that is raised while
	// it is opened may come again as an event.
	Alerts   []alert.Event    `json:"alerts,omitempty"`
	Sampling control.Sampling `json:"-"`
}

// ErrModules reports a daemon that does not have all modules asked for: it is older than
// this program, or the machine has no such sensor.
var ErrModules = errors.New("this daemon does not have all of the modules")

// Watcher follows the daemon across restarts. Run connects, reports the state of the
// connection, forwards the daemon's events, polls the modules that are not pushed, and
// keeps a burst going while the interval is shorter than the daemon's.
//
// The control client's goroutine calls onEvent; everything else runs in Run's goroutine,
// and show in a separate one. Events that come before a connection is announced wait, so
// that the message "connection" is the first of each connection.
type Watcher struct {
	Socket   string
	Modules  []string      // none: the pushed ones
	Interval time.Duration // between messages of metrics; 0: as the daemon samples
	All      bool          // without Modules, poll all that are not pushed

	out  chan Message
	lost atomic.Int64 // messages since the last EventLost

	mu         sync.Mutex // protects the fields below
	announcing bool       // a new connection has not been announced: events wait
	waiting    []Message

	// Owned by the goroutine that calls onEvent.
	// pending are the members of metrics that were not forwarded yet, lastTS is the time of
	// the metrics forwarded last.
	pending map[string]json.RawMessage
	lastTS  int64
}

// Bounds of a Watcher. A burst is renewed two seconds before it would end, so that one slow
// answer does not interrupt it.
const (
	queueSize   = 256              // messages that wait for a slow reader, and events for the announcement
	burstTTL    = 15 * time.Second // how long a burst may outlive the watcher
	burstRenew  = burstTTL - 2*time.Second
	callTimeout = 5 * time.Second // of one request
	firstRetry  = 200 * time.Millisecond
	maxRetry    = 2 * time.Second
)

// Run calls show with the channel of messages and works until show returns, ctx ends, or the
// daemon refuses. The first connection must succeed; a lost one is retried forever. Run
// returns the error of show, or why the daemon refused: control.ErrPermission or ErrModules.
func (w *Watcher) Run(ctx context.Context, show func(context.Context, <-chan Message) error) error {
	cl, err := w.dial(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	shown := make(chan error, 1)
	go func() {
		defer cancel()
		shown <- show(ctx, w.out)
	}()
	err = w.follow(ctx, cl)
	cancel() // show may still wait for a message
	return cmp.Or(<-shown, err)
}

// dial connects. onEvent is called from then on, before the connection is announced. No two
// connections overlap, so that onEvent's fields need no lock.
func (w *Watcher) dial(ctx context.Context) (*control.Client, error) {
	if w.out == nil {
		w.out = make(chan Message, queueSize)
	}
	w.pending, w.lastTS = nil, 0
	w.mu.Lock()
	w.announcing, w.waiting = true, nil
	w.mu.Unlock()
	return control.DialOptions{OnEvent: w.onEvent}.Dial(ctx, w.Socket)
}

// follow serves cl and the connections after it. It returns nil when ctx ends, and an error
// that another attempt would meet again: ErrModules or control.ErrPermission.
//
// It closes each connection that it was given or made. The first retry comes at once; waits
// then grow from firstRetry to maxRetry, which is short because the daemon is on this machine.
func (w *Watcher) follow(ctx context.Context, cl *control.Client) error {
	for {
		err := w.serve(ctx, cl)
		_ = cl.Close()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrModules):
			return err
		}
		w.publish(EventConnection, Connection{TS: time.Now().UnixMilli(), State: "lost"})
		for wait := firstRetry; ; wait = min(wait*3/2, maxRetry) {
			if cl, err = w.dial(ctx); err == nil {
				break
			}
			if errors.Is(err, control.ErrPermission) {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(wait):
			}
		}
	}
}

// serve announces a connection, then polls and renews the burst until it ends. It always
// returns an error, the reason for the end.
func (w *Watcher) serve(ctx context.Context, cl *control.Client) error {
	connection, err := w.announce(ctx, cl)
	if err != nil {
		return err
	}
	defer w.release() // also when it fails
	unpushed := w.unpushed(connection.Sampling.Modules)
	base := time.Duration(connection.Sampling.IntervalMS) * time.Millisecond
	var renew, poll <-chan time.Time
	if w.Interval > 0 && w.Interval < base {
		if err := w.burst(ctx, cl); err != nil {
			return err
		}
		t := time.NewTicker(burstRenew)
		defer t.Stop()
		renew = t.C
	}
	if len(unpushed) > 0 {
		if unpushed, err = w.poll(ctx, cl, unpushed); err != nil {
			return err
		}
		t := time.NewTicker(max(cmp.Or(w.Interval, base), time.Second))
		defer t.Stop()
		poll = t.C
	}
	w.release()
	for err == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-cl.Done():
			return control.ErrClosed
		case <-renew:
			err = w.burst(ctx, cl)
		case <-poll:
			unpushed, err = w.poll(ctx, cl, unpushed)
		}
	}
	return err
}

// announce requests the daemon's status and publishes EventConnection. A restart may have
// changed the version, the name and the pushed modules.
func (w *Watcher) announce(ctx context.Context, cl *control.Client) (*Connection, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var s struct {
		NodeID   string           `json:"node_id"`
		Name     string           `json:"name"`
		Sampling control.Sampling `json:"sampling"`
		Alerts   []alert.Event    `json:"alerts"`
	}
	if err := cl.Status(ctx, &s); err != nil {
		return nil, err
	}
	c := &Connection{TS: time.Now().UnixMilli(), State: "ready", ServerVersion: cl.Hello().ServerVersion,
		NodeID: s.NodeID, Name: s.Name, Alerts: s.Alerts, Sampling: s.Sampling}
	w.publish(EventConnection, c)
	return c, nil
}

// unpushed returns the modules to show that the daemon does not push. Older daemons call
// memory mem.
//
// The result is a copy, which poll may shorten.
func (w *Watcher) unpushed(pushed []string) []string {
	want := w.Modules
	if len(want) == 0 && w.All {
		want = ModuleNames()
	}
	return slices.DeleteFunc(slices.Clone(want), func(m string) bool {
		return slices.Contains(pushed, m) || (m == "memory" && slices.Contains(pushed, "mem"))
	})
}

// poll requests a snapshot of modules and sends it. It returns the modules to request from
// then on. An older daemon may not know all of them: if the caller named them, poll returns
// ErrModules; otherwise later polls request only the modules that every daemon has.
//
// An error that is not an answer of the daemon ends the connection; an answer other than invalid
// params is tried again at the next tick.
func (w *Watcher) poll(ctx context.Context, cl *control.Client, modules []string) ([]string, error) {
	if len(modules) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var raw json.RawMessage
	err := cl.Call(ctx, control.MethodSnapshot, map[string]any{"modules": modules}, &raw)
	var answer *control.Error
	switch {
	case err == nil:
		w.send(Message{EventSnapshot, raw})
		return modules, nil
	case !errors.As(err, &answer):
		return nil, err
	case answer.Code != control.CodeInvalidParams: // the machine cannot be read now
		return modules, nil
	case len(w.Modules) > 0:
		return nil, fmt.Errorf("%w %s: %w", ErrModules, strings.Join(w.Modules, ","), err)
	}
	known := baseModules()
	return slices.DeleteFunc(modules, func(m string) bool { return !slices.Contains(known, m) }), nil
}

// burst asks the daemon to sample faster. The burst ends by itself after burstTTL, so that
// nothing is left behind when this process is killed.
func (w *Watcher) burst(ctx context.Context, cl *control.Client) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := cl.Burst(ctx, w.Interval, burstTTL)
	var answer *control.Error
	if errors.As(err, &answer) && answer.Code == control.CodeRateLimited {
		return nil // others run the most bursts there may be; the next renewal tries again
	}
	return err
}

// onEvent handles an event of the daemon. Metrics are forwarded at most once per Interval,
// measured by their timestamps. The members of skipped metrics are merged into the next one,
// so that a rarely read module is not lost. A clock that is set back does not stop the stream.
func (w *Watcher) onEvent(e control.Event) {
	if e.Method != control.EventMetrics || (w.Interval == 0 && len(w.Modules) == 0) {
		w.forward(Message{e.Method, e.Params})
		return
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(e.Params, &members) != nil {
		return
	}
	if w.pending == nil {
		w.pending = make(map[string]json.RawMessage)
	}
	for k, v := range members {
		if k == "ts" || k == "seq" || len(w.Modules) == 0 || slices.Contains(w.Modules, k) {
			w.pending[k] = v
		}
	}
	var ts int64
	if json.Unmarshal(members["ts"], &ts) != nil {
		return
	}
	passed := ts - w.lastTS
	if w.lastTS > 0 && passed >= 0 && passed < w.Interval.Milliseconds()*9/10 { // 10 % of jitter
		return
	}
	pending := w.pending
	w.pending, w.lastTS = nil, ts
	if b, err := json.Marshal(pending); err == nil && len(pending) > len([]string{"ts", "seq"}) {
		w.forward(Message{e.Method, b})
	}
}

// forward sends an event of the daemon, or keeps it until the connection is announced. It
// sends under the lock, so that no later event overtakes those that release sends.
func (w *Watcher) forward(m Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case !w.announcing:
		w.send(m)
	case len(w.waiting) < queueSize:
		w.waiting = append(w.waiting, m)
	default:
		w.lost.Add(1)
	}
}

// release sends the events that were held back until the announcement.
//
// The lock is held while it sends. send does not block, so that onEvent waits a moment at most.
func (w *Watcher) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.waiting {
		w.send(m)
	}
	w.announcing, w.waiting = false, nil
}

// publish sends a message of the watcher. It is not held back, since it is the announcement
// itself, or the end of the connection.
func (w *Watcher) publish(event string, params any) {
	b, err := json.Marshal(params)
	if err != nil {
		panic(err) // the types are ours
	}
	w.send(Message{event, b})
}

// send queues a message. When the queue is full it drops and counts the message, and EventLost
// reports the count before the next message that fits. It never blocks.
func (w *Watcher) send(m Message) {
	if n := w.lost.Load(); n > 0 {
		select {
		case w.out <- Message{EventLost, fmt.Appendf(nil, `{"count":%d}`, n)}:
			w.lost.Add(-n)
		default:
		}
	}
	select {
	case w.out <- m:
	default:
		w.lost.Add(1)
	}
}

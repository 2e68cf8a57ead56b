package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/config"
	"agentctl/control"
	"agentctl/duration"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/term"
)

func newWatch() *cobra.Command {
	var w watcher
	var out output
	var limit limits
	c := &cobra.Command{
		Use:   "watch",
		Short: "See this box live: sparklines on a terminal, events as ndjson elsewhere",
		Long: `See this box live. On a terminal it is a view with sparklines and alerts; q or Ctrl-C ends
it and gives the terminal back as it was. Elsewhere, or with -o ndjson, it is one JSON object
a line: {"event":"metrics",...}, with the daemon's events by their names and, of this command,
"snapshot" (modules that are not pushed), "connection" (state lost or ready, with the alerts
that were raised before) and "lost" (count of events that this reader was too slow for).

A restart of the daemon is waited for. An --interval below the daemon's own is asked for as a
burst, which ends by itself soon after this command. Watching turns push on for everybody, and
starts cpu and memory, as any client that takes events does.`,
		Example: `  agentctl watch
  agentctl watch --interval 200ms --modules cpu,temperature
  agentctl watch -o ndjson --count 10 | jq -c 'select(.event=="metrics") | .cpu'`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if w.interval != 0 && (w.interval < prober.MinInterval || w.interval > prober.MaxInterval) {
				return exit(exitUsage, "--interval %s is out of range: 100ms to 60s", w.interval)
			}
			if err := limit.check(); err != nil {
				return err
			}
			if w.modules, err = checkModules(w.modules); err != nil {
				return err
			}
			ctx, cancel := limit.context(cmd)
			defer cancel()
			if !out.isText(cmd) {
				return w.run(ctx, func(ctx context.Context, msgs <-chan watchMsg) error {
					return printEvents(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr(), msgs, limit.count)
				})
			}
			w.live = true
			f := term.AsTerminal(cmd.OutOrStdout())
			v := newView(term.ColorEnabled(f), term.ASCIIOnly())
			return w.run(ctx, func(ctx context.Context, msgs <-chan watchMsg) error { return v.run(ctx, f, msgs, limit.count) })
		},
	}
	out.streamFlags(c)
	c.Flags().StringVar(&w.socket, "socket", env("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	c.Flags().Var(duration.NewValue(&w.interval, 0), "interval", "show a sample each `DURATION`, 100ms to 60s (default: as the daemon samples)")
	c.Flags().StringSliceVar(&w.modules, "modules", nil, "only these `MODULES`: "+strings.Join(moduleNames, ", "))
	limit.flags(c, "end", "samples")
	return c
}

// watchMsg is an event of the daemon, or one of this command's own.
type watchMsg struct {
	event  string
	params []byte // an object
}

// Events that are not the daemon's.
const (
	watchSnapshot   = "snapshot"   // a snapshot: modules that are not pushed
	watchConnection = "connection" // watchState
	watchLost       = "lost"       // {count}
)

// watchState tells how the connection is.
type watchState struct {
	TS            int64            `json:"ts"`
	State         string           `json:"state"` // ready, lost
	ServerVersion string           `json:"server_version,omitempty"`
	NodeID        string           `json:"node_id,omitempty"`
	Name          string           `json:"name,omitempty"`
	Alerts        []alert.Event    `json:"alerts,omitempty"` // raised before, and not cleared
	Sampling      control.Sampling `json:"-"`
}

// watcher keeps a connection to the daemon and passes on what it says.
type watcher struct {
	socket   string
	modules  []string // none: what is pushed; live, everything there is
	interval time.Duration
	live     bool

	out  chan watchMsg
	lost atomic.Int64 // events since the last one that found room

	mu      sync.Mutex // protects the fields below
	opening bool       // a new connection has not been announced: its events wait in early
	early   []watchMsg

	// What the goroutine that reads events keeps.
	held map[string]json.RawMessage // members of metrics that were not passed on
	last int64                      // ts of the metrics passed on last
}

const (
	watchQueue = 256              // events that wait for a slow reader; more are counted and lost
	burstTTL   = 15 * time.Second // a burst outlives this command by no more
	burstRenew = burstTTL - 2*time.Second
	watchCall  = 5 * time.Second // one request
)

// run has show take what the daemon says, until it has enough, or ctx ends, or the daemon
// refuses. Only the first connection must succeed.
func (w *watcher) run(ctx context.Context, show func(context.Context, <-chan watchMsg) error) error {
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
	err = w.connections(ctx, cl)
	cancel()
	if serr := <-shown; serr != nil && !errors.Is(serr, client.ErrStop) {
		return serr
	}
	return err
}

// dial connects. Events come from then on.
func (w *watcher) dial(ctx context.Context) (*control.Client, error) {
	if w.out == nil {
		w.out = make(chan watchMsg, watchQueue)
	}
	w.held, w.last = nil, 0
	w.mu.Lock()
	w.opening, w.early = true, nil
	w.mu.Unlock()
	cl, err := control.DialOptions{OnEvent: w.onEvent}.Dial(ctx, w.socket)
	if err != nil {
		return nil, socketError(err)
	}
	return cl, nil
}

// connections serves cl and those after it, until ctx ends.
func (w *watcher) connections(ctx context.Context, cl *control.Client) error {
	for {
		err := w.serve(ctx, cl)
		_ = cl.Close()
		if ctx.Err() != nil {
			return nil
		}
		var e *exitError
		if errors.As(err, &e) {
			return err
		}
		w.say(watchConnection, watchState{TS: time.Now().UnixMilli(), State: "lost"})
		for pause := 200 * time.Millisecond; ; pause = min(pause*3/2, 2*time.Second) {
			if cl, err = w.dial(ctx); err == nil {
				break
			}
			if errors.As(err, &e) && e.code == exitUnauthorized {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(pause):
			}
		}
	}
}

// serve asks what events do not tell, and keeps a burst going, until the connection ends.
// An exitError is final.
func (w *watcher) serve(ctx context.Context, cl *control.Client) error {
	st, err := w.hello(ctx, cl)
	if err != nil {
		return err
	}
	defer w.opened() // also when it fails
	missing := w.missing(st.Sampling.Modules)
	base := time.Duration(st.Sampling.IntervalMS) * time.Millisecond
	var renew, poll <-chan time.Time
	if w.interval > 0 && w.interval < base {
		if err := w.burst(ctx, cl); err != nil {
			return err
		}
		t := time.NewTicker(burstRenew)
		defer t.Stop()
		renew = t.C
	}
	if len(missing) > 0 {
		if missing, err = w.poll(ctx, cl, missing); err != nil {
			return err
		}
		t := time.NewTicker(max(cmp.Or(w.interval, base), time.Second))
		defer t.Stop()
		poll = t.C
	}
	w.opened()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-cl.Done():
			return control.ErrClosed
		case <-renew:
			err = w.burst(ctx, cl)
		case <-poll:
			missing, err = w.poll(ctx, cl, missing)
		}
		if err != nil {
			return err
		}
	}
}

// hello asks who answers, and says it.
func (w *watcher) hello(ctx context.Context, cl *control.Client) (*watchState, error) {
	ctx, cancel := context.WithTimeout(ctx, watchCall)
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
	st := &watchState{TS: time.Now().UnixMilli(), State: "ready", ServerVersion: cl.Hello().ServerVersion,
		NodeID: s.NodeID, Name: s.Name, Alerts: s.Alerts, Sampling: s.Sampling}
	w.say(watchConnection, st)
	return st, nil
}

// missing are the modules to show that are not pushed.
func (w *watcher) missing(pushed []string) []string {
	want := w.modules
	if len(want) == 0 && w.live {
		want = moduleNames
	}
	return slices.DeleteFunc(slices.Clone(want), func(m string) bool {
		return slices.Contains(pushed, m) || (m == "memory" && slices.Contains(pushed, "mem"))
	})
}

// poll asks for modules and passes on what they say. It returns those to ask for from then
// on: an older daemon may not know all.
func (w *watcher) poll(ctx context.Context, cl *control.Client, modules []string) ([]string, error) {
	if len(modules) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, watchCall)
	defer cancel()
	var raw json.RawMessage
	err := cl.Call(ctx, control.MethodSnapshot, map[string]any{"modules": modules}, &raw)
	var ce *control.Error
	switch {
	case errors.As(err, &ce) && ce.Code == control.CodeInvalidParams && len(w.modules) == 0:
		return slices.DeleteFunc(modules, func(m string) bool { return !slices.Contains(baseModules, m) }), nil
	case errors.As(err, &ce) && ce.Code == control.CodeInvalidParams:
		return nil, exit(exitUsage, "this daemon does not have all of --modules %s: %w", strings.Join(w.modules, ","), err)
	case errors.As(err, &ce): // the machine cannot be read: maybe later
		return modules, nil
	case err != nil:
		return nil, err
	}
	w.offer(watchMsg{watchSnapshot, raw})
	return modules, nil
}

func (w *watcher) burst(ctx context.Context, cl *control.Client) error {
	ctx, cancel := context.WithTimeout(ctx, watchCall)
	defer cancel()
	_, err := cl.Burst(ctx, w.interval, burstTTL)
	var ce *control.Error
	if errors.As(err, &ce) && ce.Code == control.CodeRateLimited {
		return nil // others have it fast already
	}
	return err
}

// onEvent takes an event of the daemon. Metrics come not more often than asked for; what
// is held back is joined to the next.
func (w *watcher) onEvent(e control.Event) {
	if e.Method != control.EventMetrics || (w.interval == 0 && len(w.modules) == 0) {
		w.pass(watchMsg{e.Method, e.Params})
		return
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(e.Params, &m) != nil {
		return
	}
	if w.held == nil {
		w.held = make(map[string]json.RawMessage)
	}
	for k, v := range m {
		if k == "ts" || k == "seq" || len(w.modules) == 0 || slices.Contains(w.modules, k) {
			w.held[k] = v
		}
	}
	ts := reading{}
	if json.Unmarshal(m["ts"], &ts.TS) != nil {
		return
	}
	if passed := ts.TS - w.last; w.last > 0 && passed >= 0 && passed < w.interval.Milliseconds()*9/10 {
		return
	}
	held := w.held
	w.held, w.last = nil, ts.TS
	if b, err := json.Marshal(held); err == nil && len(held) > 2 {
		w.pass(watchMsg{e.Method, b})
	}
}

// pass offers an event of the daemon, or keeps it until the connection is announced.
func (w *watcher) pass(m watchMsg) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case !w.opening:
		w.offer(m)
	case len(w.early) < watchQueue:
		w.early = append(w.early, m)
	default:
		w.lost.Add(1)
	}
}

// opened says that the connection was announced.
func (w *watcher) opened() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.early {
		w.offer(m)
	}
	w.opening, w.early = false, nil
}

// say offers an event of this command's own.
func (w *watcher) say(event string, params any) {
	b, err := json.Marshal(params)
	if err != nil {
		panic(err) // the types are ours
	}
	w.offer(watchMsg{event, b})
}

// offer passes an event on if there is room.
func (w *watcher) offer(m watchMsg) {
	if n := w.lost.Load(); n > 0 {
		select {
		case w.out <- watchMsg{watchLost, fmt.Appendf(nil, `{"count":%d}`, n)}:
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

// printEvents writes one object a line until there were count samples.
func printEvents(ctx context.Context, out, errs io.Writer, msgs <-chan watchMsg, count int) error {
	n, was := 0, ""
	for {
		var m watchMsg
		select {
		case <-ctx.Done():
			return nil
		case m = <-msgs:
		}
		if _, err := out.Write(eventLine(m)); err != nil {
			return exit(exitFailure, "write: %w", err)
		}
		switch m.event {
		case watchConnection:
			var st watchState
			_ = json.Unmarshal(m.params, &st)
			if st.State == "lost" {
				fmt.Fprintln(errs, "agentctl: the daemon closed the connection; waiting for it to come back")
			} else if was == "lost" {
				fmt.Fprintln(errs, "agentctl: connected again")
			}
			was = st.State
		case control.EventMetrics:
			if n++; n == count {
				return client.ErrStop
			}
		}
	}
}

// eventLine is an event as a line: its name before its params.
func eventLine(m watchMsg) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"event":%q`, m.event)
	if params := bytes.TrimSpace(m.params); len(params) > 2 {
		b.WriteByte(',')
		b.Write(params[1:])
	} else {
		b.WriteByte('}')
	}
	b.WriteByte('\n')
	return b.Bytes()
}

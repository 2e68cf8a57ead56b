package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// fleet.watch watches some boards for some seconds. It is a stream whose frames are what was seen so
// far, one every watchReport; the last one is the result.
//
//	kernel ── Notify, Next, Err, Close ──> watchStream
//	             run ──┬─ watchBoard, one for each board
//	                   │     followFrames   the board's own metric stream, for figures of frames
//	                   │     pollModules    asks every watchPoll, for figures of modules
//	                   └─ publish(summarize) every watchReport, and at the end
//
// A board that cannot be watched any more keeps what was seen of it, and the reason (watchedBoard.why). The
// watch ends early when that is so of all boards. Frames that the kernel does not take in time are replaced
// by newer ones, which have all that they had.

// Bounds of a watch.
const (
	maxWatched      = 20 // boards
	maxWatchSeconds = 25 // clients give up after 30 s
	minWatchSeconds = 2
	defWatchSeconds = 10
	maxWatchPoints  = 30 // of each metric
	maxWatchAnswer  = 6 << 10
	watchInterval   = time.Second     // of the boards' metric streams
	watchPoll       = 5 * time.Second // of figures that no stream has
	watchReport     = 4 * time.Second
)

var watchTool = tool{
	name: "fleet.watch", title: "Watch boards", scope: manifest.ScopeCallReadOnly, streams: true,
	description: "Watch up to 20 boards for some seconds: min, mean, max, last and points of each metric.",
	input: arguments.Object{
		{Name: "boards", Type: arguments.Array, Min: 1, Max: maxWatched, Pattern: selectorPattern, Form: selectorForm, Example: selectorExample, Required: true, Description: "as in fleet.query"},
		{Name: "metrics", Type: arguments.Array, Min: 1, Max: maxQueryMetrics, Pattern: keyPattern, Form: keyForm, Example: keyExample, Description: "as in fleet.query; default cpu_pct and mem_pct"},
		{Name: "seconds", Type: arguments.Integer, Min: minWatchSeconds, Max: maxWatchSeconds, Default: defWatchSeconds, Description: "how long"},
	},
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
		return p.watch(ctx, r)
	},
}

// watch answers fleet.watch with a stream that ends by itself.
func (p *Plugin) watch(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	var args struct {
		Boards  []string `json:"boards"`
		Metrics []string `json:"metrics"`
		Seconds int      `json:"seconds"`
	}
	if err := readArguments(r, &args); err != nil {
		return nil, err
	}
	list, err := parseMetrics(args.Metrics, []string{"cpu_pct", "mem_pct"})
	if err != nil {
		return nil, err
	}
	boards, err := p.selectBoards(r.Caller, args.Boards)
	if err != nil {
		return nil, err
	}
	if len(boards) > maxWatched {
		return nil, arguments.Invalid("argument boards: these are %d boards, and 20 can be watched at a time; fleet.query answers for more", len(boards))
	}
	release, err := p.acquireAsking(r.Caller)
	if err != nil {
		return nil, err
	}
	// A copy, since the kernel may reuse the request once this call has returned.
	w := &watchStream{plugin: p, request: *r, metrics: list, seconds: cmp.Or(args.Seconds, defWatchSeconds), done: make(chan struct{})}
	for i := range boards {
		w.boards = append(w.boards, &watchedBoard{board: boards[i], why: statusReason(&boards[i]), seen: make([]observed, len(list))})
	}
	// The watch ends with ctx, but not at its deadline, which is that of a call without a stream.
	watching, cancel := context.WithCancel(context.WithoutCancel(ctx))
	w.cancel = cancel
	unlink := context.AfterFunc(ctx, cancel)
	go func() {
		defer close(w.done)
		defer release()
		defer unlink()
		if err := withoutPanic(func() error { w.run(watching); return nil }); err != nil {
			w.publish(nil, err)
		}
	}()
	return &kernel.Result{Stream: w}, nil
}

// watchStream is a watch in progress. Its goroutine ends with the watch, or with Close, which waits for
// it.
type watchStream struct {
	plugin  *Plugin
	request kernel.Request
	metrics []int
	seconds int
	boards  []*watchedBoard
	cancel  context.CancelFunc
	done    chan struct{}

	mu     sync.Mutex // protects the fields below; a leaf, which is not held while notify runs
	notify func()
	frame  []byte // the newest one, until Next takes it
	err    error
}

var _ kernel.Stream = (*watchStream)(nil)

// watchedBoard is what was seen of a board.
type watchedBoard struct {
	board Board
	mu    sync.Mutex // protects the fields below; a leaf
	why   string     // there is nothing: one of the reasons
	seen  []observed // by metric
}

// observed are the values of one metric. points are the first maxWatchPoints of them: at watchInterval a
// watch has no more than that.
type observed struct {
	tally
	last   float64
	points []float64
}

func (o *observed) add(v float64) {
	if math.IsNaN(v) {
		return
	}
	o.tally.add(v)
	o.last = v
	if len(o.points) < maxWatchPoints {
		o.points = append(o.points, v)
	}
}

// Notify implements kernel.Stream.
func (w *watchStream) Notify(fn func()) {
	w.mu.Lock()
	w.notify = fn
	w.mu.Unlock()
	fn()
}

// Next implements kernel.Stream.
func (w *watchStream) Next() (f *manifest.Frame, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.frame == nil {
		return nil, false
	}
	f = &manifest.Frame{Data: w.frame}
	w.frame = nil
	return f, true
}

// Err implements kernel.Stream: io.EOF when the watch is over and its last frame was taken.
func (w *watchStream) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.frame != nil {
		return nil
	}
	return w.err
}

// Close implements kernel.Stream.
func (w *watchStream) Close() {
	w.cancel()
	<-w.done
}

// run watches until the time is over, ctx ends or no board is left. Each board is watched in its own
// goroutine, since a slow one must not delay the others; run waits for all of them. The end of the time is
// the end of their context, so that there is one way out of the loop.
func (w *watchStream) run(ctx context.Context) {
	began := time.Now()
	watching, stop := context.WithTimeout(ctx, time.Duration(w.seconds)*time.Second)
	defer stop()
	var wg sync.WaitGroup
	for _, b := range w.boards {
		if b.why == "" {
			wg.Go(func() { w.watchBoard(watching, b) })
		}
	}
	watched := make(chan struct{})
	go func() {
		wg.Wait()
		close(watched)
	}()
	report := time.NewTicker(watchReport)
	defer report.Stop()
	for isOver := false; !isOver; {
		select {
		case <-watched: // also earlier than asked for, when no board can be watched any more
			isOver = true
		case <-report.C:
			w.publish(w.summarize(time.Since(began)), nil)
		}
	}
	w.publish(w.summarize(time.Since(began)), io.EOF)
}

// publish makes a frame the next one, in place of one that nobody took.
func (w *watchStream) publish(frame []byte, err error) {
	w.mu.Lock()
	w.frame, w.err = frame, err
	notify := w.notify
	w.mu.Unlock()
	if notify != nil {
		notify()
	}
}

// watchBoard watches one board: the figures of metric frames with the board's stream, others by
// asking again and again.
func (w *watchStream) watchBoard(ctx context.Context, b *watchedBoard) {
	var wg sync.WaitGroup
	if slices.ContainsFunc(w.metrics, func(m int) bool { return !metrics[m].isModule }) {
		wg.Go(func() { b.failed(withoutPanic(func() error { return w.followFrames(ctx, b) })) })
	}
	if slices.ContainsFunc(w.metrics, func(m int) bool { return metrics[m].isModule }) {
		wg.Go(func() { b.failed(withoutPanic(func() error { return w.pollModules(ctx, b) })) })
	}
	wg.Wait()
}

// withoutPanic calls fn and turns a panic into an error. The kernel does so for calls of a plugin; a
// panic in a goroutine of the plugin would end the relay.
func withoutPanic(fn func() error) (err error) {
	defer func() {
		if recover() != nil { // the value may quote what a board sent
			err = manifest.E(manifest.Internal, "the watch failed")
		}
	}()
	return fn()
}

// failed keeps why a board is not watched, or no longer.
func (b *watchedBoard) failed(err error) {
	if err == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.why = reasonOf(err)
}

// followFrames takes the frames of a board's metric stream until ctx ends, which is no error. The stream is
// shared: the hub asks the board for one, however many callers watch it.
func (w *watchStream) followFrames(ctx context.Context, b *watchedBoard) error {
	r := &w.request
	name, ok := w.plugin.boardTool(ctx, r.Caller.Tenant, b.board.ID, manifest.KindMetrics, manifest.VerbSubscribe)
	if !ok {
		return errNoTool
	}
	// Without the caller's session, to which the board's stream would send its frames as progress:
	// watchStream sends the only ones.
	res, err := w.plugin.opt.Call(ctx, &kernel.Request{Caller: r.Caller, Tool: name, ConnID: r.ConnID, TraceID: r.TraceID, Traced: r.Traced, Stream: true, Inner: true,
		Arguments: fmt.Appendf(nil, `{"interval_ms":%d}`, watchInterval.Milliseconds())})
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	s := res.Stream
	defer s.Close()
	// Capacity 1: one pending notification is enough for any number of frames, since Next is called until
	// none is left.
	ready := make(chan struct{}, 1)
	s.Notify(func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	})
	for {
		for f, ok := s.Next(); ok; f, ok = s.Next() {
			values := newFigures()
			values.readFrame(f.Data, time.Time{})
			b.observe(w.metrics, values, false)
		}
		if err := s.Err(); err != nil {
			return ignoreEnd(ctx, err)
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return nil
		}
	}
}

// ignoreEnd is err, unless the watch is over, which ends everything that it has begun.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// pollModules asks a board for figures that no stream has, until ctx ends: those that it reads now, or
// those that it has recorded a moment ago if it is of an older version.
func (w *watchStream) pollModules(ctx context.Context, b *watchedBoard) error {
	tick := time.NewTicker(watchPoll)
	defer tick.Stop()
	for {
		err := w.plugin.askFigures(ctx, &w.request, b.board.ID, manifest.KindModules, manifest.VerbRead)
		if errors.Is(err, errNoTool) {
			err = w.plugin.askRecorded(ctx, &w.request, b.board.ID, w.metrics)
		}
		if err != nil {
			return ignoreEnd(ctx, err)
		}
		values := w.plugin.figures.get(w.plugin.opt.Boards, w.plugin.cacheKey(&w.request, b.board.ID), w.plugin.opt.Now())
		b.observe(w.metrics, &values, true)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// observe adds the values of the metrics that come from modules, or of those that do not.
func (b *watchedBoard) observe(list []int, f *figures, modules bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, m := range list {
		if metrics[m].isModule == modules {
			b.seen[i].add(metrics[m].possible(f.values[m]))
		}
	}
}

// watchAnswer is the answer of fleet.watch.
type watchAnswer struct {
	Seconds float64             `json:"seconds"`
	Boards  []watchedAnswer     `json:"boards"`
	Missing map[string]*missing `json:"missing,omitempty"`
}

// watchedAnswer is what was observed of one board; Metrics has those with a value only.
type watchedAnswer struct {
	Name    string                    `json:"name,omitempty"`
	ID      string                    `json:"id"`
	Ended   string                    `json:"ended,omitempty"` // why the board was not watched to the end
	Metrics map[string]observedAnswer `json:"metrics"`
}

type observedAnswer struct {
	N      int       `json:"n"`
	Min    rounded   `json:"min"`
	Mean   rounded   `json:"mean"`
	Max    rounded   `json:"max"`
	Last   rounded   `json:"last"`
	Points []rounded `json:"points,omitempty"`
}

// summarize encodes what was seen. While that has more than maxWatchAnswer bytes, the points of each metric
// are halved, at last to none; minimum, mean, maximum and the last value stay.
func (w *watchStream) summarize(took time.Duration) []byte {
	for limit := maxWatchPoints; ; limit /= 2 {
		a := watchAnswer{Seconds: math.Round(10*took.Seconds()) / 10, Boards: []watchedAnswer{}}
		var failed []boardValues
		for _, b := range w.boards {
			if row := b.answer(w.metrics, limit); len(row.Metrics) > 0 {
				a.Boards = append(a.Boards, row)
			} else {
				failed = append(failed, boardValues{board: b.board, why: cmp.Or(row.Ended, reasonNotMeasured)})
			}
		}
		a.Missing = countAnswered(failed).Missing
		data, err := json.Marshal(&a)
		if err != nil {
			return []byte(`{}`) // cannot happen: numbers and strings
		}
		if len(data) <= maxWatchAnswer || limit == 0 {
			return data
		}
	}
}

// answer describes what was seen of a board with at most maxPoints of each metric.
func (b *watchedBoard) answer(list []int, maxPoints int) watchedAnswer {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := watchedAnswer{Name: b.board.Name, ID: b.board.ID, Ended: b.why, Metrics: make(map[string]observedAnswer)}
	for i, m := range list {
		o := &b.seen[i]
		if o.n == 0 {
			continue
		}
		row := observedAnswer{N: o.n, Min: rounded(o.min), Mean: rounded(o.sum / float64(o.n)), Max: rounded(o.max), Last: rounded(o.last)}
		for j := range min(maxPoints, len(o.points)) { // evenly over all of them
			row.Points = append(row.Points, rounded(o.points[j*len(o.points)/min(maxPoints, len(o.points))]))
		}
		a.Metrics[metrics[m].key] = row
	}
	return a
}

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// frameStream is a board's metric stream: a frame a second.
type frameStream struct {
	mu     sync.Mutex
	notify func()
	frames int // made and not taken
	n      int
	err    error
	closed bool
	timer  *time.Timer
}

func newFrameStream() *frameStream {
	s := &frameStream{}
	s.mu.Lock() // tick reads timer
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(0, s.tick)
	return s
}

func (s *frameStream) tick() {
	s.mu.Lock()
	s.frames++
	notify := s.notify
	s.timer.Reset(time.Second)
	s.mu.Unlock()
	if notify != nil {
		notify()
	}
}

func (s *frameStream) fail(err error) {
	s.mu.Lock()
	s.err = err
	notify := s.notify
	s.mu.Unlock()
	notify()
}

func (s *frameStream) Notify(fn func()) {
	s.mu.Lock()
	s.notify = fn
	s.mu.Unlock()
	fn()
}

func (s *frameStream) Next() (*manifest.Frame, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.frames == 0 {
		return nil, false
	}
	s.frames--
	s.n++
	return &manifest.Frame{Data: fmt.Appendf(nil, `{"cpu_pct":%d,"mem_bytes":1,"mem_total_bytes":4}`, s.n)}, true
}

func (s *frameStream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *frameStream) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.timer.Stop()
}

// watchedFleet is a fleet whose boards stream.
type watchedFleet struct {
	*testFleet
	mu      sync.Mutex
	streams map[string]*frameStream
}

func (f *watchedFleet) call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	name, _ := manifest.ParseToolName(r.Tool)
	if name.Verb != manifest.VerbSubscribe || f.answers[name.NodeID] != nil {
		return f.testFleet.call(ctx, r)
	}
	if !r.Stream || string(r.Arguments) != `{"interval_ms":1000}` {
		return nil, errors.New("not a stream")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.streams[name.NodeID] = newFrameStream()
	return &kernel.Result{Stream: f.streams[name.NodeID]}, nil
}

// watch starts fleet.watch within the budget of a call, as the kernel does, and reads the stream to its
// end. It returns all frames, and how long the watch took.
func (f *watchedFleet) watch(t *testing.T, ctx context.Context, args string) (frames []watchResult, took time.Duration, err error) {
	t.Helper()
	p := New(Options{Call: f.call, Boards: f})
	checked, err := watchTool.input.Check([]byte(args))
	if err != nil {
		return nil, 0, err
	}
	began := time.Now()
	res, err := p.watch(budgetContext{ctx, began.Add(kernel.CallBudget)}, &kernel.Request{Caller: reader, Arguments: checked})
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		res.Stream.Close()
		res.Stream.Close()
		if len(p.used) != 0 {
			t.Error("the watch still counts")
		}
		for id, s := range f.streams {
			if !s.closed {
				t.Errorf("the stream of %s is open", id)
			}
		}
	}()
	ready := make(chan struct{}, 1)
	res.Stream.Notify(func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	})
	last := time.Now()
	for {
		for frame, ok := res.Stream.Next(); ok; frame, ok = res.Stream.Next() {
			var v watchResult
			if err := json.Unmarshal(frame.Data, &v); err != nil || len(frame.Data) > maxWatchAnswer {
				t.Fatalf("a frame of %d bytes: %v", len(frame.Data), err)
			}
			if silent := time.Since(last); silent > 5*time.Second {
				t.Errorf("nothing for %v", silent)
			}
			frames, last = append(frames, v), time.Now()
		}
		if err := res.Stream.Err(); err != nil {
			return frames, time.Since(began), err
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return frames, time.Since(began), ctx.Err()
		}
	}
}

// budgetContext is the context of a call: its deadline holds only if no stream is opened.
type budgetContext struct {
	context.Context
	deadline time.Time
}

func (c budgetContext) Deadline() (time.Time, bool) { return c.deadline, true }

// watchResult is watchAnswer as a client reads it.
type watchResult struct {
	Seconds float64
	Boards  []struct {
		Name, Ended string
		Metrics     map[string]struct {
			N                    int
			Min, Mean, Max, Last float64
			Points               []float64
		}
	}
	Missing map[string]struct{ N int }
}

func newWatchedFleet(n int) *watchedFleet {
	return &watchedFleet{testFleet: newFleet(n), streams: make(map[string]*frameStream)}
}

// A watch ends by itself, reports what it sees meanwhile, and leaves no stream open.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newWatchedFleet(20)
		f.boards[7].Status = Offline
		f.announce(8)
		frames, took, err := f.watch(t, t.Context(), `{"boards":["all"],"metrics":["cpu_pct","mem_pct","temperature_c"],"seconds":25}`)
		if !errors.Is(err, io.EOF) || took != 25*time.Second || len(frames) != 7 {
			t.Fatalf("%d frames in %v, then %v", len(frames), took, err)
		}
		last := frames[len(frames)-1]
		if len(last.Boards) != 18 || last.Seconds != 25 || last.Missing["offline"].N != 1 || last.Missing["no_history"].N+last.Missing["not_measured"].N != 1 {
			t.Fatalf("%+v", last)
		}
		cpu, temperature := last.Boards[0].Metrics["cpu_pct"], last.Boards[0].Metrics["temperature_c"]
		if cpu.N < 25 || cpu.Min != 1 || cpu.Last != float64(cpu.N) || cpu.Max != cpu.Last || cpu.Mean != float64(cpu.N+1)/2 || temperature.N < 5 {
			t.Errorf("%+v, %+v", cpu, temperature)
		}
		if first := frames[0].Boards[0].Metrics["cpu_pct"]; first.N < 4 || first.N > 5 {
			t.Errorf("the first report: %+v", first)
		}

		// One board has all points.
		frames, took, _ = f.watch(t, t.Context(), `{"boards":["board-001"]}`)
		if got := frames[len(frames)-1].Boards[0].Metrics["mem_pct"]; took != 10*time.Second || len(got.Points) != got.N || got.N < 10 || got.Mean != 25 {
			t.Errorf("%v: %+v", took, got)
		}
	})
}

// A board that goes away while it is watched, one that never answers and one that lies do not end the
// watch of the others.
func TestWatchHostileBoards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newWatchedFleet(4)
		f.reading = always(1e9) // no temperature is that
		f.answers[nodeID(1)] = silent
		time.AfterFunc(3500*time.Millisecond, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.streams[nodeID(2)].fail(&manifest.Error{Code: manifest.NodeOffline, Reason: "stream_end"})
		})
		frames, took, err := f.watch(t, t.Context(), `{"boards":["all"],"metrics":["cpu_pct","temperature_c"],"seconds":10}`)
		if !errors.Is(err, io.EOF) || took != 10*time.Second {
			t.Fatalf("%v, %v", took, err)
		}
		last := frames[len(frames)-1]
		if len(last.Boards) != 3 || last.Missing["no_answer"].N != 1 {
			t.Fatalf("%+v", last)
		}
		for _, b := range last.Boards {
			ended, n := "", 10
			if b.Name == "board-002" {
				ended, n = "offline", 4
			}
			if _, lies := b.Metrics["temperature_c"]; lies || b.Ended != ended || math.Abs(float64(b.Metrics["cpu_pct"].N-n)) > 1 {
				t.Errorf("%+v", b)
			}
		}
	})
}

// A watch that has no board to watch, or none any more, does not wait for its time.
func TestWatchEndsWithItsBoards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newWatchedFleet(2)
		f.boards[0].Status = Offline
		frames, took, err := f.watch(t, t.Context(), `{"boards":["board-000"],"seconds":25}`)
		if !errors.Is(err, io.EOF) || took > 0 || len(frames) != 1 || frames[0].Missing["offline"].N != 1 {
			t.Errorf("an offline board: %v, %v: %+v", took, err, frames)
		}
		time.AfterFunc(3*time.Second, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.streams[nodeID(1)].fail(&manifest.Error{Code: manifest.NodeOffline, Reason: "stream_end"})
		})
		if _, took, err = f.watch(t, t.Context(), `{"boards":["all"],"metrics":["cpu_pct"],"seconds":25}`); !errors.Is(err, io.EOF) || took != 3*time.Second {
			t.Errorf("a board that went offline: %v, %v", took, err)
		}
	})
}

// A caller who leaves ends the watch at once.
func TestWatchIsCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newWatchedFleet(3)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if _, took, _ := f.watch(t, ctx, `{"boards":["all"],"seconds":25}`); took != 3*time.Second {
			t.Errorf("took %v", took)
		}
	})
}

// What cannot be watched is refused at once.
func TestBadWatch(t *testing.T) {
	f := newWatchedFleet(21)
	for args, want := range map[string]string{
		`{"boards":["all"]}`:                             "these are 21 boards",
		`{"boards":["all"],"seconds":26}`:                "seconds",
		`{"boards":["board-001"],"metrics":["loadavg"]}`: "there are cpu_pct",
		`{"boards":["tag:roof"]}`:                        "none of your boards has a tag",
		`{}`:                                             "boards",
	} {
		if _, _, err := f.watch(t, t.Context(), args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// A panic while a board is watched is an error of that board: in a goroutine of the plugin it would end
// the relay.
func TestPanicWhileWatching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(2)
		p := New(Options{Call: func(context.Context, *kernel.Request) (*kernel.Result, error) { panic("a fault") }, Boards: f})
		args, err := watchTool.input.Check([]byte(`{"boards":["all"],"metrics":["cpu_pct","temperature_c"]}`))
		if err != nil {
			t.Fatal(err)
		}
		res, err := p.watch(t.Context(), &kernel.Request{Caller: reader, Arguments: args})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		frame, ok := res.Stream.Next()
		if !ok || !strings.Contains(string(frame.Data), `"missing":{"failed":{"n":2`) || !errors.Is(res.Stream.Err(), io.EOF) {
			t.Errorf("the watch ends with %s, %v; want both boards as failed, and io.EOF", frame.Data, res.Stream.Err())
		}
		res.Stream.Close()
	})
}

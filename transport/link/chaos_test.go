package link

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// chaosRelay is a relay with one node: the least that an owner of sessions and Calls has to do
// for RFC-0002 §7.3.
type chaosRelay struct {
	t    *testing.T
	pipe func() (Conn, Conn)

	mu       sync.Mutex
	calls    Calls[*chaosCall]
	session  *Session // ready; nil: none
	id, boot string   // of the session that can be resumed
	lostAt   time.Time
	proxy    *proxy // of the newest link
	verdicts map[AckVerdict]int
	resumed  int

	wg sync.WaitGroup
}

// chaosCall is one echo of its number.
type chaosCall struct {
	id       string
	n        int
	deadline time.Time
	outcome  chan string
}

// OnAck and the others are the SessionHandler.
func (r *chaosRelay) OnAck(id string, a CmdAck) bool {
	r.mu.Lock()
	c, verdict := r.calls.Ack(id)
	r.verdicts[verdict]++
	r.mu.Unlock()
	if verdict != AckAccepted {
		return verdict == AckLate || verdict == AckRepeated
	}
	switch {
	case !a.OK:
		c.outcome <- string(a.Code)
	case string(a.Result) != fmt.Sprintf(`{"n":%d}`, c.n):
		c.outcome <- "the result of another call: " + string(a.Result)
	default:
		c.outcome <- "ok"
	}
	return true
}
func (r *chaosRelay) OnAnnounce(*Manifest)   {}
func (r *chaosRelay) OnMetric(Metric) error  { return nil }
func (r *chaosRelay) OnStreamEnd(*StreamEnd) {}
func (r *chaosRelay) OnEvent(*Event)         {}

// dial is the device's Dial: a link through a proxy.
func (r *chaosRelay) dial(context.Context) (Conn, error) {
	dev, outer := r.pipe()
	inner, rel := r.pipe()
	p := newProxy(outer, inner)
	r.wg.Go(p.run)
	r.mu.Lock()
	r.proxy = p
	r.mu.Unlock()
	r.wg.Go(func() { r.serve(rel) })
	return dev, nil
}

// serve runs one link.
func (r *chaosRelay) serve(conn Conn) {
	var resume *Resume
	s, _, err := Accept(context.Background(), conn, AcceptOptions{Authenticate: authenticate, ReconnectSpreadMS: func() int64 { return 300 },
		Admit: func(_ context.Context, _ *Session, a *Auth) (Admission, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if a.Resume == nil || a.Resume.SessionID != r.id || a.BootID != r.boot || time.Since(r.lostAt) >= ResumeTTL {
				return Admission{}, nil
			}
			resume = a.Resume
			return Admission{SessionID: r.id, Resumed: true}, nil
		}})
	if err != nil {
		return
	}
	r.mu.Lock()
	if r.session != nil { // half-open
		r.session.Close(CloseSuperseded, "superseded")
		r.calls.Lost()
	}
	if r.session = s; resume == nil {
		r.failLocked()
		r.id, r.boot = s.ID, s.BootID
	} else {
		r.resumed++
		for _, id := range r.calls.Resume(resume.Seen, time.Now()) {
			r.writeLocked(r.calls.live[r.calls.find(id)].value)
		}
	}
	r.mu.Unlock()
	_ = s.Run(context.Background(), r)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session == s {
		r.session, r.lostAt = nil, time.Now()
		r.calls.Lost()
	}
}

func (r *chaosRelay) failLocked() {
	for _, f := range r.calls.Fail() {
		f.Value.outcome <- endedIn(f.State)
	}
}

// writeLocked writes a command, unless it could not start in time; its caller expires it then.
func (r *chaosRelay) writeLocked(c *chaosCall) {
	e, err := r.session.Stamp(c.deadline)
	if err == nil && r.session.Send(AppendCmd(nil, c.id, echoTool, fmt.Appendf(nil, `{"n":%d}`, c.n), 0, "", e)) == nil {
		r.calls.MarkSent(c.id)
	}
}

// call makes one call and returns its outcome.
func (r *chaosRelay) call(n int) string {
	c := &chaosCall{id: NewID(), n: n, deadline: time.Now().Add(5 * time.Second), outcome: make(chan string, 1)}
	r.mu.Lock()
	if r.session == nil && (r.id == "" || time.Since(r.lostAt) >= 5*time.Second) {
		r.mu.Unlock()
		return "not_sent"
	}
	if r.calls.Add(c.id, c.deadline, CallInfo{Tool: echoTool}, c) != nil {
		r.mu.Unlock()
		return "not_sent"
	}
	if r.session != nil {
		r.writeLocked(c)
	}
	r.mu.Unlock()
	select {
	case o := <-c.outcome:
		return o
	case <-time.After(time.Until(c.deadline)):
	}
	r.mu.Lock()
	was, ended := r.calls.Expire(c.id)
	r.mu.Unlock()
	if ended {
		return endedIn(was)
	}
	return <-c.outcome
}

// cut breaks the newest link, and hold delays what passes through it.
func (r *chaosRelay) cut() { r.withProxy(func(p *proxy) { p.cutOnce.Do(func() { close(p.isCut) }) }) }
func (r *chaosRelay) hold(d time.Duration) {
	r.withProxy(func(p *proxy) { p.heldUntil = time.Now().Add(d) })
}

func (r *chaosRelay) withProxy(fn func(p *proxy)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.proxy != nil {
		r.proxy.mu.Lock()
		fn(r.proxy)
		r.proxy.mu.Unlock()
	}
}

// proxy joins two pipes, control frames included. When it is cut, what is in it is lost.
type proxy struct {
	device, relay *pipeConn
	isCut         chan bool
	cutOnce       sync.Once
	mu            sync.Mutex
	heldUntil     time.Time
}

func newProxy(device, relay Conn) *proxy {
	return &proxy{device: device.(*pipeConn), relay: relay.(*pipeConn), isCut: make(chan bool)}
}

func (p *proxy) run() {
	var wg sync.WaitGroup
	wg.Go(func() { p.pump(p.device, p.relay) })
	wg.Go(func() { p.pump(p.relay, p.device) })
	wg.Wait()
}

// pump forwards one direction until either end is gone.
func (p *proxy) pump(from, to *pipeConn) {
	defer func() {
		_ = from.Close(CloseGoingAway, "gone")
		_ = to.Close(CloseGoingAway, "gone")
	}()
	for {
		var m pipeMsg
		select {
		case m = <-from.in:
		case <-p.isCut:
			return
		case <-from.closing.done:
			select {
			case m = <-from.in:
			default:
				return
			}
		}
		p.mu.Lock()
		held := time.Until(p.heldUntil)
		p.mu.Unlock()
		if held > 0 {
			select {
			case <-time.After(held):
			case <-p.isCut:
				return
			}
		}
		if to.send(m) != nil {
			return
		}
	}
}

// chaosBoard counts how often and when each number was run.
type chaosBoard struct {
	mu     sync.Mutex
	random *rand.Rand
	slow   time.Duration // a handler takes up to this
	runs   map[int][]time.Time
}

func (b *chaosBoard) Capabilities() []manifest.Capability {
	return []manifest.Capability{manifest.Echo()}
}

func (b *chaosBoard) Call(ctx context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
	var echo struct {
		N int `json:"n"`
	}
	if err := strictjson.Unmarshal(args, &echo); err != nil {
		return nil, nil, manifest.E(manifest.ManifestInvalid, err.Error())
	}
	b.mu.Lock()
	b.runs[echo.N] = append(b.runs[echo.N], time.Now())
	pause := time.Duration(b.random.Int64N(int64(b.slow)))
	b.mu.Unlock()
	select {
	case <-time.After(pause):
		return []byte(`{"n":` + strconv.Itoa(echo.N) + `}`), nil, nil
	case <-ctx.Done():
		return nil, nil, manifest.E(manifest.DeadlineExceeded, "late")
	}
}

// chaosRig is a relay, a board and the calls between them.
type chaosRig struct {
	*chaosRelay
	board    *chaosBoard
	random   *rand.Rand
	callers  sync.WaitGroup
	made     int
	mu       sync.Mutex
	outcomes map[string]int
	late     int // starts after the caller was answered
}

func newChaos(t *testing.T, seed uint64, pipe func() (Conn, Conn), slow time.Duration) *chaosRig {
	random := rand.New(rand.NewPCG(seed, 0))
	return &chaosRig{chaosRelay: &chaosRelay{t: t, pipe: pipe, verdicts: make(map[AckVerdict]int)}, random: random,
		board:    &chaosBoard{random: rand.New(rand.NewPCG(seed, 1)), slow: slow, runs: make(map[int][]time.Time)},
		outcomes: make(map[string]int)}
}

// start runs a board's process; stop ends it.
func (r *chaosRig) start() (stop func()) {
	c := NewClient(ClientOptions{Dial: r.dial, Token: func() (string, error) { return "good", nil }, InstanceID: testInstance, Handler: r.board})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			r.t.Errorf("Run ended with %v", err)
		}
	}
}

// goCall makes a call in the background and checks it when it has ended, and 40 s later.
func (r *chaosRig) goCall() {
	n := r.made
	r.made++
	r.callers.Go(func() {
		start := time.Now()
		outcome := r.call(n)
		answered := time.Now()
		if took := answered.Sub(start); took > 5250*time.Millisecond {
			r.t.Errorf("call %d ended after %v", n, took)
		}
		time.Sleep(40 * time.Second) // what is held comes through
		r.board.mu.Lock()
		runs := slices.Clone(r.board.runs[n])
		r.board.mu.Unlock()
		if len(runs) > 1 || outcome == "ok" && len(runs) != 1 || outcome == "not_sent" && len(runs) != 0 {
			r.t.Errorf("call %d ended %s and ran %d times", n, outcome, len(runs))
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.outcomes[outcome]++
		if len(runs) > 0 && runs[0].After(answered) {
			r.late++
		}
	})
}

func (r *chaosRig) end(stop func()) {
	r.callers.Wait()
	stop()
	r.wg.Wait()
}

func (r *chaosRig) sleep(most time.Duration) { time.Sleep(time.Duration(r.random.Int64N(int64(most)))) }

// TestChaos: with links that break, hold what passes and come back, with a board that restarts
// and a relay that forgets the session, each call ends once and in time, runs at most once, is
// not started after its caller was answered, and its outcome is true. Each seed is a simulated
// minute.
func TestChaos(t *testing.T) {
	seeds := uint64(40)
	switch {
	case slow():
		seeds = 3000
	case raceDetector:
		seeds = 10
	}
	for seed := range seeds {
		bubble(t, func(t *testing.T) {
			r := newChaos(t, seed, Pipe21, 1500*time.Millisecond)
			stop := r.start()
			time.Sleep(time.Second)
			for range 60 {
				for range r.random.IntN(4) {
					r.goCall()
					r.sleep(20 * time.Millisecond)
				}
				switch r.random.IntN(12) {
				case 0, 1, 2, 3:
					r.cut()
				case 4:
					r.hold(time.Duration(r.random.Int64N(int64(17 * time.Second))))
				case 5:
					stop()
					stop = r.start()
				case 6:
					r.chaosRelay.mu.Lock()
					if r.session == nil {
						r.failLocked()
						r.id = ""
					}
					r.chaosRelay.mu.Unlock()
				}
				r.sleep(time.Second)
			}
			r.end(stop)
			if r.late != 0 {
				t.Errorf("seed %d: %d commands were started after their caller was answered", seed, r.late)
			}
			if n := r.verdicts[AckForeign]; n != 0 {
				t.Errorf("seed %d: %d acks of the node's own were foreign", seed, n)
			}
			if r.outcomes["ok"] == 0 || r.resumed == 0 {
				t.Errorf("seed %d: %v, %d resumed", seed, r.outcomes, r.resumed)
			}
		})
		if t.Failed() {
			t.Fatalf("failed with seed %d", seed)
		}
	}
}

// TestNothingIsLost: when links break at any moment and the board is back within 300 ms, all
// calls end with their result.
func TestNothingIsLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newChaos(t, 1, Pipe21, 20*time.Millisecond)
		stop := r.start()
		time.Sleep(time.Second)
		breaks := 300
		if raceDetector && !slow() {
			breaks = 100
		}
		for range breaks {
			for range 1 + r.random.IntN(6) {
				r.goCall()
			}
			r.sleep(25 * time.Millisecond) // before cmd, in it, in the handler, in cmd_ack, after
			r.cut()
			time.Sleep(stableAfter + time.Second) // the next break is the first one again
		}
		r.end(stop)
		if r.outcomes["ok"] != r.made {
			t.Errorf("of %d calls: %v", r.made, r.outcomes)
		}
		if r.verdicts[AckDuplicate]+r.verdicts[AckForeign] > 0 {
			t.Errorf("acks %v: those that a resumed device repeats are known", r.verdicts)
		}
		t.Logf("%d calls, %d links resumed, acks %v", r.made, r.resumed, r.verdicts)
	})
}

// TestHeldLink: a link that holds everything for 17 s and then delivers it starts no command
// whose caller was answered. On v2 the device cannot know.
func TestHeldLink(t *testing.T) {
	for name, tt := range map[string]struct {
		pipe func() (Conn, Conn)
		late bool
	}{"v2": {Pipe, true}, "v2.1": {Pipe21, false}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newChaos(t, 1, tt.pipe, time.Millisecond)
				stop := r.start()
				time.Sleep(time.Second)
				for range 20 {
					r.hold(17 * time.Second)
					for range 40 {
						r.goCall()
						time.Sleep(500 * time.Millisecond)
					}
					time.Sleep(10 * time.Second)
				}
				r.end(stop)
				if (r.late > 0) != tt.late {
					t.Errorf("%d of %d commands were started late", r.late, r.made)
				}
				t.Logf("%d calls: %v, %d late", r.made, r.outcomes, r.late)
			})
		})
	}
}

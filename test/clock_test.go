package test

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/handlers"
	"agentctl/prober"
	"agentctl/prober/history"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// shiftedClock is a wall clock that is wrong by a duration.
type shiftedClock struct{ by atomic.Int64 }

func (c *shiftedClock) now() time.Time       { return time.Now().Add(time.Duration(c.by.Load())) }
func (c *shiftedClock) set(by time.Duration) { c.by.Store(int64(by)) }
func (c *shiftedClock) options(o *relay.Options) {
	o.Now, o.Synchronized = c.now, func() bool { return false }
}

// to1970 is how wrong a clock is that starts in 1970.
func to1970() time.Duration { return time.Minute - time.Duration(time.Now().UnixNano()) }

const day = 24 * time.Hour

// clockBoard is the device's own code with a history, and a clock that NTP keeps right or not.
type clockBoard struct {
	node    string
	client  *link.Client
	clock   *clock.Clock
	history *history.Store
	stop    func()
}

// clockBoard starts a board. Its token is of the time now, whatever the relay thinks of that.
func (r *testRelay) clockBoard(ntp bool, token auth.Minted) *clockBoard {
	r.t.Helper()
	b := &clockBoard{node: token.NodeID, clock: clock.New(time.Time{}, func() bool { return ntp })}
	p := prober.New(prober.Options{Source: fixedSource{}, Interval: 100 * time.Millisecond, Now: func() int64 { ms, _ := b.clock.NowMS(); return ms }})
	mux, err := handlers.New(handlers.Options{}, handlers.NewEcho(b.clock.NowMS), handlers.NewMetrics(p, b.clock.NowMS))
	if err != nil {
		r.t.Fatal(err)
	}
	b.history, err = history.Open(history.Options{Path: filepath.Join(r.t.TempDir(), "history.db"), Now: b.clock.NowMS})
	if err != nil {
		r.t.Fatal(err)
	}
	b.client = link.NewClient(link.ClientOptions{
		Dial:  func(ctx context.Context) (link.Conn, error) { return link.Dial(ctx, r.url, link.DialOptions{}) },
		Token: func() (string, error) { return token.Token, nil }, Version: "v1.2.3", InstanceID: strings.Repeat("0a", 16),
		Handler: mux, Clock: b.clock,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = p.Run(ctx) })
	wg.Go(func() { _ = b.history.Record(ctx, p) })
	wg.Go(func() { _ = b.client.Run(ctx) })
	b.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	r.t.Cleanup(func() { b.stop(); _ = b.history.Close() })
	return b
}

// TestRelayWithWrongClock: boards that NTP keeps right stay right whatever their relay says, and
// lose no history. The relay refuses them, with the reason, when its clock cannot be right, and
// serves them by itself when it is.
func TestRelayWithWrongClock(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		by      time.Duration
		ntp     bool
		refused bool
	}{
		{"an hour ahead", time.Hour, true, false},
		{"an hour ahead, a board without a clock", time.Hour, false, false},
		{"40 days ahead", 40 * day, true, false},
		{"1970", to1970(), true, true},
		{"1970, a board without a clock", to1970(), false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var c shiftedClock
			r := newTestRelay(t, c.options)
			token := r.mint(auth.MintRequest{Class: "device"})
			c.set(tt.by)
			b := r.clockBoard(tt.ntp, token)
			if tt.refused {
				eventually(t, "the board is refused", func() bool { return b.client.Status().LastErr == "link closed: 4503 clock" })
				if a := r.do("GET", "/readyz", "", nil); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "clock: the clock says 1970") {
					t.Errorf("readyz: %d %s", a.status, a.body)
				}
				if !strings.Contains(r.logs.String(), "--accept-clock") {
					t.Error("the log does not say what to do")
				}
				c.set(0) // NTP has set it
			}
			eventually(t, "the board is linked", func() bool { return b.client.Status().State == link.StateReady })
			want := time.Duration(0)
			if !tt.ntp && !tt.refused { // it follows the relay, as it has no better time
				want = tt.by
			}
			right := func(what string, ms int64) {
				t.Helper()
				if off := time.Until(time.UnixMilli(ms).Add(-want)); off > patience || off < -patience { // clocks here are off by an hour or more
					t.Errorf("%s is %v off", what, off)
				}
			}
			c.set(0) // for the tokens of the calls
			eventually(t, "the board answers", func() bool {
				return r.call("sysecho."+b.node+".echo.invoke", `{"message":"x"}`).status == http.StatusOK
			})
			var echo struct {
				ReceivedAtMS int64 `json:"received_at_ms"`
			}
			_ = json.Unmarshal([]byte(r.call("sysecho."+b.node+".echo.invoke", `{"message":"x"}`).body), &echo)
			right("an echo", echo.ReceivedAtMS)
			var frame struct {
				TSMS int64 `json:"ts_ms"`
			}
			since := time.Now().Add(want).UnixMilli()
			eventually(t, "a new frame", func() bool { // the one before may be from before the link
				_ = json.Unmarshal([]byte(r.call("sys."+b.node+".metrics.snapshot", `{}`).body), &frame)
				return frame.TSMS >= since
			})
			right("a frame", frame.TSMS)
			b.stop()
			rows, last := 0, int64(0)
			if err := b.history.Query(context.Background(), history.Query{FromMS: 1, ToMS: 1 << 53}, func(row history.Row) error {
				rows, last = rows+1, row.TSMS
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			st := b.history.Stats()
			if int64(rows) != st.Rows || rows == 0 || st.Dropped != 0 {
				t.Errorf("a query has %d of %d rows; %d dropped", rows, st.Rows, st.Dropped)
			}
			right("the newest row", last)
		})
	}
}

// TestRelayClockBehindItsLog: a clock that is before the newest stored event cannot be right either,
// after a restart as well.
func TestRelayClockBehindItsLog(t *testing.T) {
	t.Parallel()
	var c shiftedClock
	dir := t.TempDir()
	inDir := func(o *relay.Options) { o.StateDir = dir }
	r := newTestRelay(t, c.options, inDir)
	token := r.mint(auth.MintRequest{Class: "device"})
	r.device(mockOptions{token: token.Token}) // its presence is an event
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	c.set(-time.Hour)
	r = newTestRelay(t, c.options, inDir)
	if got := r.refusedLinkCode(mockOptions{token: token.Token}); got != link.CloseDraining {
		t.Errorf("an hour behind: refused with %d", got)
	}
	if a := r.do("GET", "/readyz", "", nil); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "newest event of the event log") {
		t.Errorf("readyz: %d %s", a.status, a.body)
	}
	c.set(0)
	r.device(mockOptions{token: token.Token})
	if a := r.do("GET", "/readyz", "", nil); a.status != http.StatusOK {
		t.Errorf("readyz with the right time: %d %s", a.status, a.body)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	c.set(-time.Hour)
	r = newTestRelay(t, c.options, inDir, func(o *relay.Options) { o.AcceptClock = true })
	if got := r.refusedLinkCode(mockOptions{token: token.Token}); got == link.CloseDraining {
		t.Error("--accept-clock does not let boards link")
	}
}

// TestLiveJumpsOfTheRelaysClock: what is open stays open, whatever the relay's wall clock does: links,
// streams and their tokens.
func TestLiveJumpsOfTheRelaysClock(t *testing.T) {
	t.Parallel()
	var c shiftedClock
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{cadence: true})
		s := m.subscribe(`{"interval_ms":1000}`)
		s.metric(5 * time.Second)
		for _, by := range []time.Duration{time.Hour, -time.Hour, day, -day, 40 * day, 20 * 365 * day, to1970(), 0} {
			c.set(by)
			for frames := 0; frames < 90; {
				if s.next(2*time.Second).Type == "metric" { // or a ping
					frames++
				}
			}
		}
		if m.hasEnded() {
			t.Error("the link was closed")
		}
	}, c.options)
}

// hasEnded reports whether the link has ended.
func (m *mockDevice) hasEnded() bool {
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

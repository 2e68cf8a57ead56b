package test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/transport/sse"
)

// skipUnlessSlow skips a test that needs real minutes, unless AGENTCTL_SLOW=1 asks for it.
func skipUnlessSlow(t *testing.T) {
	t.Helper()
	if os.Getenv("AGENTCTL_SLOW") == "" {
		t.Skip("needs real minutes; `make test-slow` runs it (AGENTCTL_SLOW=1)")
	}
	t.Parallel()
}

// RFC-0009 §6, §7: which of the two rules cuts a reader that reads nothing at all, and
// when. A pipe in memory holds nothing, so its kernel acknowledges nothing.
func TestRFC0009StalledReader(t *testing.T) {
	t.Parallel()
	tests := []struct {
		intervalMS      int
		code            sse.Code
		atLeast, atMost time.Duration
	}{
		{1000, sse.Backpressure, 2 * time.Second, 6 * time.Second},
		{5000, sse.Backpressure, 14 * time.Second, 22 * time.Second},
		{20000, sse.Backpressure, 59 * time.Second, 66 * time.Second},
		{45000, sse.IdleTimeout, 85 * time.Second, 95 * time.Second},
		{60000, sse.IdleTimeout, 85 * time.Second, 95 * time.Second},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.intervalMS), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *testRelay) {
				m := r.device(mockOptions{cadence: true})
				args := fmt.Sprintf(`{"interval_ms":%d}`, tt.intervalMS)
				prompt := m.subscribe(args)
				start := time.Now()
				r.stream(m.subscribeTool(), args, streamOptions{stalled: true})
				r.waitAudited("reason=close=" + fmt.Sprint(int(tt.code)))
				if took := time.Since(start); took < tt.atLeast || took > tt.atMost {
					t.Errorf("cut after %s, want %s to %s", took, tt.atLeast, tt.atMost)
				}
				for n := int(time.Since(start).Milliseconds()) / tt.intervalMS; n > 0; {
					if ev := prompt.next(time.Minute); ev.Type == "metric" {
						n--
					} else if ev.Type != "ping" {
						t.Fatalf("the prompt reader got %s %s", ev.Type, ev.Data)
					}
				}
			})
		})
	}
}

// RFC-0009 §6 on a real kernel, in two seconds: a board that samples fast replaces
// the minutes. The reader that comes back finds every frame and the close event.
func TestRFC0009Backpressure(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withMetrics)
	m := r.device(mockOptions{})
	prompt := m.subscribe(`{"interval_ms":1000}`)
	stalled := r.stream(m.subscribeTool(), `{"interval_ms":1000}`, streamOptions{stalled: true, rcvbuf: 2304})
	prompt.metric(time.Second)
	id := m.lastStream()
	sent := int64(1)
	cut := func() bool {
		return strings.Contains(metricsText(t, r), `agentctl_sse_closes_total{code="4413"} 1`)
	}
	for deadline := time.Now().Add(patience); !cut(); {
		if time.Now().After(deadline) {
			t.Fatal("the stalled reader was not cut")
		}
		for range 2 {
			sent++
			m.metric(id, sent, m.sample(sent))
			prompt.metric(time.Second)
		}
		time.Sleep(20 * time.Millisecond)
	}
	stalled.read()
	if got, _ := stalled.waitEnd(sse.Backpressure, 5*time.Second); got < 4 || int64(got) >= sent {
		t.Errorf("the stalled reader got %d frames of %d", got, sent)
	}
	if strings.Contains(stalled.raw.String(), "retry") {
		t.Error("guidance to retry")
	}
	r.waitAudited("reason=close=4413")
	_ = prompt.conn.Close()
}

// RFC-0009 §9 fixture 1 in real time.
func TestRFC0009Fixture1Real(t *testing.T) {
	skipUnlessSlow(t)
	r := newTestRelay(t)
	m := r.device(mockOptions{cadence: true})
	s := m.subscribe(`{"interval_ms":5000}`)
	time.Sleep(30 * time.Second)
	s.halfClose()
	if metrics, pings := s.waitEnd(sse.Normal, 2*time.Second); metrics < 6 || pings != 1 {
		t.Errorf("%d frames and %d pings", metrics, pings)
	}
}

// RFC-0009 §9 fixture 2 in real time: two frames larger than the reader's window stay
// unacknowledged in part, three are never due, so the 90 s decide.
func TestRFC0009Fixture2Real(t *testing.T) {
	skipUnlessSlow(t)
	r := newTestRelay(t)
	m := r.device(mockOptions{})
	prompt := m.subscribe(`{"interval_ms":60000}`)
	prompt.metric(time.Second)
	s := r.stream(m.subscribeTool(), `{"interval_ms":60000}`, streamOptions{stalled: true, rcvbuf: 2304})
	start := time.Now()
	for seq := int64(2); seq <= 3; seq++ {
		good := m.sample(seq)
		m.metric(m.lastStream(), seq, strings.Replace(good, ",", ","+strings.Repeat(" ", manifest.MaxSample-len(good)), 1))
		prompt.metric(time.Second)
	}
	for !strings.Contains(fmt.Sprint(r.audit()), "close=4408") {
		if time.Since(start) > 90*time.Second+patience {
			t.Fatal("the stalled reader was not cut")
		}
		time.Sleep(100 * time.Millisecond)
	}
	if took := time.Since(start); took < 85*time.Second || took > 90*time.Second+patience/4 {
		t.Errorf("cut after %s", took)
	}
	s.read()
	s.waitEnd(sse.IdleTimeout, 5*time.Second)
	compareGolden(t, "fixture2", []traceEntry{{"after the reader came back", s.raw.String()}})
}

// RFC-0009 §6 in real time: interval 1000, a reader with the smallest window there is.
func TestRFC0009BackpressureReal(t *testing.T) {
	skipUnlessSlow(t)
	for _, intervalMS := range []int{1000, 5000} {
		t.Run(fmt.Sprint(intervalMS), func(t *testing.T) {
			t.Parallel()
			r := newTestRelay(t)
			m := r.device(mockOptions{cadence: true})
			s := r.stream(m.subscribeTool(), fmt.Sprintf(`{"interval_ms":%d}`, intervalMS), streamOptions{stalled: true, rcvbuf: 2304})
			for start := time.Now(); !strings.Contains(fmt.Sprint(r.audit()), "close=4413"); time.Sleep(100 * time.Millisecond) {
				if time.Since(start) > time.Duration(intervalMS)*60*time.Millisecond {
					t.Fatal("the stalled reader was not cut within 60 frames")
				}
			}
			s.read()
			s.waitEnd(sse.Backpressure, 5*time.Second)
		})
	}
}

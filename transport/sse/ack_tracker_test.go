package sse

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

func rfcTracker() ackTracker {
	return ackTracker{maxFrames: 3, maxBurst: 64, grace: time.Second, idleTimeout: 90 * time.Second}
}

// A stalled reader is cut with the fourth unacknowledged frame, at any interval,
// and not before the oldest has waited for the grace.
func TestAckTrackerFull(t *testing.T) {
	tests := []struct {
		name     string
		interval time.Duration
		want     int // frames written before full
	}{
		{"fastest metric stream", time.Second, 3},
		{"default", 5 * time.Second, 3},
		{"slowest", time.Minute, 3},
		{"within the grace", 100 * time.Millisecond, 10},
		{"a burst", 0, 64},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := rfcTracker()
			var now time.Duration
			n := 0
			for ; !l.isFull(now); now += tt.interval {
				n++
				l.wrote(int64(100*n), now, true)
			}
			if n != tt.want {
				t.Errorf("%d frames, want %d", n, tt.want)
			}
			l.acknowledged(100, now)
			if tt.want == 3 && l.isFull(now) {
				t.Error("still full with two frames waiting")
			}
		})
	}
}

// Idle counts from the last progress, or from when bytes began to be outstanding.
func TestAckTrackerIdle(t *testing.T) {
	l := rfcTracker()
	if l.isIdle(time.Hour) {
		t.Fatal("idle with nothing written")
	}
	l.wrote(100, time.Hour, true)
	steps := []struct {
		at   time.Duration // since the hour
		ack  int64         // 0: nothing new
		idle bool
	}{
		{5 * time.Second, 0, false},
		{89 * time.Second, 0, false},
		{90 * time.Second, 0, true},
		{91 * time.Second, 40, false}, // half way between 90 and 91
		{180 * time.Second, 0, false},
		{180*time.Second + 500*time.Millisecond, 0, true},
		{200 * time.Second, 100, false},
		{900 * time.Second, 0, false}, // all acknowledged
	}
	for _, s := range steps {
		now := time.Hour + s.at
		l.acknowledged(max(s.ack, l.acked), now)
		if l.isIdle(now) != s.idle {
			t.Errorf("at %v: idle %v, want %v", s.at, !s.idle, s.idle)
		}
	}
}

// TestAckTrackerModel simulates a peer that acknowledges at random times and a
// stream that reads acknowledgements only when the tracker needs them, and compares with
// an observer who sees each acknowledgement.
func TestAckTrackerModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := rfcTracker()
		var now time.Duration
		var written, acked int64 // the truth
		var progress time.Duration
		type frame struct {
			end int64
			at  time.Duration
		}
		var frames []frame
		trueFull := func() bool {
			n := 0
			var oldest time.Duration
			for i := len(frames) - 1; i >= 0 && frames[i].end > acked; i-- {
				n, oldest = n+1, frames[i].at
			}
			return n >= 64 || n >= 3 && now-oldest >= time.Second
		}
		refresh := func() { l.acknowledged(acked, now) }
		t.Repeat(map[string]func(*rapid.T){
			"time": func(t *rapid.T) {
				step := time.Duration(rapid.IntRange(0, 20_000).Draw(t, "ms")) * time.Millisecond
				for end := now + step; ; { // the timer of the stream
					at, ok := l.nextCheck()
					if !ok || at > end {
						now = end
						return
					}
					now = max(now, at)
					refresh()
					if l.isIdle(now) {
						if late := now - progress - 90*time.Second; acked == written || late < -5*time.Second || late > 5*time.Second {
							t.Fatalf("idle %v after true progress", now-progress)
						}
						l.progressAt, progress = now, now // go on as if it had moved
					}
				}
			},
			"peer": func(t *rapid.T) {
				if acked < written {
					acked += rapid.Int64Range(1, written-acked).Draw(t, "bytes")
					progress = now
				}
			},
			"frame": func(t *rapid.T) {
				if l.needsRefresh(now) {
					refresh()
				}
				if got, want := l.isFull(now), trueFull(); got != want {
					t.Fatalf("full %v, want %v", got, want)
				}
				if !trueFull() {
					if acked == written {
						progress = now
					}
					written += 100
					l.wrote(written, now, true)
					frames = append(frames, frame{written, now})
				}
			},
			"": func(t *rapid.T) {
				if acked < written && now-progress > 95*time.Second {
					t.Fatalf("no idle %v after true progress", now-progress)
				}
				if len(l.frames) > 64 {
					t.Fatalf("%d marks", len(l.frames))
				}
			},
		})
	})
}

package link

import (
	"slices"
	"testing"
	"time"
)

func TestBackoff(t *testing.T) {
	const s, m, h = time.Second, time.Minute, time.Hour
	type step struct {
		code     int
		ready    time.Duration
		after    time.Duration // since the step before
		min, max time.Duration // of the wait
	}
	tests := []struct {
		name   string
		spread time.Duration
		steps  []step
	}{
		{"gone for long: first in the default spread, then doubling to it, after 5 min up to 60 s", 0, []step{
			{0, 0, 0, 0, 5 * s}, {0, 0, s, 0, 1 * s}, {0, 0, s, 0, 2 * s}, {0, 0, s, 0, 4 * s}, {0, 0, s, 0, 5 * s},
			{0, 0, 5*m - 5*s, 0, 5 * s}, {0, 0, s, 0, m}, {0, 0, h, 0, m}, {0, 0, 0, 0, m}}},
		{"few boards: the cap is 4 s", s, []step{{0, 0, 0, 0, s}, {0, 0, 0, 0, s}, {0, 0, 0, 0, 2 * s}, {0, 0, 0, 0, 4 * s}, {0, 0, 0, 0, 4 * s}}},
		{"short links in between: each begins the five minutes anew", s, []step{
			{0, 0, 0, 0, s}, {0, 0, s, 0, s}, {0, 5 * s, 5 * m, 0, 2 * s}, {0, 0, s, 0, 4 * s}, {0, 0, 5 * m, 0, m}}},
		{"many boards: from spread/8 to the spread", 32 * s, []step{
			{0, 0, 0, 0, 32 * s}, {0, 0, 0, 0, 4 * s}, {0, 0, 0, 0, 8 * s}, {0, 0, 0, 0, 16 * s}, {0, 0, 0, 0, 32 * s}, {0, 0, 0, 0, 32 * s}}},
		{"very many: the cap is 60 s", 10 * m, []step{{0, 0, 0, 0, 10 * m}, {0, 0, 0, 0, m}, {0, 0, 0, 0, m}}},
		{"spread of the last auth_ok", 8 * s, []step{{0, 0, 0, 0, 8 * s}, {0, 0, 0, 0, s}}},
		{"spread is bounded", 24 * h, []step{{CloseDraining, 0, 0, 0, 10 * m}}},
		{"spread below zero is the default", -s, []step{{CloseDraining, 0, 0, 0, 5 * s}}},
		{"60 s of ready start afresh", 8 * s, []step{{0, 0, 0, 0, 8 * s}, {0, 0, 0, 0, s}, {0, m, h, 0, 8 * s}, {0, 0, 0, 0, s}}},
		{"59 s do not", 8 * s, []step{{0, 0, 0, 0, 8 * s}, {0, 59 * s, 0, 0, s}, {0, 59 * s, 0, 0, 2 * s}}},
		{"normal", 9 * s, []step{{CloseNormal, m, 0, 0, 9 * s}, {CloseNormal, 0, 0, 0, 1125 * time.Millisecond}}},
		{"going away", 9 * s, []step{{CloseGoingAway, 0, 0, 0, 9 * s}, {CloseGoingAway, 0, 0, 0, 9 * s}}},
		{"service restart", 9 * s, []step{{CloseServiceRestart, 0, 0, 0, 9 * s}, {CloseServiceRestart, 0, 0, 0, 9 * s}}},
		{"draining", 9 * s, []step{{CloseDraining, 0, 0, 0, 9 * s}, {CloseDraining, 0, 0, 0, 9 * s}}},
		{"draining for long: not faster than any other failure", s, []step{
			{CloseDraining, h, 0, 0, s}, {CloseDraining, 0, 0, 0, s}, {CloseDraining, 0, 0, 0, 2 * s}, {CloseDraining, 0, 0, 0, 4 * s}, {CloseDraining, 0, 5 * m, 0, m}}},
		{"auth failed: not before 5 min", 0, []step{{CloseAuthFailed, 0, 0, 5 * m, 5*m + 30*s}, {CloseAuthFailed, 0, 0, 5 * m, 5*m + 30*s}}},
		{"forbidden", 0, []step{{CloseForbidden, h, 0, 5 * m, 5*m + 30*s}}},
		{"timeout", 9 * s, []step{{CloseTimeout, 0, 0, 0, 9 * s}, {CloseTimeout, 0, 0, 0, 1125 * time.Millisecond}}},
		{"too large", 9 * s, []step{{CloseTooLarge, 0, 0, 0, 9 * s}, {CloseTooLarge, 0, 0, 0, 1125 * time.Millisecond}}},
		{"superseded: 60 s doubling to 1 h", 0, []step{
			{CloseSuperseded, 0, 0, m, m}, {CloseSuperseded, 0, 0, 2 * m, 2 * m}, {CloseSuperseded, 0, 0, 4 * m, 4 * m}, {CloseSuperseded, 0, 0, 8 * m, 8 * m},
			{CloseSuperseded, 0, 0, 16 * m, 16 * m}, {CloseSuperseded, 0, 0, 32 * m, 32 * m}, {CloseSuperseded, 0, 0, h, h}, {CloseSuperseded, 0, 0, h, h}}},
		{"two installs that alternate go on doubling", 0, []step{
			{CloseSuperseded, m, 0, m, m}, {CloseSuperseded, m, 0, 2 * m, 2 * m}, {CloseSuperseded, 2 * m, 0, 4 * m, 4 * m}, {CloseSuperseded, h, 0, 8 * m, 8 * m}}},
		{"a takeover is forgotten after 2 h", 0, []step{{CloseSuperseded, 0, 0, m, m}, {CloseSuperseded, 0, 0, 2 * m, 2 * m}, {CloseSuperseded, 2 * h, 0, m, m}}},
		{"manifest invalid: hourly", 0, []step{{CloseManifestInvalid, 0, 0, h, h + 5*m}, {CloseManifestInvalid, 0, 0, h, h + 5*m}}},
		{"upgrade required: hourly", 0, []step{{CloseUpgradeRequired, 0, 0, h, h + 5*m}}},
		{"rate limited: max backoff", 0, []step{{CloseRateLimited, h, 0, 30 * s, m}}},
		{"bad frame: backoff, the third in 10 min at max", 9 * s, []step{
			{CloseBadFrame, 0, 0, 0, 9 * s}, {CloseBadFrame, 0, 4 * m, 0, 1125 * time.Millisecond}, {CloseBadFrame, 0, 4 * m, 30 * s, m}, {CloseBadFrame, 0, m, 30 * s, m}}},
		{"bad frame now and then", 9 * s, []step{
			{CloseBadFrame, m, 0, 0, 9 * s}, {CloseBadFrame, m, 6 * m, 0, 9 * s}, {CloseBadFrame, m, 6 * m, 0, 9 * s}}},
		{"a code of another product", 9 * s, []step{{4999, 0, 0, 0, 9 * s}, {4999, 0, 0, 0, 1125 * time.Millisecond}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			const rounds = 400
			low, high := make([]time.Duration, len(tt.steps)), make([]time.Duration, len(tt.steps))
			for r := range rounds {
				var b Backoff
				b.SetSpread(tt.spread)
				var now time.Duration
				for i, st := range tt.steps {
					now += st.after
					got := b.Next(st.code, st.ready, now)
					if got < st.min || got > st.max {
						t.Fatalf("step %d, code %d: wait %v, want %v to %v", i, st.code, got, st.min, st.max)
					}
					if r == 0 || got < low[i] {
						low[i] = got
					}
					high[i] = max(high[i], got)
				}
			}
			// Uniform: of 400 draws some lie in the lowest and the highest twentieth of the
			// range. The test fails by chance once in 10^8 steps.
			for i, st := range tt.steps {
				edge := (st.max - st.min) / 20
				if low[i] > st.min+edge || high[i] < st.max-edge {
					t.Errorf("step %d: waits lie in %v to %v, want all of %v to %v", i, low[i], high[i], st.min, st.max)
				}
			}
		})
	}
}

// A change of the network is worth a dial at once. Changes without end are not: the dials that they
// cause come at growing distances, and never more than one a second.
func TestBackoffWake(t *testing.T) {
	var b Backoff
	b.SetSpread(time.Second)
	for range 10 {
		b.Next(0, 0, 0)
	}
	const s = time.Second
	now := 10 * time.Minute // a long outage
	if wait := b.Wake(time.Minute, now); wait != 0 {
		t.Fatalf("the first wake waits %v", wait)
	}
	for range 100 { // the waits start over
		c := b
		if wait := c.Next(0, 0, now); wait > s {
			t.Fatalf("after a wake: %v", wait)
		}
	}
	last := now
	for i, want := range []time.Duration{s, s, s, s, s, s, s, 2 * s, 4 * s, 8 * s, 16 * s, 32 * s, 60 * s, 60 * s, 60 * s} {
		now += 10 * time.Millisecond // changes all the time
		wait := b.Wake(time.Hour, now)
		if now += wait; now-last != want {
			t.Fatalf("wake %d: dials after %v, want %v", i, now-last, want)
		}
		last = now
	}
	for range 10 { // changes that never end do not undo the back-off
		b.Next(0, 0, now)
		b.Wake(time.Hour, now)
	}
	if b.failures < 10 {
		t.Errorf("%d failures are remembered", b.failures)
	}
	if wait := b.Wake(100*time.Millisecond, now); wait != 100*time.Millisecond {
		t.Errorf("a wake makes a wait of 100 ms one of %v", wait)
	}
	if wait := b.Wake(time.Hour, now+wakeMemory+time.Hour); wait != 0 {
		t.Errorf("a wake after a pause waits %v", wait)
	}
}

// herd is the model of a relay that goes away at 0 and is back at away: how often each of n boards
// dials, and when it is back.
func herd(n int, spread, away time.Duration) (dials []int, back []time.Duration) {
	for range n {
		var b Backoff
		b.SetSpread(spread)
		ready, dialed := time.Hour, 0
		for now := time.Duration(0); ; ready = 0 {
			now += b.Next(0, ready, now)
			if dialed++; now >= away {
				dials, back = append(dials, dialed), append(back, now-away)
				break
			}
		}
	}
	slices.Sort(dials)
	slices.Sort(back)
	return dials, back
}

// TestHerd: with the spread that the relay chooses for so many boards (hub.reconnectSpreadMS),
// few boards are back in seconds after any outage, and many do not dial often.
func TestHerd(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		boards       int
		spread, away time.Duration
		back         time.Duration // of the last board
		dials        int           // median
	}{
		{100, s, 2 * s, 5 * s, 6},
		{100, s, 20 * s, 5 * s, 0},
		{100, s, 2 * time.Minute, 10 * s, 0},
		{5000, 25 * s, 2 * s, 60 * s, 6},
		{5000, 25 * s, 30 * s, 60 * s, 6},
	} {
		dials, back := herd(tt.boards, tt.spread, tt.away)
		last, median, most := back[len(back)-1], dials[len(dials)/2], 0
		for i, t := range back { // boards within one second
			j, _ := slices.BinarySearch(back, t+s)
			most = max(most, j-i)
		}
		t.Logf("%d boards, relay away %v: back after %v, median %d dials, at most %d boards/s", tt.boards, tt.away, last.Round(s/10), median, most)
		if last > tt.back || tt.dials > 0 && median > tt.dials {
			t.Errorf("%d boards, relay away %v: back after %v, want %v; median %d dials, want %d", tt.boards, tt.away, last, tt.back, median, tt.dials)
		}
	}
}

package link

import (
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
		{"gone for long: first in the default spread, then doubling to the cap", 0, []step{
			{0, 0, 0, 0, 5 * s}, {0, 0, 0, 0, 1 * s}, {0, 0, 0, 0, 2 * s}, {0, 0, 0, 0, 4 * s}, {0, 0, 0, 0, 8 * s},
			{0, 0, 0, 0, 16 * s}, {0, 0, 0, 0, 32 * s}, {0, 0, 0, 0, m}, {0, 0, 0, 0, m}, {0, 0, 0, 0, m}}},
		{"spread of the last auth_ok", 30 * s, []step{{0, 0, 0, 0, 30 * s}, {0, 0, 0, 0, s}}},
		{"spread is bounded", 24 * h, []step{{CloseDraining, 0, 0, 0, 10 * m}}},
		{"spread below zero is the default", -s, []step{{CloseDraining, 0, 0, 0, 5 * s}}},
		{"60 s of ready start afresh", 20 * s, []step{{0, 0, 0, 0, 20 * s}, {0, 0, 0, 0, s}, {0, m, 0, 0, 20 * s}}},
		{"59 s do not", 20 * s, []step{{0, 0, 0, 0, 20 * s}, {0, 59 * s, 0, 0, s}, {0, 59 * s, 0, 0, 2 * s}}},
		{"normal", 9 * s, []step{{CloseNormal, m, 0, 0, 9 * s}, {CloseNormal, 0, 0, 0, s}}},
		{"going away", 9 * s, []step{{CloseGoingAway, 0, 0, 0, 9 * s}, {CloseGoingAway, 0, 0, 0, 9 * s}}},
		{"service restart", 9 * s, []step{{CloseServiceRestart, 0, 0, 0, 9 * s}, {CloseServiceRestart, 0, 0, 0, 9 * s}}},
		{"draining", 9 * s, []step{{CloseDraining, 0, 0, 0, 9 * s}, {CloseDraining, 0, 0, 0, 9 * s}}},
		{"auth failed: not before 5 min", 0, []step{{CloseAuthFailed, 0, 0, 5 * m, 5*m + 30*s}, {CloseAuthFailed, 0, 0, 5 * m, 5*m + 30*s}}},
		{"forbidden", 0, []step{{CloseForbidden, h, 0, 5 * m, 5*m + 30*s}}},
		{"timeout", 9 * s, []step{{CloseTimeout, 0, 0, 0, 9 * s}, {CloseTimeout, 0, 0, 0, s}}},
		{"too large", 9 * s, []step{{CloseTooLarge, 0, 0, 0, 9 * s}, {CloseTooLarge, 0, 0, 0, s}}},
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
			{CloseBadFrame, 0, 0, 0, 9 * s}, {CloseBadFrame, 0, 4 * m, 0, s}, {CloseBadFrame, 0, 4 * m, 30 * s, m}, {CloseBadFrame, 0, m, 30 * s, m}}},
		{"bad frame now and then", 9 * s, []step{
			{CloseBadFrame, m, 0, 0, 9 * s}, {CloseBadFrame, m, 6 * m, 0, 9 * s}, {CloseBadFrame, m, 6 * m, 0, 9 * s}}},
		{"a code of another product", 9 * s, []step{{4999, 0, 0, 0, 9 * s}, {4999, 0, 0, 0, s}}},
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

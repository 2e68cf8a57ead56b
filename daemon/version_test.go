package daemon

import (
	"testing"
	"time"
)

// TestIsNewer: each version of the list is newer than those before it, and none than itself.
func TestIsNewer(t *testing.T) {
	order := []string{
		"v0.9.10", "v1.0.0-0.20260101120000-abcdef123456", "v1.0.0-0.20260201120000-012345abcdef", "v1.0.0-alpha", "v1.0.0-alpha.1",
		"v1.0.0-alpha.beta", "v1.0.0-beta.2", "v1.0.0-beta.11", "v1.0.0-rc.1", "v1.0.0-rc.1-3-gabcdef0", "v1.0.0", "v1.0.0-2-gabcdef0-dirty",
		"v1.0.0-10-g0123456", "v1.0.1-0.20260301120000-abcdef123456", "v1.0.1", "v1.1.0", "1.2.0", "v2.0.0+build.7", "v10.0.0",
	}
	for i, a := range order {
		for j, b := range order {
			if got := isNewer(Build{Version: a}, Build{Version: b}); got != (i > j) {
				t.Errorf("%s newer than %s: %v", a, b, got)
			}
		}
	}
}

// TestIsNewerByTime: versions without an order, and equal ones, are compared by their commits.
func TestIsNewerByTime(t *testing.T) {
	early, late := time.Unix(1_770_000_000, 0), time.Unix(1_780_000_000, 0)
	for _, pair := range [][2]string{{"abc1234", "def5678"}, {"devel", "devel"}, {"v1.0.0", "v1.0.0-dirty"}, {"abc1234-dirty", "v1.0.0"}} {
		for _, tt := range []struct {
			staged, running time.Time
			want            bool
		}{{late, early, true}, {early, late, false}, {early, early, false}, {time.Time{}, early, false}, {late, time.Time{}, false}} {
			if got := isNewer(Build{Version: pair[0], Time: tt.staged}, Build{Version: pair[1], Time: tt.running}); got != tt.want {
				t.Errorf("%s of %v newer than %s of %v: %v", pair[0], tt.staged, pair[1], tt.running, got)
			}
		}
	}
	if !isNewer(Build{Version: "v2.0.0", Time: early}, Build{Version: "v1.0.0", Time: late}) {
		t.Error("the time takes precedence over the version")
	}
}

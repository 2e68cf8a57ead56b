package fleet

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"agentctl/manifest"
)

// Every figure is read, in the order of metrics. A later answer without it makes it unknown again.
func TestReadFigures(t *testing.T) {
	f := newFigures()
	f.readFrame([]byte(`{"cpu_pct":1,"mem_bytes":333,"mem_total_bytes":1000,"disk_pct":4,"load_1m":5,"load_5m":6,"load_15m":7}`), time.Now())
	f.readModules([]byte(`{"temperature":{"hottest_c":8},"network":{"bytes_in_per_s":9,"bytes_out_per_s":10},`+
		`"power":{"under_voltage":true,"freq_capped":false,"throttled":true,"soft_temp_limit":false},"wear":{"used_pct":11,"pre_eol":"warning"}}`), time.Now())
	if want := []float64{1, 33.3, 333, 1000, 4, 5, 6, 7, 8, 9, 10, 1, 0, 1, 0, 11, 2}; !slices.Equal(f.values[:], want) {
		t.Errorf("read %v, want %v", f.values, want)
	}
	f.readModules([]byte(`{"power":{}}`), time.Now())
	f.readFrame([]byte(`{}`), time.Now())
	for i, v := range f.values {
		if !math.IsNaN(v) {
			t.Errorf("%s is %v after an answer without it", metrics[i].key, v)
		}
	}
}

// A full cache drops the boards whose figures are too old, and all of them if none is.
func TestFigureCache(t *testing.T) {
	var c figureCache
	now := time.Now()
	answer := []byte(`{"cpu_pct":1}`)
	fill := func(age func(i int) time.Duration) {
		c.boards = nil
		for i := range maxCachedFigures {
			f := newFigures()
			f.times[metricIndex("cpu_pct")] = now.Add(-age(i)).UnixMilli()
			if c.boards == nil {
				c.boards = make(map[string]*figures)
			}
			c.boards[fmt.Sprint(i)] = f
		}
		c.put("one more", manifest.KindMetrics, answer, now)
	}
	fill(func(i int) time.Duration { return time.Duration(i%2) * time.Minute })
	if n := len(c.boards); n != maxCachedFigures/2+1 {
		t.Errorf("%d boards, want the half that is not old and one more", n)
	}
	fill(func(int) time.Duration { return 0 })
	if n := len(c.boards); n != 1 {
		t.Errorf("%d boards, want one: the cache was full of new ones", n)
	}
}

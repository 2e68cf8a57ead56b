package history

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/prober"
)

// Buckets are sought with separate statements; the rows without a step are only read. So the
// buckets of random records, folded from their rows, are the answer to a query with a step: over gaps,
// restarts and jumps of the clock, with keys that are recorded at different times, for windows that
// cut buckets, and with the newest records in memory.
func TestBucketsAgreeWithRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	records := often(15_000, 3_000)
	for round := range often(20, 4) {
		s, c := open(t, Options{Path: filepath.Join(quickDir(t), "history.db")})
		isExact := round%4 == 3 // records at the last millisecond of each second, with all keys
		if isExact {
			c.step(999 * time.Millisecond)
		}
		for i := range records {
			if isExact {
				c.step(time.Second)
			} else {
				c.step(time.Duration(200+rng.IntN(1600)) * time.Millisecond)
			}
			switch n := rng.IntN(records / 5); {
			case isExact:
			case n == 0:
				c.step(time.Duration(rng.IntN(24)) * time.Hour)
			case n == 1:
				now, _ := c.now()
				c.set(now + int64(rng.IntN(200_000)-100_000))
			case n < 7: // a record at the very end of a minute, others not before the next one
				now, _ := c.now()
				c.step(time.Duration(59_999-now%60_000) * time.Millisecond)
				s.Add(c.sample(i), reading(keyNames[i%len(keyNames)], float64(i)))
			case n == 7:
				s = reopen(t, s, c, fmt.Sprint("boot-", i))
			}
			var readings []prober.Reading
			for k, key := range keyNames {
				if isExact || i%[]int{10, 10, 700, 33, 10, 10, 10, 7, 61, 3600, 3600}[k] == 0 || round%2 == 0 && rng.IntN(500) == 0 {
					readings = append(readings, reading(key, float64(rng.IntN(1000))/8))
				}
			}
			s.Add(c.sample(rng.IntN(10_000)), readings...)
			if i%1500 == 1499 && i < records-1000 || isExact && i%300 == 299 {
				flush(t, s)
			}
		}
		now, _ := c.now()
		for range 30 {
			q := Query{
				FromMS:  now - rng.Int64N(now-epoch),
				StepMS:  []int64{10_000, 60_000, 61_234, 3_600_000, 86_400_000, 1 << 45}[rng.IntN(6)],
				Modules: [][]string{nil, {"cpu", "memory"}, {"wear"}, {"network"}, {"load", "power", "wear"}, {"temperature.hottest_c"}, {"network.errors_in", "wear"}}[rng.IntN(7)],
			}
			if q.ToMS = now; rng.IntN(2) == 0 {
				q.ToMS = q.FromMS + rng.Int64N(now-q.FromMS+1)
			}
			rows := q
			rows.StepMS = 0
			want := buckets(query(t, s, rows), q.StepMS)
			got := query(t, s, q)
			if fmt.Sprint(got) != fmt.Sprint(want) {
				i := 0
				for i < min(len(got), len(want)) && fmt.Sprint(got[i]) == fmt.Sprint(want[i]) {
					i++
				}
				t.Fatalf("%+v: %d rows, want %d; they differ at %d:\n%v\n%v", q, len(got), len(want), i, got[i:min(i+1, len(got))], want[i:min(i+1, len(want))])
			}
		}
	}
}

// buckets folds rows into buckets: the last sample and the last reading of each key.
func buckets(rows []Row, step int64) (folded []Row) {
	for _, r := range rows {
		n := len(folded)
		if n == 0 || folded[n-1].TSMS/step != r.TSMS/step {
			folded = append(folded, r)
			continue
		}
		b := &folded[n-1]
		if b.TSMS = r.TSMS; r.HasSample {
			b.HasSample, b.Sample = true, r.Sample
		}
		for _, reading := range r.Modules {
			i := slices.IndexFunc(b.Modules, func(old prober.Reading) bool { return old.Key == reading.Key })
			if i < 0 {
				b.Modules = append(b.Modules, reading)
			} else {
				b.Modules[i] = reading
			}
		}
		slices.SortFunc(b.Modules, func(x, y prober.Reading) int { return strings.Compare(x.Key, y.Key) })
	}
	return folded
}

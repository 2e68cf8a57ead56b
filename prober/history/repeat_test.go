package history

import (
	"context"
	"slices"
	"testing"
	"time"
)

// TestAskedAgain checks that a query up to the last row of an answer returns the same bytes
// while samples are added, saved and removed by retention.
func TestAskedAgain(t *testing.T) {
	const saved, unsaved = 600, 300
	tests := []struct {
		name string
		q    Query
	}{
		{"every row", Query{}},
		{"seconds", Query{StepMS: 1000}},
		{"buckets that are read", Query{StepMS: 7000}},
		{"buckets that are looked for", Query{StepMS: 60_000}},
		{"one bucket", Query{StepMS: 1 << 40}},
		{"samples only", Query{StepMS: 60_000, Modules: []string{"cpu"}}},
		{"readings only", Query{StepMS: 30_000, Modules: []string{"network"}}},
		{"the first", Query{Limit: 700}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, c := open(t, Options{Path: quickDir(t) + "/history.db"})
			busy := func(n int) {
				for i := range n {
					c.step(500 * time.Millisecond)
					s.Add(c.sample(i), reading("network.bytes_in_per_s", float64(i)), reading("temperature.hottest_c", float64(i%7)))
				}
			}
			// ask collects an answer; between its rows the daemon goes on.
			ask := func(q Query) (rows []Row) {
				err := s.Query(context.Background(), q, func(r Row) error {
					r.Modules = slices.Clone(r.Modules)
					rows = append(rows, r)
					if n := len(rows); n == 1 || n%200 == 0 {
						busy(20)
						flush(t, s)
						busy(1)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				return rows
			}
			busy(saved)
			flush(t, s)
			busy(unsaved)
			q := tt.q
			q.FromMS = epoch
			same := func(a, b Row) bool {
				return a.TSMS == b.TSMS && a.HasSample == b.HasSample && a.Sample == b.Sample && slices.Equal(a.Modules, b.Modules)
			}
			first := ask(q)
			q.ToMS = first[len(first)-1].TSMS
			again := ask(q)
			if !slices.EqualFunc(first, again, same) {
				t.Fatalf("%d rows, then %d, or others", len(first), len(again))
			}

			// Retention takes from the front, and changes nothing behind.
			if err := s.SetRetention(5*time.Minute, 0); err != nil {
				t.Fatal(err)
			}
			q.Limit = 0
			short := ask(q)
			flush(t, s)
			shorter := ask(q)
			if tt.q.Limit > 0 {
				return // the limit has others now
			}
			for _, rows := range [][]Row{short, shorter} {
				if len(rows) == 0 || len(rows) >= len(first) && len(first) > 1 || !slices.EqualFunc(rows, first[len(first)-len(rows):], same) {
					t.Errorf("%d rows are left of %d, and they are not the last", len(rows), len(first))
				}
			}
		})
	}
}

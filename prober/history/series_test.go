//go:build linux

package history

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"agentctl/prober"
)

// point is a step as fn of Series gets it.
type point struct {
	start  int64
	values []float64
}

func series(t testing.TB, s *Store, q SeriesQuery) (points []point) {
	t.Helper()
	err := s.Series(context.Background(), q, func(start int64, values []float64) error {
		points = append(points, point{start, slices.Clone(values)})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return points
}

func wantPoints(t *testing.T, got []point, want ...point) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

var none = math.NaN()

// Each aggregate, over steps that lie in the file, in memory, in both and in neither.
func TestSeries(t *testing.T) {
	s, c := open(t, Options{})
	add := func(cpu float64, memKiB uint64, readings ...prober.Reading) {
		x := c.sample(0)
		x.CPUPct, x.MemBytes = cpu, memKiB<<10
		if cpu == 3 {
			x.DiskErr = prober.ErrDisk
		}
		s.Add(x, readings...)
		c.step(time.Second)
	}
	add(1, 2048, reading("temperature.hottest_c", 40))
	add(3, 1024)
	flush(t, s)
	add(8, 3000, reading("temperature.hottest_c", 50.5))
	c.step(7 * time.Second) // a step without a record
	add(4, 4096)
	names := []string{"cpu_pct", "memory.used", "temperature.hottest_c", "disk_pct", "mem_bytes", "wear.used_pct"}
	q := func(aggregate string) SeriesQuery {
		return SeriesQuery{FromMS: epoch, EndMS: epoch + 15_000, StepMS: 5000, Metrics: names, Aggregate: aggregate}
	}
	later := []float64{4, 4, none, 45.23, 4 << 20, none}
	wantPoints(t, series(t, s, q(AggregateLast)), point{epoch, []float64{8, 2, 50.5, 45.23, 3000 << 10, none}}, point{epoch + 10_000, later})
	wantPoints(t, series(t, s, q(AggregateMean)), point{epoch, []float64{4, 1, 45.25, 45.23, 2024 << 10, none}}, point{epoch + 10_000, later})
	wantPoints(t, series(t, s, q(AggregateMin)), point{epoch, []float64{1, 1, 40, 45.23, 1 << 20, none}}, point{epoch + 10_000, later})
	wantPoints(t, series(t, s, q(AggregateMax)), point{epoch, []float64{8, 2, 50.5, 45.23, 3000 << 10, none}}, point{epoch + 10_000, later})

	if err := s.Series(context.Background(), SeriesQuery{EndMS: 1, StepMS: 1, Metrics: []string{"cpu"}}, nil); !errors.Is(err, ErrMetric) {
		t.Errorf("an unknown metric: %v", err)
	}
	stop := errors.New("stop")
	if err := s.Series(context.Background(), q(AggregateMean), func(int64, []float64) error { return stop }); err != stop {
		t.Errorf("fn's error: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Series(ctx, q(AggregateMean), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled ctx: %v", err)
	}
	if n := len(s.db.stmts); n > 20 {
		t.Errorf("%d statements are kept", n)
	}
}

// seriesStep is what a series aggregates: the values of a step by metric, from the rows.
type seriesStep struct {
	start       int64
	cpu, errors []float64
}

// stepsOf groups all rows from a time to another, which is not included, by steps.
func stepsOf(t *testing.T, s *Store, from, end, step int64) (steps []*seriesStep) {
	t.Helper()
	for _, row := range query(t, s, Query{FromMS: from, ToMS: end - 1}) {
		start := row.TSMS - (row.TSMS-from)%step
		if len(steps) == 0 || steps[len(steps)-1].start != start {
			steps = append(steps, &seriesStep{start: start})
		}
		last := steps[len(steps)-1]
		if row.HasSample {
			last.cpu = append(last.cpu, row.Sample.CPUPct)
		}
		for _, r := range row.Modules {
			if r.Key == "network.errors_in" {
				last.errors = append(last.errors, r.Value)
			}
		}
	}
	return steps
}

// randomHistory has 1500 samples up to 4 s apart, with gaps of hours, readings in a fifth of them, and the
// newest 250 in memory.
func randomHistory(t *testing.T) (*Store, *fakeClock) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	s, c := open(t, Options{})
	for i := range 1500 {
		c.step(time.Duration(1+rng.IntN(4000)) * time.Millisecond)
		if rng.IntN(100) == 0 {
			c.step(3 * time.Hour)
		}
		if rng.IntN(5) == 0 {
			s.Add(c.sample(rng.IntN(10000)), reading("wear.used_pct", float64(i)), reading("network.errors_in", float64(rng.IntN(9))))
		} else {
			s.Add(c.sample(rng.IntN(10000)))
		}
		if i == 750 || i == 1250 {
			flush(t, s)
		}
	}
	return s, c
}

// TestSeriesAgreesWithRows compares series with what their rows give, whose values they round.
func TestSeriesAgreesWithRows(t *testing.T) {
	s, c := randomHistory(t)
	now, _ := c.now()
	from, end := epoch+7, now-5 // in the middle of steps
	for _, step := range []int64{1500, 60_000, 7_200_000, 80_000_000} {
		steps := stepsOf(t, s, from, end, step)
		for _, aggregate := range []string{AggregateLast, AggregateMean, AggregateMin, AggregateMax} {
			got := series(t, s, SeriesQuery{FromMS: from, EndMS: end, StepMS: step, Metrics: []string{"cpu_pct", "network.errors_in"}, Aggregate: aggregate})
			if len(got) != len(steps) {
				t.Fatalf("%s by %d: %d steps, want %d", aggregate, step, len(got), len(steps))
			}
			for i, want := range steps {
				cpu, errors := aggregated(aggregate, want.cpu), aggregated(aggregate, want.errors)
				if got[i].start != want.start || !isNear(got[i].values[0], cpu, 0.005) || !isNear(got[i].values[1], errors, 0.0005) {
					t.Fatalf("%s by %d: step %d is %v, want %v and %v at %d", aggregate, step, i, got[i], cpu, errors, want.start)
				}
			}
		}
	}
}

// isNear compares values up to rounding; NaN stands for no value.
func isNear(got, want, rounding float64) bool {
	if math.IsNaN(want) {
		return math.IsNaN(got)
	}
	return math.Abs(got-want) <= rounding*1.01
}

func aggregated(aggregate string, values []float64) float64 {
	if len(values) == 0 {
		return none
	}
	switch aggregate {
	case AggregateLast:
		return values[len(values)-1]
	case AggregateMin:
		return slices.Min(values)
	case AggregateMax:
		return slices.Max(values)
	}
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// While the disk does not work a series has what is in memory.
func TestSeriesWithoutDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.db")
	if err := os.Mkdir(path, 0o700); err != nil { // no file can be opened there
		t.Fatal(err)
	}
	s, c := open(t, Options{Path: path})
	record(s, c, 10)
	s.Add(c.sample(10), reading("wear.used_pct", 1))
	for _, aggregate := range []string{AggregateLast, AggregateMax} {
		got := series(t, s, SeriesQuery{FromMS: epoch, EndMS: epoch + 100_000, StepMS: 50_000, Metrics: []string{"cpu_pct", "wear.used_pct"}, Aggregate: aggregate})
		wantPoints(t, got, point{epoch, []float64{0.09, 1}})
	}
	if s.Stats().State == "ok" {
		t.Error("Stats shows no fault")
	}
}

// Records without a time get one, and a place in the series, when the time becomes known.
func TestSeriesUndated(t *testing.T) {
	s, c := open(t, Options{})
	c.set(0)
	record(s, c, 10)
	flush(t, s)
	record(s, c, 10)
	q := SeriesQuery{FromMS: epoch, EndMS: epoch + 60_000, StepMS: 20_000, Metrics: []string{"cpu_pct"}, Aggregate: AggregateMax}
	if got := series(t, s, q); len(got) != 0 || s.Oldest(context.Background()) != maxTS {
		t.Errorf("before: %v, from %d", got, s.Oldest(context.Background()))
	}
	c.set(epoch + 20_000) // the first sample was taken 19 s ago
	if got := s.Oldest(context.Background()); got != epoch+1000 {
		t.Errorf("the oldest is %d", got-epoch)
	}
	wantPoints(t, series(t, s, q), point{epoch, []float64{0.09}}, point{epoch + 20_000, []float64{0.09}})
}

func BenchmarkSeries(b *testing.B) {
	s := hours(b, 24)
	for _, step := range []struct {
		name string
		ms   int64
	}{{"minutes", 60_000}, {"whole", msPerDay}} {
		for _, aggregate := range []string{AggregateLast, AggregateMean, AggregateMax} {
			b.Run("day/"+step.name+"/"+aggregate, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					series(b, s, SeriesQuery{FromMS: epoch, EndMS: epoch + msPerDay, StepMS: step.ms, Metrics: []string{"cpu_pct", "mem_bytes"}, Aggregate: aggregate})
				}
			})
		}
	}
}

package alert

import (
	"cmp"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"agentctl/prober"
)

// TestNoFlapping checks that a figure which moves inside the hysteresis band causes no event,
// and that raised and cleared alternate.
func TestNoFlapping(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 300 {
		r := Rule{ID: "r", Metric: "disk_pct", Op: []Op{Above, AtLeast, Below, AtMost}[rng.IntN(4)],
			Threshold: 40 + 20*rng.Float64(), Hysteresis: 0.5 + 20*rng.Float64(), Level: Warn}
		e := engine(t, r)
		lo, hi := min(r.Threshold, r.clearsAt()), max(r.Threshold, r.clearsAt())
		inside := func() float64 { return lo + (hi-lo)*(0.0001+0.9998*rng.Float64()) }
		bad, well := hi+1, lo-1
		if !r.Op.isUpper() {
			bad, well = well, bad
		}
		n := 0
		for _, phase := range []struct {
			v    float64
			want string
		}{{well, ""}, {bad, "+r"}, {well, "-r"}, {bad, "+r"}} {
			if got := brief(e.Evaluate(at(n, disk(phase.v)))); got != phase.want {
				t.Fatalf("%+v at %v: got %q, want %q", r, phase.v, got, phase.want)
			}
			for range 50 {
				n++
				v := inside()
				if got := e.Evaluate(at(n, disk(v))); got != nil {
					t.Fatalf("%+v: %v inside the band says %q", r, v, brief(got))
				}
			}
		}
	}
}

// oracle evaluates the whole past of one figure for each sample, from the definition of a
// Rule and without state.
func oracle(r Rule, past []prober.Sample) (raised bool, events int) {
	begin := 0 // of the samples since the last event
	for i := range past {
		beyond := func(k int) bool {
			if past[k].Modules == nil {
				return false // not known: neither holds nor is well
			}
			c := past[k].Modules.Temperature.HottestC
			if !raised {
				return r.Op.holds(c, r.Threshold)
			}
			return !r.Op.holds(c, r.clearsAt())
		}
		wait := r.For
		if raised {
			wait = cmp.Or(r.ClearFor, r.For)
		}
		k := i
		for k >= begin && beyond(k) {
			k--
		}
		if k++; k <= i && past[i].Mono-past[k].Mono >= wait {
			raised, begin = !raised, i+1
			events++
		}
	}
	return raised, events
}

func TestSameAsOracle(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 200 {
		r := Rule{ID: "r", Metric: "temperature_c", Op: []Op{Above, AtLeast, Below, AtMost}[rng.IntN(4)],
			Threshold: float64(rng.IntN(10)), Hysteresis: float64(rng.IntN(5)), Level: Warn,
			For: time.Duration(rng.IntN(6)) * time.Second, ClearFor: time.Duration(rng.IntN(6)) * time.Second}
		e := engine(t, r)
		var past []prober.Sample
		events, second := 0, 0
		for range 120 {
			second += 1 + rng.IntN(3)
			set := heated(float64(rng.IntN(16) - 3))
			if rng.IntN(12) == 0 {
				set = none
			}
			past = append(past, at(second, set))
			for _, ev := range e.Evaluate(past[len(past)-1]) {
				events++
				if ev.Cleared != (events%2 == 0) {
					t.Fatalf("%+v: event %d, cleared %v", r, events, ev.Cleared)
				}
			}
			wantRaised, wantEvents := oracle(r, past)
			if events != wantEvents || (len(e.Active()) == 1) != wantRaised {
				t.Fatalf("%+v after %d samples: %d events, raised %v; the oracle has %d, %v",
					r, len(past), events, len(e.Active()) == 1, wantEvents, wantRaised)
			}
		}
	}
}

// A rule that passes Check can be raised, and can be cleared, by figures that its
// metric can have; whatever it is, nothing panics.
func FuzzRule(f *testing.F) {
	f.Add("disk_pct", ">=", 95.0, 2.0)
	f.Add("temperature_c", "<", -10.0, 160.0)
	f.Add("under_voltage", ">", 0.0, 0.0)
	f.Add("load_1m", "<=", math.MaxFloat64, math.Inf(1))
	f.Fuzz(func(t *testing.T, metric, op string, threshold, hysteresis float64) {
		r := Rule{ID: "r", Metric: metric, Op: Op(op), Threshold: threshold, Hysteresis: hysteresis, Level: Warn}
		if Check([]Rule{r}) != nil {
			return
		}
		figure := *sensorOf(metric)
		bad, well := figure.Metric.Min, figure.Metric.Max
		if r.Op.isUpper() {
			bad, well = well, bad
		}
		v := 0.0
		figure.Read = func(*prober.Sample) (float64, bool) { return v, true }
		st := ruleState{Rule: r, sensor: &figure}
		for i, v0 := range []float64{well, bad, bad, well, well, bad} {
			v = v0
			ev, turned := st.evaluate(&prober.Sample{Mono: time.Duration(i)})
			if turned != (i == 1 || i == 3 || i == 5) || turned && ev.Cleared != (i == 3) || len(ev.Message) > 512 {
				t.Fatalf("%+v with %v: turned %v, %+v", r, v, turned, ev)
			}
		}
	})
}

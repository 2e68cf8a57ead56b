package history

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"agentctl/prober"
)

// model is what a history is, in maps.
type model struct {
	samples  map[int64]prober.Sample      // by time
	readings map[int64]map[string]float64 // by time
	early    []prober.Sample              // of this boot, by Mono, without a time yet
	latest   *prober.Sample
}

var propKeys = []string{"network.bytes_in_per_s", "network.bytes_out_per_s", "temperature.hottest_c", "power.throttled"}

// settle gives early samples their time.
func (m *model) settle(now int64, mono time.Duration) {
	for _, x := range m.early {
		ts := now - mono.Milliseconds() + x.Mono.Milliseconds()
		if _, taken := m.samples[ts]; !taken {
			x.TSMS = ts
			m.samples[ts] = x
		}
	}
	m.early = nil
}

// query is Query, as plainly as it can be said.
func (m *model) query(q Query, now int64) []Row {
	to := q.ToMS
	if to == 0 {
		to = now
	}
	core := len(q.Modules) == 0
	wants := func(key string) bool { return len(q.Modules) == 0 }
	if !core {
		core = slices.ContainsFunc(q.Modules, func(n string) bool { return slices.Contains([]string{"cpu", "mem", "memory", "disk", "load"}, n) })
		wants = func(key string) bool {
			return slices.ContainsFunc(q.Modules, func(n string) bool {
				return key == n || strings.HasPrefix(key, n+".") || n == "net" && strings.HasPrefix(key, "network.")
			})
		}
	}
	at := map[int64]bool{}
	if core {
		for ts := range m.samples {
			at[ts] = true
		}
	}
	for ts, rs := range m.readings {
		for key := range rs {
			at[ts] = at[ts] || wants(key)
		}
	}
	var rows []Row
	values := map[string]float64{}
	for _, ts := range slices.Sorted(maps.Keys(at)) {
		if !at[ts] || ts < q.FromMS || ts > to {
			continue
		}
		n := len(rows)
		if q.StepMS == 0 || n == 0 || rows[n-1].TSMS/q.StepMS != ts/q.StepMS {
			rows = append(rows, Row{})
			clear(values)
			n++
		}
		r := &rows[n-1]
		r.TSMS = ts
		if x, ok := m.samples[ts]; ok && core {
			r.HasSample, r.Sample = true, x
			r.Sample.Mono = 0
		}
		for key, v := range m.readings[ts] {
			if wants(key) {
				values[key] = v
			}
		}
		r.Modules = nil
		for _, key := range slices.Sorted(maps.Keys(values)) {
			r.Modules = append(r.Modules, reading(key, values[key]))
		}
	}
	if q.Limit > 0 && len(rows) > q.Limit {
		rows = rows[:q.Limit]
	}
	if len(rows) == 0 && core && m.latest != nil {
		rows = []Row{{TSMS: m.latest.TSMS, HasSample: true, Sample: *m.latest}}
	}
	return rows
}

// TestQueryIsTheModel plays a history: samples at several cadences, a clock that jumps
// and is lost, restarts and reboots, flushes in between, and asks all sorts of windows.
func TestQueryIsTheModel(t *testing.T) {
	dir := quickDir(t)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		c := &fakeClock{wall: epoch, mono: time.Minute}
		boots := 1
		o := Options{Path: filepath.Join(dir, fmt.Sprint(run), "history.db"), Now: c.now, Mono: c.monotonic, BootID: "boot-1"}
		s, err := Open(o)
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { s.Close() }()
		m := &model{samples: map[int64]prober.Sample{}, readings: map[int64]map[string]float64{}}
		n := 0
		settle := func() {
			if now, ok := c.now(); ok {
				m.settle(now, c.monotonic())
			}
		}
		flush := func() {
			if err := s.Flush(context.Background()); err != nil {
				rt.Fatal(err)
			}
			settle()
		}
		add := func(readings bool) {
			n++
			x := c.sample(n)
			s.Add(x)
			m.latest = &x
			if _, taken := m.samples[x.TSMS]; x.TSMS == 0 {
				if !slices.ContainsFunc(m.early, func(o prober.Sample) bool { return o.Mono.Milliseconds() == x.Mono.Milliseconds() }) {
					m.early = append(m.early, x)
				}
			} else if !taken {
				m.samples[x.TSMS] = x
			}
			if !readings || x.TSMS == 0 {
				return
			}
			rs := m.readings[x.TSMS]
			if rs == nil {
				rs = map[string]float64{}
				m.readings[x.TSMS] = rs
			}
			for i, key := range propKeys {
				if n%(1<<i) == 0 {
					addReading(s, x, key, float64(n)/8)
					if _, taken := rs[key]; !taken {
						rs[key] = float64(n) / 8
					}
				}
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"record": func(rt *rapid.T) {
				every := rapid.SampledFrom([]time.Duration{0, time.Millisecond, 100 * time.Millisecond, time.Second, time.Minute}).Draw(rt, "every")
				readings := rapid.Bool().Draw(rt, "readings")
				for range rapid.IntRange(1, 400).Draw(rt, "samples") {
					c.step(every)
					add(readings)
				}
				if s.Stats().Unsaved > maxUnsaved-800 {
					flush()
				}
			},
			"pause": func(rt *rapid.T) {
				c.step(time.Duration(rapid.IntRange(0, 7200).Draw(rt, "s")) * time.Second)
			},
			"clock jumps": func(rt *rapid.T) {
				if now, ok := c.now(); ok {
					c.set(now + int64(rapid.IntRange(-100_000, 100_000).Draw(rt, "ms")))
				}
			},
			"clock lost": func(rt *rapid.T) {
				settle()
				flush()
				c.set(0)
				add(false)
			},
			"clock found": func(rt *rapid.T) {
				if _, ok := c.now(); !ok {
					c.set(epoch + int64(rapid.IntRange(0, 3_600_000).Draw(rt, "ms")))
					flush()
				}
			},
			"flush": func(rt *rapid.T) { flush() },
			"restart": func(rt *rapid.T) {
				if err := s.Close(); err != nil {
					rt.Fatal(err)
				}
				settle()
				m.latest = nil
				if rapid.Bool().Draw(rt, "reboot") {
					boots++
					o.BootID = fmt.Sprint("boot-", boots)
					m.early = nil // their time is never known
				}
				if s, err = Open(o); err != nil {
					rt.Fatal(err)
				}
			},
			"": func(rt *rapid.T) {
				now, known := c.now()
				if !known {
					return
				}
				at := rapid.Custom(func(rt *rapid.T) int64 {
					ts := now
					if len(m.samples) > 0 && rapid.Bool().Draw(rt, "near a sample") {
						all := slices.Sorted(maps.Keys(m.samples))
						ts = all[rapid.IntRange(0, len(all)-1).Draw(rt, "which")]
					}
					return ts + int64(rapid.IntRange(-2, 2).Draw(rt, "off by"))
				})
				q := Query{
					FromMS:  at.Draw(rt, "from"),
					ToMS:    at.Draw(rt, "to"),
					StepMS:  rapid.SampledFrom([]int64{0, 0, 1, 7, 1000, 9999, 60_000, 3_600_000, 1 << 45}).Draw(rt, "step"),
					Modules: rapid.SampledFrom([][]string{nil, nil, {"cpu"}, {"network"}, {"mem", "power", "net"}, {"temperature.hottest_c"}, {"none"}}).Draw(rt, "modules"),
					Limit:   rapid.SampledFrom([]int{0, 0, 0, 1, 300}).Draw(rt, "limit"),
				}
				if q.FromMS > q.ToMS {
					q.FromMS, q.ToMS = q.ToMS, q.FromMS
				}
				if rapid.Bool().Draw(rt, "everything") {
					q.FromMS, q.ToMS = 1, 1<<44
				}
				settle()
				want := m.query(q, now)
				got := 0
				err := s.Query(context.Background(), q, func(r Row) error {
					r.Sample.Mono = 0
					if got < len(want) {
						w := want[got]
						w.Sample.Mono = 0
						if fmt.Sprint(r) != fmt.Sprint(w) {
							return fmt.Errorf("row %d is %v, want %v", got, r, w)
						}
					}
					got++
					return nil
				})
				if err != nil || got != len(want) {
					rt.Fatalf("Query(%+v): %d rows, want %d: %v", q, got, len(want), err)
				}
			},
		})
		if st := s.Stats(); st.Dropped != 0 {
			rt.Fatalf("stats %+v, want nothing dropped", st)
		}
	})
}

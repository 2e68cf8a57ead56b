package history

import (
	"cmp"
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

// TestQueryIsTheModel performs random steps on a Store and on a model of it: samples at several
// cadences, a clock that jumps or is lost, restarts, reboots and flushes. After each step it compares
// the answers of both to a random query.
func TestQueryIsTheModel(t *testing.T) {
	dir := quickDir(t)
	runs := 0
	rapid.Check(t, func(rt *rapid.T) {
		runs++
		p := newPlayer(rt, filepath.Join(dir, fmt.Sprint(runs), "history.db"))
		defer func() { p.store.Close() }()
		rt.Repeat(map[string]func(*rapid.T){
			"record":     p.record,
			"pause":      p.pause,
			"jump clock": p.jumpClock,
			"lose clock": p.loseClock,
			"find clock": p.findClock,
			"flush":      p.flush,
			"restart":    p.restart,
			"":           p.compare, // after each of the others
		})
		if st := p.store.Stats(); st.Dropped != 0 {
			rt.Fatalf("stats %+v, want nothing dropped", st)
		}
	})
}

// model is a history in maps, without a file.
type model struct {
	samples  map[int64]prober.Sample      // by time
	readings map[int64]map[string]float64 // by time, then by key
	undated  []prober.Sample              // taken in this boot, before the time was known
	latest   *prober.Sample               // since the process started; nil: none
}

// add records a sample. The first one of a millisecond counts.
func (m *model) add(x prober.Sample) {
	m.latest = &x
	if x.TSMS != 0 {
		if _, isTaken := m.samples[x.TSMS]; !isTaken {
			m.samples[x.TSMS] = x
		}
		return
	}
	sameMS := func(o prober.Sample) bool { return o.Mono.Milliseconds() == x.Mono.Milliseconds() }
	if !slices.ContainsFunc(m.undated, sameMS) {
		m.undated = append(m.undated, x)
	}
}

// addReading records a reading of a sample. The first one of a millisecond counts.
func (m *model) addReading(ts int64, key string, v float64) {
	if m.readings[ts] == nil {
		m.readings[ts] = map[string]float64{}
	}
	if _, isTaken := m.readings[ts][key]; !isTaken {
		m.readings[ts][key] = v
	}
}

// dateSamples gives undated samples their time, by the boot's clock.
func (m *model) dateSamples(now int64, mono time.Duration) {
	for _, x := range m.undated {
		ts := now - mono.Milliseconds() + x.Mono.Milliseconds()
		if _, isTaken := m.samples[ts]; !isTaken {
			x.TSMS = ts
			m.samples[ts] = x
		}
	}
	m.undated = nil
}

// query is Store.Query. A row has the last sample of its step, and the last reading of each key.
func (m *model) query(q Query, now int64) []Row {
	wantsSamples, wantsKey := selection(q.Modules)
	var rows []Row
	values := map[string]float64{} // of the step so far, by key
	for _, ts := range m.times(wantsSamples, wantsKey) {
		if ts < q.FromMS || ts > cmp.Or(q.ToMS, now) {
			continue
		}
		if n := len(rows); n == 0 || q.StepMS == 0 || rows[n-1].TSMS/q.StepMS != ts/q.StepMS {
			rows = append(rows, Row{})
			clear(values)
		}
		row := &rows[len(rows)-1]
		row.TSMS = ts
		if x, ok := m.samples[ts]; ok && wantsSamples {
			row.HasSample, row.Sample = true, x
		}
		for key, v := range m.readings[ts] {
			if wantsKey(key) {
				values[key] = v
			}
		}
		row.Modules = nil
		for _, key := range slices.Sorted(maps.Keys(values)) {
			row.Modules = append(row.Modules, reading(key, values[key]))
		}
	}
	if q.Limit > 0 && len(rows) > q.Limit {
		rows = rows[:q.Limit]
	}
	if len(rows) == 0 && wantsSamples && m.latest != nil { // an empty window has the newest sample
		rows = []Row{{TSMS: m.latest.TSMS, HasSample: true, Sample: *m.latest}}
	}
	return rows
}

// times returns the times at which there is something that a query wants, in order.
func (m *model) times(wantsSamples bool, wantsKey func(string) bool) []int64 {
	set := map[int64]bool{}
	if wantsSamples {
		for ts := range m.samples {
			set[ts] = true
		}
	}
	for ts, byKey := range m.readings {
		for key := range byKey {
			if wantsKey(key) {
				set[ts] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// selection returns what a query for these modules wants: everything without any.
func selection(modules []string) (samples bool, key func(string) bool) {
	if len(modules) == 0 {
		return true, func(string) bool { return true }
	}
	for _, m := range modules {
		samples = samples || slices.Contains([]string{"cpu", "mem", "memory", "disk", "load"}, m)
	}
	return samples, func(key string) bool {
		return slices.ContainsFunc(modules, func(m string) bool {
			return key == m || strings.HasPrefix(key, m+".") || m == "net" && strings.HasPrefix(key, "network.")
		})
	}
}

// player performs the same steps on a Store and on its model. One clock drives both.
type player struct {
	options Options
	clock   *fakeClock
	store   *Store
	model   *model
	boots   int // so far; each has another Options.BootID
	samples int // so far; each one is distinct
}

func newPlayer(rt *rapid.T, path string) *player {
	c := &fakeClock{wall: epoch, mono: time.Minute}
	p := &player{
		options: Options{Path: path, Now: c.now, Mono: c.monotonic, BootID: "boot-1"},
		clock:   c,
		model:   &model{samples: map[int64]prober.Sample{}, readings: map[int64]map[string]float64{}},
		boots:   1,
	}
	p.open(rt)
	return p
}

func (p *player) open(rt *rapid.T) {
	var err error
	if p.store, err = Open(p.options); err != nil {
		rt.Fatal(err)
	}
}

// add records a sample and, if the time is known, readings: one key in every sample, the others in
// every second, fourth and eighth one.
func (p *player) add(withReadings bool) {
	p.samples++
	x := p.clock.sample(p.samples)
	p.store.Add(x)
	p.model.add(x)
	if !withReadings || x.TSMS == 0 {
		return
	}
	for i, key := range []string{"network.bytes_in_per_s", "network.bytes_out_per_s", "temperature.hottest_c", "power.throttled"} {
		if p.samples%(1<<i) == 0 {
			v := float64(p.samples) / 8
			addReading(p.store, x, key, v)
			p.model.addReading(x.TSMS, key, v)
		}
	}
}

// dateSamples dates the model's samples if the time is known: the Store does so at each flush and query.
func (p *player) dateSamples() {
	if now, ok := p.clock.now(); ok {
		p.model.dateSamples(now, p.clock.monotonic())
	}
}

func (p *player) record(rt *rapid.T) {
	every := rapid.SampledFrom([]time.Duration{0, time.Millisecond, 100 * time.Millisecond, time.Second, time.Minute}).Draw(rt, "every")
	withReadings := rapid.Bool().Draw(rt, "readings")
	const maxSamples = 400
	for range rapid.IntRange(1, maxSamples).Draw(rt, "samples") {
		p.clock.step(every)
		p.add(withReadings)
	}
	if p.store.Stats().Unsaved > maxUnsaved-2*maxSamples { // before the Store drops any
		p.flush(rt)
	}
}

func (p *player) pause(rt *rapid.T) {
	p.clock.step(time.Duration(rapid.IntRange(0, 7200).Draw(rt, "s")) * time.Second)
}

// jumpClock sets the wall clock by up to 100 s.
func (p *player) jumpClock(rt *rapid.T) {
	if now, ok := p.clock.now(); ok {
		p.clock.set(now + int64(rapid.IntRange(-100_000, 100_000).Draw(rt, "ms")))
	}
}

func (p *player) loseClock(rt *rapid.T) {
	p.dateSamples()
	p.flush(rt)
	p.clock.set(0)
	p.add(false)
}

func (p *player) findClock(rt *rapid.T) {
	if _, isKnown := p.clock.now(); !isKnown {
		p.clock.set(epoch + int64(rapid.IntRange(0, 3_600_000).Draw(rt, "ms")))
		p.flush(rt)
	}
}

func (p *player) flush(rt *rapid.T) {
	if err := p.store.Flush(context.Background()); err != nil {
		rt.Fatal(err)
	}
	p.dateSamples()
}

// restart closes and opens the Store, in the same boot or in another one.
func (p *player) restart(rt *rapid.T) {
	if err := p.store.Close(); err != nil {
		rt.Fatal(err)
	}
	p.dateSamples()
	p.model.latest = nil
	if rapid.Bool().Draw(rt, "reboot") {
		p.boots++
		p.options.BootID = fmt.Sprint("boot-", p.boots)
		p.model.undated = nil // their time will never be known
	}
	p.open(rt)
}

// compare asks both the same, if the time is known.
func (p *player) compare(rt *rapid.T) {
	now, isKnown := p.clock.now()
	if !isKnown {
		return
	}
	q := p.drawQuery(rt, now)
	p.dateSamples()
	want := p.model.query(q, now)
	n := 0
	err := p.store.Query(context.Background(), q, func(got Row) error {
		got.Sample.Mono = 0 // is not recorded
		if n < len(want) {
			want[n].Sample.Mono = 0
			if fmt.Sprint(got) != fmt.Sprint(want[n]) {
				return fmt.Errorf("row %d is %v, want %v", n, got, want[n])
			}
		}
		n++
		return nil
	})
	if err != nil || n != len(want) {
		rt.Fatalf("Query(%+v): %d rows, want %d: %v", q, n, len(want), err)
	}
}

// drawQuery draws a window that begins and ends near samples, or is all of the history.
func (p *player) drawQuery(rt *rapid.T, now int64) Query {
	at := rapid.Custom(func(rt *rapid.T) int64 {
		ts := now
		if len(p.model.samples) > 0 && rapid.Bool().Draw(rt, "near a sample") {
			ts = rapid.SampledFrom(slices.Sorted(maps.Keys(p.model.samples))).Draw(rt, "which")
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
	return q
}

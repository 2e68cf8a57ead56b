package prober

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// fakeModules is a Source whose modules a test decides: n counts the readings of one
// module from 1.
type fakeModules struct {
	fake
	read map[string]func(n int, m *ModuleReadings) error

	mu     sync.Mutex
	opened map[string]int
	closed map[string]int
	at     map[string][]time.Duration
	begin  time.Time
}

type fakeReader struct {
	f    *fakeModules
	name string
	n    int
}

func newFakeModules() *fakeModules {
	return &fakeModules{
		read:   map[string]func(int, *ModuleReadings) error{},
		opened: map[string]int{}, closed: map[string]int{}, at: map[string][]time.Duration{},
		begin: time.Now(),
	}
}

func (f *fakeModules) OpenModule(name string) ModuleReader {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opened[name]++
	if f.read[name] == nil {
		return nil
	}
	return &fakeReader{f: f, name: name}
}

func (r *fakeReader) Read(m *ModuleReadings) error {
	r.n++
	r.f.mu.Lock()
	r.f.at[r.name] = append(r.f.at[r.name], time.Since(r.f.begin))
	r.f.mu.Unlock()
	return r.f.read[r.name](r.n, m)
}

func (r *fakeReader) Close() error {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	r.f.closed[r.name]++
	return nil
}

// warm is a thermometer that always says the same.
func warm(_ int, m *ModuleReadings) error {
	m.Temperature = &Temperature{40, []Zone{{"cpu", 40}}}
	return nil
}

func powered(_ int, m *ModuleReadings) error {
	m.Power = &Power{UnderVoltage: new(false)}
	return nil
}

// settle lets time pass, and what is due by then happen.
func settle(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// tape is what a watcher got, and when.
type tape struct {
	mu  sync.Mutex
	at  []time.Duration
	got []Sample
}

func record(ctx context.Context, p *Prober, every time.Duration) *tape {
	tp := new(tape)
	begin := time.Now()
	go p.Watch(ctx, every, func(s Sample) error {
		tp.mu.Lock()
		defer tp.mu.Unlock()
		tp.at, tp.got = append(tp.at, time.Since(begin)), append(tp.got, s)
		return nil
	})
	return tp
}

func (tp *tape) read() ([]time.Duration, []Sample) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	return slices.Clone(tp.at), slices.Clone(tp.got)
}

// last is the newest sample.
func (tp *tape) last() Sample {
	_, got := tp.read()
	return got[len(got)-1]
}

func (f *fakeModules) times(name string) []time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.at[name])
}

func (f *fakeModules) opens(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.opened[name]
}

func (f *fakeModules) closes(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed[name]
}

func states(p *Prober) string {
	var s []string
	for _, m := range p.ModuleStates() {
		s = append(s, m.Name+" "+m.State)
	}
	return strings.Join(s, ", ")
}

func TestModulesAreOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		p, stop := start(t, Options{Source: src, Interval: time.Second})
		settle(5*time.Second + time.Millisecond)
		if s, err := p.Latest(); err != nil || s.Modules != nil {
			t.Errorf("%+v, %v, want no modules", s, err)
		}
		if len(src.opened) != 0 {
			t.Errorf("opened %v", src.opened)
		}
		if got, want := states(p), "network off, temperature off, power off, wear off"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		stop()
	})
}

// modulesAt returns the modules of a sample of each of the seconds 0 to n. Temperature is read each 5 s,
// which is its default, and power more often than samples are taken; this machine has no wear.
func modulesAt(t *testing.T, src *fakeModules, n int) []*ModuleReadings {
	t.Helper()
	src.read["temperature"], src.read["power"] = warm, powered
	p, stop := start(t, Options{Source: src, Interval: time.Second, Modules: []string{"temperature", "power", "wear"}})
	defer stop()
	if err := p.SetModuleInterval("power", 300*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	watched := record(ctx, p, time.Second)
	settle(time.Duration(n)*time.Second + time.Millisecond)
	cancel()
	synctest.Wait()
	_, samples := watched.read()
	if len(samples) != n+1 {
		t.Fatalf("%d samples, want one for each of the seconds 0 to %d", len(samples), n)
	}
	if got, want := states(p), "network off, temperature ok, power ok, wear absent"; got != want {
		t.Errorf("states are %q, want %q", got, want)
	}
	var list []*ModuleReadings
	for _, s := range samples {
		list = append(list, s.Modules)
	}
	return list
}

// Each sample has the newest reading of each module, and no module that is off or absent.
func TestModulesComeWithTheSample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for second, m := range modulesAt(t, newFakeModules(), 11) {
			if m == nil || m.Temperature == nil || m.Power == nil || m.Wear != nil || m.Network != nil {
				t.Errorf("the sample of %d s has %+v, want temperature and power", second, m)
			}
		}
	})
}

// A reading is a new pointer if the module was read again, and the same one if not.
func TestPointersShowWhatIsNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := modulesAt(t, newFakeModules(), 11)
		for second := 1; second < len(list); second++ {
			isNew := list[second].NewSince(list[second-1])
			want := SetOf(ModulePower)
			if second%5 == 0 {
				want |= SetOf(ModuleTemperature)
			}
			if isNew != want {
				t.Errorf("new at %d s: %v, want %v", second, isNew.Names(), want.Names())
			}
		}
	})
}

func TestModuleIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		modulesAt(t, src, 11)
		if got, want := src.times("temperature"), []time.Duration{0, 5e9, 10e9}; !slices.Equal(got, want) {
			t.Errorf("temperature is read at %v, want %v", got, want)
		}
		if n := len(src.times("power")); n != 12 {
			t.Errorf("power is read %d times, want with each of 12 samples", n)
		}
	})
}

// SetModules takes effect with the next sample, and opens a reader each time that it enables a module.
func TestSetModules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		src.read["temperature"], src.read["power"] = warm, powered
		p, stop := start(t, Options{Source: src, Interval: time.Second, Modules: []string{"temperature", "power"}})
		settle(time.Second)
		for _, names := range [][]string{{"power"}, {"temperature"}, {}} {
			if err := p.SetModules(names); err != nil {
				t.Fatal(err)
			}
			settle(time.Second)
			s, err := p.Latest()
			if err != nil {
				t.Fatal(err)
			}
			if got := s.optional().NewSince(&noReadings).Names(); !slices.Equal(got, names) {
				t.Errorf("the sample has %q, want %q", got, names)
			}
		}
		settle(time.Second)
		if n := p.modules.running; n != 0 {
			t.Errorf("%d goroutines run without modules", n)
		}
		stop()
		for name, want := range map[string]int{"temperature": 2, "power": 1} {
			if opened, closed := src.opens(name), src.closes(name); opened != want || closed != want {
				t.Errorf("%s was opened %d times and closed %d times, want %d", name, opened, closed, want)
			}
		}
	})
}

// TestHungModule checks that a module which hangs affects only itself: samples continue, one of
// them waits, its last reading expires, and enabling it again starts no second goroutine.
func TestHungModule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		hang := make(chan struct{})
		src.read["power"] = powered
		src.read["temperature"] = func(n int, m *ModuleReadings) error {
			if n == 3 {
				<-hang
			}
			return warm(n, m)
		}
		p, stop := start(t, Options{Source: src, Interval: time.Second, Modules: []string{"temperature", "power"}})
		if err := errors.Join(p.SetModuleInterval("temperature", time.Second), p.SetModuleInterval("power", time.Second)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		tp := record(ctx, p, time.Second)
		settle(4*time.Second + 100*time.Millisecond) // readings of 0 and 1 s are well, that of 2 s hangs
		last := tp.last()
		if last.Modules == nil || last.Modules.Temperature == nil || last.Modules.Power == nil {
			t.Errorf("at 4 s: %+v, want the old temperature", last.Modules)
		}
		want := []time.Duration{0, 1e9, 2e9 + moduleTimeout, 3e9, 4e9}
		if at, _ := tp.read(); !slices.Equal(at, want) {
			t.Errorf("samples at %v, want %v: only the first is waited for", at, want)
		}
		settle(2 * time.Second)
		last = tp.last()
		if last.Mono != 6*time.Second || last.Modules.Temperature != nil || last.Modules.Power == nil {
			t.Errorf("at 6 s: %v, %+v, want the temperature gone, and only it", last.Mono, last.Modules)
		}
		if st := p.Stats(); st.Errors != 0 || st.Slips != 0 {
			t.Errorf("stats %+v", st)
		}
		m := p.ModuleStates()[ModuleTemperature-firstOptional]
		if m.State != "hung" || !strings.Contains(m.LastError, "temperature") {
			t.Errorf("state %+v", m)
		}
		for range 5 {
			if err := p.SetModules([]string{"power"}); err != nil {
				t.Fatal(err)
			}
			settle(time.Second)
			if err := p.SetModules([]string{"temperature", "power"}); err != nil {
				t.Fatal(err)
			}
			settle(time.Second)
		}
		if n := src.opens("temperature"); n != 1 {
			t.Errorf("%d readers while one hangs", n)
		}
		close(hang)
		settle(2 * time.Second)
		last = tp.last()
		if last.Modules == nil || last.Modules.Temperature == nil || src.opens("temperature") != 2 || src.closes("temperature") != 1 {
			t.Errorf("when it is back: %+v, %d opened", last.Modules, src.opens("temperature"))
		}
		if got := states(p); !strings.Contains(got, "temperature ok") {
			t.Errorf("states %s", got)
		}
		cancel()
		synctest.Wait()
		stop()
	})
}

func TestModuleThatNeverAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		hang := make(chan struct{})
		for _, name := range OptionalModuleNames() {
			src.read[name] = func(int, *ModuleReadings) error { <-hang; return nil }
		}
		p := New(Options{Source: src, Interval: time.Second, Modules: OptionalModuleNames()})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		settle(10*time.Second + 100*time.Millisecond)
		if s, err := p.Latest(); err != nil || s.Modules != nil || s.Mono != 10*time.Second {
			t.Errorf("%+v, %v", s, err)
		}
		cancel()
		began := time.Now()
		if err := <-done; errors.Is(err, ErrHung) || time.Since(began) > moduleCloseTimeout {
			t.Errorf("Run: %v after %v", err, time.Since(began))
		}
		if src.fake.closed.Load() != 1 {
			t.Error("the source was not closed")
		}
		close(hang)
		synctest.Wait()
		if src.closes("wear") != 1 {
			t.Error("the reader was not closed when it came back")
		}
	})
}

// TestSlowModule checks that a sample waits once for a slow module, whose reading then comes
// with the next one.
func TestSlowModule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		src.read["temperature"] = func(n int, m *ModuleReadings) error {
			if n <= 4 {
				time.Sleep(750 * time.Millisecond)
			}
			return warm(n, m)
		}
		p, stop := start(t, Options{Source: src, Interval: 5 * time.Second, Modules: []string{"temperature"}})
		if err := p.SetModuleInterval("temperature", time.Second); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		tp := record(ctx, p, 5*time.Second)
		settle(16 * time.Second)
		at, got := tp.read()
		if want := []time.Duration{moduleTimeout, 5e9, 10e9, 15e9}; !slices.Equal(at, want) {
			t.Errorf("samples at %v, want %v", at, want)
		}
		for i, s := range got {
			if (s.Modules != nil) != (i > 0) {
				t.Errorf("sample %d: %+v, want a temperature from the second on", i, s.Modules)
			}
		}
		settle(10 * time.Second)
		if want := []time.Duration{0, 5e9, 10e9, 15e9, 20e9, 25e9}; !slices.Equal(src.times("temperature"), want) {
			t.Errorf("read at %v, want %v", src.times("temperature"), want)
		}
		cancel()
		synctest.Wait()
		stop()
	})
}

// The first reading of the network has no figures yet, which does not mean that this
// machine has none.
func TestFirstOfTwoReadings(t *testing.T) {
	r := &moduleWorker{state: "waiting", needsTwo: true}
	for _, want := range []string{"waiting", "absent"} {
		if r.handle(moduleResult{}); r.state != want {
			t.Errorf("state %s, want %s", r.state, want)
		}
	}
}

func TestFailingModule(t *testing.T) {
	tests := []struct {
		name string
		spit func(m *ModuleReadings) error
		want string // state
	}{
		{"error", func(*ModuleReadings) error { return errors.New("bus error") }, "failing"},
		{"nothing", func(*ModuleReadings) error { return nil }, "absent"},
		{"another module", func(m *ModuleReadings) error { return powered(0, m) }, "absent"},
		{"NaN", func(m *ModuleReadings) error {
			m.Temperature = &Temperature{math.NaN(), []Zone{{"cpu", math.NaN()}}}
			return nil
		}, "failing"},
		{"an error and a figure", func(m *ModuleReadings) error { warm(0, m); return errors.New("bus error") }, "failing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := newFakeModules()
				src.read["temperature"] = func(n int, m *ModuleReadings) error {
					if n == 2 {
						return tt.spit(m)
					}
					return warm(n, m)
				}
				p, stop := start(t, Options{Source: src, Interval: 5 * time.Second, Modules: []string{"temperature"}})
				settle(6 * time.Second)
				s, err := p.Latest()
				if err != nil || s.Modules != nil {
					t.Errorf("%+v, %v, want a sample without modules", s, err)
				}
				if m := p.ModuleStates()[ModuleTemperature-firstOptional]; m.State != tt.want || (m.LastError != "") != (tt.want == "failing") {
					t.Errorf("state %+v, want %s", m, tt.want)
				}
				settle(5 * time.Second)
				if s, err := p.Latest(); err != nil || s.Modules == nil || p.ModuleStates()[ModuleTemperature-firstOptional].State != "ok" {
					t.Errorf("after that: %+v, %v", s, err)
				}
				stop()
			})
		})
	}
}

func TestModuleNames(t *testing.T) {
	p := New(Options{Source: newFakeModules()})
	for _, name := range OptionalModuleNames() {
		if err := errors.Join(p.SetModules([]string{name}), p.SetModuleInterval(name, MinInterval), p.SetModuleInterval(name, 0)); err != nil {
			t.Error(err)
		}
	}
	for _, err := range []error{
		p.SetModules([]string{"power", "temprature"}),
		p.SetModuleInterval("temprature", time.Second),
	} {
		if err == nil || !strings.Contains(err.Error(), `"temprature"; choose from network, temperature, power, wear`) {
			t.Errorf("got %v, want the name and those that there are", err)
		}
	}
	for _, d := range []time.Duration{-1, 99 * time.Millisecond, MaxModuleInterval + 1} {
		if err := p.SetModuleInterval("power", d); err == nil || !strings.Contains(err.Error(), "100ms..24h0m0s") {
			t.Errorf("interval %v: %v, want the bounds", d, err)
		}
	}
	if m := p.ModuleStates()[ModuleWear-firstOptional]; m.State != "waiting" || m.IntervalMS != time.Hour.Milliseconds() {
		t.Errorf("a module that was enabled and nothing else: %+v", m)
	}

	src := &fake{}
	p = New(Options{Source: src, Modules: []string{"gpio"}})
	if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "gpio") || src.closed.Load() != 1 {
		t.Errorf("Run with an unknown module: %v", err)
	}
	if err := p.Watch(t.Context(), time.Second, nil); err != ErrStopped {
		t.Errorf("Watch then: %v", err)
	}
}

// A Source that knows no modules has none.
func TestModulesOfAPlainSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, stop := start(t, Options{Source: &fake{}, Interval: time.Second, Modules: OptionalModuleNames()})
		settle(2 * time.Second)
		if s, err := p.Latest(); err != nil || s.Modules != nil {
			t.Errorf("%+v, %v", s, err)
		}
		if got, want := states(p), "network absent, temperature absent, power absent, wear absent"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		stop()
	})
}

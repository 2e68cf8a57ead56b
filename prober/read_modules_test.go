package prober

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// Modules that the sampler does not read are read for the caller: the network twice, what the machine
// does not have not at all.
func TestReadModules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeModules()
		f.read["temperature"] = warm
		f.read["power"] = func(int, *ModuleReadings) error { return errors.New("broken") }
		f.read["network"] = func(n int, m *ModuleReadings) error {
			if n > 1 {
				m.Network = &Network{WindowMS: 500, BytesIn: 7}
			}
			return nil
		}
		p := New(Options{Source: f})
		begin := time.Now()
		r, unfinished := p.ReadModules(t.Context(), OptionalModules)
		if r.Temperature == nil || r.Network == nil || r.Power != nil || r.Wear != nil || unfinished != SetOf(ModulePower) {
			t.Errorf("got %+v, unfinished %v", r, unfinished.Names())
		}
		if d := time.Since(begin); d != networkWindow {
			t.Errorf("it took %v", d)
		}
		if f.closed["network"] != 1 || f.closed["temperature"] != 1 || f.opened["wear"] != 1 {
			t.Errorf("opened %v, closed %v", f.opened, f.closed)
		}
		if r, _ := p.ReadModules(t.Context(), SetOf(ModuleWear, ModuleCPU)); r != (ModuleReadings{}) {
			t.Errorf("what the machine does not have is %+v", r)
		}
	})
}

// What the sampler reads is taken from its newest sample.
func TestReadModulesUsesTheSample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeModules()
		f.read["temperature"] = warm
		p := New(Options{Source: f, Modules: []string{"temperature"}})
		ctx, stop := context.WithCancel(t.Context())
		go p.Run(ctx)
		settle(3 * time.Second)
		before := f.opened["temperature"]
		if r, unfinished := p.ReadModules(t.Context(), OptionalModules); r.Temperature == nil || unfinished != 0 {
			t.Errorf("got %+v, unfinished %v", r, unfinished.Names())
		}
		if f.opened["temperature"] != before {
			t.Error("a module that is sampled was opened again")
		}
		stop()
		synctest.Wait()
	})
}

// A reader that hangs costs its module, and a bounded number of goroutines.
func TestReadModulesHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeModules()
		hang := make(chan struct{})
		f.read["temperature"] = warm
		f.read["power"] = func(int, *ModuleReadings) error { <-hang; return nil }
		p := New(Options{Source: f})
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			r, unfinished := p.ReadModules(ctx, SetOf(ModulePower, ModuleTemperature))
			cancel()
			if r.Temperature == nil || unfinished != SetOf(ModulePower) {
				t.Errorf("got %+v, unfinished %v", r, unfinished.Names())
			}
		}
		if f.opened["power"] != maxReaders {
			t.Errorf("%d readers hang, want %d", f.opened["power"], maxReaders)
		}
		close(hang)
		synctest.Wait()
		f.read["power"] = powered
		if r, unfinished := p.ReadModules(t.Context(), SetOf(ModulePower)); r.Power == nil || unfinished != 0 {
			t.Errorf("after it: %+v, %v", r, unfinished.Names())
		}
	})
}

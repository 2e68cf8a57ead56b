package prober

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// networkWindow is the time between the two readings of ReadModules whose difference is the traffic.
const networkWindow = 500 * time.Millisecond

// maxReaders bounds the readers of a module that ReadModules runs at a time.
const maxReaders = 2

// ReadModules returns readings of the modules in a set: those of the newest sample where the sampler
// reads a module, and new ones of the others. unfinished are the modules that were not read when ctx
// ended, or whose reader failed; what is neither in readings nor there, the machine does not have.
//
// A reader that hangs keeps its goroutine. When maxReaders of a module do, the module is unfinished
// until one of them returns.
func (p *Prober) ReadModules(ctx context.Context, set ModuleSet) (readings ModuleReadings, unfinished ModuleSet) {
	set &= OptionalModules
	if s, err := p.Latest(); err == nil && s.Modules != nil {
		readings = s.Modules.Only(set)
		set &^= readings.NewSince(&noReadings)
	}
	source, ok := p.source.(ModuleSource)
	if !ok || set == 0 {
		return readings, 0
	}
	type result struct {
		module Module
		read   ModuleReadings
		err    error
	}
	results := make(chan result, NumModules) // a reader that comes too late has no receiver
	for m := firstOptional; m < NumModules; m++ {
		if !set.Has(m) {
			continue
		}
		unfinished |= SetOf(m)
		if !p.startReading(m) {
			set &^= SetOf(m)
			continue
		}
		go func() {
			read, err := readModule(ctx, source, m)
			p.endReading(m) // first: the caller may ask again at once
			results <- result{m, read, err}
		}()
	}
	for set != 0 {
		select {
		case r := <-results:
			set &^= SetOf(r.module)
			if r.err != nil {
				p.log.Debug("a module cannot be read", zap.Error(r.err))
				continue
			}
			unfinished &^= SetOf(r.module)
			readings.Update(&r.read, SetOf(r.module))
		case <-ctx.Done():
			return readings, unfinished
		}
	}
	return readings, unfinished
}

// startReading counts a reader of ReadModules; false if there are too many.
func (p *Prober) startReading(m Module) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reading[m] >= maxReaders {
		return false
	}
	p.reading[m]++
	return true
}

func (p *Prober) endReading(m Module) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reading[m]--
}

// readModule reads a module once; the network twice, because its values are differences.
func readModule(ctx context.Context, source ModuleSource, m Module) (out ModuleReadings, err error) {
	reader := source.OpenModule(m.String())
	if reader == nil {
		return out, nil
	}
	defer func() { _ = reader.Close() }()
	var read ModuleReadings
	if err := reader.Read(&read); err != nil {
		return out, fmt.Errorf("module %s: %w", m, err)
	}
	if m == ModuleNetwork {
		timer := time.NewTimer(networkWindow)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return out, ctx.Err()
		}
		read = ModuleReadings{}
		if err := reader.Read(&read); err != nil {
			return out, fmt.Errorf("module %s: %w", m, err)
		}
	}
	out.Update(&read, SetOf(m))
	if err := moduleTable[m].check(&out); err != nil {
		return ModuleReadings{}, fmt.Errorf("module %s: %w", m, err)
	}
	return out, nil
}

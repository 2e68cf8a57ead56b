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

// ReadModules returns readings of the modules in set. It takes them from the newest sample where the
// sampler reads the module, and reads the others now, concurrently. unfinished are the modules that
// were not read when ctx ended, or whose reader failed. The machine does not have a module that is
// neither in readings nor in unfinished.
//
// A reader that hangs keeps its goroutine. While maxReaders of a module hang, the module is unfinished.
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
	results := make(chan result, NumModules) // nobody receives from a reader that is late
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
			p.endReading(m) // before the send: the caller may ask again as soon as it has the result
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

// endReading counts a reader of ReadModules out.
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

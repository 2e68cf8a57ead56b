package control

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"agentctl/prober"
)

// The methods that change sampling. They apply to all clients; the event state announces
// a change after the request was answered.
//
// Each takes its params first and calls finish before it changes anything, so that a request
// with an error has no effect.

// startExtra and burstExtra are State.Extra.
type startExtra struct {
	Modules []string `json:"modules"`
}

type burstExtra struct {
	IntervalMS int64 `json:"interval_ms"`
	// ExpiresAt is the end of the burst, milliseconds since 1970.
	ExpiresAt int64 `json:"expires_at"`
}

// start starts push and recording, with the given modules in place of those before.
func (ss *session) start(_ context.Context, p *params) (any, error) {
	set := p.modules("modules", defaultModules)
	if err := p.finish(); err != nil {
		return nil, err
	}
	s := ss.srv
	if _, err := s.applySampling(true, func(prober.ModuleSet) prober.ModuleSet { return set }); err != nil {
		return nil, err
	}
	names := set.Names()
	ss.c.afterAnswer(func() { s.publishState("start", MethodStart, startExtra{names}) })
	return startResult{true, names}, nil
}

// stop ends push and recording. The modules are remembered for a hello with
// metrics_stream, which starts again.
func (ss *session) stop(_ context.Context, p *params) (any, error) {
	if err := p.finish(); err != nil {
		return nil, err
	}
	s := ss.srv
	if _, err := s.applySampling(false, func(now prober.ModuleSet) prober.ModuleSet { return now }); err != nil {
		return nil, err
	}
	ss.c.afterAnswer(func() { s.publishState("stop", MethodStop, nil) })
	return okResult{true}, nil
}

// setConfig changes cadences, and saves them with persist. A change that cannot be saved
// still takes effect, and the answer says so.
func (ss *session) setConfig(ctx context.Context, p *params) (any, error) {
	base := p.millis("base_interval_ms", prober.MinInterval, prober.MaxInterval)
	var byName map[string]integer
	p.take("module_intervals", &byName)
	var persist bool
	p.take("persist", &persist)
	every, err := parseIntervals(byName)
	if err != nil {
		p.fail(err)
	}
	if err := p.finish(); err != nil {
		return nil, err
	}

	now, serr := ss.srv.setIntervals(base, every, false)
	if serr != nil {
		return nil, serr
	}
	result := ConfigResult{OK: true, BaseIntervalMS: now.Milliseconds(), EffectiveIntervals: every.byName()}
	if persist {
		persisted := ss.persist(ctx, Config{base.Milliseconds(), result.EffectiveIntervals, true})
		result.Persisted = &persisted
	}
	return result, nil
}

// persist reports whether Options.Persist saved the change. A failure is logged and not an
// error of the request, whose change is in force already.
func (ss *session) persist(ctx context.Context, c Config) bool {
	if ss.srv.o.Persist == nil {
		return false
	}
	err := ss.srv.o.Persist(ctx, c)
	if err != nil {
		ss.srv.log.Warn("set_config was not persisted", zap.Error(err))
	}
	return err == nil
}

// parseIntervals checks the module_intervals of set_config and of a configuration.
func parseIntervals(byName map[string]integer) (every intervals, err *Error) {
	const param = "module_intervals"
	for name, ms := range byName {
		m, ok := prober.ModuleByName(name)
		switch {
		case !ok:
			return every, errParams(param, "knows only %s", moduleChoice)
		case every[m] != 0: // by two of its names
			return every, errParams(param, "names module %s twice", m)
		}
		if every[m], err = ms.millis(param, prober.MinInterval, m.MaxInterval()); err != nil {
			return every, err
		}
	}
	return every, nil
}

// byName are the intervals that are set, in milliseconds.
func (iv *intervals) byName() map[string]int64 {
	byName := map[string]int64{}
	for m, d := range iv {
		if d > 0 {
			byName[prober.Module(m).String()] = d.Milliseconds()
		}
	}
	return byName
}

// burst adds a burst, which ends by itself.
func (ss *session) burst(_ context.Context, p *params) (any, error) {
	var ignored []string // a burst speeds up all modules (docs/control.md)
	p.take("modules", &ignored)
	every := p.requireMillis("interval_ms", prober.MinInterval, prober.MaxInterval)
	ttl := p.requireMillis("ttl_ms", prober.MinInterval, maxBurstTTL)
	if err := p.finish(); err != nil {
		return nil, err
	}

	s := ss.srv
	if err := s.addBurst(every, ttl); err != nil {
		return nil, err
	}
	ms, _ := s.clock.NowMS()
	expires := ms + ttl.Milliseconds()
	ss.c.afterAnswer(func() { s.publishState("burst", MethodBurst, burstExtra{every.Milliseconds(), expires}) })
	return burstResult{true, expires}, nil
}

// subscribe enables or disables push. The connection gets events only if its hello named
// metrics_stream.
func (ss *session) subscribe(_ context.Context, p *params) (any, error) {
	var enable bool
	p.require("enable", &enable)
	if err := p.finish(); err != nil {
		return nil, err
	}
	s := ss.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sampling.pushEnabled = enable
	s.replanLocked()
	return okResult{true}, nil
}

// addBurst adds a burst of a fast cadence, for all clients. There are at most maxBursts,
// since each is looked at whenever the sampler plans; the error says so to the client.
func (s *Server) addBurst(every, ttl time.Duration) error {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sampling.plan(0, now) // removes bursts that have ended
	if len(s.sampling.bursts) >= maxBursts {
		return newError(CodeRateLimited, fmt.Sprintf("%d bursts are running: wait for one to end", maxBursts))
	}
	s.sampling.bursts = append(s.sampling.bursts, burst{every, now.Add(ttl)})
	s.replanLocked()
	return nil
}

package kernel

// A plugin that is replaced or unloaded is retired: it gets no further call, and those in flight
// go on. A call that found it in the registry just before looks up the name again, so that a new
// version takes over without a call that fails.

// retired is added to counters.inFlight of a retired plugin: the count is negative from then on, so
// that callPlugin refuses, and equal to retired when the last call has ended.
const retired = -1 << 62

// release counts a call in flight out, and ends the drain of its plugin if it was the last one.
func (k *Kernel) release(l *loaded) {
	if l.counts.inFlight.Add(-1) == retired {
		k.finishDrain(l)
	}
}

// retireLocked makes further calls look up the name again. mu is held, and the plugin is no longer
// in the registry.
func (k *Kernel) retireLocked(l *loaded) { l.counts.inFlight.Add(retired) }

// drainLocked is retireLocked. The channel is closed when no call of the plugin is in flight. mu is
// held.
func (k *Kernel) drainLocked(l *loaded) <-chan struct{} {
	done := make(chan struct{})
	k.drainMu.Lock()
	k.draining[l] = done
	k.drainMu.Unlock()
	if l.counts.inFlight.Add(retired) == retired {
		k.finishDrain(l)
	}
	return done
}

// finishDrain closes the channel of drainLocked, if there is one.
func (k *Kernel) finishDrain(l *loaded) {
	k.drainMu.Lock()
	defer k.drainMu.Unlock()
	if done := k.draining[l]; done != nil {
		delete(k.draining, l)
		close(done)
	}
}

// Replace loads a plugin in place of the one of its name, if there is one, in one step: a call goes
// to the one or to the other and is never refused in between. drained is closed when the calls of
// the replaced one that were in flight have ended.
func (k *Kernel) Replace(p Plugin) (drained <-chan struct{}, err error) { return k.load(p, true, true) }

// Retire is Unload. drained is closed when the plugin's calls that were in flight have ended; at
// once if it was not loaded.
func (k *Kernel) Retire(p Plugin) (drained <-chan struct{}) {
	name := p.Manifest().Name
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.loadedLocked(name, p)
	if l == nil {
		return closedChannel
	}
	k.withdrawLocked(l)
	return k.drainLocked(l)
}

// IsLoaded reports whether p is loaded, and not another plugin of its name.
func (k *Kernel) IsLoaded(p Plugin) bool {
	name := p.Manifest().Name
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.loadedLocked(name, p) != nil
}

// closedChannel is what drained is for a plugin that had no call in flight.
var closedChannel = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// successor returns the MethodHandler that is loaded under the name of a retired one, if the
// caller may know of it.
func (k *Kernel) successor(l *loaded, c *Caller) *loaded {
	k.mu.RLock()
	defer k.mu.RUnlock()
	next := k.plugins[l.manifest.Name]
	if next == nil || !next.visibleTo(c) {
		return nil
	}
	if _, ok := next.plugin.(MethodHandler); !ok {
		return nil
	}
	return next
}

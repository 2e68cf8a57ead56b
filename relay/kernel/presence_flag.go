package kernel

// Flag is one of the flags of Presence.
type Flag uint8

// The flags.
const (
	FlagSuspect Flag = iota
	FlagCloneSuspected
)

// FlagPresence sets or clears a flag of a device or agent, and reports a change like one of
// status. An unknown one is not recorded.
func (k *Kernel) FlagPresence(tenant, kind, id string, flag Flag, on bool) {
	p := &k.presence
	key := presenceKey{tenant, kind, id}
	p.order.Lock()
	defer p.order.Unlock()
	p.mu.Lock()
	e := p.entries[key]
	if e == nil {
		p.mu.Unlock()
		return
	}
	field := &e.suspect
	if flag == FlagCloneSuspected {
		field = &e.cloneSuspected
	}
	changed := *field != on
	*field = on
	current := e.presence(key)
	p.mu.Unlock()
	if changed {
		p.report(current)
	}
}

package control

import (
	"context"
	"strings"

	"agentctl/prober"
)

// defaultModules are those of a request that names none.
const defaultModules = prober.ModuleSet(1<<prober.ModuleCPU | 1<<prober.ModuleMemory)

// moduleChoice lists the names of modules that a client may use, for error texts. The frozen
// protocol knows mem by its JSON member memory, and network as net, as well.
var moduleChoice = func() string {
	var names []string
	for m := range prober.NumModules {
		name := m.String()
		if other := m.OtherName(); other != "" {
			name += " (or " + other + ")"
		}
		names = append(names, name)
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}()

// snapshotOf is what a sample says of the modules in set.
func snapshotOf(s *prober.Sample, set prober.ModuleSet) Snapshot {
	snap := Snapshot{TS: s.TSMS}
	if set.Has(prober.ModuleCPU) {
		snap.CPU = &CPU{s.CPUPct}
	}
	if set.Has(prober.ModuleMemory) {
		snap.Memory = &Memory{Total: s.MemTotalBytes >> 20, Used: s.MemBytes >> 20}
	}
	if set.Has(prober.ModuleDisk) && s.DiskErr == nil {
		snap.Disk = &Disk{s.DiskPct}
	}
	if set.Has(prober.ModuleLoad) {
		snap.Load = &Load{s.Load1, s.Load5, s.Load15}
	}
	if s.Modules != nil {
		snap.ModuleReadings = s.Modules.Only(set)
	}
	return snap
}

// snapshot answers with what the modules say now.
func (ss *session) snapshot(ctx context.Context, p *params) (any, error) {
	set := p.modules("modules", defaultModules)
	if err := p.finish(); err != nil {
		return nil, err
	}
	sample, err := ss.srv.prober.Now(ctx)
	if err != nil {
		return nil, newError(CodeInternal, err.Error())
	}
	return snapshotOf(&sample, set), nil
}

package daemon

import (
	"context"
	"time"

	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/handlers"
	"agentctl/prober"
	"agentctl/prober/inspect"
	"agentctl/transport/clock"
)

// inspection returns the handlers of the kinds that read something of this machine. Which of them are
// announced depends on enabledCapabilities.
func (d *Daemon) inspection() []handlers.Handler {
	list := []handlers.Handler{
		handlers.NewServices(),
		handlers.NewJournal(d.cfg.Text("journal.socket")),
	}
	d.machine = inspect.New(inspect.Options{Version: d.build.Version, Now: d.now, Synchronized: clock.NTPSynchronized})
	if d.machine == nil {
		return list
	}
	o := handlers.InspectionOptions{
		Machine: confinedMachine{d.machine, d.cfg.Text("processes.socket")}, Modules: modulesOf{d}, Clock: d.now,
		Arguments: func() bool { return d.config().Bool("processes.arguments") },
	}
	if d.examine != nil {
		o.Doctor = d.runDoctor
	}
	return append(list, handlers.Inspections(o)...)
}

// confinedMachine is a machine whose processes a helper reads, if the sandbox of the daemon hides them.
type confinedMachine struct {
	*inspect.Machine
	socket string
}

// Processes implements handlers.Machine.
func (m confinedMachine) Processes(ctx context.Context, q inspect.ProcessQuery) inspect.Processes {
	if m.SeesProcesses() {
		return m.Machine.Processes(ctx, q)
	}
	return inspect.AskProcesses(ctx, m.socket, q)
}

// now is the time of the device, which is made after the handlers.
func (d *Daemon) now() (ms int64, ok bool) { return d.device.clock.NowMS() }

// modulesOf reads modules of the device's prober, which is made after the handlers.
type modulesOf struct{ *Daemon }

// ReadModules implements handlers.Modules.
func (m modulesOf) ReadModules(ctx context.Context, set prober.ModuleSet) (prober.ModuleReadings, prober.ModuleSet) {
	return m.device.prober.ReadModules(ctx, set)
}

// Examination is what the checks of a doctor look at.
type Examination struct {
	Build    Build
	Config   *config.Config
	Status   *Status
	Readings *prober.ModuleReadings
}

// DoctorFunc runs the checks of package doctor, which imports this one. It returns when ctx ends.
type DoctorFunc func(ctx context.Context, e *Examination) *handlers.DoctorReport

// doctorModules are those that the checks need.
var doctorModules = prober.SetOf(prober.ModuleTemperature, prober.ModulePower, prober.ModuleWear)

// runDoctor examines this daemon.
func (d *Daemon) runDoctor(ctx context.Context) *handlers.DoctorReport {
	// A sensor that hangs must not take the time of the checks.
	timed, cancel := context.WithTimeout(ctx, time.Second)
	readings, _ := d.device.prober.ReadModules(timed, doctorModules)
	cancel()
	return d.examine(ctx, &Examination{d.build, d.config(), d.status(), &readings})
}

// enabledCapabilities returns which capabilities to announce with a configuration: those that it
// enables and that this machine can serve.
func (d *Daemon) enabledCapabilities(c *config.Config) func(capID string) bool {
	return func(capID string) bool {
		if !c.CapabilityEnabled(capID) {
			return false
		}
		switch capID {
		case "processes":
			if d.machine != nil && (d.machine.SeesProcesses() || handlers.HasSocket(c.Text("processes.socket"))) {
				return true
			}
			d.log.Info("system.processes is not offered: the processes of others are hidden from this one",
				zap.String("hint", "systemctl start agentctl-processes.socket, then: systemctl reload agentctl; or capabilities.processes: false"))
			return false
		case "services":
			return handlers.HasServices()
		case "journal":
			if handlers.HasSocket(c.Text("journal.socket")) {
				return true
			}
			d.log.Warn("the journal cannot be read: its helper's socket is not there", zap.String("socket", c.Text("journal.socket")),
				zap.String("hint", "systemctl start agentctl-journal.socket, then: systemctl reload agentctl"))
			return false
		}
		return true
	}
}

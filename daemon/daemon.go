// Package daemon composes the device wing, as package relay composes the relay wing. A
// Daemon samples the machine, keeps a history, raises alerts, answers the control socket,
// keeps the link to a relay, follows the configuration files and feeds systemd's watchdog:
//
//	d, err := daemon.New(daemon.Options{Source: source, Config: cfg, Log: log})
//	if err == nil {
//		err = d.Run(ctx)
//	}
//
// The parts do not import each other; this package connects them:
//
//	prober ── sampleSource ──► alert ──► control socket, link, log
//	   │            └────────► history ◄── control socket (queries)
//	   ├── control socket (push to local clients)
//	   └── handlers ── link (metric streams of the relay)
//
// RunMocks runs simulated boards instead of this machine.
//
// # Goroutines
//
// Run starts eight goroutines and waits for them: the prober and the link (the device), and the
// control socket, the recorder, the watchers of the configuration and of the network, the
// membership in a relay and the watchdog (the services).
// The first one that returns ends the others; the device ends last. The parts start more
// goroutines, which they own.
//
// # Failures
//
// A board must stay reachable. A relay that is away, a disk that fails or hangs, a damaged file in
// the state directory and an invalid new configuration are logged and do not end the daemon. What
// the daemon reads and writes in the state directory goes through statedir.Do, except the history,
// which bounds its waits itself.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/atomicfile"
	"agentctl/config"
	"agentctl/control"
	"agentctl/enrollment"
	"agentctl/prober/alert"
	"agentctl/prober/history"
	"agentctl/prober/inspect"
	"agentctl/statedir"
	"agentctl/transport/clock"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
	"agentctl/transport/pin"
)

// Options configure a Daemon.
type Options struct {
	Source config.Source    // read again on each reload
	Config *config.Config   // the configuration that Source.Load returned last
	Build  Build            // of this binary
	Log    *zap.Logger      // required
	Level  zap.AtomicLevel  // the level of Log; a reload changes it
	Reload <-chan os.Signal // each value causes a reload; nil: only changed files do
	// OwnsProcess is set when the process runs nothing else and called TuneProcess: the daemon then
	// returns the process's memory to the system after the start and after much work.
	OwnsProcess bool
	Doctor      DoctorFunc // nil: there is no system.doctor
}

// Build identifies the running binary.
type Build struct {
	Version string    // shown to the relay and to local clients
	Stamp   string    // of the linker, for daemons that find this binary staged; here so that the linker keeps it
	Time    time.Time // of the commit; zero when not known
}

// HistoryFile is the name of the history in the state directory.
const HistoryFile = "history.db"

// ErrStateDir reports a state directory that cannot be made.
var ErrStateDir = enroll.ErrStateDir

// Daemon is the device with its control socket, its history and its alerts.
//
// Lock order: reloadMu, then mu, then the locks of the parts.
type Daemon struct {
	source config.Source
	build  Build
	id     *enroll.Identity
	unlock func() // the state directory; nil: it could not be locked
	disk   *statedir.Monitor
	log    *zap.Logger
	level  zap.AtomicLevel
	reload <-chan os.Signal
	start  time.Time

	ownsProcess bool
	examine     DoctorFunc       // nil: there is none
	machine     *inspect.Machine // nil: not on this system

	device          *device
	control         *control.Server
	history         *history.Store // nil when the daemon started without history
	alerts          *alert.Engine
	socketInherited bool // systemd opened the control socket

	warnExposed    sync.Once   // of a token file that others may read
	pushEnabled    atomic.Bool // by start and stop on the control socket
	historyEnabled atomic.Bool // by the configuration

	reloadMu      sync.Mutex // serializes changes of the configuration and of its files
	mu            sync.Mutex // protects the fields below
	cfg           *config.Config
	damage        []*atomicfile.Damage // files that could not be used at the start
	configError   string               // why the present files are not in force, "" when they are
	restartNeeded []string             // keys whose change waits for a restart
	member        membership
	socketModules []string // modules of the prober that clients of the socket started
}

// New opens all parts: the identity, the device, the history and the control socket. It
// starts nothing. Run must be called, because it closes the parts.
func New(o Options) (*Daemon, error) {
	d := &Daemon{source: o.Source, build: o.Build, log: o.Log, level: o.Level, reload: o.Reload, cfg: o.Config, start: time.Now(), ownsProcess: o.OwnsProcess, examine: o.Doctor}
	d.pushEnabled.Store(true)
	d.historyEnabled.Store(o.Config.HistoryEnabled())
	d.disk = statedir.New(o.Config.Text("state_dir"))
	if err := d.open(); err != nil {
		d.closeHistory()
		d.unlockState()
		return nil, err
	}
	return d, nil
}

// open opens the parts in the order of their needs: identity, device, alerts, history, control
// socket. The socket is last, because clients may call as soon as it listens. A state directory
// that cannot be written is no error: a board with a full card still has to be reachable.
func (d *Daemon) open() (err error) {
	stateDir := d.cfg.Text("state_dir")
	if err := d.openStateDir(stateDir); err != nil {
		return err
	}
	if d.member, err = d.newMembership(d.cfg); err != nil {
		return err
	}
	if d.member.err != nil {
		d.log.Error("the credential cannot be used", zap.Error(d.member.err), zap.String("hint", JoinHint(d.member.err)))
	}
	d.warnOfConflict(d.member)
	d.adoptNode(d.member)
	o, err := d.deviceOptions(d.cfg, d.member)
	if err != nil {
		return err
	}
	if d.cfg.HistoryEnabled() {
		o.History = historySeries{d}
	}
	o.Inspection = d.inspection()
	floor, err := statedir.Do(d.disk, func() (time.Time, error) { return clockFloor(d.build, filepath.Join(stateDir, enroll.FileName)), nil })
	if err != nil {
		floor = d.build.Time
	}
	if d.device, err = newDevice(o, floor); err != nil {
		return err
	}
	if d.alerts, err = alert.New(d.cfg.AlertRules()); err != nil {
		return err
	}
	if err := d.setModules(d.cfg); err != nil {
		return err
	}
	if d.cfg.HistoryEnabled() {
		d.history, err = history.Open(history.Options{
			Path: filepath.Join(stateDir, HistoryFile), Flush: d.cfg.Duration("history.flush"),
			MaxAge: d.cfg.Duration("history.max_age"), MaxBytes: d.cfg.Int("history.max_bytes"),
			Now: d.device.clock.NowMS, Logger: d.log,
		})
		if err != nil {
			return err
		}
	}
	return d.listen()
}

// clockFloor returns the latest time that has certainly passed: that of the build or of the
// last write to the state file.
//
// It protects boards without a battery-backed clock, which start in 1970 or at the time of
// their last shutdown. Go's linker does not know the time of the build; the build passes it.
func clockFloor(b Build, stateFile string) time.Time {
	if st, err := os.Stat(stateFile); err == nil && st.ModTime().After(b.Time) {
		return st.ModTime()
	}
	return b.Time
}

// unlockState ends the lock of the state directory, if there is one.
func (d *Daemon) unlockState() {
	if d.unlock != nil {
		d.unlock()
	}
}

// deviceOptions derives the device from a configuration and a membership, which comes first
// for the relay that both name. It fails when the certificate authority cannot be read.
//
// The token file is read before each connection and not here, so that a token can be replaced
// without a reload.
func (d *Daemon) deviceOptions(c *config.Config, m membership) (deviceOptions, error) {
	tokenFile := c.Text("token_file")
	o := deviceOptions{
		Relay: c.Text("relay"), Name: c.Text("name"), Version: d.build.Version, InstanceID: d.id.InstanceID(),
		Interval: c.Interval(), DiskPath: c.Text("disk_path"), Synchronized: clock.NTPSynchronized, Log: d.log,
		Token:   func() (string, error) { return d.readToken(tokenFile) },
		OnReady: d.saveNodeID, Enabled: d.enabledCapabilities(c),
	}
	var err error
	if k := m.keeper; k != nil {
		o.Relay, o.Joined = m.cred.Relay, true
		o.InstanceID = cmp.Or(m.cred.InstanceID, o.InstanceID) // to which the token is bound
		o.Token = func() (string, error) { return k.Token(), nil }
		o.Sign = func(nonce, token string) (string, error) {
			return k.Sign(enrollment.LinkMessage(nonce, m.cred.NodeID, token)), nil
		}
		o.OnState = onLinkState(k)
		o.OnReady = func(ok link.AuthOK) {
			k.Ready(ok.ServerTimeMS)
			d.saveNodeID(ok)
		}
		if m.cred.CASHA256 != "" {
			o.TLS, err = pin.ClientConfig(m.cred.CASHA256)
			return o, err
		}
	}
	if o.Relay != "" {
		o.TLS, err = c.TLS()
	}
	return o, err
}

// readToken reads the token of this board. One that other users may read is used all the same, since
// a board must stay reachable; the log says so once.
func (d *Daemon) readToken(path string) (string, error) {
	token, err := config.ReadToken(path)
	var exposed *config.ExposedError
	if !errors.As(err, &exposed) {
		return token, err
	}
	d.warnExposed.Do(func() {
		d.log.Warn("the token is used all the same", zap.Error(err), zap.String("hint", "chmod 600 "+path))
	})
	return token, nil
}

// saveNodeID saves the node id that the relay assigned to this board.
//
// A board whose disk does not take it gets the same id again with the next link.
func (d *Daemon) saveNodeID(ok link.AuthOK) {
	if d.setNode(ok.NodeID, ok.TenantID) {
		d.log.Info("node id assigned by the relay", zap.String("node_id", ok.NodeID))
	}
}

// Run serves until ctx ends or a part fails. It returns the first failure, nil when ctx
// ended. All recorded samples are on the disk when it returns.
//
// The device stops after the services, so that their last requests still find the prober
// and the link.
func (d *Daemon) Run(ctx context.Context) error {
	defer d.unlockState()
	defer d.closeHistory()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	// Not a child of ctx: the device has to outlive the services.
	deviceCtx, stopDevice := context.WithCancel(context.WithoutCancel(ctx))
	defer stopDevice()

	d.log.Info("ready", zap.String("node_id", d.id.NodeID()), zap.String("socket", d.control.Addr()),
		zap.String("relay", d.relay()), zap.String("version", d.build.Version))
	NotifySystemd("READY=1", "STATUS="+d.systemdStatus())

	device, services := group{stop: stop}, group{stop: stop}
	device.start(deviceCtx, d.device.prober.Run)
	device.start(deviceCtx, d.device.runLink)
	services.start(ctx, d.control.Serve)
	services.start(ctx, d.recordSamples)
	services.start(ctx, d.watchConfig)
	services.start(ctx, d.runMembership)
	services.start(ctx, d.watchNetwork)
	services.start(ctx, d.runWatchdog)
	err := services.wait()
	stopDevice()
	err = cmp.Or(err, device.wait())
	d.log.Info("stopped")
	return err
}

// systemdStatus returns the status line of a healthy daemon in systemctl status.
func (d *Daemon) systemdStatus() string {
	return "node " + d.id.NodeID() + "; ask it with: agentctl status"
}

// closeHistory writes the unsaved samples and closes the history.
func (d *Daemon) closeHistory() {
	if d.history == nil {
		return
	}
	if err := d.history.Close(); err != nil {
		d.log.Warn("history", zap.Error(err))
	}
}

// relay returns the URL of the relay to which this board links, "" for none.
func (d *Daemon) relay() string {
	if m := d.membership(); m.keeper != nil {
		return m.cred.Relay
	}
	return d.config().Text("relay")
}

// config returns the configuration in force.
//
// A reload may replace it between two calls, but does not change the one that was returned.
func (d *Daemon) config() *config.Config {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg
}

// group runs functions together: the first one that returns stops the others.
//
// A group is used by one goroutine: start and wait are not called at the same time. Two groups
// that share stop end together, and each one can be waited for alone.
type group struct {
	stop context.CancelFunc // ends the functions of this group, and of groups that share it
	wg   sync.WaitGroup
	once sync.Once
	err  error // the first error that is not a cancellation
}

// start runs fn in a goroutine that wait waits for.
//
// A cancellation is not an error: it is how stop ends the others.
func (g *group) start(ctx context.Context, fn func(context.Context) error) {
	g.wg.Go(func() {
		defer g.stop()
		if err := fn(ctx); err != nil && !errors.Is(err, context.Canceled) {
			g.once.Do(func() { g.err = err })
		}
	})
}

// wait returns the first error when all functions have returned.
func (g *group) wait() error {
	g.wg.Wait()
	return g.err
}

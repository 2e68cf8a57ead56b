package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// Goroutines: Run has one for each version of a plugin (Plugin.run) and one for each version that
// is drained, and waits for all of them. jrpc2 has its own for each connection, which end with it.
// Host.mu is not held while a plugin starts or stops; loadedPlugin.changing is.
//
// loadedPlugin.changing makes the changes of one plugin wait for each other; those of different plugins
// run at the same time:
//
//	Load     add, connect, Kernel.Load, supervise. A failure removes the entry again.
//	Reload   acquire, connect a version beside the old one, Kernel.Replace, supervise; then the old
//	         version ends in the background (draining). A failure leaves the old one as it is.
//	Unload   acquire, Kernel.Retire, end of the version, remove.
//
// An entry of Host.loaded exists from add to remove, and its current version is never nil.

// MaxProcesses bounds the plugins of a Host. During reloads there are up to twice as many processes, since
// the versions before them drain.
const MaxProcesses = 32

// Errors that callers may test for.
var (
	ErrNotLoaded  = errors.New("no such plugin is loaded; `agentctl plugin ls` shows them")
	ErrNotRunning = errors.New("the relay is starting or stopping, try again")
	ErrBusy       = errors.New("another change of this plugin is in progress, try again")
)

// Options configure a Host. Dir and Kernel must be given.
type Options struct {
	Dir     string // the plugin directory
	Kernel  *kernel.Kernel
	Version string // of the relay, sent to plugins by initialize
	Logger  *zap.Logger
	Log     kernel.Log // of events; nil: none are appended

	// SocketDir has a socket NAME.sock for each plugin that a service manager starts; the relay
	// then does not start its executable. "" for none.
	SocketDir string
	// DataDir gets a folder NAME for the data of each plugin that the relay starts, its HOME.
	// "": HOME is the plugin's own folder.
	DataDir string
	// Private are the files and folders that plugins must not reach: the relay's state directory
	// and keys. Dir and DataDir may lie in them.
	Private []string
	// Bundled are plugins of the relay's binary, by name. A folder of the same name is ignored.
	Bundled map[string]Bundled
	// Bus gives plugins what they ask for and an operator has allowed; nil: nothing.
	Bus *Bus
	// OnDown is called when the program of a plugin that was offered has ended, was killed because it
	// did not answer, or did not start again. The reason quotes nothing of the program. nil: not.
	// It must not block.
	OnDown func(plugin, reason string)
	// NoSandbox starts executables without a sandbox: they may do what the relay may.
	NoSandbox bool
}

// How a plugin is kept from the relay's files: State.Sandbox.
const (
	SandboxLandlock = "landlock" // the relay starts it in a sandbox
	SandboxService  = "service"  // a service manager starts it, with the restrictions of its unit
	SandboxExternal = "external" // somebody else starts it; only its socket is known
	SandboxOff      = "off"      // nothing keeps it (Options.NoSandbox)
)

// Host runs the plugins of a directory, each supervised by a goroutine of Run. Its methods
// may be called from any goroutine.
type Host struct {
	o   Options
	log *zap.Logger

	mu sync.Mutex // protects the fields below
	// ctx is that of Run, nil before it. wg counts the goroutines that Run waits for, and the changes
	// in progress; a change begins only while stopped is false, so that none begins once Run waits.
	ctx     context.Context
	loaded  map[string]*loadedPlugin
	wg      sync.WaitGroup
	stopped bool
}

// loadedPlugin is a plugin from Load to Unload: what outlasts its versions.
type loadedPlugin struct {
	name    string
	watches *watchSet
	// changing has capacity 1. It is held while the plugin is loaded, reloaded or unloaded.
	changing chan struct{}

	// protected by Host.mu
	current     *runningVersion
	draining    *runningVersion // the version before, while it ends; nil: none did, or it has ended
	isUnloading bool
}

// runningVersion is a Plugin that is supervised. cancel ends it, done is closed after that.
type runningVersion struct {
	plugin *Plugin
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}
}

// drainTimeout bounds how long a version that was replaced or unloaded goes on for its calls in
// flight, which have kernel.CallBudget. Tests shorten it.
var drainTimeout = kernel.CallBudget + time.Second

// New makes a Host; nothing starts before Run.
func New(o Options) *Host {
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	return &Host{o: o, log: o.Logger, loaded: make(map[string]*loadedPlugin)}
}

// Run starts the named plugins and keeps them and those that Load adds running until ctx
// ends. Then it stops them and waits for their processes.
//
// A named plugin whose folder open refuses is logged and skipped. One whose process does not
// start is tried again, and offered after it does.
func (h *Host) Run(ctx context.Context, names ...string) error {
	h.mu.Lock()
	h.ctx = ctx
	h.mu.Unlock()
	for _, name := range names {
		if err := h.loadAtStart(name); err != nil {
			h.log.Error("plugin not loaded", zap.String("plugin", name), zap.Error(err))
		}
	}
	<-ctx.Done()
	h.mu.Lock()
	h.stopped = true
	h.mu.Unlock()
	h.wg.Wait()
	return ctx.Err()
}

// Check returns the error in the folder of a plugin. It starts nothing.
func (h *Host) Check(name string) error {
	_, err := h.open(name, tempFolders[0])
	return err
}

// loadAtStart begins to supervise a plugin, which is offered after its first connection.
func (h *Host) loadAtStart(name string) error {
	src, err := h.open(name, tempFolders[0])
	if err != nil {
		return err
	}
	lp, v, err := h.add(src)
	if err != nil {
		return err
	}
	defer h.wg.Done()
	defer func() { <-lp.changing }()
	// Unlike Load this does not wait for the connection, which is tried until it succeeds: a program
	// that needs the network at its start is offered once the network is up.
	h.supervise(lp, v, nil, func() error { return h.o.Kernel.Load(v.plugin, false) })
	return nil
}

// Load starts the plugin of that name and offers it after it has shown that it serves what
// its manifest declares. It runs until Unload or the end of Run.
//
// Load waits for at most initializeTimeout. A plugin that fails its first attempt is stopped
// before Load returns the error, so that a failed Load leaves no process behind.
func (h *Host) Load(ctx context.Context, name string) (*State, error) {
	src, err := h.open(name, tempFolders[0])
	if err != nil {
		return nil, err
	}
	lp, v, err := h.add(src)
	if err != nil {
		return nil, err
	}
	defer h.wg.Done()
	defer func() { <-lp.changing }()
	c, err := v.connect(ctx)
	if err == nil {
		v.plugin.setUp(c) // before a call can come
		if err = h.o.Kernel.Load(v.plugin, false); err != nil {
			c.close()
		}
	}
	if err != nil {
		h.remove(lp, v)
		return nil, fmt.Errorf("plugin %s is not loaded: %w", name, err)
	}
	h.supervise(lp, v, c, nil)
	s := v.plugin.state()
	return &s, nil
}

// connect is Plugin.connect, which also ends with the version.
func (v *runningVersion) connect(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(v.ctx, cancel)
	defer stop()
	c, err := v.plugin.connect(ctx)
	switch {
	case err == nil:
		return c, nil
	case v.ctx.Err() != nil:
		return nil, ErrNotRunning
	case ctx.Err() != nil:
		return nil, fmt.Errorf("it did not start in time; see its lines in the relay's log: %v", err)
	}
	return nil, errors.New(printable(err.Error()))
}

// Reload starts the version of a plugin that its folder has now, beside the one that runs. If it
// serves what its manifest declares, it takes the place of the old one in one step: no call fails,
// and watches go on. The old one ends after its calls in flight, drainTimeout later at the latest.
// If not, the old one stays, and the error says why.
//
// At most two versions of a plugin run at the same time: Reload waits for the end of the one
// before.
func (h *Host) Reload(ctx context.Context, name string) (*State, error) {
	lp, err := h.acquire(ctx, name)
	if err != nil {
		return nil, err
	}
	defer h.wg.Done()
	defer func() { <-lp.changing }()
	h.mu.Lock()
	old, before := lp.current, lp.draining
	h.mu.Unlock()
	// ctx bounds the wait and the start together. waited lets the error say which of them took the time.
	began, waited := time.Now(), time.Duration(0)
	if before != nil {
		select {
		case <-before.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("plugin %s is not reloaded: the version before still has calls in flight; try again in %s", name, drainTimeout)
		}
		waited = time.Since(began)
	}
	v, drained, err := h.startBeside(ctx, lp, old)
	if err != nil && waited > 0 && ctx.Err() != nil { // the start is not to blame, or not alone
		err = fmt.Errorf("%w; the version before had calls in flight for %s of that time, try again", err, waited.Round(time.Millisecond))
	}
	if err != nil {
		return nil, fmt.Errorf("plugin %s is not reloaded, version %s goes on: %w", name, old.plugin.manifest.Version, err)
	}
	h.mu.Lock()
	lp.current, lp.draining = v, old
	h.mu.Unlock()
	h.wg.Go(func() {
		old.end(drained)
		h.mu.Lock()
		defer h.mu.Unlock()
		if lp.draining == old {
			lp.draining = nil
		}
	})
	s := v.plugin.state()
	return &s, nil
}

// startBeside starts and checks a new version, and replaces the old one by it.
func (h *Host) startBeside(ctx context.Context, lp *loadedPlugin, old *runningVersion) (*runningVersion, <-chan struct{}, error) {
	temp := tempFolders[0]
	// The launcher empties the folder at each start, so not the one that the old version uses.
	if old.plugin.temp == temp {
		temp = tempFolders[1]
	}
	src, err := h.open(lp.name, temp)
	if err == nil {
		err = h.allowSandbox(src.manifest)
	}
	if err != nil {
		return nil, nil, err
	}
	v := h.newVersion(src, lp.watches)
	c, err := v.connect(ctx)
	if err != nil {
		v.cancel()
		return nil, nil, err
	}
	v.plugin.setUp(c) // before a call can come
	drained, err := h.o.Kernel.Replace(v.plugin)
	if err != nil {
		c.close()
		v.cancel()
		return nil, nil, err
	}
	h.supervise(lp, v, c, nil)
	return v, drained, nil
}

// end ends a version after its calls in flight. Those that wait for a restart go to the next
// version.
func (v *runningVersion) end(drained <-chan struct{}) {
	v.plugin.retire()
	v.awaitCalls(drained)
	v.cancel()
	<-v.done
}

// awaitCalls waits for the calls in flight, until drainTimeout is over or the version ends. drained is
// the kernel's signal, which covers the calls since its last Refresh only; the plugin counts all of them.
func (v *runningVersion) awaitCalls(drained <-chan struct{}) {
	timer := time.NewTimer(drainTimeout)
	defer timer.Stop()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for drained != nil || v.plugin.active.Load() > 0 {
		select {
		case <-drained:
			drained = nil
		case <-poll.C:
		case <-timer.C:
			return
		case <-v.ctx.Done():
			return
		}
	}
}

// Unload ends a plugin: NAME or NAME@VERSION. The kernel offers its tools no longer; its process ends
// after the calls in flight, drainTimeout later at the latest. Unload waits for that until ctx
// ends, and then returns nil: the rest follows.
func (h *Host) Unload(ctx context.Context, name string) error {
	name, want, hasVersion := strings.Cut(name, "@")
	lp, err := h.acquire(ctx, name)
	if err != nil {
		return err
	}
	h.mu.Lock()
	v, before := lp.current, lp.draining
	isOther := hasVersion && v.plugin.manifest.Version != want
	lp.isUnloading = !isOther
	h.mu.Unlock()
	if isOther {
		<-lp.changing
		h.wg.Done()
		return ErrNotLoaded
	}
	drained := h.o.Kernel.Retire(v.plugin)
	ended := make(chan struct{})
	go func() {
		defer h.wg.Done()
		defer close(ended)
		v.end(drained)
		if before != nil {
			<-before.done
		}
		h.remove(lp, v)
		<-lp.changing
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	return nil
}

// Reloaded is what became of a plugin whose folder has changed.
type Reloaded struct {
	Name string
	Err  error // nil: the new version runs; else the old one does
}

// ReloadChanged reloads the loaded plugins whose manifest or program is not the one that runs, all
// at the same time. The list is by name.
func (h *Host) ReloadChanged(ctx context.Context) []Reloaded {
	h.mu.Lock()
	running := make(map[string]source, len(h.loaded))
	for name, lp := range h.loaded { // a copy: open, below, reads the disk, without Host.mu
		running[name] = lp.current.plugin.source
	}
	h.mu.Unlock()
	var list []Reloaded
	for _, name := range slices.Sorted(maps.Keys(running)) {
		now, err := h.open(name, running[name].temp)
		if err != nil || now.differs(running[name]) {
			list = append(list, Reloaded{Name: name, Err: err})
		}
	}
	var wg sync.WaitGroup
	for i := range list {
		if list[i].Err == nil {
			wg.Go(func() { _, list[i].Err = h.Reload(ctx, list[i].Name) })
		}
	}
	wg.Wait()
	return list
}

// List returns the states of the loaded plugins, by name.
func (h *Host) List() []State {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]State, 0, len(h.loaded))
	for _, lp := range h.loaded {
		list = append(list, lp.current.plugin.state())
	}
	slices.SortFunc(list, func(a, b State) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// acquire returns a loaded plugin with changing held, which the caller releases. h.wg counts the
// caller until it calls Done.
func (h *Host) acquire(ctx context.Context, name string) (*loadedPlugin, error) {
	for {
		h.mu.Lock()
		lp := h.loaded[name]
		if lp == nil || h.stopped {
			h.mu.Unlock()
			return nil, ErrNotLoaded
		}
		h.wg.Add(1)
		h.mu.Unlock()
		select {
		case lp.changing <- struct{}{}:
		case <-ctx.Done():
			h.wg.Done()
			return nil, ErrBusy
		}
		h.mu.Lock()
		// The plugin may have been unloaded meanwhile, and loaded again as another entry.
		isLoaded := h.loaded[name] == lp
		h.mu.Unlock()
		if isLoaded {
			return lp, nil
		}
		<-lp.changing
		h.wg.Done()
	}
}

// add enters a plugin, with changing held. For Load, h.wg counts the caller until it calls Done.
func (h *Host) add(s source) (*loadedPlugin, *runningVersion, error) {
	name := s.manifest.Name
	if err := h.allowSandbox(s.manifest); err != nil {
		return nil, nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.ctx == nil || h.stopped:
		return nil, nil, ErrNotRunning
	case h.loaded[name] != nil && h.loaded[name].isUnloading:
		return nil, nil, fmt.Errorf("plugin %s is not loaded: the one before still has calls in flight; try again in %s", name, drainTimeout)
	case h.loaded[name] != nil:
		return nil, nil, fmt.Errorf("plugin %s is loaded already; for a new version: agentctl plugin reload %s", name, name)
	case len(h.loaded) >= MaxProcesses:
		return nil, nil, fmt.Errorf("%d plugins are loaded, which is the maximum; unload one", MaxProcesses)
	}
	lp := &loadedPlugin{name: name, watches: newWatchSet(), changing: make(chan struct{}, 1)}
	lp.changing <- struct{}{}
	lp.current = h.newVersion(s, lp.watches)
	h.loaded[name] = lp
	h.wg.Add(1)
	return lp, lp.current, nil
}

// remove removes a plugin after its last version has ended.
func (h *Host) remove(lp *loadedPlugin, v *runningVersion) {
	v.cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.loaded[lp.name] == lp {
		delete(h.loaded, lp.name)
		close(lp.watches.unloaded)
	}
}

// newVersion makes a version. Its context is that of Run and not of the call that loads it, which it
// outlives.
func (h *Host) newVersion(s source, watches *watchSet) *runningVersion {
	v := &runningVersion{plugin: newPlugin(s, watches, h.o.Version, h.log), done: make(chan struct{})}
	v.plugin.onDown = h.o.OnDown
	v.ctx, v.cancel = context.WithCancel(h.ctx)
	return v
}

// supervise runs a version in a goroutine that Run waits for.
func (h *Host) supervise(lp *loadedPlugin, v *runningVersion, c *conn, offer func() error) {
	h.wg.Go(func() {
		defer close(v.done)
		defer v.cancel()
		if err := v.plugin.run(v.ctx, c, offer); v.ctx.Err() == nil && !v.plugin.retired.Load() { // the kernel refused it
			v.plugin.setDown(err, time.Time{})
			h.log.Error("plugin not loaded", zap.String("plugin", lp.name), zap.Error(err))
			h.removeRefused(lp, v)
		}
		h.o.Kernel.Unload(v.plugin)
	})
}

// removeRefused removes a plugin that the kernel refused, unless a Reload replaces it: the kernel refuses
// the version before then, too.
func (h *Host) removeRefused(lp *loadedPlugin, v *runningVersion) {
	select {
	case lp.changing <- struct{}{}:
	case <-v.ctx.Done(): // it ends anyway
		return
	}
	defer func() { <-lp.changing }()
	h.mu.Lock()
	isCurrent := lp.current == v
	h.mu.Unlock()
	if isCurrent {
		h.remove(lp, v)
	}
}

// allowSandbox says why a plugin is not started with the sandbox that this machine has. It logs what
// an operator should know about one that is.
func (h *Host) allowSandbox(m *kernel.Manifest) error {
	switch m.Sandbox {
	case SandboxLandlock:
		if err := sandbox.Available(); err != nil {
			return fmt.Errorf("plugin %s is not started, since it could read the relay's keys: %w; run it as a separate service (docs/kernel.md, Sandbox), or start the relay with --plugin-sandbox off if you trust it with them", m.Name, err)
		}
		if os.Geteuid() == 0 {
			h.log.Warn("the relay runs as root, so that nothing bounds the number of a plugin's processes: run it as a separate user", zap.String("plugin", m.Name))
		}
	case SandboxOff:
		h.log.Warn("a plugin runs without a sandbox: it can read the relay's keys (--plugin-sandbox off)", zap.String("plugin", m.Name))
	}
	return nil
}

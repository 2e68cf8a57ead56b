package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// Goroutines: Run has one for each loaded plugin (Plugin.run), and waits for all of them.
// jrpc2 has its own for each connection, which end with it. Host.mu is not held while a plugin
// starts or stops.

// MaxProcesses bounds the plugins of a Host.
const MaxProcesses = 32

// Errors that callers may test for.
var (
	ErrNotLoaded  = errors.New("no such plugin is loaded; `agentctl plugin ls` shows them")
	ErrNotRunning = errors.New("the relay is starting or stopping, try again")
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

	mu      sync.Mutex // protects the fields below
	ctx     context.Context
	loaded  map[string]*process
	wg      sync.WaitGroup
	stopped bool
}

// process is a plugin that is supervised. cancel ends it, done is closed after that.
type process struct {
	plugin *Plugin
	cancel context.CancelFunc
	done   chan struct{}
}

// New makes a Host; nothing starts before Run.
func New(o Options) *Host {
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	return &Host{o: o, log: o.Logger, loaded: make(map[string]*process)}
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
		s, err := h.open(name)
		if err == nil {
			_, err = h.start(s)
		}
		if err != nil {
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
	_, err := h.open(name)
	return err
}

// Load starts the plugin of that name and offers it after it has shown that it serves what
// its manifest declares. It runs until Unload or the end of Run.
//
// Load waits for at most initializeTimeout. A plugin that fails its first attempt is stopped
// before Load returns the error, so that a failed Load leaves no process behind.
func (h *Host) Load(ctx context.Context, name string) (*State, error) {
	src, err := h.open(name)
	if err != nil {
		return nil, err
	}
	pr, err := h.start(src)
	if err != nil {
		return nil, err
	}
	p := pr.plugin
	ctx, cancel := context.WithTimeout(ctx, initializeTimeout)
	defer cancel()
	for err == nil {
		p.mu.Lock()
		isUp, changed, lastErr := p.conn != nil, p.changed, p.lastErr
		p.mu.Unlock()
		switch {
		case isUp:
			s := p.state()
			return &s, nil
		case lastErr != "":
			err = errors.New(lastErr)
			continue
		}
		select {
		case <-changed:
		case <-pr.done:
			err = ErrNotRunning
		case <-ctx.Done():
			err = errors.New("it did not start in time; see its lines in the relay's log")
		}
	}
	pr.cancel()
	<-pr.done
	return nil, fmt.Errorf("plugin %s is not loaded: %w", name, err)
}

// Unload stops a plugin: NAME or NAME@VERSION. Its calls in flight fail. Unload returns when
// the process has ended and the kernel no longer offers the plugin's tools.
func (h *Host) Unload(name string) error {
	name, version, hasVersion := strings.Cut(name, "@")
	h.mu.Lock()
	pr := h.loaded[name]
	h.mu.Unlock()
	if pr == nil || (hasVersion && pr.plugin.manifest.Version != version) {
		return ErrNotLoaded
	}
	pr.cancel()
	<-pr.done
	return nil
}

// List returns the states of the loaded plugins, by name.
func (h *Host) List() []State {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]State, 0, len(h.loaded))
	for _, pr := range h.loaded {
		list = append(list, pr.plugin.state())
	}
	slices.SortFunc(list, func(a, b State) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// start begins to supervise a plugin, in a goroutine that Run waits for. The goroutine's
// context is that of Run and not of Load: a plugin outlives the call that loaded it.
func (h *Host) start(s source) (*process, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	name := s.manifest.Name
	switch {
	case h.ctx == nil || h.stopped:
		return nil, ErrNotRunning
	case h.loaded[name] != nil:
		return nil, fmt.Errorf("plugin %s is loaded already; unload it first: agentctl plugin unload %s", name, name)
	case len(h.loaded) >= MaxProcesses:
		return nil, fmt.Errorf("%d plugins are loaded, which is the maximum; unload one", MaxProcesses)
	}
	switch s.manifest.Sandbox {
	case SandboxLandlock:
		if err := sandbox.Available(); err != nil {
			return nil, fmt.Errorf("plugin %s is not started, since it could read the relay's keys: %w; run it as a separate service (docs/kernel.md, Sandbox), or start the relay with --plugin-sandbox off if you trust it with them", name, err)
		}
		if os.Geteuid() == 0 {
			h.log.Warn("the relay runs as root, so that nothing bounds the number of a plugin's processes: run it as a separate user", zap.String("plugin", name))
		}
	case SandboxOff:
		h.log.Warn("a plugin runs without a sandbox: it can read the relay's keys (--plugin-sandbox off)", zap.String("plugin", name))
	}
	ctx, cancel := context.WithCancel(h.ctx)
	watches := newWatchSet()
	p := newPlugin(s, watches, h.o.Version, h.log)
	pr := &process{plugin: p, cancel: cancel, done: make(chan struct{})}
	h.loaded[name] = pr
	h.wg.Go(func() {
		defer close(pr.done)
		defer cancel()
		err := p.run(ctx, func() error { return h.o.Kernel.Load(p, false) })
		// run ended by itself: the kernel refused the plugin. setState makes Load return.
		if ctx.Err() == nil {
			p.setState(nil, err)
			h.log.Error("plugin not loaded", zap.String("plugin", name), zap.Error(err))
		}
		h.o.Kernel.Unload(p)
		close(watches.unloaded)
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.loaded, name)
	})
	return pr, nil
}

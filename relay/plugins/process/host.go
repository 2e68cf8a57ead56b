package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"go.uber.org/zap"

	"agentctl/lazyregexp"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// The plugin directory decides which programs run on the relay's machine, and its manifests
// what of that machine they may use. Therefore open
// checks the directory, the plugin's folder, its manifest and its executable: none may be a
// link, writable by group or others, or owned by a user other than root and the relay's.
// Paths are resolved below an os.Root, so that a link inside of the directory cannot lead
// out of it.
//
// Goroutines: Run has one for each loaded plugin (Plugin.run), and waits for all of them.
// jrpc2 has its own for each connection, which end with it. Host.mu is not held while a plugin
// starts or stops.

// Names in a plugin's folder.
const (
	manifestFile = "plugin.json"
	runFile      = "run"
	socketFile   = "run.sock"
)

// MaxProcesses bounds the plugins of a Host.
const MaxProcesses = 32

// Errors that callers may test for.
var (
	ErrNotLoaded  = errors.New("no such plugin is loaded; `agentctl plugin ls` shows them")
	ErrNotRunning = errors.New("the relay is starting or stopping, try again")
)

// folderName is the form of a plugin's name, which is also the name of its folder.
var folderName = lazyregexp.New(`^[a-z][a-z0-9_]{0,31}$`)

// reservedNames are names whose tools or resources belong to the relay.
var reservedNames = []string{"kernel", "tickets", "agents", "devices", "schemas", "sys", "sysecho"}

// Options configure a Host. Dir and Kernel must be given.
type Options struct {
	Dir     string // the plugin directory
	Kernel  *kernel.Kernel
	Version string // of the relay, sent to plugins by initialize
	Logger  *zap.Logger

	// SocketDir has a socket NAME.sock for each plugin that a service manager starts; the relay
	// then does not start its executable. "" for none.
	SocketDir string
	// DataDir gets a folder NAME for the data of each plugin that the relay starts, its HOME.
	// "": HOME is the plugin's own folder.
	DataDir string
	// Private are the files and folders that plugins must not reach: the relay's state directory
	// and keys. Dir and DataDir may lie in them.
	Private []string
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
		p, err := h.open(name)
		if err == nil {
			_, err = h.start(p)
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
	p, err := h.open(name)
	if err != nil {
		return nil, err
	}
	pr, err := h.start(p)
	if err != nil {
		return nil, err
	}
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
func (h *Host) start(p *Plugin) (*process, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	name := p.manifest.Name
	switch {
	case h.ctx == nil || h.stopped:
		return nil, ErrNotRunning
	case h.loaded[name] != nil:
		return nil, fmt.Errorf("plugin %s is loaded already; unload it first: agentctl plugin unload %s", name, name)
	case len(h.loaded) >= MaxProcesses:
		return nil, fmt.Errorf("%d plugins are loaded, which is the maximum; unload one", MaxProcesses)
	}
	switch p.manifest.Sandbox {
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
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.loaded, name)
	})
	return pr, nil
}

// open reads and checks the folder of a plugin. A user who can write to it can run
// programs on the relay's machine, so only the relay's user and root may.
//
// A folder with neither an executable nor a socket is refused. Of a socket only its existence
// is checked: the relay runs nothing of it, and the folder's owner decides which one it is.
func (h *Host) open(name string) (*Plugin, error) {
	if h.o.Dir == "" {
		return nil, errors.New("the relay has no plugin directory; set one with --plugin-dir")
	}
	if !folderName.MatchString(name) || slices.Contains(reservedNames, name) {
		return nil, fmt.Errorf("%q cannot be the name of a plugin: a letter, then a-z, 0-9 and _, at most 32, and none of %s", name, strings.Join(reservedNames, ", "))
	}
	root, err := os.OpenRoot(h.o.Dir)
	if err != nil {
		return nil, fmt.Errorf("open the plugin directory: %w", err)
	}
	defer func() { _ = root.Close() }()
	for _, f := range []struct {
		path string
		typ  fs.FileMode
	}{{".", fs.ModeDir}, {name, fs.ModeDir}, {filepath.Join(name, manifestFile), 0}} {
		if err := checkOwner(root, f.path, f.typ); err != nil { // an owner could replace what is below
			return nil, err
		}
	}
	raw, err := readManifest(root, name)
	if err != nil {
		return nil, err
	}
	m, pm, err := parse(raw)
	if err != nil {
		return nil, fmt.Errorf("%s of plugin %s: %w", manifestFile, name, err)
	}
	if m.Name != name {
		return nil, fmt.Errorf("%s of plugin %s names the plugin %s: rename the folder or the plugin", manifestFile, name, m.Name)
	}
	dial, err := h.dialer(root, m, pm.Sandbox)
	if err != nil {
		return nil, err
	}
	return newPlugin(m, dial, h.o.Version, h.log), nil
}

// dialer decides how a plugin is reached: at the socket of its service, by starting its
// executable, or at the socket in its folder, the first of these that is there. It sets
// the manifest's Sandbox.
func (h *Host) dialer(root *os.Root, m *kernel.Manifest, wants DeclaredSandbox) (func(context.Context) (*lineChannel, error), error) {
	name := m.Name
	dir, err := filepath.Abs(filepath.Join(h.o.Dir, name))
	if err != nil {
		return nil, err
	}
	if path, err := h.serviceSocket(name); err != nil || path != "" {
		m.Sandbox = SandboxService
		return socketDialer(path), err
	}
	if err := checkOwner(root, filepath.Join(name, runFile), 0); errors.Is(err, fs.ErrNotExist) {
		if _, err := root.Lstat(filepath.Join(name, socketFile)); err != nil {
			return nil, fmt.Errorf("plugin %s has neither an executable %q nor a socket %q in its folder", name, runFile, socketFile)
		}
		m.Sandbox = SandboxExternal
		return socketDialer(filepath.Join(dir, socketFile)), nil
	} else if err != nil {
		return nil, err
	}
	c := &child{name: name, path: filepath.Join(dir, runFile), sandbox: !h.o.NoSandbox}
	if h.o.DataDir != "" {
		if c.data, err = filepath.Abs(filepath.Join(h.o.DataDir, name)); err != nil {
			return nil, err
		}
	}
	m.Sandbox = SandboxOff
	if c.sandbox {
		m.Sandbox = SandboxLandlock
		if c.policy, err = h.policy(dir, c.data, wants); err != nil {
			return nil, fmt.Errorf("%s of plugin %s: %w", manifestFile, name, err)
		}
	}
	return c.dial(h.log.With(zap.String("plugin", name))), nil
}

// policy is what a plugin in dir may use, with what its manifest asks for. The sandbox checks
// when it starts that none of it is private.
func (h *Host) policy(dir, data string, wants DeclaredSandbox) (sandbox.Policy, error) {
	p := sandbox.Policy{Folder: dir, Data: data, NoNetwork: wants.Network != nil && !*wants.Network}
	for _, f := range []struct {
		to    *[]string
		paths []string
	}{{&p.Read, wants.Read}, {&p.Write, wants.Write}} {
		for _, path := range f.paths {
			if rest, ok := strings.CutPrefix(path, "~/"); ok {
				home, err := os.UserHomeDir()
				if err != nil {
					return p, fmt.Errorf("sandbox: %s: the relay has no home directory: %w", path, err)
				}
				path = filepath.Join(home, rest)
			}
			*f.to = append(*f.to, path)
		}
	}
	for _, path := range h.o.Private {
		path, err := filepath.Abs(path)
		if err != nil {
			return p, err
		}
		p.Private = append(p.Private, path)
	}
	return p, nil
}

// serviceSocket returns the path of the socket of a plugin's service, or "" if it has none. A
// user who could replace it would be given calls, so that only root and the relay's user may.
func (h *Host) serviceSocket(name string) (string, error) {
	if h.o.SocketDir == "" {
		return "", nil
	}
	root, err := os.OpenRoot(h.o.SocketDir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", fmt.Errorf("open the directory of the plugins' sockets: %w", err)
	}
	defer func() { _ = root.Close() }()
	file := name + ".sock"
	if _, err := root.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return filepath.Join(h.o.SocketDir, file), checkOwner(root, ".", fs.ModeDir)
}

// readManifest reads a manifest, and no more than MaxManifest of a larger file.
func readManifest(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(filepath.Join(name, manifestFile))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	raw, err := io.ReadAll(io.LimitReader(f, MaxManifest+1))
	if err == nil && len(raw) > MaxManifest {
		err = fmt.Errorf("%s of plugin %s is larger than 1 MiB", manifestFile, name)
	}
	return raw, err
}

// checkOwner checks that path is of the type, not a link, and writable by root and the
// user of this process only. Parents of the plugin directory are not checked: the operator
// chose that path.
func checkOwner(root *os.Root, path string, typ fs.FileMode) error {
	st, err := root.Lstat(path)
	at := filepath.Join(root.Name(), path)
	switch {
	case err != nil:
		return fmt.Errorf("plugin: %w", err)
	case st.Mode().Type() != typ:
		return fmt.Errorf("plugin: %s must be a %s, not a link or anything else", path, map[fs.FileMode]string{0: "file", fs.ModeDir: "folder"}[typ])
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("plugin: other users may write %s; fix it with: chmod go-w %s", at, at)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("plugin: %s belongs to uid %d, who could change what the relay runs; fix it with: chown %d %s", at, sys.Uid, os.Geteuid(), at)
	}
	return nil
}

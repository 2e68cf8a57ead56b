package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/process"
)

// External plugins: their directory, what their manifests declare, and their loading and
// unloading by the control plane. The bus over which they call the relay is in bus.go.

// Directories of plugins below the state directory.
const (
	pluginDir     = "plugins"     // default of Options.PluginDir
	pluginDataDir = "plugin-data" // a folder for each plugin that the relay starts
)

// processOptions returns the options of the host of external plugins.
func (r *Relay) processOptions() process.Options {
	// The key of the certificate may be outside of the state directory.
	private := []string{r.opt.StateDir}
	if r.opt.TLSKey != "" {
		private = append(private, r.opt.TLSKey)
	}
	return process.Options{
		Dir: cmp.Or(r.opt.PluginDir, filepath.Join(r.opt.StateDir, pluginDir)), Kernel: r.kernel, Version: r.opt.Version, Logger: r.log, Log: r.queue, SocketDir: r.opt.PluginSockets,
		DataDir: filepath.Join(r.opt.StateDir, pluginDataDir), Private: private, NoSandbox: r.opt.PluginSandbox == SandboxOff, Bus: r.bus, Bundled: r.bundledPlugins(),
		OnDown: func(name, reason string) { r.logPluginChange("restart", name, reason) },
	}
}

// checkPlugins refuses the name of a plugin that cannot be started, before anything is created.
func (r *Relay) checkPlugins() error {
	host := process.New(r.processOptions())
	for _, name := range r.opt.ExternalPlugins {
		err := host.Check(name)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w\nPut the plugin's folder into the plugin directory, or name another directory", err)
		}
		if err != nil {
			return badOption("ExternalPlugins", "plugin %s: %w", name, err)
		}
	}
	return nil
}

// ReadPluginManifest reads and checks the plugin.json of an external plugin.
func ReadPluginManifest(path string) (*kernel.Manifest, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	m, err := process.Manifest(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

// pluginDirRecord is the plugin directory for auth.Endpoint: "" for the one in the state directory,
// which moves with it.
func (r *Relay) pluginDirRecord() string {
	if r.opt.PluginDir == "" {
		return ""
	}
	dir, err := filepath.Abs(r.opt.PluginDir)
	if own, ownErr := filepath.Abs(filepath.Join(r.opt.StateDir, pluginDir)); err != nil || ownErr != nil || dir == own {
		return ""
	}
	return dir
}

// PluginDir is the plugin directory of the relay of a state directory, whether it runs or not; at is
// what it stored when it last started.
func PluginDir(stateDir string, at auth.Endpoint) string {
	return cmp.Or(at.PluginDir, filepath.Join(stateDir, pluginDir))
}

// PluginScopes returns the scopes that the manifests in a plugin directory declare, sorted. The
// error names manifests that cannot be read; the scopes are those of the others.
func PluginScopes(dir string) ([]string, error) { return process.DeclaredScopes(dir) }

// pluginLoader loads and unloads plugins for the control plane. Built-in plugins that were
// enabled at the start can be unloaded and loaded again; those of the plugin directory are
// processes.
type pluginLoader struct{ r *Relay }

// Load loads a built-in plugin again, or starts one of the plugin directory.
func (p pluginLoader) Load(ctx context.Context, name string) error {
	b := p.r.builtins[name]
	if b == nil {
		_, err := p.r.processes.Load(ctx, name)
		return err
	}
	err := p.r.kernel.Load(b, false)
	if errors.Is(err, kernel.ErrAlreadyLoaded) {
		return manifest.E(manifest.BadRequest, "this plugin is loaded already")
	}
	return err
}

// maxPluginChange bounds a reload or an unload. It leaves time for the answer within kernel.CallBudget.
const maxPluginChange = kernel.CallBudget - time.Second

// Reload replaces a plugin by what its folder has now. A built-in one is replaced by itself, which
// closes its breaker and begins its counters anew.
func (p pluginLoader) Reload(ctx context.Context, name string) error {
	if name == control.Name {
		return manifest.E(manifest.BadRequest, "the control plane is part of the relay: restart the relay for another version")
	}
	if b := p.r.builtins[name]; b != nil {
		if !p.r.kernel.IsLoaded(b) {
			return kernel.ErrNotLoaded
		}
		_, err := p.r.kernel.Replace(b)
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, maxPluginChange)
	defer cancel()
	_, err := p.r.processes.Reload(ctx, name)
	return err
}

// Unload ends a plugin, given as NAME or NAME@VERSION.
func (p pluginLoader) Unload(ctx context.Context, name string) error {
	if base, _, _ := strings.Cut(name, "@"); base == control.Name {
		return manifest.E(manifest.BadRequest, "the control plane stays: without it nothing could be loaded again")
	}
	ctx, cancel := context.WithTimeout(ctx, maxPluginChange)
	defer cancel()
	err := p.r.processes.Unload(ctx, name)
	if errors.Is(err, process.ErrNotLoaded) && !strings.Contains(name, ":") { // a colon: a device, which its link unloads
		return p.r.kernel.UnloadByName(name)
	}
	return err
}

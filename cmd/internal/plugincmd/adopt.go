//go:build linux

package plugincmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay"
	"agentctl/relay/plugins/process"
)

// packagedPlugins is the plugin directory of the relay that the packages install.
const packagedPlugins = "/usr/local/lib/agentctl-relay/plugins"

// adoption is one run of 'plugin adopt': its flags, and what it found on the way. run has the steps:
// locate, prepare, process.Adopt, finish.
//
//	locate          checks the name, the flags and the folder, before anything is started or written
//	prepare         makes the command one that starts from any directory, and installs a package in the
//	                stage, a folder beside those of the plugins
//	process.Adopt   starts the server once, in the stage or in the plugin's folder, and asks what it offers
//	finish          prints the report, writes plugin.json, and loads the plugin
//
// Until finish the folder of the plugin is as it was, so that an error or Ctrl-C leaves what was
// adopted before. A process that is killed leaves its stage, which a later adoption removes.
//
// Typed by root, it works for the relay's user: the server runs as that user, who owns what is installed.
type adoption struct {
	relay     cli.RelayFlags
	out       cli.Output
	stateDir  string
	pluginDir string
	sandbox   string
	// What the server may use. These flags add to the manifest, which is the old one with --again and
	// no command.
	read      []string
	write     []string
	env       []string
	noNetwork bool
	again     bool
	// dryRun still starts the server, and installs its package in the stage; nothing is left of either.
	dryRun bool

	name string
	// Set by locate, which makes stateDir and pluginDir absolute as well: the server starts elsewhere.
	folder string         // of the plugin
	stage  *process.Stage // where a new command is made ready; nil without one
	// What the folder has from before, nil without a plugin.json.
	previous     *process.PluginManifest
	previousJSON []byte
}

// newPluginAdopt returns the command plugin adopt.
func newPluginAdopt() *cobra.Command {
	var a adoption
	c := &cobra.Command{
		Use:   "adopt NAME -- COMMAND [ARG]...",
		Short: "Make a plugin of any MCP server",
		Long: `Make a plugin of an MCP server that was not written for the relay: start it in the sandbox that it
will have, read what it offers, and write a plugin.json for review. Its tools get the names
NAME.TOOL, and its resources the URIs mcp://NAME/URI.

Of 'npx -y PACKAGE' the package is installed in the plugin's folder first, without running its
scripts: what was reviewed is what runs, and nothing is downloaded when the plugin starts.

Each tool is written with a digest of what the server said about it. If the server describes it
differently later, it is withdrawn until the server is adopted again (--again).

Tools that the server calls read-only need the scope NAME:read, all others NAME:write. The server can
read the files that its command names; give it more with --read and --write. Run this on the relay's
machine, as the user of the relay or as root. With a token of an operator the plugin is loaded too.`,
		Example: `  agentctl plugin adopt everything -- npx -y @modelcontextprotocol/server-everything
  agentctl plugin adopt docs --write /srv/docs -- npx -y @modelcontextprotocol/server-filesystem /srv/docs
  agentctl plugin adopt memory --env MEMORY_FILE_PATH='$HOME/memory.json' -- npx -y @modelcontextprotocol/server-memory
  agentctl plugin adopt weather --no-network --token-file operator.token -- python3 /srv/weather/server.py
  agentctl plugin adopt weather --again`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() > 1 || cmd.ArgsLenAtDash() < 0 && len(args) > 1 {
				return cli.Errorf(cli.ExitUsage, "give one name, and the command after --: agentctl plugin adopt NAME -- COMMAND ARG...")
			}
			a.name = args[0]
			return a.run(cmd, args[1:])
		},
	}
	f := c.Flags()
	cli.AddStateDirFlag(c, &a.stateDir)
	f.StringVar(&a.pluginDir, "plugin-dir", cli.EnvOr("AGENTCTL_PLUGIN_DIR", ""), "`DIR` with the relay's plugins; default: that of the packaged relay, or plugins in the state directory [AGENTCTL_PLUGIN_DIR]")
	f.StringVar(&a.sandbox, "plugin-sandbox", cli.EnvOr("AGENTCTL_PLUGIN_SANDBOX", relay.SandboxLandlock), "`KIND`: landlock, or off: the server can then read the relay's keys [AGENTCTL_PLUGIN_SANDBOX]")
	f.StringArrayVar(&a.read, "read", nil, "let the server read the file or folder `PATH` (repeatable)")
	f.StringArrayVar(&a.write, "write", nil, "let the server write to the file or folder `PATH` (repeatable)")
	f.StringArrayVar(&a.env, "env", nil, "set the variable `NAME=VALUE` for the server; $HOME is the folder for its data (repeatable; no place for secrets)")
	f.BoolVar(&a.noNetwork, "no-network", false, "give the server no network")
	f.BoolVar(&a.again, "again", false, "replace what was adopted before; without a command, that of plugin.json")
	f.BoolVar(&a.again, "force", false, "the same as --again")
	f.BoolVar(&a.dryRun, "dry-run", false, "print what would be written, and do nothing")
	a.relay.AddFlags(c)
	a.out.AddFlags(c)
	return c
}

// run adopts the server. It changes nothing in the plugin's folder before the server has answered and,
// where it would replace another manifest, before the operator has seen the difference (--again). The
// report goes to stdout, the progress of an installation to stderr. The exit code is 2 for invalid flags or
// an invalid command, 1 for a server that cannot be adopted or a manifest that differs.
func (a *adoption) run(cmd *cobra.Command, command []string) (err error) {
	if err := a.locate(); err != nil {
		return err
	}
	syscall.Umask(0o022) // the relay's user has to read what root installs
	m := process.PluginManifest{Command: command}
	if len(command) == 0 {
		// Without --again a name alone is a mistake: it would start the program of an old plugin.json.
		if a.previous == nil || !a.again {
			return cli.Errorf(cli.ExitUsage, "give the command of the server after --: agentctl plugin adopt %s -- COMMAND ARG...", a.name)
		}
		// The installed package stays: without a stage the server starts in the plugin's folder.
		m = *a.previous
	}
	if err := a.addFlags(&m); err != nil {
		return err
	}
	start := a.folder // where the server starts
	if len(command) > 0 {
		err := a.prepare(cmd, &m)
		// Also after an error: prepare may have made the stage before it failed.
		if a.stage != nil {
			defer a.stage.Remove()
		}
		if err != nil {
			return err
		}
		start = a.stage.Dir()
	}
	// The folder that a link leads to may be one that only root finds, as that of a DynamicUser= is.
	private, err := filepath.EvalSymlinks(a.stateDir)
	if err != nil {
		return err
	}
	o := process.AdoptOptions{Name: a.name, Folder: start, Command: m.Command, Env: m.Env, Sandbox: m.Sandbox,
		Private: []string{private}, NoSandbox: a.sandbox == relay.SandboxOff, Version: cli.Version, User: process.OwnerOf(a.stateDir)}
	found, err := process.Adopt(cmd.Context(), o)
	if err != nil {
		return a.explain(err)
	}
	return a.finish(cmd, found)
}

// locate checks the name and the flags, and finds the plugin's folder and what was adopted before. A
// manifest that cannot be read is an error unless --again replaces it.
//
// The plugin directory is --plugin-dir, or that of the packaged relay if the state directory is that
// relay's, or plugins in the state directory: the one that the relay uses.
func (a *adoption) locate() (err error) {
	if err := process.CheckName(a.name); err != nil {
		return cli.Errorf(cli.ExitUsage, "%w", err)
	}
	if a.sandbox != relay.SandboxLandlock && a.sandbox != relay.SandboxOff {
		return cli.Errorf(cli.ExitUsage, "--plugin-sandbox: not a kind of sandbox: %q (use landlock or off)", a.sandbox)
	}
	if a.stateDir, err = filepath.Abs(a.stateDir); err != nil {
		return err
	}
	// The sandbox hides this directory from the server. With a wrong one the relay's keys would not be hidden.
	if _, err := os.Stat(a.stateDir); err != nil {
		return fmt.Errorf("%w: name the relay's state directory with --state-dir DIR", err)
	}
	if a.pluginDir == "" {
		a.pluginDir = filepath.Join(a.stateDir, "plugins")
		if st, err := os.Stat(packagedPlugins); err == nil && st.IsDir() && a.stateDir == "/var/lib/agentctl-relay" {
			a.pluginDir = packagedPlugins
		}
	}
	if a.pluginDir, err = filepath.Abs(a.pluginDir); err != nil {
		return err
	}
	a.folder = filepath.Join(a.pluginDir, a.name)
	a.previousJSON, err = os.ReadFile(filepath.Join(a.folder, "plugin.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	if a.previous, err = process.ParseManifest(a.previousJSON); err != nil && a.again {
		a.previous, err = nil, nil // it is replaced
	}
	return err
}

// addFlags adds to the manifest what the flags give to the server. Paths become absolute: the relay
// starts the server in another directory.
func (a *adoption) addFlags(m *process.PluginManifest) error {
	for _, e := range a.env {
		name, value, ok := strings.Cut(e, "=")
		if !ok {
			return cli.Errorf(cli.ExitUsage, "--env %s: use NAME=VALUE", name)
		}
		if m.Env == nil {
			m.Env = make(map[string]string)
		}
		// The map may belong to a.previous. That is no harm: finish compares the bytes of the file.
		m.Env[name] = value
	}
	for _, l := range []struct {
		from []string
		to   *[]string
	}{{a.read, &m.Sandbox.Read}, {a.write, &m.Sandbox.Write}} {
		for _, path := range l.from {
			path, err := filepath.Abs(path)
			if err != nil {
				return err
			}
			addPath(l.to, path)
		}
	}
	if a.noNetwork {
		m.Sandbox.Network = new(bool)
	}
	return nil
}

// addPath adds a path to the list once.
func addPath(list *[]string, path string) {
	if !slices.Contains(*list, path) {
		*list = append(*list, path)
	}
}

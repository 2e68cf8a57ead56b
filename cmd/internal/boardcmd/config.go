//go:build linux

package boardcmd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/configctl"
	"agentctl/control"
)

// The commands ask the daemon if one answers: only it knows its flags, its environment and what waits for a
// restart. Without one, or if a flag names files, they read the files of this user, or of the service if
// the user has none (config.ClientSource). Package configctl has both ways.
//
//	              a daemon answers                        no daemon, or files are named
//	show, get     what it has in force                    what a daemon of this user would have
//	set, unset    saved; configctl.Effect has the cases   saved; in force with the next start, or reloaded
//	              of when it is in force                  by a daemon that uses the same files
//	validate      the files: no daemon is asked           the files
//	schema        neither
//
// set and unset write STATE_DIR/settings.yaml only. config.yaml and conf.d belong to the person who wrote
// them, and settings.yaml takes precedence over both.

// configFlags say which configuration a command is about.
//
// With path or stateDir no daemon is asked, also if path comes from AGENTCTL_CONFIG. AGENTCTL_STATE_DIR alone
// does not have that effect: it is not the default of the flag, but one of the sources that a daemon reads
// too. socket is "" for that of config.ClientSocket.
type configFlags struct {
	path, stateDir, socket string
}

// addFlags adds the flags to c.
func (f *configFlags) addFlags(c *cobra.Command) {
	c.Flags().StringVar(&f.path, "config", cli.EnvOr("AGENTCTL_CONFIG", ""), "configuration `FILE`; read it without asking a daemon [AGENTCTL_CONFIG]")
	c.Flags().StringVar(&f.stateDir, "state-dir", "", "`DIR` of the daemon's state; read it without asking a daemon [AGENTCTL_STATE_DIR]")
	c.Flags().StringVar(&f.socket, "socket", "", "`PATH` of the control socket [AGENTCTL_SOCKET]")
}

// source returns where settings come from without a daemon: the files and the environment of this user,
// and the flags, which take precedence. Their keys parse them, as they do for 'agentctl run': a relative path
// becomes absolute.
func (f *configFlags) source() (config.Source, error) {
	s := config.ClientSource(f.path)
	for name, text := range map[string]string{"state_dir": f.stateDir, "socket": f.socket} {
		if text == "" {
			continue
		}
		v, err := config.FindKey(name).Parse(text)
		if err != nil {
			return s, cli.Errorf(cli.ExitUsage, "%w", err)
		}
		s.Flags[name] = config.Setting{Value: v, Origin: "--" + flagName(name)}
	}
	return s, nil
}

// session connects to the daemon if one runs and no files were named; else the session reads files. The
// caller closes it with closeSession.
//
// A daemon knows more than the files do: flags, its environment, and settings that wait for a
// restart. No daemon is no error, because settings are also made before the first start.
//
// A socket that this user may not open (exit code 4) and a daemon that does not answer are errors, and not a
// reason to read the files: what they have may not be in force.
func (f *configFlags) session(ctx context.Context) (*configctl.Session, error) {
	source, err := f.source()
	s := &configctl.Session{Source: source}
	if err != nil || f.path != "" || f.stateDir != "" {
		return s, err
	}
	socket := f.socket
	if socket == "" {
		socket = cli.EnvOr("AGENTCTL_SOCKET", config.ClientSocket())
	}
	s.Daemon, err = control.Dial(ctx, socket)
	if errors.Is(err, control.ErrNotRunning) {
		err = nil
	}
	return s, err
}

// closeSession closes the connection of a session, if it has one.
func closeSession(s *configctl.Session) {
	if s.Daemon != nil {
		_ = s.Daemon.Close()
	}
}

// view returns the configuration, and who was asked for it, as the end of a sentence that begins with
// "From".
func (f *configFlags) view(ctx context.Context) (v config.View, from string, err error) {
	s, err := f.session(ctx)
	if err != nil {
		return v, "", err
	}
	defer closeSession(s)
	from = "the daemon"
	if s.Daemon == nil {
		from = "the files; no daemon was asked"
	}
	v, err = s.View(ctx)
	return v, from, err
}

// newConfig returns the command config with its subcommands. All but validate and schema ask the daemon
// if one runs, unless --config or --state-dir name files.
func newConfig() *cobra.Command {
	c := &cobra.Command{
		Use:   "config",
		Short: "Show, check and change the settings of the daemon",
		Long: `Show, check and change the daemon's settings: those of the running daemon or, if none runs,
those of the files. docs/config.md lists all keys.`,
		Example: "  agentctl config show --origin\n  agentctl config set base_interval_ms 5000\n  agentctl config validate",
	}
	c.AddCommand(newConfigShow(), newConfigGet(), newConfigSet(), newConfigUnset(), newConfigValidate(), newConfigSchema())
	return c
}

// withKey makes the RunE of a command whose first argument is KEY: run gets the key and the arguments
// after it. An unknown key is a usage error, which names the nearest one.
func withKey(run func(cmd *cobra.Command, k *config.Key, rest []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		k, err := config.NeedKey(args[0])
		if err != nil {
			return cli.Errorf(cli.ExitUsage, "%w", err)
		}
		return run(cmd, k, args[1:])
	}
}

// completeKeys completes KEY.
func completeKeys(_ *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return cli.WithPrefix(config.KeyNames(), toComplete), cobra.ShellCompDirectiveNoFileComp
}

// completeSetting completes a key, and the value of one that has a closed set of words or is a bool.
func completeSetting(c *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return completeKeys(c, args, toComplete)
	}
	k := config.FindKey(args[0])
	if k == nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	// WithPrefix changes its slice, and this one belongs to the catalogue of keys.
	words := slices.Clone(k.Words)
	if k.Kind == config.KindBool {
		words = []string{"true", "false"}
	}
	return cli.WithPrefix(words, toComplete), cobra.ShellCompDirectiveNoFileComp
}

// newConfigValidate makes the command that checks files. It asks no daemon: files are checked before a
// daemon reads them, in a build of an image for example.
//
// With FILE, checks that depend on several files are left out, such as that of the number of alert rules,
// for which the built-in ones count. A relay without a token is valid here, because the file is often written
// before the token exists; 'agentctl run' refuses it (config.Source.ForDaemon). The exit code for an invalid
// file is 1 and not 2 (usage), since the command line is right.
func newConfigValidate() *cobra.Command {
	var f configFlags
	c := &cobra.Command{
		Use:     "validate [FILE]",
		Short:   "Check a configuration file, or all files that the daemon would read",
		Example: "  agentctl config validate\n  agentctl config validate new.yaml",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				given, errs := config.ReadFile(args[0])
				if len(errs) > 0 {
					return cli.Errorf(cli.ExitFailure, "%w", errs)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s is valid: %d settings\n", args[0], len(given))
				return nil
			}
			s, err := f.source()
			if err != nil {
				return err
			}
			loaded, err := s.Load()
			if err != nil {
				return cli.Errorf(cli.ExitFailure, "%w", err)
			}
			// Notes name what could not be checked, such as saved settings that only root may read.
			for _, note := range loaded.Notes {
				fmt.Fprintln(cmd.ErrOrStderr(), "agentctl: "+note)
			}
			files := "there is no file: all settings are defaults or from the environment; write " + s.Path
			if len(loaded.Files) > 0 {
				files = strings.Join(loaded.Files, "\n")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s\ngood\n", files)
			return nil
		},
	}
	f.addFlags(c)
	return c
}

// newConfigSchema returns the command config schema, for editors that check YAML.
func newConfigSchema() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of a configuration file",
		Example: "  agentctl config schema > config.schema.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			b, err := config.SchemaJSON()
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(b)
			return err
		},
	}
}

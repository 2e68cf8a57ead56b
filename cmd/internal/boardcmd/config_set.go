//go:build linux

package boardcmd

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/configctl"
	"agentctl/control"
	"agentctl/term"
)

// What a change prints, on stdout:
//
//	base_interval_ms: 1000 -> 5000
//	saved in /var/lib/agentctl/settings.yaml; undo with: agentctl config unset base_interval_ms
//	in force now
//
// A value that the daemon refuses is taken out of the file again (configctl.ErrRefused), so that its next
// start does not find it there.

// changeFlags are the flags of config set and config unset. The printed undo repeats those of configFlags.
type changeFlags struct {
	configFlags
	dryRun bool
}

// addFlags adds the flags to c, a command whose first argument is KEY.
func (f *changeFlags) addFlags(c *cobra.Command) {
	f.configFlags.addFlags(c)
	cli.AddDryRunFlag(c, &f.dryRun)
}

// newConfigSet returns the command config set. The value is checked here, before a daemon is asked, so
// that a wrong one is a usage error whether a daemon runs or not.
func newConfigSet() *cobra.Command {
	var f changeFlags
	c := &cobra.Command{
		Use:   "set KEY VALUE",
		Short: "Change a setting; a running daemon applies it",
		Long: `Change a setting. It is saved in STATE_DIR/settings.yaml, which takes precedence over
config.yaml. A running daemon applies it automatically.`,
		Example: `  agentctl config set base_interval_ms 5000
  agentctl config set module_intervals.disk 60000 --dry-run
  agentctl config set modules network,temperature
  agentctl config set history.flush 10m`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: completeSetting,
		RunE: withKey(func(cmd *cobra.Command, k *config.Key, value []string) error {
			v, err := k.Parse(value[0])
			if err != nil {
				return cli.Errorf(cli.ExitUsage, "%s: %w", k.Name, err)
			}
			return f.change(cmd, k, v)
		}),
	}
	f.addFlags(c)
	return c
}

// newConfigUnset returns the command config unset, which is the undo of a first config set. A key that was
// not saved is no error, so that a script may repeat it; the output then says where its value comes from.
func newConfigUnset() *cobra.Command {
	var f changeFlags
	c := &cobra.Command{
		Use:               "unset KEY",
		Short:             "Remove a setting that `config set` saved",
		Example:           "  agentctl config unset base_interval_ms",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeKeys,
		RunE: withKey(func(cmd *cobra.Command, k *config.Key, _ []string) error {
			return f.change(cmd, k, nil)
		}),
	}
	f.addFlags(c)
	return c
}

// change changes a setting, and prints what it was and how to undo it. A nil value removes the saved
// setting.
//
// With --dry-run it checks the key and the value, and reads the present settings. It does not find out
// whether the daemon would accept the value: for that the daemon has to read it from the file.
func (f *changeFlags) change(cmd *cobra.Command, key *config.Key, value any) error {
	s, err := f.session(cmd.Context())
	if err != nil {
		return err
	}
	defer closeSession(s)
	c, err := s.Change(cmd.Context(), key, value, f.dryRun)
	if err != nil {
		return changeError(err)
	}
	w := cmd.OutOrStdout()
	// Old is the saved value if there was one, else the value in force. After an unset the text is "not set":
	// Change does not look up which source sets the key then.
	before, after := key.Text(c.Old), "not set"
	if value != nil {
		after = key.Text(c.New)
	}
	switch {
	case value == nil && !c.WasSaved:
		fmt.Fprintf(w, "%s was not set in %s; it is %s (%s)\n", key.Name, c.Path, before, c.Origin)
	case f.dryRun:
		fmt.Fprintf(w, "would change %s from %s to %s in %s\n", key.Name, before, after, c.Path)
	case key.Kind == config.KindRules: // no command takes rules
		fmt.Fprintf(w, "%s: %s -> %s\nsaved in %s; undo by writing into a configuration file:\n\n", key.Name, before, after, c.Path)
		err = term.WriteYAML(term.JSONWriter(w), config.Nest(map[string]any{key.Name: c.Old}))
		fmt.Fprintf(w, "\n%s\n", c.EffectText())
	default:
		fmt.Fprintf(w, "%s: %s -> %s\nsaved in %s; undo with: %s%s\n%s\n", key.Name, before, after, c.Path, undoChange(c), cli.GivenFlags(cmd, "config", "state-dir", "socket"), c.EffectText())
	}
	return err
}

// undoChange is the command that undoes a change: it removes a setting that had not been saved before, and
// saves the old value again of one that had.
func undoChange(c *configctl.Change) string {
	if !c.WasSaved {
		return "agentctl config unset " + c.Key.Name
	}
	before := c.Key.Text(c.Old)
	if before == "none" || before == "-" { // an empty list or text was saved
		before = ""
	}
	return "agentctl config set " + c.Key.Name + " " + cli.ShellQuote(before)
}

// changeError gives an error of configctl.Session.Change its exit code and next step. Errors of the control
// socket have theirs already. Others, such as configctl.ErrRefused, stay as they are: exit code 1.
func changeError(err error) error {
	switch {
	case errors.Is(err, configctl.ErrInFileOnly):
		return cli.Errorf(cli.ExitUsage, "%w: edit %s", err, config.DefaultPath())
	// The value is in force, and lost after a restart: a failure, since it should have been saved.
	case errors.Is(err, configctl.ErrNotSaved):
		return cli.Errorf(cli.ExitFailure, "%w (journalctl -u agentctl)", err)
	case errors.Is(err, fs.ErrPermission) && !errors.Is(err, control.ErrPermission):
		return cli.Errorf(cli.ExitUnauthorized, "%w; use sudo", err)
	}
	return err
}

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
)

func newConfigSet() *cobra.Command {
	var f configFlags
	var dry bool
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
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := needKey(args[0])
			if err != nil {
				return err
			}
			v, err := k.Parse(args[1])
			if err != nil {
				return cli.Errorf(cli.ExitUsage, "%s: %w", k.Name, err)
			}
			return f.change(cmd, k, v, dry)
		},
	}
	f.add(c)
	c.Flags().BoolVar(&dry, "dry-run", false, "show what would change, and change nothing")
	return c
}

func newConfigUnset() *cobra.Command {
	var f configFlags
	var dry bool
	c := &cobra.Command{
		Use:               "unset KEY",
		Short:             "Remove a setting that `config set` saved",
		Example:           "  agentctl config unset base_interval_ms",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeKeys,
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := needKey(args[0])
			if err != nil {
				return err
			}
			return f.change(cmd, k, nil, dry)
		},
	}
	f.add(c)
	c.Flags().BoolVar(&dry, "dry-run", false, "show what would change, and change nothing")
	return c
}

// change changes a setting, and prints what it was and how to undo it. A nil value removes
// the saved setting.
func (f *configFlags) change(cmd *cobra.Command, key *config.Key, value any, dryRun bool) error {
	s, err := f.session(cmd.Context())
	if err != nil {
		return err
	}
	defer closeSession(s)
	c, err := s.Change(cmd.Context(), key, value, dryRun)
	if err != nil {
		return changeError(err)
	}
	w := cmd.OutOrStdout()
	before, after := key.Text(c.Old), "not set"
	if value != nil {
		after = key.Text(c.New)
	}
	switch {
	case value == nil && !c.WasSaved:
		fmt.Fprintf(w, "%s was not set in %s; it is %s (%s)\n", key.Name, c.Path, before, c.Origin)
	case dryRun:
		fmt.Fprintf(w, "would change %s from %s to %s in %s\n", key.Name, before, after, c.Path)
	default:
		fmt.Fprintf(w, "%s: %s -> %s\nsaved in %s; undo with: %s\n%s\n", key.Name, before, after, c.Path, c.Undo()+cli.GivenFlags(cmd, "config", "state-dir", "socket"), c.EffectText())
	}
	return nil
}

// changeError gives an error of configctl.Session.Change its exit code and next step. An
// error of the control socket names sudo already.
func changeError(err error) error {
	switch {
	case errors.Is(err, configctl.ErrInFileOnly):
		return cli.Errorf(cli.ExitUsage, "%w: edit %s", err, config.DefaultPath())
	case errors.Is(err, configctl.ErrNotSaved):
		return cli.Errorf(cli.ExitFailure, "%w (journalctl -u agentctl)", err)
	case errors.Is(err, fs.ErrPermission) && !errors.Is(err, control.ErrPermission):
		return cli.Errorf(cli.ExitUnauthorized, "%w; use sudo", err)
	}
	return err
}

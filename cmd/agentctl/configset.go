package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/control"
)

// settingChange is a change of one kept setting.
type settingChange struct {
	key   *config.Key
	value any // nil takes it out
}

func newConfigSet() *cobra.Command {
	var f configFlags
	var dry bool
	c := &cobra.Command{
		Use:   "set KEY VALUE",
		Short: "Change a setting, for good; a daemon that runs takes it over",
		Long: `Change a setting, for good. It is kept in STATE_DIR/settings.yaml, which counts more than
config.yaml, and a daemon that runs takes it over by itself.`,
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
				return exit(exitUsage, "%s: %w", k.Name, err)
			}
			return f.change(cmd, settingChange{k, v}, dry)
		},
	}
	f.add(c)
	c.Flags().BoolVar(&dry, "dry-run", false, "say what would change, and change nothing")
	return c
}

func newConfigUnset() *cobra.Command {
	var f configFlags
	var dry bool
	c := &cobra.Command{
		Use:               "unset KEY",
		Short:             "Take back what `config set` set",
		Example:           "  agentctl config unset base_interval_ms",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeKeys,
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := needKey(args[0])
			if err != nil {
				return err
			}
			return f.change(cmd, settingChange{k, nil}, dry)
		},
	}
	f.add(c)
	c.Flags().BoolVar(&dry, "dry-run", false, "say what would change, and change nothing")
	return c
}

// onSocket tells whether set_config knows the key.
func (ch *settingChange) onSocket() bool {
	return ch.value != nil && (ch.key.Name == "base_interval_ms" || strings.HasPrefix(ch.key.Name, "module_intervals."))
}

// change makes a change where it belongs, and says what it was and how to undo it.
func (f *configFlags) change(cmd *cobra.Command, ch settingChange, dry bool) error {
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	cl, err := f.dial(ctx)
	if err != nil {
		return err
	}
	running := cl != nil
	if running {
		defer func() { _ = cl.Close() }()
	}
	before, path, err := f.before(ctx, cl)
	if err != nil {
		return err
	}
	if ch.key.Name == "state_dir" || ch.key.Name == "socket" {
		return exit(exitUsage, "%s decides where kept settings are, so it is written into a file: edit %s", ch.key.Name, config.DefaultPath())
	}
	kept, errs := config.ReadFile(path)
	if len(errs) > 0 && !config.IsMissing(errs) && !(running && ch.onSocket()) {
		return keepError(errs[0])
	}
	was, wasKept := kept[ch.key.Name]
	old := valueLine(before.Values[ch.key.Name], ch.key.Name)
	if wasKept {
		old = valueLine(config.Plain(was.Value), ch.key.Name)
	}
	if ch.value == nil && !wasKept {
		fmt.Fprintf(w, "%s was not set in %s; it is %s (%s)\n", ch.key.Name, path, old, before.Origins[ch.key.Name])
		return nil
	}
	if dry {
		fmt.Fprintf(w, "would change %s from %s to %s in %s\n", ch.key.Name, old, ch.text(), path)
		return nil
	}
	if running && ch.onSocket() {
		err = ch.send(ctx, cl)
	} else if err = config.SaveSettings(path, config.Settings{ch.key.Name: config.Setting{Value: ch.value}}); err != nil {
		err = keepError(err)
	}
	if err != nil {
		return err
	}
	force, err := ch.inForce(ctx, cl, before)
	if err != nil {
		_ = config.SaveSettings(path, config.Settings{ch.key.Name: was})
		return err
	}
	fmt.Fprintf(w, "%s: %s -> %s\n", ch.key.Name, old, ch.text())
	fmt.Fprintf(w, "kept in %s; undo with: %s\n%s\n", path, ch.undo(old, wasKept), force)
	return nil
}

// keepError says what to do where settings cannot be kept.
func keepError(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return exit(exitUnauthorized, "%w; use sudo", err)
	}
	return exit(exitFailure, "%w", err)
}

func (ch *settingChange) text() string {
	if ch.value == nil {
		return "not set"
	}
	return valueLine(config.Plain(ch.value), ch.key.Name)
}

func (ch *settingChange) undo(old string, wasKept bool) string {
	if ch.value != nil && !wasKept {
		return "agentctl config unset " + ch.key.Name
	}
	if old == "none" || old == "-" {
		old = `""`
	}
	return "agentctl config set " + ch.key.Name + " " + old
}

// before is the configuration as it is, and the file of kept settings.
func (f *configFlags) before(ctx context.Context, cl *control.Client) (v config.View, path string, err error) {
	s, err := f.source()
	if err != nil {
		return v, "", err
	}
	if cl == nil {
		c, err := s.Load()
		if err != nil {
			return v, "", exit(exitFailure, "%w", err)
		}
		return c.View(), c.SettingsPath(), nil
	}
	if err := cl.Call(ctx, control.MethodGetConfig, nil, &v); err != nil {
		return v, "", err
	}
	dir, _ := v.Values["state_dir"].(string)
	return v, dir + "/" + config.SettingsFile, nil
}

// send changes a cadence through the socket, to be kept.
func (ch *settingChange) send(ctx context.Context, cl *control.Client) error {
	cfg := control.Config{Persist: true}
	if module, ok := strings.CutPrefix(ch.key.Name, "module_intervals."); ok {
		cfg.ModuleIntervals = map[string]int64{module: ch.value.(int64)}
	} else {
		cfg.BaseIntervalMS = ch.value.(int64)
	}
	r, err := cl.SetConfig(ctx, cfg)
	if err != nil {
		return err
	}
	if r.Persisted == nil || !*r.Persisted {
		return exit(exitFailure, "%s is in force, but could not be kept over a restart; the daemon's log says why (journalctl -u agentctl)", ch.key.Name)
	}
	return nil
}

// inForce says when the change comes into force. A daemon that runs takes it over: its
// refusal is the error.
func (ch *settingChange) inForce(ctx context.Context, cl *control.Client, before config.View) (string, error) {
	origin := before.Origins[ch.key.Name]
	given := strings.HasPrefix(origin, "AGENTCTL_") || strings.HasPrefix(origin, "--")
	switch {
	case given && cl != nil && ch.onSocket():
		return "in force now, but " + origin + " of the daemon counts more from its next start on", nil
	case given:
		return "but " + origin + " of the daemon counts more, and stays in force", nil
	case cl == nil && ch.key.Applied == config.ApplyRestart:
		return "in force with the next start of the daemon", nil
	case cl == nil:
		return "in force with the next start of the daemon; one that runs with these files takes it over by itself", nil
	case ch.onSocket():
		return "in force now", nil
	case ch.key.Applied == config.ApplyRestart:
		return "in force after: systemctl restart agentctl", nil
	}
	// To keep nothing more: the daemon reads its files anew at once.
	if _, err := cl.SetConfig(ctx, control.Config{Persist: true}); err != nil {
		return "", err
	}
	var v config.View
	if err := cl.Call(ctx, control.MethodGetConfig, nil, &v); err != nil {
		return "", err
	}
	if v.Error != "" {
		return "", exit(exitFailure, "the daemon refuses it, and nothing was changed: %s", v.Error)
	}
	return "in force now", nil
}

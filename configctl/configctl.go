// Package configctl reads and changes the configuration of a daemon from another process:
// through the control socket where a daemon runs, and through its files where none does.
//
//	s := configctl.Session{Source: config.ClientSource(""), Daemon: client}
//	change, err := s.Change(ctx, config.FindKey("base_interval_ms"), int64(5000), false)
//
// A change is saved in the settings of the state directory (config.SaveSettings). Sampling
// intervals go through set_config, which needs no access to that directory.
//
// Where a daemon runs, it is the authority: View is what it has in force, with what clients
// and systemd set instead of the files. A change that it refuses is taken out of the file again, so that
// its next start does not fail.
package configctl

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"agentctl/config"
	"agentctl/control"
)

// Errors of Change.
var (
	// ErrInFileOnly reports a key that determines where settings are saved.
	ErrInFileOnly = errors.New("determines where settings are saved, so only a configuration file can set it")
	// ErrNotSaved reports a change that is in force in the daemon until it restarts.
	ErrNotSaved = errors.New("in force, but could not be saved for the next start; the daemon's log says why")
	// ErrRefused reports a change that the daemon refused, and that was undone.
	ErrRefused = errors.New("the daemon refused the change, so nothing was changed")
)

// Session reads and changes one configuration.
type Session struct {
	Source config.Source   // the files and the environment of this user
	Daemon *control.Client // nil: no daemon is running, or the caller named a file
}

// View returns the daemon's configuration, or that of the files.
func (s *Session) View(ctx context.Context) (v config.View, err error) {
	v, _, err = s.view(ctx)
	return v, err
}

// view returns View and the path of the saved settings.
func (s *Session) view(ctx context.Context) (v config.View, path string, err error) {
	if s.Daemon == nil {
		c, err := s.Source.Load()
		if err != nil {
			return v, "", err
		}
		return c.View(), c.SettingsPath(), nil
	}
	if err := s.Daemon.Call(ctx, control.MethodGetConfig, nil, &v); err != nil {
		return v, "", err
	}
	v.Error = config.WithQuotes(v.Error)
	stateDir, _ := v.Values["state_dir"].(string)
	return v, filepath.Join(stateDir, config.SettingsFile), nil
}

// Effect is when a change takes effect.
type Effect uint8

// Effects of a change. The overridden ones name their Change.Origin.
const (
	NoChange          Effect = iota // the key was not set
	Now                             // at once, in the running daemon
	NowThenOverridden               // at once; after the next start Origin takes precedence
	Overridden                      // not while Origin sets the key
	AfterRestart                    // after a restart of the running daemon
	NextStart                       // at the next start: no daemon is running
	NextReload                      // at the next reload, which a daemon with these files does by itself
)

// Change is what Session.Change did, or would do.
type Change struct {
	Key      *config.Key
	Old, New any    // in the form of config.View; New is nil when the setting was removed
	WasSaved bool   // Old is a saved setting, not the setting of another source
	Origin   string // of Old in the configuration in force
	Path     string // of the saved settings
	Effect   Effect
}

// EffectText says when the change takes effect.
func (c *Change) EffectText() string {
	switch c.Effect {
	case NowThenOverridden:
		return "in force now, but " + c.Origin + " of the daemon takes precedence from its next start on"
	case Overridden:
		return "but " + c.Origin + " of the daemon takes precedence, and stays in force"
	case NextStart:
		return "in force with the next start of the daemon"
	case NextReload:
		return "in force with the next start of the daemon; one that runs with these files reloads them by itself"
	case AfterRestart:
		return "in force after: systemctl restart agentctl"
	}
	return "in force now"
}

// Change saves a setting, or with a nil value removes it. With dryRun it changes nothing,
// and Effect is not set.
func (s *Session) Change(ctx context.Context, key *config.Key, value any, dryRun bool) (*Change, error) {
	if key.Name == "state_dir" || key.Name == "socket" {
		return nil, fmt.Errorf("%s %w", key.Name, ErrInFileOnly)
	}
	view, path, err := s.view(ctx)
	if err != nil {
		return nil, err
	}
	if s.Daemon != nil {
		if err := s.Daemon.CheckDisk(ctx); err != nil {
			return nil, err
		}
	}
	viaSocket := s.Daemon != nil && value != nil && isInterval(key)
	saved, errs := config.ReadFile(path)
	if len(errs) > 0 && !config.IsMissing(errs) && !viaSocket {
		return nil, errs[0]
	}
	before, wasSaved := saved[key.Name]
	c := &Change{Key: key, Old: view.Values[key.Name], New: config.Plain(value), WasSaved: wasSaved, Origin: view.Origins[key.Name], Path: path}
	if wasSaved {
		c.Old = config.Plain(before.Value)
	}
	if dryRun || value == nil && !wasSaved {
		return c, nil
	}
	if viaSocket {
		err = s.setInterval(ctx, key, value.(int64))
	} else {
		err = config.SaveSettings(path, config.Settings{key.Name: {Value: value}})
	}
	if err != nil {
		return nil, err
	}
	// A daemon notices a changed file within seconds. Waiting for its reload here shows the
	// person now whether it accepts the value.
	c.Effect = s.effect(c, value != nil)
	if c.Effect == Now && !viaSocket {
		if err := s.reload(ctx); err != nil {
			return nil, errors.Join(err, config.SaveSettings(path, config.Settings{key.Name: before}))
		}
	}
	return c, nil
}

// isInterval reports whether set_config on the control socket can set the key.
func isInterval(key *config.Key) bool {
	return key.Name == "base_interval_ms" || strings.HasPrefix(key.Name, "module_intervals.")
}

// effect says when a saved change takes effect. The environment and the flags of the daemon
// take precedence over the saved settings, so that their origin decides first. An interval
// set through the socket is in force at once even then, until the daemon starts again.
func (s *Session) effect(c *Change, isSet bool) Effect {
	overridden := strings.HasPrefix(c.Origin, "AGENTCTL_") || strings.HasPrefix(c.Origin, "--")
	running, restart := s.Daemon != nil, c.Key.Applied == config.ApplyRestart
	switch {
	case overridden && running && isSet && isInterval(c.Key):
		return NowThenOverridden
	case overridden:
		return Overridden
	case !running && restart:
		return NextStart
	case !running:
		return NextReload
	case restart:
		return AfterRestart
	}
	return Now
}

// setInterval sets an interval in the daemon, which saves it.
func (s *Session) setInterval(ctx context.Context, key *config.Key, ms int64) error {
	c := control.Config{Persist: true, BaseIntervalMS: ms}
	if module, ok := strings.CutPrefix(key.Name, "module_intervals."); ok {
		c = control.Config{Persist: true, ModuleIntervals: map[string]int64{module: ms}}
	}
	r, err := s.Daemon.SetConfig(ctx, c)
	if err == nil && (r.Persisted == nil || !*r.Persisted) {
		err = fmt.Errorf("%s is %w", key.Name, ErrNotSaved)
	}
	return err
}

// reload makes the daemon read its files now, with a set_config that saves nothing.
func (s *Session) reload(ctx context.Context) error {
	if _, err := s.Daemon.SetConfig(ctx, control.Config{Persist: true}); err != nil {
		return err
	}
	v, err := s.View(ctx)
	if err == nil && v.Error != "" {
		err = fmt.Errorf("%w: %s", ErrRefused, v.Error)
	}
	return err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"agentctl/config"
	"agentctl/control"
)

const (
	lookEvery   = 3 * time.Second // at the configuration files
	updateEvery = 20              // looks, to one at the binary: once a minute
)

// keepUp reads the configuration anew when a file of it changed, or on SIGHUP, and looks
// for a newer binary, until ctx ends.
func (b *box) keepUp(ctx context.Context, hup <-chan os.Signal) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	update := newUpdateWatch(os.Executable)
	seen := b.source.Fingerprint(b.config())
	kept := b.id.RetrySave()
	for n := 0; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-hup:
			sdReloading()
			seen = b.source.Fingerprint(b.config())
			state := "STATUS=" + b.ready()
			if b.reload() != nil { // logged
				state = "STATUS=the new configuration is wrong, the one before is in force; see: agentctl config validate"
			}
			sdNotify("READY=1", state)
		case <-ticker.C:
			if now := b.source.Fingerprint(b.config()); now != seen {
				seen = now
				_ = b.reload()
			}
			if n++; n%updateEvery == 1 {
				if !kept {
					kept = b.id.RetrySave()
				}
				if v := update.look(); v != "" {
					b.log.Info("a newer version is staged; it comes into force with the next start", zap.String("version", v), zap.String("file", update.path))
					b.srv.PublishUpdateReady("agentctl", v)
				}
			}
		}
	}
}

// sdReloading tells systemd that a reload begins; READY=1 ends it (sd_notify(3)).
func sdReloading() {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) == nil {
		sdNotify("RELOADING=1", "MONOTONIC_USEC="+strconv.FormatInt(ts.Nano()/1000, 10))
	}
}

// reload reads the configuration anew and puts it into force. When anything of it is
// wrong all stays as it is.
func (b *box) reload() error {
	b.reloading.Lock()
	defer b.reloading.Unlock()
	return b.reloadLocked()
}

func (b *box) reloadLocked() error {
	old := b.config()
	now, err := b.source.Load()
	if err == nil {
		err = b.apply(old, now)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wrong = ""
	if err != nil {
		b.wrong = err.Error()
		b.log.Error("the new configuration is wrong; the one before stays in force", zap.Strings("errors", strings.Split(b.wrong, "\n")),
			zap.String("hint", "mend it, and try it with: agentctl config validate"))
		return err
	}
	return nil
}

// Applied puts a configuration into force in place of another.
func (b *box) apply(old, now *config.Config) error {
	changed := map[string]string{} // key to when it comes into force
	for _, k := range now.Changed(old) {
		changed[k.Name] = k.Applied
	}
	has := func(prefix string) bool {
		return slices.ContainsFunc(slices.Collect(maps.Keys(changed)), func(k string) bool { return strings.HasPrefix(k, prefix) })
	}
	var wait []string
	if has("history.") && now.HistoryEnabled() && b.store == nil {
		wait = append(wait, "history.enabled")
	}
	for name, when := range changed {
		if when == config.ApplyRestart {
			wait = append(wait, name)
		}
	}

	// What may fail comes first, so that all or nothing changes.
	o, err := b.deviceOptions(now)
	if err != nil {
		return err
	}
	cleared, err := b.alerts.Replace(now.AlertRules())
	if err != nil {
		return err
	}
	b.tell(cleared)
	if err := b.configureHistory(now); err != nil {
		return err
	}
	if err := b.setModules(now); err != nil {
		return err
	}
	if err := b.configureSocket(has, now); err != nil {
		return err
	}
	if err := b.level.UnmarshalText([]byte(now.Text("log_level"))); err != nil {
		return err
	}
	if slices.Contains(slices.Collect(maps.Values(changed)), config.ApplyLink) {
		b.dev.relink(o)
	}
	b.inForce(now, changed, wait)
	return nil
}

// configureSocket changes cadences; what a client set meanwhile stays unless the
// configuration changed.
func (b *box) configureSocket(has func(prefix string) bool, now *config.Config) error {
	var c control.Config
	if has("base_interval_ms") {
		c.BaseIntervalMS = now.Int("base_interval_ms")
	}
	if has("module_intervals.") {
		c.ModuleIntervals = now.ModuleIntervals()
	}
	if c.BaseIntervalMS == 0 && c.ModuleIntervals == nil {
		return nil
	}
	return b.srv.Configure(c)
}

func (b *box) configureHistory(now *config.Config) error {
	b.recording.Store(now.HistoryEnabled())
	if b.store == nil || !now.HistoryEnabled() {
		return nil
	}
	return errors.Join(b.store.SetFlush(now.Duration("history.flush")),
		b.store.SetRetention(now.Duration("history.max_age"), now.Int("history.max_bytes")))
}

// inForce notes and logs what a configuration changed.
func (b *box) inForce(now *config.Config, changed map[string]string, wait []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cfg = now
	for _, name := range wait {
		if !slices.Contains(b.waiting, name) {
			b.waiting = append(b.waiting, name)
		}
	}
	slices.Sort(b.waiting)
	if len(changed) == 0 {
		return
	}
	b.log.Info("configuration read anew", zap.Strings("changed", slices.Sorted(maps.Keys(changed))))
	if len(wait) > 0 {
		b.log.Warn("these settings come into force with the next start", zap.Strings("keys", wait), zap.String("hint", "systemctl restart agentctl"))
	}
}

// persist keeps what a client set, in the settings of the state directory. Where that is
// nothing the files are read anew all the same: so a client has it done at once.
func (b *box) persist(_ context.Context, c control.Config) error {
	change := config.Settings{}
	if c.BaseIntervalMS > 0 {
		change["base_interval_ms"] = config.Setting{Value: c.BaseIntervalMS}
	}
	for name, ms := range c.ModuleIntervals {
		k := config.FindKey("module_intervals." + name)
		if k == nil {
			return fmt.Errorf("no module %s", name)
		}
		change[k.Name] = config.Setting{Value: ms}
	}
	b.reloading.Lock()
	defer b.reloading.Unlock()
	if len(change) > 0 {
		if err := config.SaveSettings(b.config().SettingsPath(), change); err != nil {
			return err
		}
	}
	return b.reloadLocked()
}

// view is the configuration with what clients changed since.
func (b *box) view() config.View {
	b.mu.Lock()
	defer b.mu.Unlock()
	v := b.cfg.View()
	v.Error, v.Restart = b.wrong, b.waiting
	if b.given { // by systemd
		v.Values["socket"], v.Origins["socket"] = b.srv.Addr(), "agentctl.socket"
	}
	if ms := b.dev.prober.Interval().Milliseconds(); ms != b.cfg.Int("base_interval_ms") {
		v.Values["base_interval_ms"], v.Origins["base_interval_ms"] = ms, "a client's set_config, until the next start"
	}
	return v
}

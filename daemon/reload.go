package daemon

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"agentctl/atomicfile"
	"agentctl/config"
	"agentctl/control"
	"agentctl/statedir"
	"agentctl/transport/enroll"
)

const (
	configPollInterval = 3 * time.Second // between two checks of the configuration files
	diskPolls          = 2               // polls per probe of the state directory
	updateCheckPolls   = 20              // polls per update check: one check a minute
)

// Load reads the configuration for New, and waits for the disk ten seconds at most. Saved settings
// on a disk that does not answer are left out; the daemon reads them when it does.
func Load(s config.Source) (*config.Config, error) {
	c, err := statedir.Do(statedir.New(""), s.Load)
	if !errors.Is(err, statedir.ErrHung) {
		return c, err
	}
	s.NoSaved = true
	if c, err = statedir.Do(statedir.New(""), s.Load); err == nil {
		c.Damage = &atomicfile.Damage{Path: c.SettingsPath(), Problem: statedir.ErrHung.Error()}
	}
	return c, err
}

// watchConfig reloads the configuration when one of its files changed, or when the caller
// of New asks for it, and does what else is due now and then (watcher.poll), until ctx ends.
func (d *Daemon) watchConfig(ctx context.Context) error {
	ticker := time.NewTicker(configPollInterval)
	defer ticker.Stop()
	w := d.newWatcher()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.reload:
			w.reload()
		case <-ticker.C:
			w.poll()
		}
	}
}

// watcher is what watchConfig remembers from one poll to the next.
//
// It polls the metadata of files instead of using inotify: polling works on every file system, sees a
// directory that is replaced, and costs a few system calls every three seconds. Everything that a
// daemon checks now and then shares this ticker, so that an idle daemon has one timer for all of it.
type watcher struct {
	*Daemon
	polls         int
	fingerprint   string         // of the configuration's files, as they were last loaded
	identitySaved bool           // nothing is left for retryIdentity
	diskState     statedir.State // as last logged
	update        *updateCheck
	memory        memoryReturner
}

func (d *Daemon) newWatcher() *watcher {
	w := &watcher{Daemon: d, update: newUpdateCheck(os.Executable, d.build)}
	w.fingerprint, _, _ = d.filesOnDisk()
	w.identitySaved = d.retryIdentity()
	w.diskState = d.pollStateDir(statedir.OK)
	return w
}

// reload reloads the configuration for a person who asked for it.
func (w *watcher) reload() {
	NotifyReloading()
	w.fingerprint, _, _ = w.filesOnDisk()
	status := w.systemdStatus()
	if w.reloadConfig() != nil { // reloadConfig logs it
		status = "the new configuration is invalid, the previous one stays in force; see: agentctl config validate"
	}
	NotifySystemd("READY=1", "STATUS="+status)
	w.restartMembership()
	w.device.wakeLink() // an operator who reloads does not want to wait for the back-off
}

// poll looks for changed files, and every now and then for a fault of the disk and a staged binary.
func (w *watcher) poll() {
	w.polls++
	if w.ownsProcess {
		w.memory.poll(w.control.ReleaseBuffer)
	}
	// While there is a fault the disk is polled each time: its end shows two polls later, since a poll
	// does not wait for the probe that it starts.
	if w.polls%diskPolls == 0 || w.diskState != statedir.OK || w.disk.Status().State != statedir.OK {
		w.pollDisk()
	}
	fingerprint, credential, err := w.filesOnDisk()
	if err != nil {
		return // status shows that the disk does not answer
	}
	if fingerprint != w.fingerprint {
		// The fingerprint is from before the reload: the next poll sees a change during it.
		w.fingerprint = fingerprint
		_ = w.reloadConfig() // logged, and shown by status
		w.device.wakeLink()
	}
	if credential != w.membership().file {
		_ = w.updateMembership() // logged, and shown by status
	}
	// Also at the first poll, so that a staged binary is reported soon after the start.
	if w.polls%updateCheckPolls == 1 {
		w.checkUpdate()
	}
}

// pollDisk probes the disk of the state directory. When a fault has ended, files that could not be read
// may be intact.
func (w *watcher) pollDisk() {
	before := w.diskState
	w.diskState = w.pollStateDir(before)
	if before == statedir.OK || w.diskState != statedir.OK {
		return
	}
	w.identitySaved = w.retryIdentity()
	if w.isUnused(config.SettingsFile) {
		_ = w.reloadConfig() // logged, and shown by status
	}
	if w.membership().err != nil {
		_ = w.updateMembership() // likewise
	}
}

// checkUpdate reports a staged binary, and saves an identity that could not be saved before.
func (w *watcher) checkUpdate() {
	if !w.identitySaved {
		w.identitySaved = w.retryIdentity()
	}
	if v := w.update.newVersion(); v != "" {
		w.log.Info("a newer version is staged; the next start uses it", zap.String("version", v), zap.String("file", w.update.path))
		w.control.PublishUpdateReady("agentctl", v)
	}
}

// filesOnDisk returns what identifies the present versions of the configuration and the credential.
func (d *Daemon) filesOnDisk() (configuration, credential string, err error) {
	c := d.config()
	versions, err := statedir.Do(d.disk, func() ([2]string, error) {
		return [2]string{d.source.Fingerprint(c), credentialVersion(c.Text("state_dir"))}, nil
	})
	return versions[0], versions[1], err
}

// retryIdentity saves an identity that could not be saved, and reports whether that is done.
func (d *Daemon) retryIdentity() bool {
	done, _ := statedir.Do(d.disk, func() (bool, error) { return d.id.RetrySave(), nil })
	if done && d.id.Damage() == nil {
		d.forgetUnused(enroll.FileName)
	}
	return done
}

// reloadConfig reads the configuration again and applies it. When any of it is invalid,
// everything stays as it is.
func (d *Daemon) reloadConfig() error {
	d.reloadMu.Lock()
	defer d.reloadMu.Unlock()
	return d.reloadLocked()
}

// reloadLocked is reloadConfig for a caller that holds reloadMu.
//
// The previous configuration stays when the new one is invalid, because a board whose file
// somebody broke must keep its link: it may be the only way to repair the file.
func (d *Daemon) reloadLocked() error {
	old := d.config()
	c, err := statedir.Do(d.disk, d.source.Load)
	if err == nil {
		err = d.apply(old, c)
	}
	if err == nil {
		d.forgetUnused(config.SettingsFile)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.configError = ""
	if err != nil {
		d.configError = config.PublicText(err) // clients of the socket may not read the files
		d.log.Error("the new configuration is invalid; the previous one stays in force", zap.Strings("errors", strings.Split(err.Error(), "\n")),
			zap.String("hint", "fix it, and check it with: agentctl config validate"))
	}
	return err
}

// apply replaces a configuration. Steps that can fail come before the replacement of the
// link, which cannot be undone.
//
// It runs with reloadMu held and takes mu only in its parts: a part may ask for the
// configuration. An error in the middle leaves the parts before it changed; the next valid
// configuration sets them again.
func (d *Daemon) apply(old, c *config.Config) error {
	changed := c.Changed(old)
	var restart []string
	if d.history == nil && c.HistoryEnabled() && anyWithPrefix(changed, "history.") {
		restart = append(restart, "history.enabled")
	}
	replaceLink := false
	for _, k := range changed {
		switch k.Applied {
		case config.ApplyRestart:
			restart = append(restart, k.Name)
		case config.ApplyLink:
			replaceLink = true
		}
	}
	m, err := d.newMembership(c)
	if m.err != nil && d.membership().cred != nil {
		err = cmp.Or(err, m.err) // the link of the credential before stays, as in updateMembership
	}
	if err != nil {
		return err
	}
	o, err := d.deviceOptions(c, m)
	if err != nil {
		return err
	}
	cleared, err := d.alerts.Replace(c.AlertRules())
	if err != nil {
		return err
	}
	d.publishAlerts(cleared)
	if err := d.configureHistory(c); err != nil {
		return err
	}
	if err := d.setModules(c); err != nil {
		return err
	}
	if err := d.configureSampling(changed, c); err != nil {
		return err
	}
	if err := d.level.UnmarshalText([]byte(c.Text("log_level"))); err != nil {
		return err
	}
	d.device.setEnabled(o.Enabled)
	if replaceLink {
		d.warnOfConflict(m)
		d.replaceMembership(m, o)
	}
	d.setConfig(c, changed, restart)
	return nil
}

func anyWithPrefix(keys []*config.Key, prefix string) bool {
	return slices.ContainsFunc(keys, func(k *config.Key) bool { return strings.HasPrefix(k.Name, prefix) })
}

// configureSampling applies changed intervals. Those that a client set since stay until
// the configuration changes them.
//
// A value is sent only when its key changed: a client's set_config would otherwise be
// undone by each save of an unrelated key.
func (d *Daemon) configureSampling(changed []*config.Key, c *config.Config) error {
	var sampling control.Config
	if anyWithPrefix(changed, "base_interval_ms") {
		sampling.BaseIntervalMS = c.Int("base_interval_ms")
	}
	if anyWithPrefix(changed, "module_intervals.") {
		sampling.ModuleIntervals = c.ModuleIntervals()
	}
	if sampling.BaseIntervalMS == 0 && sampling.ModuleIntervals == nil {
		return nil
	}
	return d.control.Configure(sampling)
}

// configureHistory applies the settings of the history. A history that was not opened by
// New is opened by the next start.
func (d *Daemon) configureHistory(c *config.Config) error {
	d.historyEnabled.Store(c.HistoryEnabled())
	if d.history == nil || !c.HistoryEnabled() {
		return nil
	}
	return errors.Join(d.history.SetFlush(c.Duration("history.flush")),
		d.history.SetRetention(c.Duration("history.max_age"), c.Int("history.max_bytes")))
}

// setConfig makes c the configuration in force and logs what changed. restart are the keys
// whose change waits for a restart.
func (d *Daemon) setConfig(c *config.Config, changed []*config.Key, restart []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cfg = c
	d.restartNeeded = append(d.restartNeeded, restart...)
	slices.Sort(d.restartNeeded)
	d.restartNeeded = slices.Compact(d.restartNeeded)
	if len(changed) == 0 {
		return
	}
	names := make([]string, len(changed))
	for i, k := range changed {
		names[i] = k.Name
	}
	d.log.Info("configuration reloaded", zap.Strings("changed", names))
	if len(restart) > 0 {
		d.log.Warn("these settings take effect at the next start", zap.Strings("keys", restart), zap.String("hint", "systemctl restart agentctl"))
	}
}

// configView returns the configuration in force, with what clients and systemd set instead.
//
// An origin shows a person where to change a value. A value that a client or systemd set has
// none in the files, so that its origin is a phrase.
func (d *Daemon) configView() config.View {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.cfg.View()
	v.Error, v.Restart = d.configError, slices.Clone(d.restartNeeded)
	if d.socketInherited {
		v.Values["socket"], v.Origins["socket"] = d.control.Addr(), "agentctl.socket"
	}
	if ms := d.device.prober.Interval().Milliseconds(); ms != d.cfg.Int("base_interval_ms") {
		v.Values["base_interval_ms"], v.Origins["base_interval_ms"] = ms, "a client's set_config, until the next start"
	}
	return v
}

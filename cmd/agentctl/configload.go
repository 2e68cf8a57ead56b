package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"agentctl/prober"
	"agentctl/prober/alert"
)

// The configuration of the daemon, from what counts least to what counts most:
//
//	defaults
//	FILE                    config.yaml, see configPath
//	conf.d/*.yaml beside it in the order of their names
//	STATE_DIR/settings.yaml what `config set` and set_config with persist keep
//	AGENTCTL_*              the environment
//	--flags                 of agentctl run

const (
	systemConfigPath = "/etc/agentctl/config.yaml"
	serviceStateDir  = "/var/lib/agentctl"
	settingsFile     = "settings.yaml" // in the state directory
	maxConfD         = 64              // files in conf.d
)

// configSource is where a configuration is read from.
type configSource struct {
	path   string // the file; its conf.d is beside it
	given  bool   // by --config: it must be there
	daemon bool   // it is for this process, not to be shown: everything must be readable
	env    func(string) (string, bool)
	flags  settings // those that were given
}

// config is a configuration that passed all checks.
type config struct {
	settings settings // of every key
	files    []string // that were read
	notes    []string // what a person should know, though it is no error
}

func (c *config) text(name string) string            { return c.settings[name].value.(string) }
func (c *config) number(name string) int64           { return c.settings[name].value.(int64) }
func (c *config) flag(name string) bool              { return c.settings[name].value.(bool) }
func (c *config) duration(name string) time.Duration { return c.settings[name].value.(time.Duration) }
func (c *config) words(name string) []string         { return c.settings[name].value.([]string) }

// interval is the base cadence.
func (c *config) interval() time.Duration {
	return time.Duration(c.number("base_interval_ms")) * time.Millisecond
}

// moduleIntervals are those that are not left to the default, milliseconds.
func (c *config) moduleIntervals() map[string]int64 {
	m := map[string]int64{}
	for _, name := range moduleWords {
		if ms := c.number("module_intervals." + name); ms > 0 {
			m[name] = ms
		}
	}
	return m
}

// recording tells whether a history is to be kept.
func (c *config) recording() bool {
	return c.flag("history.enabled") && c.duration("history.flush") > 0
}

// rules are the alert rules in force: those of the file, and the built-in ones whose id
// they do not use.
func (c *config) rules() []alert.Rule {
	own := c.settings["alerts.rules"].value.([]alert.Rule)
	rules := slices.Clone(own)
	if !c.flag("alerts.defaults") {
		return rules
	}
	for _, r := range alert.DefaultRules() {
		if !slices.ContainsFunc(own, func(o alert.Rule) bool { return o.ID == r.ID }) {
			rules = append(rules, r)
		}
	}
	return rules
}

// tokenPath is the file with the token, "" for none.
func (c *config) tokenPath() string { return c.text("token_file") }

// settingsPath is the file that settings are kept in.
func (c *config) settingsPath() string { return filepath.Join(c.text("state_dir"), settingsFile) }

// configPath is the file of the service, or of an ordinary user.
func configPath() string {
	if systemDaemon() || strings.HasPrefix(os.Getenv("STATE_DIRECTORY"), "/var/lib/") {
		return systemConfigPath
	}
	return filepath.Join(env("XDG_CONFIG_HOME", filepath.Join(os.Getenv("HOME"), ".config")), "agentctl", "config.yaml")
}

// newConfigSource is the usual source. path is --config, or AGENTCTL_CONFIG, or "".
func newConfigSource(path string) configSource {
	s := configSource{path: path, given: path != "", env: os.LookupEnv}
	if path == "" {
		s.path = configPath()
	}
	if abs, err := filepath.Abs(s.path); err == nil { // its conf.d, and errors that tell where
		s.path = abs
	}
	return s
}

// load reads everything and returns all that is wrong at once.
func (s configSource) load() (*config, error) {
	c := &config{settings: settings{}}
	var errs configErrors
	take := func(from settings, wrong configErrors) {
		for name, v := range from {
			c.settings[name] = v
		}
		errs = append(errs, wrong...)
	}
	file := func(path string, needed bool) {
		from, wrong := readConfigFile(path)
		if !needed && missing(wrong) {
			return
		}
		c.files = append(c.files, path)
		take(from, wrong)
	}

	take(defaultSettings(), nil)
	file(s.path, s.given)
	others, err := s.confD()
	if err != nil {
		errs = append(errs, err)
	}
	for _, path := range others {
		file(path, false)
	}
	// Where the kept settings are is said by the other sources alone.
	above, wrong := s.environment()
	errs = append(errs, wrong...)
	for name, v := range s.flags {
		above[name] = v
	}
	if v, ok := above["state_dir"]; ok {
		c.settings["state_dir"] = v
	}
	kept, wrong := readConfigFile(c.settingsPath())
	switch {
	case missing(wrong):
	case len(wrong) == 1 && errors.Is(wrong[0], fs.ErrPermission) && !s.daemon:
		c.notes = append(c.notes, "settings that were kept in "+c.settingsPath()+" are not shown: permission denied; use sudo")
	default:
		c.files = append(c.files, c.settingsPath())
		for _, name := range []string{"state_dir", "socket"} {
			if v, ok := kept[name]; ok {
				wrong = append(wrong, &configError{v.origin, name, "cannot be set here, where it decides what is read; write it into " + s.path})
			}
		}
		take(kept, wrong)
	}
	take(above, nil)
	if len(errs) == 0 {
		errs = c.checkTogether(s.daemon)
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return c, nil
}

// wrongFile tells that something is wrong in a file, not in what was typed.
func wrongFile(err error) bool {
	var errs configErrors
	return errors.As(err, &errs) && slices.ContainsFunc(errs, func(err error) bool {
		var e *configError
		return !errors.As(err, &e) || strings.HasPrefix(e.where, "/")
	})
}

// missing tells that there is no such file.
func missing(errs configErrors) bool {
	return len(errs) == 1 && (errors.Is(errs[0], fs.ErrNotExist) || errors.Is(errs[0], syscall.ENOTDIR))
}

// checkTogether checks what no key can be judged by alone.
func (c *config) checkTogether(daemon bool) (errs configErrors) {
	if daemon && c.text("relay") != "" && c.tokenPath() == "" {
		errs = append(errs, &configError{c.settings["relay"].origin, "relay",
			"a relay needs a token (token_file, or --token-file; the service reads /etc/agentctl/token); mint one on the relay with: agentctl token create --class device"})
	}
	if n := len(c.rules()); n > alert.MaxRules {
		errs = append(errs, &configError{c.settings["alerts.rules"].origin, "alerts.rules",
			fmt.Sprintf("%d rules with the built-in ones; write at most %d, or alerts.defaults: false", n, alert.MaxRules)})
	}
	return errs
}

// confD are the files of conf.d, by name.
func (s configSource) confD() ([]string, error) {
	dir := filepath.Join(filepath.Dir(s.path), "conf.d")
	entries, err := os.ReadDir(dir) // sorted
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	var paths []string
	for _, e := range entries {
		if name := e.Name(); !strings.HasPrefix(name, ".") && (strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml")) {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	if len(paths) > maxConfD {
		return nil, &configError{dir, "", fmt.Sprintf("%d files, at most %d are read; join some", len(paths), maxConfD)}
	}
	return paths, nil
}

func defaultSettings() settings {
	out := settings{}
	for i := range configKeys {
		out[configKeys[i].name] = setting{configKeys[i].def(), "default"}
	}
	return out
}

// environment reads the variables. An empty one counts as none.
func (s configSource) environment() (settings, configErrors) {
	out := settings{}
	var errs configErrors
	for i := range configKeys {
		k := &configKeys[i]
		name := k.env()
		if name == "" {
			continue
		}
		if text, ok := s.env(name); ok && text != "" {
			v, err := k.parseFor(text)
			if err != nil {
				errs = append(errs, &configError{name, k.name, err.Error()})
				continue
			}
			out[k.name] = setting{v, name}
		}
	}
	return out, errs
}

// parseFor is parseText with the checks. Here paths may be relative: a person sees where
// they stand.
func (k *configKey) parseFor(text string) (any, error) {
	v, err := k.parseText(text)
	if err != nil {
		return nil, err
	}
	if k.kind == kindPath {
		if v, err = filepath.Abs(v.(string)); err != nil {
			return nil, err
		}
	}
	return v, k.checkValue(v)
}

// enabledModules are the modules of the prober that somebody needs, each once.
func enabledModules(lists ...[]string) []string {
	var out []string
	for _, name := range prober.ModuleNames() {
		for _, list := range lists {
			if slices.Contains(list, name) && !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	return out
}

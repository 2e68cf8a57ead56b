package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"agentctl/prober/alert"
)

// The configuration of the daemon, from what counts least to what counts most:
//
//	defaults
//	FILE                    config.yaml, see DefaultPath
//	conf.d/*.yaml beside it in the order of their names
//	STATE_DIR/settings.yaml what `config set` and set_config with persist keep
//	AGENTCTL_*              the environment
//	--flags                 of agentctl run

const (
	SettingsFile = "settings.yaml" // in the state directory
	maxConfD     = 64              // Files in conf.d
)

// Source is where a configuration is read from.
type Source struct {
	Path      string // the file; its conf.d is beside it
	Required  bool   // by --config: it must be there
	ForDaemon bool   // it is for this process, not to be shown: everything must be readable
	LookupEnv func(string) (string, bool)
	Flags     Settings // those that were given
}

// Config is a configuration that passed all checks.
type Config struct {
	Settings Settings // of every key
	Files    []string // that were read
	Notes    []string // what a person should know, though it is no error
}

func (c *Config) Text(name string) string            { return c.Settings[name].Value.(string) }
func (c *Config) Int(name string) int64              { return c.Settings[name].Value.(int64) }
func (c *Config) Bool(name string) bool              { return c.Settings[name].Value.(bool) }
func (c *Config) Duration(name string) time.Duration { return c.Settings[name].Value.(time.Duration) }
func (c *Config) Words(name string) []string         { return c.Settings[name].Value.([]string) }

// Interval is the base cadence.
func (c *Config) Interval() time.Duration {
	return time.Duration(c.Int("base_interval_ms")) * time.Millisecond
}

// ModuleIntervals are those that are not left to the default, milliseconds.
func (c *Config) ModuleIntervals() map[string]int64 {
	m := map[string]int64{}
	for _, name := range moduleWords {
		if ms := c.Int("module_intervals." + name); ms > 0 {
			m[name] = ms
		}
	}
	return m
}

// HistoryEnabled tells whether a history is to be kept.
func (c *Config) HistoryEnabled() bool {
	return c.Bool("history.enabled") && c.Duration("history.flush") > 0
}

// AlertRules are the alert rules in force: those of the file, and the built-in ones whose id
// they do not use.
func (c *Config) AlertRules() []alert.Rule {
	own := c.Settings["alerts.rules"].Value.([]alert.Rule)
	rules := slices.Clone(own)
	if !c.Bool("alerts.defaults") {
		return rules
	}
	for _, r := range alert.DefaultRules() {
		if !slices.ContainsFunc(own, func(o alert.Rule) bool { return o.ID == r.ID }) {
			rules = append(rules, r)
		}
	}
	return rules
}

// TokenPath is the file with the token, "" for none.
func (c *Config) TokenPath() string { return c.Text("token_file") }

// Changed are the keys whose value differs from that of another configuration.
func (c *Config) Changed(from *Config) []*Key {
	var changed []*Key
	for i := range keys {
		if k := &keys[i]; !reflect.DeepEqual(from.Settings[k.Name].Value, c.Settings[k.Name].Value) {
			changed = append(changed, k)
		}
	}
	return changed
}

// SettingsPath is the file that settings are kept in.
func (c *Config) SettingsPath() string { return filepath.Join(c.Text("state_dir"), SettingsFile) }

// NewSource is the usual source. path is --config, or AGENTCTL_CONFIG, or "".
func NewSource(path string) Source {
	s := Source{Path: path, Required: path != "", LookupEnv: os.LookupEnv}
	if path == "" {
		s.Path = DefaultPath()
	}
	if abs, err := filepath.Abs(s.Path); err == nil { // its conf.d, and errors that tell where
		s.Path = abs
	}
	return s
}

// ClientSource is the source that a command for people reads: that of the service when
// this user has no configuration.
func ClientSource(path string) Source {
	s := NewSource(path)
	s.Flags = Settings{}
	if path == "" && !exists(s.Path) && exists(SystemPath) {
		s.Path = SystemPath
		s.Flags["state_dir"] = Setting{SystemStateDir, "the service"}
	}
	return s
}

// Load reads everything and returns all that is wrong at once.
func (s Source) Load() (*Config, error) {
	c := &Config{Settings: Settings{}}
	var errs Errors
	take := func(from Settings, wrong Errors) {
		for name, v := range from {
			c.Settings[name] = v
		}
		errs = append(errs, wrong...)
	}
	file := func(path string, needed bool) {
		from, wrong := ReadFile(path)
		if !needed && IsMissing(wrong) {
			return
		}
		c.Files = append(c.Files, path)
		take(from, wrong)
	}

	take(defaultSettings(), nil)
	file(s.Path, s.Required)
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
	for name, v := range s.Flags {
		above[name] = v
	}
	if v, ok := above["state_dir"]; ok {
		c.Settings["state_dir"] = v
	}
	kept, wrong := ReadFile(c.SettingsPath())
	switch {
	case IsMissing(wrong):
	case len(wrong) == 1 && errors.Is(wrong[0], fs.ErrPermission) && !s.ForDaemon:
		c.Notes = append(c.Notes, "settings that were kept in "+c.SettingsPath()+" are not shown: permission denied; use sudo")
	default:
		c.Files = append(c.Files, c.SettingsPath())
		for _, name := range []string{"state_dir", "socket"} {
			if v, ok := kept[name]; ok {
				wrong = append(wrong, &Error{v.Origin, name, "cannot be set here, where it decides what is read; write it into " + s.Path})
			}
		}
		take(kept, wrong)
	}
	take(above, nil)
	if len(errs) == 0 {
		errs = c.checkTogether(s.ForDaemon)
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return c, nil
}

// InFile tells that something is wrong in a file, not in what was typed.
func InFile(err error) bool {
	var errs Errors
	return errors.As(err, &errs) && slices.ContainsFunc(errs, func(err error) bool {
		var e *Error
		return !errors.As(err, &e) || strings.HasPrefix(e.Where, "/")
	})
}

// IsMissing tells that there is no such file.
func IsMissing(errs Errors) bool {
	return len(errs) == 1 && (errors.Is(errs[0], fs.ErrNotExist) || errors.Is(errs[0], syscall.ENOTDIR))
}

// checkTogether checks what no key can be judged by alone.
func (c *Config) checkTogether(daemon bool) (errs Errors) {
	if daemon && c.Text("relay") != "" && c.TokenPath() == "" {
		errs = append(errs, &Error{c.Settings["relay"].Origin, "relay",
			"a relay needs a token (token_file, or --token-file; the service reads /etc/agentctl/token); mint one on the relay with: agentctl token create --class device"})
	}
	if n := len(c.AlertRules()); n > alert.MaxRules {
		errs = append(errs, &Error{c.Settings["alerts.rules"].Origin, "alerts.rules",
			fmt.Sprintf("%d rules with the built-in ones; write at most %d, or alerts.defaults: false", n, alert.MaxRules)})
	}
	return errs
}

// confD are the files of conf.d, by name.
func (s Source) confD() ([]string, error) {
	dir := filepath.Join(filepath.Dir(s.Path), "conf.d")
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
		return nil, &Error{dir, "", fmt.Sprintf("%d files, at most %d are read; join some", len(paths), maxConfD)}
	}
	return paths, nil
}

func defaultSettings() Settings {
	out := Settings{}
	for i := range keys {
		out[keys[i].Name] = Setting{keys[i].def(), "default"}
	}
	return out
}

// environment reads the variables. An empty one counts as none.
func (s Source) environment() (Settings, Errors) {
	out := Settings{}
	var errs Errors
	for i := range keys {
		k := &keys[i]
		name := k.Env()
		if name == "" {
			continue
		}
		if text, ok := s.LookupEnv(name); ok && text != "" {
			v, err := k.Parse(text)
			if err != nil {
				errs = append(errs, &Error{name, k.Name, err.Error()})
				continue
			}
			out[k.Name] = Setting{v, name}
		}
	}
	return out, errs
}

// Parse is parseText with the checks. Here paths may be relative: a person sees where
// they stand.
func (k *Key) Parse(text string) (any, error) {
	v, err := k.parseText(text)
	if err != nil {
		return nil, err
	}
	if k.Kind == KindPath {
		if v, err = filepath.Abs(v.(string)); err != nil {
			return nil, err
		}
	}
	return v, k.checkValue(v)
}

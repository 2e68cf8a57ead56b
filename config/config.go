// Package config is the configuration of the daemon: a table of keys, the sources that set
// them, and the checks. Precedence, from low to high:
//
//	defaults
//	config.yaml             DefaultPath
//	conf.d/*.yaml           beside it, in the order of their names
//	STATE_DIR/settings.yaml what `config set` and clients of the control socket saved
//	AGENTCTL_*              the environment
//	Source.Flags            the command line
//
// A Source is read with Load, as often as its files change:
//
//	source := config.NewSource("")
//	c, err := source.Load()
//	...
//	interval := c.Interval()
//
// To add a key, add a row to the table in keys.go. The checks, the JSON Schema
// (docs/config.schema.json) and `config show` are derived from it; docs/config.md lists it.
//
// # Parts
//
// keys.go has the table of keys, parse.go reads one YAML file, source.go merges the sources,
// and settings_store.go writes the saved settings. schema.go and view.go derive the JSON Schema
// and the answer to get_config from the table. token_file.go reads the files that keys name.
//
// # Errors and reloads
//
// Load does not stop at the first error: its Errors has those of all sources, most with a file
// and a line. It returns either a valid Config or an error, so that half a configuration is
// not applied. The package starts no goroutine and watches no file: the caller decides
// when to load again, with Source.Fingerprint.
package config

import (
	"crypto/tls"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"agentctl/atomicfile"
	"agentctl/prober/alert"
	"agentctl/transport/enroll"
)

// Setting is the value of one key, and where it comes from.
type Setting struct {
	Value  any    // of the type of the key's Kind; in SaveSettings nil removes the key
	Origin string // default, FILE:LINE, AGENTCTL_NAME, or as the caller names its flags
}

// Settings are the values that one source, or all of them, give to keys.
// Keys that a source does not set are absent, and not present with a zero value.
type Settings map[string]Setting

// Config is a valid configuration. It is not changed after Load.
//
// It may be read by several goroutines. Settings has every key of the table, so that the
// accessors need no second result.
type Config struct {
	Settings Settings // of every key
	Files    []string // that were read
	Notes    []string // hints for a person that are not errors
	// Damage reports saved settings that could not be used, with Source.SetAside; nil: none.
	Damage *atomicfile.Damage
}

// Text returns the value of a key of KindText or KindPath. These accessors panic for a key
// that does not exist or is of another kind.
func (c *Config) Text(name string) string { return c.Settings[name].Value.(string) }

// Int returns the value of a key of KindInt.
func (c *Config) Int(name string) int64 { return c.Settings[name].Value.(int64) }

// Bool returns the value of a key of KindBool.
func (c *Config) Bool(name string) bool { return c.Settings[name].Value.(bool) }

// Duration returns the value of a key of KindDuration.
func (c *Config) Duration(name string) time.Duration { return c.Settings[name].Value.(time.Duration) }

// Words returns the value of a key of KindWords.
func (c *Config) Words(name string) []string { return c.Settings[name].Value.([]string) }

// Interval returns the base cadence.
//
// A client of the control socket may have set another one since; prober.Prober.Interval is
// the one in use.
func (c *Config) Interval() time.Duration {
	return time.Duration(c.Int("base_interval_ms")) * time.Millisecond
}

// ModuleIntervals returns the intervals that are not left to the default, in milliseconds by
// module.
//
// A value of 0 is the default of the table. A file or a variable cannot set it: the lower
// bound is 100 ms.
func (c *Config) ModuleIntervals() map[string]int64 {
	intervals := map[string]int64{}
	for name, s := range c.Settings {
		module, found := strings.CutPrefix(name, "module_intervals.")
		if ms, _ := s.Value.(int64); found && ms > 0 {
			intervals[module] = ms
		}
	}
	return intervals
}

// HistoryEnabled reports whether samples are recorded.
//
// Both history.enabled: false and history.flush: 0 turn recording off.
func (c *Config) HistoryEnabled() bool {
	return c.Bool("history.enabled") && c.Duration("history.flush") > 0
}

// CapabilityEnabled reports whether a capability may be announced. Those without a switch may.
func (c *Config) CapabilityEnabled(capID string) bool {
	s, ok := c.Settings["capabilities."+capID]
	return !ok || s.Value.(bool)
}

// AlertRules returns the rules in force: those of the configuration, and the built-in ones
// whose id it does not use.
//
// The configured rules come first, in the order of the file. The slice is a copy, which the
// caller may change. Only the id decides whether a rule replaces a built-in one: a file can make
// a built-in alert less strict without disabling the others.
func (c *Config) AlertRules() []alert.Rule {
	rules := slices.Clone(c.Settings["alerts.rules"].Value.([]alert.Rule))
	if !c.Bool("alerts.defaults") {
		return rules
	}
	for _, builtIn := range alert.DefaultRules() {
		if !slices.ContainsFunc(rules, func(r alert.Rule) bool { return r.ID == builtIn.ID }) {
			rules = append(rules, builtIn)
		}
	}
	return rules
}

// SettingsPath returns the file of saved settings.
func (c *Config) SettingsPath() string { return filepath.Join(c.Text("state_dir"), SettingsFile) }

// TLS returns the configuration of a connection to the relay; see ClientTLS.
func (c *Config) TLS() (*tls.Config, error) {
	return ClientTLS(c.Text("ca_file"), c.Text("ca_sha256"))
}

// Changed returns the keys whose value differs from that of an earlier configuration.
//
// Origins are not compared: a value that moves from the file to the environment is the same.
// The keys are in the order of the table, and belong to it.
func (c *Config) Changed(from *Config) []*Key {
	var changed []*Key
	for i := range keys {
		if k := &keys[i]; !reflect.DeepEqual(from.Settings[k.Name].Value, c.Settings[k.Name].Value) {
			changed = append(changed, k)
		}
	}
	return changed
}

// checkTogether makes the checks that depend on several keys.
//
// A relay without a token is an error for the daemon only: a person writes and validates a
// file before the token exists. A board that joined needs none. The number of rules is checked
// here and not with the key, because the built-in rules count and depend on alerts.defaults.
func (c *Config) checkTogether(forDaemon bool) (errs Errors) {
	if forDaemon && c.Text("relay") != "" && c.Text("token_file") == "" && !exists(filepath.Join(c.Text("state_dir"), enroll.CredentialFile)) {
		errs = append(errs, &Error{Where: c.Settings["relay"].Origin, Key: "relay",
			Problem: "a relay needs a token: leave relay out and paste the line of `agentctl invite`, or set token_file (the service reads /etc/agentctl/token) to a token of `agentctl token create --class device`"})
	}
	if n := len(c.AlertRules()); n > alert.MaxRules {
		errs = append(errs, &Error{Where: c.Settings["alerts.rules"].Origin, Key: "alerts.rules",
			Problem: fmt.Sprintf("%d rules with the built-in ones; write at most %d, or alerts.defaults: false", n, alert.MaxRules)})
	}
	return errs
}

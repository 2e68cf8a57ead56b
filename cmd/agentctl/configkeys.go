package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/prober/history"
	"agentctl/transport/link"
)

// kind is what a key's value is made of.
type kind uint8

const (
	kindText     kind = iota // string
	kindPath                 // string; absolute in a file
	kindInt                  // int64
	kindBool                 // bool
	kindDuration             // time.Duration, written 300s, 12h or 30d
	kindWords                // []string, each one of words
	kindRules                // []alert.Rule
)

// When a change of a key comes into force in a daemon that runs.
const (
	applyLive    = "at once"
	applyLink    = "at once; the link is opened anew"
	applyRestart = "with the next start"
)

// configKey is one setting of the daemon: the one place that says what it may be. The
// checks, the JSON Schema and `config show` are made from it; docs/config.md lists them.
type configKey struct {
	name     string
	kind     kind
	min, max int64    // kindInt; kindDuration in nanoseconds
	zero     string   // what a duration of 0 means, where it may be 0
	words    []string // the values there are
	unit     string
	flag     string // of agentctl run, "" for none
	apply    string
	def      func() any // default
	doc      string
	check    func(string) error // further checks of a text
}

// env is the name of a key's environment variable, "" for none.
func (k *configKey) env() string {
	if k.kind == kindRules {
		return ""
	}
	return "AGENTCTL_" + strings.ToUpper(strings.ReplaceAll(k.name, ".", "_"))
}

// moduleWords are the modules that module_intervals knows.
var moduleWords = append([]string{"cpu", "mem", "disk", "load"}, prober.ModuleNames()...)

var configKeys = newConfigKeys()

func newConfigKeys() []configKey {
	text := func(s string) func() any { return func() any { return s } }
	keys := []configKey{
		{name: "relay", kind: kindText, flag: "relay", apply: applyLink, def: text(""), check: checkRelayURL,
			doc: "URL of the relay, wss:// (ws:// for loopback only). Empty: the board works alone."},
		{name: "name", kind: kindText, flag: "name", apply: applyLink, def: text(""), check: checkBoardName,
			doc: "Name that the relay should show for this board: 1 to 32 lower case letters, digits and hyphens."},
		{name: "token_file", kind: kindPath, flag: "token-file", apply: applyLink, def: func() any { return credential("token") },
			doc: "File with the device token. Default: the systemd credential token. The file is read anew before each connection."},
		{name: "ca_file", kind: kindPath, flag: "ca-file", apply: applyLink, def: text(""),
			doc: "PEM file of the authority that signed the relay's certificate. Default: the system's."},
		{name: "socket", kind: kindPath, flag: "socket", apply: applyRestart, def: func() any { return defaultSocket() },
			doc: "Path of the control socket."},
		{name: "state_dir", kind: kindPath, flag: "state-dir", apply: applyRestart, def: func() any { return defaultStateDir("") },
			doc: "Directory of identity, history and kept settings."},
		{name: "log_level", kind: kindText, flag: "log-level", apply: applyLive, def: text("info"), words: []string{"debug", "info", "warn", "error"},
			doc: "What is logged: this and what is worse."},
		{name: "base_interval_ms", kind: kindInt, min: prober.MinInterval.Milliseconds(), max: prober.MaxInterval.Milliseconds(),
			unit: "ms", flag: "interval", apply: applyLive, def: func() any { return int64(1000) },
			doc: "How often the machine is sampled."},
		{name: "modules", kind: kindWords, words: prober.ModuleNames(), flag: "modules", apply: applyLive, def: func() any { return prober.ModuleNames() },
			doc: "Modules that are read beyond cpu, memory, disk and load. Alert rules add those they look at."},
		{name: "disk_path", kind: kindPath, flag: "disk-path", apply: applyRestart, def: text("/"),
			doc: "A path on the filesystem whose fill is measured."},
		{name: "history.enabled", kind: kindBool, apply: applyLive, def: func() any { return true },
			doc: "Whether samples are recorded in STATE_DIR/history.db."},
		{name: "history.flush", kind: kindDuration, min: int64(history.MinFlush), max: int64(history.MaxFlush), zero: "no history", flag: "history-flush",
			apply: applyLive, def: func() any { return history.DefaultFlush },
			doc: "How often samples are written to the disk; until then they are in memory. 0: no history."},
		{name: "history.max_age", kind: kindDuration, min: int64(history.MinMaxAge), max: int64(10 * 365 * 24 * time.Hour),
			apply: applyLive, def: func() any { return history.DefaultMaxAge },
			doc: "Older samples are removed."},
		{name: "history.max_bytes", kind: kindInt, min: history.MinMaxBytes, max: 1 << 40, unit: "bytes",
			apply: applyLive, def: func() any { return int64(history.DefaultMaxBytes) },
			doc: "Size of the file, beyond which the oldest samples are removed."},
		{name: "alerts.defaults", kind: kindBool, apply: applyLive, def: func() any { return true },
			doc: "Whether the built-in rules are in force beside alerts.rules; a rule with the same id replaces one."},
		{name: "alerts.rules", kind: kindRules, apply: applyLive, def: func() any { return []alert.Rule(nil) },
			doc: "Rules for the event alert. A list in a later file replaces one in an earlier file."},
	}
	for _, m := range moduleWords {
		k := configKey{name: "module_intervals." + m, kind: kindInt, min: 100, max: 60_000, unit: "ms", apply: applyLive, def: func() any { return int64(0) },
			doc: "How often module " + m + " is told to clients. Default: with each sample."}
		if slices.Contains(prober.ModuleNames(), m) {
			k.doc = "How often module " + m + " is read and told to clients. Default: " + moduleDefault[m] + "."
		}
		keys = append(keys, k)
	}
	return keys
}

// moduleDefault is how often the prober reads a module by itself.
var moduleDefault = map[string]string{"network": "with each sample", "temperature": "every 5 s", "power": "every 2 s", "wear": "every hour"}

// findKey knows a key by its name, and mem as memory as well.
func findKey(name string) *configKey {
	if name == "module_intervals.memory" {
		name = "module_intervals.mem"
	}
	if i := slices.IndexFunc(configKeys, func(k configKey) bool { return k.name == name }); i >= 0 {
		return &configKeys[i]
	}
	return nil
}

// keyGroups are the maps that keys with a dot live in.
func keyGroups() []string {
	groups := map[string]bool{}
	for i := range configKeys {
		if group, _, ok := strings.Cut(configKeys[i].name, "."); ok {
			groups[group] = true
		}
	}
	return slices.Sorted(maps.Keys(groups))
}

// ruleKeys are the keys of a rule; threshold and hysteresis are numbers, for and clear_for
// durations.
var ruleKeys = []string{"id", "metric", "op", "threshold", "hysteresis", "for", "clear_for", "level"}

func checkRelayURL(s string) error {
	if s == "" {
		return nil
	}
	_, err := link.NormalizeRelayURL(s)
	return err
}

func checkBoardName(s string) error {
	if s != "" && !manifest.ValidNodeName(s) {
		return fmt.Errorf("%.64q must be 1 to 32 lower case letters, digits and hyphens", s)
	}
	return nil
}

// right says what a key's value should be, for the end of an error.
func (k *configKey) right() string {
	switch {
	case k.kind == kindWords:
		return "a list of " + strings.Join(k.words, ", ")
	case len(k.words) > 0:
		return "one of " + strings.Join(k.words, ", ")
	case k.kind == kindPath:
		return "an absolute path, one that begins with /"
	case k.kind == kindInt:
		return fmt.Sprintf("a whole number from %d to %d (%s)", k.min, k.max, k.unit)
	case k.kind == kindBool:
		return "true or false"
	case k.kind == kindDuration:
		zero := ""
		if k.zero != "" {
			zero = ", or 0 for " + k.zero
		}
		return fmt.Sprintf("%s to %s%s", durationText(time.Duration(k.min)), durationText(time.Duration(k.max)), zero)
	case k.kind == kindRules:
		return "a list of rules with " + strings.Join(ruleKeys, ", ")
	}
	return "a text"
}

// checkValue checks a value that has the type of its kind.
func (k *configKey) checkValue(v any) error {
	switch v := v.(type) {
	case string:
		if len(v) > 4096 || strings.ContainsAny(v, "\x00\n") {
			return fmt.Errorf("is too long, or has a line break; write %s", k.right())
		}
		if k.kind == kindPath && !strings.HasPrefix(v, "/") {
			return fmt.Errorf("%q is no absolute path; write %s", v, k.right())
		}
		if len(k.words) > 0 && !slices.Contains(k.words, v) {
			return fmt.Errorf("%.64q%s; write %s", v, nearest(v, k.words), k.right())
		}
		if k.check != nil {
			return k.check(v)
		}
	case int64:
		if v < k.min || v > k.max {
			return fmt.Errorf("%d is out of range; write %s", v, k.right())
		}
	case time.Duration:
		if (v != 0 || k.zero == "") && (int64(v) < k.min || int64(v) > k.max) {
			return fmt.Errorf("%s is out of range; write %s", durationText(v), k.right())
		}
	case []string:
		for i, w := range v {
			if !slices.Contains(k.words, w) {
				return fmt.Errorf("%.64q is not known%s; write %s", w, nearest(w, k.words), k.right())
			}
			if slices.Contains(v[:i], w) {
				return fmt.Errorf("%q stands there twice; write it once", w)
			}
		}
	case []alert.Rule:
		return alert.Check(v)
	}
	return nil
}

// parseText reads a value from an environment variable, a flag or a command line.
func (k *configKey) parseText(s string) (any, error) {
	s = strings.TrimSpace(s)
	switch k.kind {
	case kindInt:
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%.64q is no whole number; write %s", s, k.right())
		}
		return n, nil
	case kindBool:
		if s != "true" && s != "false" {
			return nil, fmt.Errorf("%.64q; write true or false", s)
		}
		return s == "true", nil
	case kindDuration:
		d, err := parseDuration(s)
		if err != nil {
			return nil, fmt.Errorf("%w; write %s", err, k.right())
		}
		return d, nil
	case kindWords:
		return append([]string{}, strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })...), nil
	case kindRules:
		return nil, fmt.Errorf("rules are written in a file; see docs/config.md, then: agentctl config validate")
	}
	return s, nil
}

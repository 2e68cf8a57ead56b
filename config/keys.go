package config

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/duration"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/prober/history"
	"agentctl/suggest"
	"agentctl/transport/link"
	"agentctl/transport/pin"
)

// Kind is the type of a key's values.
type Kind uint8

// Kinds, with the Go type of their values.
const (
	KindText     Kind = iota // string
	KindPath                 // string; absolute in a file
	KindInt                  // int64
	KindBool                 // bool
	KindDuration             // time.Duration, in the grammar of package duration
	KindWords                // []string, each one of Key.Words
	KindRules                // []alert.Rule
)

// Values of Key.Applied, in the words of docs/config.md.
const (
	ApplyLive    = "at once"
	ApplyLink    = "at once; the link is reopened"
	ApplyRestart = "with the next start"
)

// MinInterval and MaxInterval are the bounds of a sampling interval.
const (
	MinInterval = prober.MinInterval
	MaxInterval = prober.MaxInterval
)

// maxText bounds a text, bytes.
const maxText = 4096

// Key is one setting of the daemon. The checks, the JSON Schema and `config show` are
// derived from it.
//
// A name has at most one dot. The part before it is a map in the file, and all names are valid
// parts of environment variables. Removing or renaming a key makes the files of older
// versions invalid.
type Key struct {
	Name    string
	Kind    Kind
	Words   []string // the allowed values; of KindText, none means any
	Applied string   // when a change takes effect in a daemon that runs

	min, max int64              // bounds; of KindDuration in nanoseconds
	zero     string             // what a duration of 0 means; "": 0 is not allowed
	unit     string             // of KindInt
	def      func() any         // the default, which may depend on the user
	doc      string             // description in the schema
	check    func(string) error // more checks of a text; nil: none
}

// Env returns the name of the key's environment variable, "" when it has none.
//
// Alert rules have none: a list of maps does not fit a variable.
func (k *Key) Env() string {
	if k.Kind == KindRules {
		return ""
	}
	return "AGENTCTL_" + strings.ToUpper(strings.ReplaceAll(k.Name, ".", "_"))
}

// Default is the default as Text has it, "" for none. It may depend on the user and, in a
// systemd service, on the environment.
func (k *Key) Default() string { return strings.TrimPrefix(k.Text(Plain(k.def())), "-") }

// NeedKey is FindKey with an error that names the nearest key, or all of them.
//
// The list of all keys is shown only when no key is near, since it is long.
func NeedKey(name string) (*Key, error) {
	if k := FindKey(name); k != nil {
		return k, nil
	}
	hint := suggest.Hint(name, KeyNames())
	if hint == "" {
		hint = "; the keys are " + strings.Join(KeyNames(), ", ")
	}
	return nil, fmt.Errorf("unknown key %.64q%s", name, hint)
}

// switchable are the capabilities that an operator can turn off, or on, by their cap_id.
var switchable = []struct {
	id, doc string
	enabled bool // by default
}{
	{"info", "model, operating system and kernel (system.info)", true},
	{"modules", "temperature, power, wear and network traffic (system.modules)", true},
	{"processes", "the processes that use most (system.processes)", true},
	{"services", "systemd's services (system.services)", true},
	{"journal", "lines of the journal (system.journal)", false},
	{"disks", "file systems and their fill (system.disks)", true},
	{"network", "interfaces, addresses and routes (system.network)", true},
	{"doctor", "the board's own checks (system.doctor)", true},
}

// moduleWords are the modules that module_intervals knows.
var moduleWords = prober.AllModules.Names()

// keys is the table. It is not changed after the start of the program, so that several
// goroutines may read it and FindKey may return pointers into it.
var keys = newKeys()

// newKeys makes the table. Defaults are functions, because paths depend on the user and on
// variables of systemd, and because a list must not be shared. Bounds of intervals are those
// of the prober, and those of the history are the store's own: a value that passes here does
// not fail there.
func newKeys() []Key {
	text := func(s string) func() any { return func() any { return s } }
	keys := []Key{
		{Name: "relay", Kind: KindText, Applied: ApplyLink, def: text(""), check: checkRelayURL,
			doc: "URL of the relay, wss:// (ws:// for loopback only). Empty: the board works alone."},
		{Name: "name", Kind: KindText, Applied: ApplyLink, def: text(""), check: checkBoardName,
			doc: "Name that the relay should show for this board: 1 to 32 lower case letters, digits and hyphens."},
		{Name: "token_file", Kind: KindPath, Applied: ApplyLink, def: func() any { return Credential("token") },
			doc: "File with the device token. Default: the systemd credential token. The file is read again before each connection."},
		{Name: "ca_file", Kind: KindPath, Applied: ApplyLink, def: text(""),
			doc: "PEM file of the authority that signed the relay's certificate. Default: the system's."},
		{Name: "ca_sha256", Kind: KindText, Applied: ApplyLink, def: text(""), check: checkPin,
			doc: "SHA-256 of the key of the relay's own authority, 64 hex digits; instead of ca_file. A board that joined has its own."},
		{Name: "socket", Kind: KindPath, Applied: ApplyRestart, def: func() any { return DefaultSocket() },
			doc: "Path of the control socket."},
		{Name: "state_dir", Kind: KindPath, Applied: ApplyRestart, def: func() any { return DefaultStateDir("") },
			doc: "Directory of identity, history and saved settings."},
		{Name: "log_level", Kind: KindText, Applied: ApplyLive, def: text("info"), Words: []string{"debug", "info", "warn", "error"},
			doc: "Least severe messages that are logged."},
		{Name: "base_interval_ms", Kind: KindInt, min: prober.MinInterval.Milliseconds(), max: prober.MaxInterval.Milliseconds(),
			unit: "ms", Applied: ApplyLive, def: func() any { return int64(1000) },
			doc: "How often the machine is sampled."},
		{Name: "modules", Kind: KindWords, Words: prober.OptionalModuleNames(), Applied: ApplyLive, def: func() any { return prober.OptionalModuleNames() },
			doc: "Modules that are read beyond cpu, memory, disk and load. Alert rules add those they look at."},
		{Name: "disk_path", Kind: KindPath, Applied: ApplyRestart, def: text("/"),
			doc: "A path on the file system whose usage is measured."},
		{Name: "history.enabled", Kind: KindBool, Applied: ApplyLive, def: func() any { return true },
			doc: "Whether samples are recorded in STATE_DIR/history.db."},
		{Name: "history.flush", Kind: KindDuration, min: int64(history.MinFlush), max: int64(history.MaxFlush), zero: "no history",
			Applied: ApplyLive, def: func() any { return history.DefaultFlush },
			doc: "How often samples are written to the disk; until then they are in memory. 0: no history."},
		{Name: "history.max_age", Kind: KindDuration, min: int64(history.MinMaxAge), max: int64(10 * 365 * 24 * time.Hour),
			Applied: ApplyLive, def: func() any { return history.DefaultMaxAge },
			doc: "Older samples are removed."},
		{Name: "history.max_bytes", Kind: KindInt, min: history.MinMaxBytes, max: 1 << 40, unit: "bytes",
			Applied: ApplyLive, def: func() any { return int64(history.DefaultMaxBytes) },
			doc: "Size of the file, beyond which the oldest samples are removed."},
		{Name: "processes.arguments", Kind: KindBool, Applied: ApplyLive, def: func() any { return false },
			doc: "Whether system.processes returns the arguments of processes, which may contain secrets."},
		{Name: "processes.socket", Kind: KindPath, Applied: ApplyRestart, def: text(DefaultProcessesSocket),
			doc: "Socket of the helper that reads processes, agentctl-processes.socket, for a daemon that may not see them."},
		{Name: "journal.socket", Kind: KindPath, Applied: ApplyRestart, def: text(DefaultJournalSocket),
			doc: "Socket of the helper that reads the journal, agentctl-journal.socket."},
		{Name: "alerts.defaults", Kind: KindBool, Applied: ApplyLive, def: func() any { return true },
			doc: "Whether the built-in rules are in force beside alerts.rules; a rule with the same id replaces one."},
		{Name: "alerts.rules", Kind: KindRules, Applied: ApplyLive, def: func() any { return []alert.Rule(nil) },
			doc: "Rules for the event alert. A list in a later file replaces one in an earlier file."},
	}
	for _, c := range switchable {
		keys = append(keys, Key{Name: "capabilities." + c.id, Kind: KindBool, Applied: ApplyLive, def: func() any { return c.enabled },
			doc: "Whether the relay and local programs may ask for " + c.doc + "."})
	}
	for _, m := range moduleWords {
		module, _ := prober.ModuleByName(m)
		k := Key{Name: "module_intervals." + m, Kind: KindInt, min: 100, max: module.MaxInterval().Milliseconds(), unit: "ms", Applied: ApplyLive, def: func() any { return int64(0) },
			doc: "How often module " + m + " is sent to clients. Default: with each sample."}
		if module.IsOptional() {
			k.doc = "How often module " + m + " is read and sent to clients. Default: " + defaultCadence(module) + "."
		}
		keys = append(keys, k)
	}
	return keys
}

// defaultCadence returns how often the prober reads an optional module by default, in words.
func defaultCadence(m prober.Module) string {
	switch d := m.DefaultInterval(); {
	case d <= prober.MinInterval:
		return "with each sample"
	case d == time.Hour:
		return "every hour"
	default:
		return fmt.Sprintf("every %g s", d.Seconds())
	}
}

// FindKey finds a key by its name, nil when there is none. A module may have another of its names:
// memory for mem, net for network.
//
// The keys do not change, so that callers may keep the pointer and must not write to it.
func FindKey(name string) *Key {
	if module, found := strings.CutPrefix(name, "module_intervals."); found {
		if m, ok := prober.ModuleByName(module); ok {
			name = "module_intervals." + m.String()
		}
	}
	if i := slices.IndexFunc(keys, func(k Key) bool { return k.Name == name }); i >= 0 {
		return &keys[i]
	}
	return nil
}

// word returns an item of a list by its usual name: modules have several.
func (k *Key) word(w string) string {
	if m, ok := prober.ModuleByName(w); ok && k.Name == "modules" {
		return m.String()
	}
	return w
}

// keyGroups returns the first parts of names with a dot: the maps of a file.
//
// They are sorted, so that an error lists them in the same order each time.
func keyGroups() []string {
	groups := map[string]bool{}
	for i := range keys {
		if group, _, ok := strings.Cut(keys[i].Name, "."); ok {
			groups[group] = true
		}
	}
	return slices.Sorted(maps.Keys(groups))
}

// ruleKeys are the keys of an alert rule in a file, in the order in which errors list them.
// fileParser.rule, RuleText and ruleSchema have the same keys.
var ruleKeys = []string{"id", "metric", "op", "threshold", "hysteresis", "for", "clear_for", "level"}

// checkRelayURL applies the link's own rule, so that a wrong URL is an error of the
// configuration and not of a connection. An empty URL is valid: the board works alone.
func checkRelayURL(s string) error {
	if s == "" {
		return nil
	}
	_, err := link.NormalizeRelayURL(s)
	return err
}

// checkPin checks the hash of an authority. None is valid: ca_file or the system decides then.
func checkPin(s string) error {
	if s == "" {
		return nil
	}
	_, err := pin.Parse(s)
	return err
}

// checkBoardName checks a name by the rule of package manifest, which the relay applies too. An
// empty name is valid.
func checkBoardName(s string) error {
	if s != "" && !manifest.ValidNodeName(s) {
		return fmt.Errorf("%.64q must be 1 to 32 lower case letters, digits and hyphens", s)
	}
	return nil
}

// expected describes the allowed values, for the end of an error.
//
// The parser's errors, those of `config set` and the test of docs/config.md use it, so that
// bounds are written once.
func (k *Key) expected() string {
	switch {
	case k.Kind == KindWords:
		return "a list of " + strings.Join(k.Words, ", ")
	case len(k.Words) > 0:
		return "one of " + strings.Join(k.Words, ", ")
	case k.Kind == KindPath:
		return "an absolute path, one that begins with /"
	case k.Kind == KindInt:
		return fmt.Sprintf("a whole number from %d to %d (%s)", k.min, k.max, k.unit)
	case k.Kind == KindBool:
		return "true or false"
	case k.Kind == KindDuration:
		bounds := duration.Format(time.Duration(k.min)) + " to " + duration.Format(time.Duration(k.max))
		if k.zero != "" {
			bounds += ", or 0 for " + k.zero
		}
		return bounds
	case k.Kind == KindRules:
		return "a list of rules with " + strings.Join(ruleKeys, ", ")
	}
	return "a text"
}

// checkValue checks a value of the type of the key's kind.
//
// It is the same for all sources: what a file may not have, a flag may not have either. The
// text of its errors goes on after the name of the key. A value of another type passes: the
// parsers make the type, and the checks of a key are only about its range.
func (k *Key) checkValue(v any) error {
	switch v := v.(type) {
	case string:
		if len(v) > maxText || strings.ContainsAny(v, "\x00\n") {
			return fmt.Errorf("is too long, or has a line break; write %s", k.expected())
		}
		if k.Kind == KindPath && !strings.HasPrefix(v, "/") {
			return fmt.Errorf("%q is not an absolute path; write %s", v, k.expected())
		}
		if len(k.Words) > 0 && !slices.Contains(k.Words, v) {
			return fmt.Errorf("%.64q%s; write %s", v, suggest.Hint(v, k.Words), k.expected())
		}
		if k.check != nil {
			return k.check(v)
		}
	case int64:
		if v < k.min || v > k.max {
			return fmt.Errorf("%d is out of range; write %s", v, k.expected())
		}
	case time.Duration:
		if (v != 0 || k.zero == "") && (int64(v) < k.min || int64(v) > k.max) {
			return fmt.Errorf("%s is out of range; write %s", duration.Format(v), k.expected())
		}
	case []string:
		for i, w := range v {
			if !slices.Contains(k.Words, w) {
				return fmt.Errorf("%.64q is not known%s; write %s", w, suggest.Hint(w, k.Words), k.expected())
			}
			// The schema says the same with uniqueItems.
			if slices.Contains(v[:i], w) {
				return fmt.Errorf("%q is given twice; write it once", w)
			}
		}
	case []alert.Rule:
		return alert.Check(v)
	}
	return nil
}

// Parse reads and checks a value from an environment variable or the command line. There, a
// path may be relative to the working directory; in a file it must be absolute.
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

// parseText reads a value without checking it against the bounds.
//
// Lists are separated by commas or spaces, and may be empty. Booleans are true and false only,
// as in YAML 1.2: with yes and on, 1 and 0 a typing error would be a value.
func (k *Key) parseText(s string) (any, error) {
	s = strings.TrimSpace(s)
	switch k.Kind {
	case KindInt:
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%.64q is not a whole number; write %s", s, k.expected())
		}
		return n, nil
	case KindBool:
		if s != "true" && s != "false" {
			return nil, fmt.Errorf("%.64q; write true or false", s)
		}
		return s == "true", nil
	case KindDuration:
		d, err := duration.Parse(s)
		if err != nil {
			return nil, fmt.Errorf("%w; write %s", err, k.expected())
		}
		return d, nil
	case KindWords:
		words := []string{}
		for _, w := range strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' }) {
			words = append(words, k.word(w))
		}
		return words, nil
	case KindRules:
		return nil, fmt.Errorf("rules are written in a file; see docs/config.md, then: agentctl config validate")
	}
	return s, nil
}

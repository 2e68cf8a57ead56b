package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
	"golang.org/x/tools/txtar"
	"pgregory.net/rapid"
)

func schemaForTest(t *testing.T) *jsonschema.Schema {
	t.Helper()
	b, err := SchemaJSON()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(schemaURL, doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile(schemaURL)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// schemaAccepts validates the text of a file against the schema, as an editor would.
func schemaAccepts(s *jsonschema.Schema, text []byte) error {
	var v any
	if err := yaml.Unmarshal(text, &v); err != nil {
		return nil // no question for a schema
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil // .nan
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		return err
	}
	return s.Validate(doc)
}

// TestConfigCorpus checks that the daemon and the schema agree, and that each error says
// where it is, what is wrong and what is expected.
func TestConfigCorpus(t *testing.T) {
	schema := schemaForTest(t)
	corpus, err := txtar.ParseFile("testdata/corpus.txtar")
	if err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`(?m)^# want: (.*)$`)
	for _, f := range corpus.Files {
		t.Run(f.Name, func(t *testing.T) {
			_, errs := parseFile(f.Name, f.Data)
			schemaErr := schemaAccepts(schema, f.Data)
			wants := want.FindAllSubmatch(f.Data, -1)
			if len(errs) != len(wants) {
				t.Errorf("%d errors, want %d:\n%v", len(errs), len(wants), errs)
			}
			for _, w := range wants {
				if !slices.ContainsFunc(errs, func(e error) bool { return strings.Contains(e.Error(), string(w[1])) }) {
					t.Errorf("no error says %q:\n%v", w[1], errs)
				}
			}
			for _, e := range errs {
				if !strings.HasPrefix(e.Error(), f.Name+":") && !strings.Contains(e.Error(), "second document") {
					t.Errorf("%v does not say where", e)
				}
			}
			kind, _, _ := strings.Cut(f.Name, "-")
			if kind == "good" != (len(errs) == 0) {
				t.Errorf("the daemon says %v", errs)
			}
			if (kind == "bad") != (schemaErr != nil) {
				t.Errorf("the schema says %v", schemaErr)
			}
		})
	}
}

// TestConfigNeverPanics checks that any file is accepted or refused with a reason, and that
// accepted settings can be written and read again.
func TestConfigNeverPanics(t *testing.T) {
	corpus, err := txtar.ParseFile("testdata/corpus.txtar")
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		text := slices.Clone(rapid.SampledFrom(corpus.Files).Draw(t, "file").Data)
		for range rapid.IntRange(0, 4).Draw(t, "changes") {
			if len(text) == 0 {
				break
			}
			at := rapid.IntRange(0, len(text)-1).Draw(t, "at")
			switch rapid.IntRange(0, 2).Draw(t, "how") {
			case 0:
				text[at] = rapid.SampledFrom([]byte("{}[]:,&*!|>-#\"' \n\t0a\x00\xff")).Draw(t, "byte")
			case 1:
				text = slices.Delete(text, at, at+1)
			default:
				text = slices.Insert(text, at, rapid.SampledFrom([]byte("{}[]:,-\n 0")).Draw(t, "byte"))
			}
		}
		got, errs := parseFile("f", text)
		if len(errs) > 0 {
			if errs.Error() == "" {
				t.Fatal("an error without a text")
			}
			return
		}
		written, err := settingsText(got)
		if err != nil {
			t.Fatal(err)
		}
		again, errs := parseFile("f", written)
		if len(errs) > 0 || len(again) != len(got) {
			t.Fatalf("%q became %q: %v", text, written, errs)
		}
		for name, v := range got {
			if a, b := settingText(v.Value), settingText(again[name].Value); a != b {
				t.Fatalf("%s: %s became %s", name, a, b)
			}
		}
	})
}

// settingText is a setting's value on one line.
func settingText(v any) string {
	if words, ok := v.([]string); ok {
		return strings.Join(words, ",")
	}
	return fmt.Sprint(Plain(v))
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestConfigLayers checks the precedence: flag, environment, saved settings, conf.d by name,
// file, default.
func TestConfigLayers(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	path := write(t, filepath.Join(dir, "config.yaml"), "name: file\nlog_level: debug\nbase_interval_ms: 2000\nmodules: [wear]\nmodule_intervals: {cpu: 200, disk: 300}\nstate_dir: "+state+"\n")
	write(t, filepath.Join(dir, "conf.d", "20-b.yaml"), "name: second\nlog_level: warn\nhistory: {flush: 10s}")
	write(t, filepath.Join(dir, "conf.d", "10-a.yml"), "name: first\nmodule_intervals: {cpu: 400}")
	write(t, filepath.Join(dir, "conf.d", ".hidden.yaml"), "nonsense")
	write(t, filepath.Join(dir, "conf.d", "note.txt"), "nonsense")
	write(t, filepath.Join(state, SettingsFile), "log_level: error\nbase_interval_ms: 3000\nmodules: [power]")
	env := map[string]string{"AGENTCTL_BASE_INTERVAL_MS": "4000", "AGENTCTL_MODULES": "network, power", "AGENTCTL_HISTORY_FLUSH": "20s", "AGENTCTL_NAME": ""}
	s := Source{Path: path, LookupEnv: func(k string) (string, bool) { v, ok := env[k]; return v, ok },
		Flags: Settings{"base_interval_ms": {int64(5000), "--interval"}}}
	c, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ key, value, origin string }{
		{"name", "second", filepath.Join(dir, "conf.d", "20-b.yaml") + ":1"},
		{"log_level", "error", filepath.Join(state, SettingsFile) + ":1"},
		{"base_interval_ms", "5000", "--interval"},
		{"modules", "network,power", "AGENTCTL_MODULES"},
		{"history.flush", "20s", "AGENTCTL_HISTORY_FLUSH"},
		{"module_intervals.cpu", "400", filepath.Join(dir, "conf.d", "10-a.yml") + ":2"},
		{"module_intervals.disk", "300", path + ":5"},
		{"history.max_age", "30d", "default"},
	} {
		got := c.Settings[tt.key]
		if text := settingText(got.Value); text != tt.value || got.Origin != tt.origin {
			t.Errorf("%s is %s from %s, want %s from %s", tt.key, text, got.Origin, tt.value, tt.origin)
		}
	}
	if want := []string{path, filepath.Join(dir, "conf.d", "10-a.yml"), filepath.Join(dir, "conf.d", "20-b.yaml"), filepath.Join(state, SettingsFile)}; !slices.Equal(c.Files, want) {
		t.Errorf("read %v, want %v", c.Files, want)
	}
	if got := c.ModuleIntervals(); len(got) != 2 || got["cpu"] != 400 {
		t.Errorf("module intervals %v", got)
	}
}

// TestConfigSources checks that one Load reports the errors of all sources.
func TestConfigSources(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "conf.d", "20.yaml")
	path := write(t, filepath.Join(dir, "config.yaml"), "name: X\nstate_dir: "+dir+"\n")
	write(t, filepath.Join(dir, "conf.d", "10.yaml"), strings.Repeat("#", maxConfigFile+1))
	if err := os.Mkdir(fifo, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, SettingsFile), "socket: /x")
	env := map[string]string{"AGENTCTL_LOG_LEVEL": "loud", "AGENTCTL_HISTORY_ENABLED": "1", "AGENTCTL_BASE_INTERVAL_MS": "1s", "AGENTCTL_HISTORY_MAX_AGE": "x"}
	_, err := Source{Path: path, LookupEnv: func(k string) (string, bool) { v, ok := env[k]; return v, ok }}.Load()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{path + ":1: name: ", "10.yaml: is larger than 256 KiB", fifo + ": is not a regular file", "settings.yaml:1: socket: cannot be set here",
		"AGENTCTL_LOG_LEVEL: log_level: ", "AGENTCTL_HISTORY_ENABLED: history.enabled: ", "AGENTCTL_BASE_INTERVAL_MS: base_interval_ms: ", "AGENTCTL_HISTORY_MAX_AGE: history.max_age"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("nothing says %q:\n%v", want, err)
		}
	}
	if n := strings.Count(err.Error(), "\n") + 1; n != 8 {
		t.Errorf("%d errors:\n%v", n, err)
	}

	// --config names a file that must be there; the usual one need not be.
	none := Source{Path: filepath.Join(dir, "x", "none.yaml"), LookupEnv: func(string) (string, bool) { return "", false }, Flags: Settings{"state_dir": {filepath.Join(dir, "y"), "--state-dir"}}}
	if _, err := none.Load(); err != nil {
		t.Error(err)
	}
	none.Required = true
	if _, err := none.Load(); err == nil || !strings.Contains(err.Error(), "none.yaml: no such file") {
		t.Errorf("a missing --config: %v", err)
	}
	// A daemon with a relay needs a token, and a person who reads needs none.
	none.Required, none.Flags["relay"] = false, Setting{"wss://relay.example", "--relay"}
	if _, err := none.Load(); err != nil {
		t.Error(err)
	}
	none.ForDaemon = true
	if _, err := none.Load(); err == nil || !strings.Contains(err.Error(), "agentctl token create") || InFile(err) {
		t.Errorf("no token: %v", err)
	}
}

// TestConfigRules checks that a rule of the file replaces the built-in one of the same id.
func TestConfigRules(t *testing.T) {
	s, errs := parseFile("f", []byte(`alerts: {rules: [{id: disk-full, metric: disk_pct, op: ">", threshold: 50, level: info}, {id: own, metric: cpu_pct, op: ">", threshold: 50, level: info}]}`))
	if errs != nil {
		t.Fatal(errs)
	}
	c, err := Source{Path: filepath.Join(t.TempDir(), "none.yaml"), LookupEnv: func(string) (string, bool) { return "", false }}.Load()
	if err != nil {
		t.Fatal(err)
	}
	builtIn := len(c.AlertRules())
	for name, v := range s {
		c.Settings[name] = v
	}
	n := 0
	for _, r := range c.AlertRules() {
		if r.ID == "disk-full" {
			n++
			if r.Threshold != 50 {
				t.Errorf("disk-full is at %v", r.Threshold)
			}
		}
	}
	if got := len(c.AlertRules()); n != 1 || got != builtIn+1 {
		t.Errorf("%d rules, %d named disk-full; want %d, 1", got, n, builtIn+1)
	}
	c.Settings["alerts.defaults"] = Setting{Value: false}
	if got := len(c.AlertRules()); got != 2 {
		t.Errorf("%d rules without the built-in ones, want 2", got)
	}
}

// TestPublicText: what the daemon says of a file to clients quotes it only if everybody may read it.
func TestPublicText(t *testing.T) {
	dir := t.TempDir()
	for d := dir; d != "/"; d = filepath.Dir(d) { // as /etc/agentctl is
		if st, err := os.Stat(d); err != nil || st.Mode().Perm()&1 == 0 && os.Chmod(d, st.Mode().Perm()|1) != nil {
			t.Skip("the temporary directory is closed: ", d)
		}
	}
	path := filepath.Join(dir, "config.yaml")
	for name, text := range map[string]string{"key": "hunter2secret: x\n", "value": "base_interval_ms: hunter2secret\n", "rule": "alerts: {rules: [{id: hunter2secret}]}\n",
		"syntax": "a: *hunter2secret\n", "duration": "history: {flush: hunter2secret}\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Source{Path: path, Required: true, LookupEnv: noEnv, Flags: Settings{"state_dir": {Value: dir}}}.Load()
		if err == nil || !strings.Contains(err.Error(), "hunter2secret") && name != "rule" {
			t.Fatalf("%s: %v", name, err)
		}
		if got := PublicText(err); strings.Contains(got, "hunter2") || !strings.Contains(got, path) || !strings.Contains(got, "config validate") {
			t.Errorf("%s: %q", name, got)
		} else if got = WithQuotes(got); got != err.Error() {
			t.Errorf("%s, for a reader of the file: %q", name, got)
		}
		if err := os.Chmod(path, 0o644); err != nil {
			t.Fatal(err)
		}
		if got := PublicText(err); got != err.Error() {
			t.Errorf("%s, readable by everybody: %q", name, got)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDamagedSettings: whatever has the place of the saved settings, a daemon starts, keeps what is
// valid, and keeps the file.
func TestDamagedSettings(t *testing.T) {
	dir := t.TempDir()
	whole := filepath.Join(dir, "whole.yaml")
	err := SaveSettings(whole, Settings{"base_interval_ms": {Value: int64(5000)}, "log_level": {Value: "debug"}, "modules": {Value: []string{"wear"}}})
	if err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	contents := map[string]string{"empty": "", "noise": "\x00\xff\x01", "yaml": "a: [", "newer": "base_interval_ms: 5000\nsomething_new: 1\n",
		"misplaced": "state_dir: /x\nbase_interval_ms: 5000\n", "huge": strings.Repeat("#", maxConfigFile+1)}
	for n := 1; n < len(good)-2; n += 16 {
		contents[fmt.Sprint("cut at ", n)] = string(good[:n])
	}
	for name, text := range contents {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, SettingsFile)
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			s := Source{Path: filepath.Join(dir, "config.yaml"), ForDaemon: true, LookupEnv: noEnv, Flags: Settings{"state_dir": {Value: dir}}}
			if _, err := s.Load(); err == nil {
				t.Error("a reload accepts it")
			}
			s.SetAside = true
			c, err := s.Load()
			if err != nil || c.Damage == nil || c.Damage.Aside == "" {
				t.Fatalf("%v, %+v", err, c)
			}
			if b, _ := os.ReadFile(c.Damage.Aside); string(b) != text {
				t.Error("the file was not kept")
			}
			if strings.Contains(text, "base_interval_ms: 5000\n") != (c.Int("base_interval_ms") == 5000) {
				t.Errorf("the interval is %d", c.Int("base_interval_ms"))
			}
			again, err := s.Load()
			if err != nil || again.Damage != nil || again.Int("base_interval_ms") != c.Int("base_interval_ms") || again.Text("log_level") != c.Text("log_level") {
				t.Errorf("after a restart: %v, %+v", err, again)
			}
		})
	}
	s := Source{Path: filepath.Join(dir, "config.yaml"), ForDaemon: true, LookupEnv: noEnv, SetAside: true, Flags: Settings{"state_dir": {Value: dir}}}
	if err := os.Mkdir(filepath.Join(dir, SettingsFile), 0o700); err != nil {
		t.Fatal(err)
	}
	if c, err := s.Load(); err != nil || c.Damage == nil || c.Damage.Aside == "" {
		t.Errorf("a directory: %v, %+v", err, c)
	}
	if err := os.Symlink(SettingsFile, filepath.Join(dir, SettingsFile)); err != nil {
		t.Fatal(err)
	}
	if c, err := s.Load(); err != nil || c.Damage == nil || c.Damage.Aside == "" {
		t.Errorf("a link to itself: %v, %+v", err, c)
	}
	if err := os.WriteFile(filepath.Join(dir, SettingsFile), good, 0o600); err != nil {
		t.Fatal(err)
	}
	s.NoSaved = true
	if c, err := s.Load(); err != nil || c.Damage != nil || slices.Contains(c.Files, c.SettingsPath()) {
		t.Errorf("without the saved settings: %v, %+v", err, c)
	}
}

func noEnv(string) (string, bool) { return "", false }

// TestNestedView: a view survives its way through get_config, and the answer of an older daemon,
// which nests nothing, is read too.
func TestNestedView(t *testing.T) {
	c, err := Source{Path: filepath.Join(t.TempDir(), "config.yaml"), LookupEnv: noEnv, Flags: Settings{"history.flush": {Value: time.Minute, Origin: "--history-flush"}}}.Load()
	if err != nil {
		t.Fatal(err)
	}
	v := c.View()
	for name, answer := range map[string]any{"nested": v.Nested(), "flat": struct {
		Values  map[string]any    `json:"values"`
		Origins map[string]string `json:"origins"`
	}{v.Values, v.Origins}} {
		b, err := json.Marshal(answer)
		if err != nil {
			t.Fatal(err)
		}
		var got View
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		for _, key := range KeyNames() {
			if got.Text(key) != v.Text(key) || got.Origins[key] != v.Origins[key] {
				t.Errorf("%s: %s is %s (%s), want %s (%s)", name, key, got.Text(key), got.Origins[key], v.Text(key), v.Origins[key])
			}
		}
	}
}

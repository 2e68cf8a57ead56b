package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/control"
	"agentctl/manifest"
	"agentctl/transport/enroll"
)

// testDaemon is a daemon that listens and does not run.
type testDaemon struct {
	*Daemon
	t    *testing.T
	path string
}

func newTestDaemon(t *testing.T, text string) *testDaemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := writeFile(t, filepath.Join(dir, "config.yaml"), text)
	state := filepath.Join(dir, "state")
	source := config.Source{Path: path, Required: true, ForDaemon: true, LookupEnv: func(string) (string, bool) { return "", false },
		Flags: config.Settings{"state_dir": {Value: state, Origin: "--state-dir"}, "socket": {Value: filepath.Join(dir, "a.sock"), Origin: "--socket"}}}
	cfg, err := source.Load()
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Options{Source: source, Config: cfg, Log: zap.NewNop(), Level: zap.NewAtomicLevel(), Build: Build{Version: "v1.0.0"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.closeHistory)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	t.Cleanup(func() { _ = b.control.Serve(ctx) }) // closes the socket
	return &testDaemon{b, t, path}
}

// reloadWith writes the file and reloads.
func (b *testDaemon) reloadWith(text string) error {
	b.t.Helper()
	writeFile(b.t, b.path, text)
	return b.reloadConfig()
}

func (b *testDaemon) wantModules(want ...string) {
	b.t.Helper()
	var got []string
	if err := b.device.prober.SetModules([]string{"gpu"}); err == nil {
		b.t.Error("the prober accepts any module")
	}
	for _, m := range b.device.prober.ModuleStates() {
		if m.State != "off" {
			got = append(got, m.Name)
		}
	}
	if !slices.Equal(got, want) {
		b.t.Errorf("modules %v are read, want %v", got, want)
	}
}

func TestReload(t *testing.T) {
	b := newTestDaemon(t, "modules: []\nalerts: {defaults: false}\n")
	if got := b.device.prober.Interval(); got != time.Second {
		t.Errorf("sampled every %v", got)
	}
	b.wantModules()
	const rules = `
base_interval_ms: 2000
log_level: debug
modules: [wear]
history: {flush: 10s, max_age: 1h, max_bytes: 3000000}
alerts: {defaults: false, rules: [{id: hot, metric: temperature_c, op: ">", threshold: 70, level: warn}]}
`
	if err := b.reloadWith(rules); err != nil {
		t.Fatal(err)
	}
	if got := b.device.prober.Interval(); got != 2*time.Second || b.level.Level() != zap.DebugLevel || len(b.alerts.Rules()) != 1 {
		t.Errorf("every %v, level %v, rules %v", got, b.level.Level(), b.alerts.Rules())
	}
	b.wantModules("temperature", "wear") // of the rule and of the list
	if err := b.enableModules([]string{"network"}); err != nil {
		t.Fatal(err)
	}
	b.wantModules("network", "temperature", "wear")

	// An invalid file changes nothing, and is reported until it is fixed.
	for _, text := range []string{"base_interval_ms: 1", "nonsense", rules + "ca_file: /nonexistent/ca.pem\nrelay: wss://127.0.0.1:1\ntoken_file: /x\nbase_interval_ms: 3000", "relay: wss://127.0.0.1:1"} {
		if err := b.reloadWith(text); err == nil {
			t.Errorf("accepted: %s", text)
		}
		if v := b.configView(); v.Error == "" || b.status().Config.Error != v.Error || v.Values["base_interval_ms"] != int64(2000) || b.device.prober.Interval() != 2*time.Second || len(b.alerts.Rules()) != 1 {
			t.Errorf("after %s: %+v", text, v)
		}
	}
	if err := b.reloadWith(rules + "disk_path: /proc\nrelay: ws://127.0.0.1:1\ntoken_file: /x\n"); err != nil {
		t.Fatal(err)
	}
	if v := b.configView(); v.Error != "" || !slices.Equal(v.Restart, []string{"disk_path"}) || b.device.link() == nil || b.status().Link.Relay == "" {
		t.Errorf("%+v, link %v", v, b.device.link())
	}
	if err := b.reloadWith("history: {enabled: false}\nalerts: {defaults: false}"); err != nil {
		t.Fatal(err)
	}
	if b.device.link() != nil || b.historyEnabled.Load() || b.status().Storage.State != "off" || len(b.alerts.Rules()) != 0 || b.device.prober.Interval() != time.Second {
		t.Errorf("not undone: %+v", b.status())
	}
	if err := b.reloadWith("history: {flush: 0}"); err != nil {
		t.Fatal(err)
	}
	if err := b.reloadWith("history: {flush: 2s}"); err != nil || !b.historyEnabled.Load() || b.status().Storage.State != "ok" {
		t.Errorf("%v, %+v", err, b.status().Storage)
	}
}

// TestReloadHistory checks that a daemon without history does not begin one, and reports
// that it needs a restart.
func TestReloadHistory(t *testing.T) {
	b := newTestDaemon(t, "history: {flush: 0}")
	if b.history != nil || b.status().Storage.State != "off" {
		t.Fatalf("%+v", b.status().Storage)
	}
	if err := b.reloadWith(""); err != nil {
		t.Fatal(err)
	}
	if v := b.configView(); !slices.Equal(v.Restart, []string{"history.enabled"}) {
		t.Errorf("%+v", v.Restart)
	}
}

// TestSaveClientConfig checks that what a client set is saved beside earlier settings, and
// is in force.
func TestSaveClientConfig(t *testing.T) {
	b := newTestDaemon(t, "base_interval_ms: 4000\nmodule_intervals: {cpu: 200}")
	path := b.config().SettingsPath()
	writeFile(t, path, "log_level: warn\n")
	if err := b.reloadConfig(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := b.saveClientConfig(t.Context(), control.Config{BaseIntervalMS: 5000, ModuleIntervals: map[string]int64{"mem": 700}, Persist: true}); err != nil {
			t.Fatal(err)
		}
	}
	answer, err := json.Marshal(b.configView().Nested())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`"([^"]*)":`).FindAllSubmatch(answer, -1) {
		if !regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`).Match(m[1]) {
			t.Errorf("get_config has the key %s", m[1])
		}
	}
	v := b.configView()
	if v.Values["base_interval_ms"] != int64(5000) || v.Values["module_intervals.mem"] != int64(700) || v.Values["module_intervals.cpu"] != int64(200) ||
		v.Values["log_level"] != "warn" || !strings.HasPrefix(v.Origins["base_interval_ms"], path) || b.device.prober.Interval() != 5*time.Second {
		t.Errorf("%+v", v)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st, err)
	}
	if err := config.SaveSettings(path, config.Settings{"base_interval_ms": {}, "module_intervals.mem": {}, "log_level": {}}); err != nil {
		t.Fatal(err)
	}
	if got, errs := config.ReadFile(path); len(got) != 0 || errs != nil {
		t.Errorf("left: %v %v", got, errs)
	}
	// A client's interval that is not saved is shown as such.
	if err := b.control.Configure(control.Config{BaseIntervalMS: 300}); err != nil {
		t.Fatal(err)
	}
	if v := b.configView(); v.Values["base_interval_ms"] != int64(300) || !strings.Contains(v.Origins["base_interval_ms"], "until the next start") {
		t.Errorf("%v from %v", v.Values["base_interval_ms"], v.Origins["base_interval_ms"])
	}
	// Saved settings that cannot be read are not overwritten.
	writeFile(t, path, "nonsense")
	if err := b.saveClientConfig(t.Context(), control.Config{BaseIntervalMS: 6000}); err == nil {
		t.Error("overwritten")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "nonsense" {
		t.Errorf("%q %v", b, err)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".settings.yaml-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// TestCall checks that the device's tools answer on the socket, under its own names only.
func TestCall(t *testing.T) {
	b := newTestDaemon(t, "")
	text, err := json.Marshal(b.capabilities())
	if err != nil || !strings.Contains(string(text), b.id.NodeID()) || !strings.Contains(string(text), `"system.echo"`) {
		t.Errorf("%s %v", text, err)
	}
	var tools []string
	for _, c := range b.device.mux.Capabilities() {
		kind, ok := manifest.LookupKind(c.Kind)
		if !ok {
			t.Fatal(c.Kind)
		}
		for _, verb := range c.Verbs {
			tools = append(tools, (manifest.ToolName{Short: kind.Short, NodeID: b.id.NodeID(), CapID: c.CapID, Verb: verb}).String())
		}
	}
	for _, tool := range tools {
		if strings.HasSuffix(tool, ".echo") {
			if out, err := b.call(t.Context(), tool, json.RawMessage(`{"message":"x"}`)); err != nil || !strings.Contains(string(out), `"x"`) {
				t.Errorf("%s: %s %v", tool, out, err)
			}
		}
		if strings.HasSuffix(tool, ".subscribe") {
			var e *manifest.Error
			if _, err := b.call(t.Context(), tool, json.RawMessage(`{"interval_ms":1000}`)); !errors.As(err, &e) || e.Code != manifest.BadRequest {
				t.Errorf("%s: %v", tool, err)
			}
		}
		if _, err := b.call(t.Context(), strings.Replace(tool, b.id.NodeID(), enroll.NewInstanceID()[:26], 1), nil); err == nil {
			t.Errorf("%s of another device answers", tool)
		}
	}
}

// TestFingerprint checks that it changes with each file of the configuration, and with no
// other.
func TestFingerprint(t *testing.T) {
	b := newTestDaemon(t, "")
	last := ""
	now := func(changed bool, what string) {
		t.Helper()
		f := b.source.Fingerprint(b.config())
		if (f != last) != changed {
			t.Errorf("%s: changed %v", what, !changed)
		}
		last = f
	}
	now(true, "begin")
	now(false, "nothing")
	confD := filepath.Join(filepath.Dir(b.path), "conf.d", "1.yaml")
	writeFile(t, confD, "")
	now(true, "a file in conf.d")
	writeFile(t, b.config().SettingsPath(), "")
	now(true, "saved settings")
	writeFile(t, filepath.Join(filepath.Dir(b.path), "other"), "")
	now(false, "another file")
	writeFile(t, b.path, "name: a")
	now(true, "the file")
	if err := os.Remove(confD); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	now(true, "a file removed")
}

func writeFile(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

package configctl_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/configctl"
	"agentctl/control"
	"agentctl/daemon"
)

// newSource has its files in a new directory; log_level is set above the files.
func newSource(t *testing.T) config.Source {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return config.Source{Path: filepath.Join(dir, "config.yaml"), LookupEnv: func(string) (string, bool) { return "", false },
		Flags: config.Settings{"state_dir": {Value: dir}, "socket": {Value: filepath.Join(dir, "a.sock")},
			"log_level": {Value: "error", Origin: "--log-level"}, "history.enabled": {Value: false}}}
}

// dialDaemon runs a daemon and connects to it.
func dialDaemon(t *testing.T, source config.Source) *control.Client {
	t.Helper()
	source.ForDaemon = true
	cfg, err := source.Load()
	if err != nil {
		t.Fatal(err)
	}
	d, err := daemon.New(daemon.Options{Source: source, Config: cfg, Log: zap.NewNop(), Level: zap.NewAtomicLevel()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	client, err := control.Dial(t.Context(), cfg.Text("socket"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestChange(t *testing.T) {
	type effects struct{ stopped, running configctl.Effect }
	tests := []struct {
		key   string
		value any // nil removes what the row before set
		want  effects
	}{
		{"base_interval_ms", int64(5000), effects{configctl.NextReload, configctl.Now}},
		{"base_interval_ms", nil, effects{configctl.NextReload, configctl.Now}},
		{"base_interval_ms", nil, effects{configctl.NoChange, configctl.NoChange}},
		{"module_intervals.cpu", int64(2000), effects{configctl.NextReload, configctl.Now}},
		{"modules", []string{"network"}, effects{configctl.NextReload, configctl.Now}},
		{"disk_path", "/proc", effects{configctl.NextStart, configctl.AfterRestart}},
		{"log_level", "debug", effects{configctl.Overridden, configctl.Overridden}},
	}
	for _, running := range []bool{false, true} {
		s := configctl.Session{Source: newSource(t)}
		if running {
			s.Daemon = dialDaemon(t, s.Source)
		}
		for _, tt := range tests {
			if c, err := s.Change(t.Context(), config.FindKey(tt.key), tt.value, true); err != nil || c.Effect != configctl.NoChange {
				t.Errorf("dry run of %s: %+v, %v", tt.key, c, err)
			}
			want := tt.want.stopped
			if running {
				want = tt.want.running
			}
			c, err := s.Change(t.Context(), config.FindKey(tt.key), tt.value, false)
			if err != nil || c.Effect != want {
				t.Fatalf("%s = %v, daemon %v: got %+v, %v; want effect %d", tt.key, tt.value, running, c, err, want)
			}
			saved, errs := config.ReadFile(c.Path)
			if _, isSaved := saved[tt.key]; isSaved != (tt.value != nil) || len(errs) > 0 && !config.IsMissing(errs) {
				t.Errorf("%s = %v: saved %v, %v", tt.key, tt.value, saved, errs)
			}
		}
	}
}

func TestChangeRefused(t *testing.T) {
	s := configctl.Session{Source: newSource(t)}
	if _, err := s.Change(t.Context(), config.FindKey("socket"), "/x", false); !errors.Is(err, configctl.ErrInFileOnly) {
		t.Errorf("socket: %v", err)
	}
	s.Daemon = dialDaemon(t, s.Source)
	key := config.FindKey("relay") // without a token
	if _, err := s.Change(t.Context(), key, "wss://relay.example", false); !errors.Is(err, configctl.ErrRefused) {
		t.Errorf("a relay without a token: %v", err)
	}
	if v, err := s.View(t.Context()); err != nil || v.Error != "" && v.Values["relay"] != "" {
		t.Errorf("after the refusal: %+v, %v", v, err)
	}
}

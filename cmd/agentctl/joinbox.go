package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/control"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/prober/history"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// box is the device daemon: the device, its socket, its history and its alerts, joined
// by the configuration. Its parts know nothing of each other.
type box struct {
	source config.Source
	id     *enroll.Identity
	log    *zap.Logger
	level  zap.AtomicLevel
	start  time.Time

	dev    *device
	srv    *control.Server
	store  *history.Store // nil when the daemon started without history
	alerts *alert.Engine
	given  bool // the socket is systemd's

	running   atomic.Bool // start and stop of the socket
	recording atomic.Bool // the configuration wants a history

	reloading sync.Mutex // serialises reload and persist; taken before mu
	mu        sync.Mutex // protects the fields below
	cfg       *config.Config
	wrong     string   // why the configuration that is there now is not in force
	waiting   []string // keys that need a restart
	started   []string // modules of the prober that the socket asked for
}

// newBox opens and joins the parts; nothing runs yet.
func newBox(source config.Source, cfg *config.Config, id *enroll.Identity, log *zap.Logger, level zap.AtomicLevel) (*box, error) {
	b := &box{source: source, cfg: cfg, id: id, log: log, level: level, start: time.Now()}
	b.running.Store(true)
	b.recording.Store(cfg.HistoryEnabled())
	o, err := b.deviceOptions(cfg)
	if err != nil {
		return nil, err
	}
	if b.dev, err = newDevice(o, clockFloor(filepath.Join(cfg.Text("state_dir"), enroll.FileName))); err != nil {
		return nil, err
	}
	if b.alerts, err = alert.New(cfg.AlertRules()); err != nil {
		return nil, err
	}
	if err := b.setModules(cfg); err != nil {
		return nil, err
	}
	if cfg.HistoryEnabled() {
		b.store, err = history.Open(history.Options{
			Path: filepath.Join(cfg.Text("state_dir"), "history.db"), Flush: cfg.Duration("history.flush"),
			MaxAge: cfg.Duration("history.max_age"), MaxBytes: cfg.Int("history.max_bytes"),
			Now: b.dev.clock.NowMS, Logger: log,
		})
	}
	return b, err
}

// deviceOptions are what a configuration makes of the device.
func (b *box) deviceOptions(c *config.Config) (deviceOptions, error) {
	token := c.TokenPath()
	o := deviceOptions{
		Relay: c.Text("relay"), Name: c.Text("name"), InstanceID: b.id.InstanceID(), Interval: c.Interval(),
		DiskPath: c.Text("disk_path"), Logger: b.log,
		Token: func() (string, error) { return config.ReadToken(token) },
		OnReady: func(ok link.AuthOK) {
			changed, err := b.id.SetNode(ok.NodeID, ok.TenantID)
			switch {
			case err != nil:
				b.log.Warn("the node id could not be kept", zap.Error(err))
			case changed:
				b.log.Info("node id given by the relay", zap.String("node_id", ok.NodeID))
			}
		},
	}
	if o.Relay != "" {
		tlsConfig, err := config.ClientTLS(c.Text("ca_file"))
		if err != nil {
			return o, err
		}
		o.TLS = tlsConfig
	}
	return o, nil
}

// listen opens the control socket.
func (b *box) listen() error {
	ln, err := serviceSocket()
	if err != nil {
		return err
	}
	b.given = ln != nil
	o := control.Options{
		Path: b.config().Text("socket"), Listener: ln, Logger: b.log,
		Status:        func(context.Context) any { return b.status() },
		Persist:       b.persist,
		OnRecording:   b.running.Store,
		EnableModules: b.enable,
		GetConfig:     func(context.Context) any { return b.view() },
		Capabilities:  b.capabilities,
		Call:          b.call,
	}
	if b.store != nil {
		o.History = recorded{b.store}
	}
	b.srv, err = b.dev.newControl(o, identity{})
	if err != nil {
		return err
	}
	c := b.config()
	return b.srv.Configure(control.Config{ModuleIntervals: c.ModuleIntervals()})
}

// ready is what systemd shows of a daemon that is well.
func (b *box) ready() string { return "node " + b.id.NodeID() + "; ask it with: agentctl status" }

// run serves until ctx ends. What is recorded is on the disk then.
func (b *box) run(ctx context.Context, hup <-chan os.Signal) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return runAll(ctx, cancel, b.srv.Serve, b.record, func(ctx context.Context) error { return b.keepUp(ctx, hup) })
}

// close closes the history, which Open left to be opened.
func (b *box) close() {
	if b.store == nil {
		return
	}
	if err := b.store.Close(); err != nil {
		b.log.Warn("history", zap.Error(err))
	}
}

func (b *box) config() *config.Config {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cfg
}

// record has samples judged and recorded until ctx ends.
func (b *box) record(ctx context.Context) error {
	var err error
	if b.store != nil {
		err = b.store.Record(ctx, samples{b})
	} else {
		for err == nil || errors.Is(err, errCadence) && ctx.Err() == nil {
			err = samples{b}.Watch(ctx, b.dev.prober.Interval(), func(prober.Sample) error { return nil })
		}
	}
	if ctx.Err() == nil {
		return fmt.Errorf("no more samples: %w", err)
	}
	return ctx.Err() // what could not be written, close says
}

// errCadence ends a watch that is to begin anew. The history takes it as such because it
// is a cancellation.
var errCadence = fmt.Errorf("the cadence was changed: %w", context.Canceled)

// samples are the samples of the prober on their way to the history: each is judged,
// and those that are not to be recorded end here. One watcher so serves both.
type samples struct{ *box }

func (s samples) Interval() time.Duration { return s.dev.prober.Interval() }

func (s samples) Watch(ctx context.Context, every time.Duration, fn func(prober.Sample) error) error {
	return s.dev.prober.Watch(ctx, every, func(x prober.Sample) error {
		s.tell(s.alerts.Evaluate(x))
		if s.running.Load() && s.recording.Load() {
			return fn(x)
		}
		if s.Interval() != every {
			return errCadence
		}
		return nil
	})
}

// tell sends and logs alerts.
func (b *box) tell(events []alert.Event) {
	for _, e := range events {
		b.srv.PublishAlert(control.Alert{Level: string(e.Level), Metric: e.Metric, Value: e.Value, Threshold: e.Threshold,
			RuleID: e.RuleID, Message: e.Message, TS: e.TS})
		if client := b.dev.link(); client != nil {
			data, _ := json.Marshal(struct { // plain values
				alert.Event
				Cleared bool `json:"cleared,omitempty"`
			}{e, e.Cleared})
			client.SendEvent(link.TopicAlert, data)
		}
		log := b.log.Info
		switch e.Level {
		case alert.Warn:
			log = b.log.Warn
		case alert.Error:
			log = b.log.Error
		}
		log("alert", zap.String("rule", e.RuleID), zap.Float64("value", e.Value), zap.Float64("threshold", e.Threshold), zap.String("message", e.Message))
	}
}

// enable is told which modules of the prober the socket started.
func (b *box) enable(names []string) error {
	b.mu.Lock()
	b.started = names
	c := b.cfg
	b.mu.Unlock()
	return b.setModules(c)
}

// setModules has the prober read what the configuration, the rules and the socket need.
func (b *box) setModules(c *config.Config) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dev.prober.SetModules(enabledModules(c.Words("modules"), b.alerts.Modules(), b.started))
}

// capabilities are what the device announces to a relay, and answers here.
func (b *box) capabilities() any {
	return struct {
		NodeID       string                `json:"node_id"`
		Capabilities []manifest.Capability `json:"capabilities"`
	}{b.id.NodeID(), b.dev.mux.Capabilities()}
}

// call calls a tool of this device by its whole name.
func (b *box) call(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
	name, ok := manifest.ParseToolName(tool)
	if !ok || name.NodeID != b.id.NodeID() {
		return nil, manifest.E(manifest.ManifestInvalid, "this device has no such tool; the method capabilities tells what it has")
	}
	result, stream, err := b.dev.mux.Call(ctx, name, args)
	if err == nil && stream != nil {
		return nil, manifest.E(manifest.BadRequest, "streams are not served here; say hello with metrics_stream")
	}
	return result, err
}

// recorded is the history as the control socket asks it.
type recorded struct{ store *history.Store }

// Query is that of control.History.
func (r recorded) Query(ctx context.Context, q control.HistoryQuery, fn func(control.HistoryRow) error) error {
	var sample prober.Sample // one for all rows
	return r.store.Query(ctx, history.Query{FromMS: q.FromMS, ToMS: q.ToMS, StepMS: q.StepMS, Modules: q.Modules, Limit: q.Limit},
		func(row history.Row) error {
			out := control.HistoryRow{TS: row.TSMS, Readings: row.Modules}
			if row.HasSample {
				sample = row.Sample
				out.Sample = &sample
			}
			return fn(out)
		})
}

// enabledModules are the modules of the prober that somebody needs, each once.
func enabledModules(lists ...[]string) []string {
	var out []string
	for _, name := range prober.OptionalModuleNames() {
		for _, list := range lists {
			if slices.Contains(list, name) && !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	return out
}

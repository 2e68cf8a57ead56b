package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"agentctl/config"
	"agentctl/control"
	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/prober/history"
	"agentctl/statedir"
)

// listen opens the control socket. agentctl.socket holds it open over restarts of the
// service; then systemd passes it to this process.
//
// The path of an inherited socket is systemd's and may differ from the configured one; the view
// of the configuration names the real one.
func (d *Daemon) listen() error {
	inherited, err := control.InheritedListener(os.Getenv)
	if err != nil {
		return err
	}
	d.socketInherited = inherited != nil
	o := control.Options{
		Path: d.cfg.Text("socket"), Listener: inherited, Prober: d.device.prober, Clock: d.device.clock,
		Version: d.build.Version, Logger: d.log,
		Status:        func(context.Context) any { return d.status() },
		Persist:       d.saveClientConfig,
		OnRecording:   d.pushEnabled.Store,
		EnableModules: d.enableModules,
		GetConfig:     func(context.Context) any { return d.configView().Nested() },
		Alerts:        d.standingAlerts,
		Capabilities:  d.capabilities,
		Call:          d.call,
	}
	if d.history != nil {
		o.History = historyReader{d.history}
	}
	if d.control, err = control.NewServer(o); err != nil {
		return err
	}
	if err := d.control.Listen(); err != nil {
		return err
	}
	return d.control.Configure(control.Config{ModuleIntervals: d.cfg.ModuleIntervals()})
}

// saveClientConfig saves the settings of a client's set_config with persist in the state
// directory, then reloads. A request without settings therefore causes a reload and waits for
// it; a credential that a join or a leave has changed is read as well.
//
// reloadMu is held over both, so that a reload by the ticker cannot read the file in between
// and report a change twice.
func (d *Daemon) saveClientConfig(_ context.Context, c control.Config) error {
	change := config.Settings{}
	if c.BaseIntervalMS > 0 {
		change["base_interval_ms"] = config.Setting{Value: c.BaseIntervalMS}
	}
	for name, ms := range c.ModuleIntervals {
		k := config.FindKey("module_intervals." + name)
		if k == nil {
			return fmt.Errorf("no module %s", name)
		}
		change[k.Name] = config.Setting{Value: ms}
	}
	err := func() error {
		d.reloadMu.Lock()
		defer d.reloadMu.Unlock()
		if len(change) > 0 {
			path := d.config().SettingsPath()
			if _, err := statedir.Do(d.disk, func() (struct{}, error) { return struct{}{}, config.SaveSettings(path, change) }); err != nil {
				return err
			}
		}
		return d.reloadLocked()
	}()
	if _, credential, diskErr := d.filesOnDisk(); diskErr == nil && credential != d.membership().file {
		_ = d.updateMembership() // logged, and shown by status
	}
	return err
}

// capabilities returns what the device announces to a relay, for local clients.
func (d *Daemon) capabilities() any {
	return struct {
		NodeID       string                `json:"node_id"`
		Capabilities []manifest.Capability `json:"capabilities"`
	}{d.id.NodeID(), d.device.mux.Capabilities()}
}

// call calls a tool of this device by its full name.
//
// A local client needs no token: access to the socket is the authorization, and the tools of
// a board read without changing anything.
func (d *Daemon) call(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
	name, ok := manifest.ParseToolName(tool)
	if !ok || name.NodeID != d.id.NodeID() {
		return nil, manifest.E(manifest.ManifestInvalid, "this device does not have this tool; the method capabilities lists its tools")
	}
	result, stream, err := d.device.mux.Call(ctx, name, args)
	if err == nil && stream != nil {
		return nil, manifest.E(manifest.BadRequest, "streams are not served here; say hello with metrics_stream")
	}
	return result, err
}

// historySeries answers system.history from the store. The store is opened after the device,
// whose clock it uses, and before the device serves.
type historySeries struct{ *Daemon }

var _ handlers.Recorded = historySeries{}

// Series implements handlers.Recorded.
func (s historySeries) Series(ctx context.Context, q handlers.HistoryQuery, fn func(int64, []float64) error) error {
	return s.history.Series(ctx, history.SeriesQuery(q), fn)
}

// Oldest implements handlers.Recorded.
func (s historySeries) Oldest(ctx context.Context) int64 { return s.history.Oldest(ctx) }

// historyReader answers history queries of the control socket from the store.
//
// control declares the queries that it needs and does not import the store (see the import
// rules); this type is the connection.
type historyReader struct{ store *history.Store }

var _ control.History = historyReader{}

// Query implements control.History.
func (r historyReader) Query(ctx context.Context, q control.HistoryQuery, fn func(control.HistoryRow) error) error {
	var sample prober.Sample // reused: fn does not keep the row
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

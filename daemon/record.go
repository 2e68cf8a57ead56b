package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/control"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/transport/link"
)

// recordSamples evaluates the alert rules on each sample and records it, until ctx ends.
//
// Without a history it still watches, because alerts do not depend on recording. The history
// restarts its watch when the cadence changes; this loop does the same by errIntervalChanged.
func (d *Daemon) recordSamples(ctx context.Context) error {
	var err error
	if d.history != nil {
		err = d.history.Record(ctx, sampleSource{d})
	} else {
		for err == nil || errors.Is(err, errIntervalChanged) && ctx.Err() == nil {
			err = sampleSource{d}.Watch(ctx, d.device.prober.Interval(), func(prober.Sample) error { return nil })
		}
	}
	if ctx.Err() == nil {
		return fmt.Errorf("no more samples: %w", err)
	}
	return ctx.Err() // closeHistory reports what could not be written
}

// errIntervalChanged ends a watch so that it begins again at the new cadence. It wraps
// context.Canceled because the history restarts its watch after a cancellation.
var errIntervalChanged = fmt.Errorf("the cadence changed: %w", context.Canceled)

// sampleSource passes the prober's samples to the history. It also evaluates the alert rules,
// and drops the samples that must not be recorded, so that one watcher of the prober serves
// both purposes.
type sampleSource struct{ *Daemon }

// Interval returns the base cadence.
func (s sampleSource) Interval() time.Duration { return s.device.prober.Interval() }

// Watch calls fn for each sample to record.
func (s sampleSource) Watch(ctx context.Context, every time.Duration, fn func(prober.Sample) error) error {
	return s.device.prober.Watch(ctx, every, func(sample prober.Sample) error {
		s.publishAlerts(s.alerts.Evaluate(sample))
		if s.pushEnabled.Load() && s.historyEnabled.Load() {
			return fn(sample)
		}
		// The history compares the cadence in fn. While samples are dropped, nobody else does.
		if s.Interval() != every {
			return errIntervalChanged
		}
		return nil
	})
}

// logLevels are the log levels of alerts. The engine accepts no rule with another level.
var logLevels = map[alert.Level]func(*zap.Logger, string, ...zap.Field){
	alert.Info:  (*zap.Logger).Info,
	alert.Warn:  (*zap.Logger).Warn,
	alert.Error: (*zap.Logger).Error,
}

// publishAlerts sends alerts to local clients and to the relay, and logs them.
//
// The order is local clients, relay, log. None of them blocks: the link keeps a bounded
// number of events while it is down, and drops the oldest for a new one.
func (d *Daemon) publishAlerts(events []alert.Event) {
	for _, e := range events {
		d.control.PublishAlert(controlAlert(e))
		if client := d.device.link(); client != nil {
			data, _ := json.Marshal(struct { // strings and finite numbers: it cannot fail
				alert.Event
				Cleared bool `json:"cleared,omitempty"`
			}{e, e.Cleared})
			client.SendEvent(link.TopicAlert, data)
		}
		logLevels[e.Level](d.log, "alert", zap.String("rule", e.RuleID), zap.Float64("value", e.Value),
			zap.Float64("threshold", e.Threshold), zap.String("message", e.Message))
	}
}

// controlAlert is an alert as local clients get it.
func controlAlert(e alert.Event) control.Alert {
	return control.Alert{Level: string(e.Level), Metric: e.Metric, Value: e.Value, Threshold: e.Threshold, RuleID: e.RuleID, Message: e.Message, TS: e.TS}
}

// standingAlerts returns the alerts that are raised, for clients that connect later.
func (d *Daemon) standingAlerts() []control.Alert {
	var alerts []control.Alert
	for _, e := range d.alerts.Active() {
		alerts = append(alerts, controlAlert(e))
	}
	return alerts
}

// enableModules enables the modules that clients of the control socket have started, in
// addition to those of the configuration.
func (d *Daemon) enableModules(names []string) error {
	d.mu.Lock()
	d.socketModules = names
	c := d.cfg
	d.mu.Unlock()
	return d.setModules(c)
}

// setModules enables the modules that the configuration, the alert rules or a client of
// the socket needs.
//
// It holds mu over the call of the prober, so that two callers cannot apply an old set last.
func (d *Daemon) setModules(c *config.Config) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	needed := slices.Concat(c.Words("modules"), d.alerts.Modules(), d.socketModules)
	return d.device.prober.SetModules(slices.DeleteFunc(prober.OptionalModuleNames(), func(name string) bool { return !slices.Contains(needed, name) }))
}

package relay

import (
	"go.uber.org/zap/zapcore"

	"agentctl/manifest"
	"agentctl/relay/plugins/control"
)

// logLevel shows and changes the level of the service log for the control plane.
type logLevel struct{ r *Relay }

// newLogLevel returns a nil interface when the level of the logger cannot be changed.
func newLogLevel(r *Relay) control.Level {
	if r.opt.Level == nil {
		return nil
	}
	return logLevel{r}
}

// Level implements control.Level.
func (l logLevel) Level() string { return l.r.opt.Level.Level().String() }

// SetLevel implements control.Level, and publishes the change under log/level.
func (l logLevel) SetLevel(to string) error {
	var lv zapcore.Level
	if lv.UnmarshalText([]byte(to)) != nil || lv < zapcore.DebugLevel || lv > zapcore.ErrorLevel {
		return manifest.E(manifest.BadRequest, "the levels are debug, info, warn and error")
	}
	previous := l.Level()
	l.r.opt.Level.SetLevel(lv)
	if l.r.gateway != nil && previous != to {
		l.r.gateway.Emit("", "log/level", map[string]string{"previous": previous, "current": to})
	}
	return nil
}

package stages

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// traceConfig is the configuration of trace.
type traceConfig struct {
	Level string `json:"level"` // of the log lines
	// Sample is the share of served calls that are logged. Refused and failed calls are
	// logged in any case.
	Sample float64 `json:"sample"`
}

// trace logs calls with their ids, without arguments or results. The trace id does not depend
// on this stage: the kernel assigns one to each request that has none.
type trace struct {
	cfg   traceConfig
	level zapcore.Level
	env   *env
}

// newTrace makes the stage. Its default logs every call at the debug level.
func newTrace(e *env, config []byte) (stage, error) {
	t := &trace{cfg: traceConfig{Level: "debug", Sample: 1}, env: e, level: zap.DebugLevel}
	err := decode("trace", config,
		enumField("level", &t.cfg.Level, "debug", "info"),
		field{"sample", &t.cfg.Sample, "a number from 0 to 1", func() bool { return t.cfg.Sample >= 0 && t.cfg.Sample <= 1 }})
	if t.cfg.Level == "info" {
		t.level = zap.InfoLevel
	}
	return t, err
}

func (t *trace) config() any { return t.cfg }

// wrap logs a call after it ended, so that the line has the outcome and the duration.
func (t *trace) wrap(next kernel.Handler) kernel.Handler {
	log := t.env.opt.Log
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if !log.Core().Enabled(t.level) { // logging that is off costs nothing
			return next(ctx, r)
		}
		start := time.Now()
		res, err := next(ctx, r)
		if err == nil && !t.sampled(r.TraceID) {
			return res, err
		}
		if ce := log.Check(t.level, "call"); ce != nil {
			ce.Write(t.fields(r, res, err, time.Since(start))...)
		}
		return res, err
	}
}

// sampled decides by the trace id, so that all relays and stages select the same calls. The
// right-hand end of a W3C trace id is random.
func (t *trace) sampled(id string) bool {
	if t.cfg.Sample >= 1 || len(id) < 8 {
		return true
	}
	n, err := strconv.ParseUint(id[len(id)-8:], 16, 32)
	return err != nil || float64(n) < t.cfg.Sample*(1<<32)
}

// maxField bounds a string in a log line, bytes.
const maxField = 128

// fields returns the fields of a call's log line, without secrets and of bounded size.
func (t *trace) fields(r *kernel.Request, res *kernel.Result, err error, took time.Duration) []zap.Field {
	fields := make([]zap.Field, 0, 12)
	add := func(key, value string) {
		if value == "" {
			return
		}
		if value = t.env.opt.LogFilter.Clean(value); len(value) > maxField {
			value = value[:maxField]
		}
		fields = append(fields, zap.String(key, value))
	}
	add("trace_id", r.TraceID)
	add("agent_id", r.Caller.Actor)
	add("tenant", r.Caller.Tenant)
	add("transport", r.Caller.Transport)
	if r.Plugin() != "" { // an unknown name is text of the caller's choice
		add("method", r.Method)
		add("tool", r.Tool)
		add("uri", r.URI)
		add("plugin", r.Plugin())
		add("ticket_id", ticketOf(r, res))
	}
	if r.Session != nil {
		if token := r.Session.ProgressToken(); token != nil {
			add("progressToken", fmt.Sprint(token))
		}
	}
	fields = append(fields, zap.Duration("took", took), zap.Bool("ok", err == nil))
	if err != nil {
		e := manifest.AsError(err)
		fields = append(fields, zap.String("code", string(e.Code)), zap.String("reason", e.Reason))
	}
	return fields
}

// ticketOf returns the id of the ticket that a call refers to: ticket_id in any tool's
// arguments, or id in the arguments or the result of the tickets plugin.
func ticketOf(r *kernel.Request, res *kernel.Result) string {
	if id := idIn(r.Arguments, "ticket_id"); id != "" {
		return id
	}
	if r.Plugin() != "tickets" {
		return ""
	}
	if id := idIn(r.Arguments, "id"); id != "" || res == nil {
		return id
	}
	if id := idIn(res.Structured, "id"); id != "" {
		return id
	}
	var answer struct {
		Ticket jsontext.Value `json:"ticket"`
	}
	if len(res.Structured) > maxSearched || json.Unmarshal(res.Structured, &answer) != nil {
		return ""
	}
	return idIn(answer.Ticket, "id")
}

// maxSearched bounds the JSON that is searched for a ticket id, bytes.
const maxSearched = 64 << 10

// idPattern is the form of an id that is safe in a log line.
var idPattern = lazyregexp.New(`^[0-9A-Za-z_-]{1,64}$`)

// idIn returns a string member of a JSON object if it has the form of an id.
func idIn(object []byte, key string) string {
	var m map[string]jsontext.Value
	var id string
	if len(object) > maxSearched || json.Unmarshal(object, &m) != nil || json.Unmarshal(m[key], &id) != nil || !idPattern.MatchString(id) {
		return ""
	}
	return id
}

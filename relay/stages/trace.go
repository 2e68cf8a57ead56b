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

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// traceConfig is the configuration of trace.
type traceConfig struct {
	Level  string  `json:"level"`  // of the log lines
	Sample float64 `json:"sample"` // share of the served calls that are logged; refused and failed ones always are
}

// trace logs calls with their ids, never with arguments or results. The kernel gives
// every request its trace id, with or without this stage.
type trace struct {
	cfg   traceConfig
	level zapcore.Level
	env   *env
}

func newTrace(e *env, config []byte) (stage, error) {
	t := &trace{cfg: traceConfig{Level: "debug", Sample: 1}, env: e}
	err := decode("trace", config,
		field{"level", &t.cfg.Level, "debug or info"},
		field{"sample", &t.cfg.Sample, "a number from 0 to 1"})
	if err == nil {
		err = oneOf("trace.level", t.cfg.Level, "debug", "info")
	}
	if err == nil && (t.cfg.Sample < 0 || t.cfg.Sample > 1) {
		err = wrong("trace.sample", "a number from 0 to 1")
	}
	if t.level = zap.DebugLevel; t.cfg.Level == "info" {
		t.level = zap.InfoLevel
	}
	return t, err
}

func (t *trace) config() any { return t.cfg }

func (t *trace) wrap(next kernel.Handler) kernel.Handler {
	log := t.env.opt.Log
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if !log.Core().Enabled(t.level) { // who logs nothing pays nothing
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

// sampled decides by the trace id, so that every relay and stage picks the same calls.
func (t *trace) sampled(id string) bool {
	if t.cfg.Sample >= 1 || len(id) < 8 {
		return true
	}
	n, err := strconv.ParseUint(id[len(id)-8:], 16, 32) // W3C: the right end is random
	return err != nil || float64(n) < t.cfg.Sample*(1<<32)
}

// maxField bounds a string in a log line, bytes.
const maxField = 128

func (t *trace) fields(r *kernel.Request, res *kernel.Result, err error, took time.Duration) []zap.Field {
	fields := make([]zap.Field, 0, 12)
	add := func(key, value string) {
		if value == "" {
			return
		}
		if value = t.env.scrub(value); len(value) > maxField {
			value = value[:maxField]
		}
		fields = append(fields, zap.String(key, value))
	}
	add("trace_id", r.TraceID)
	add("agent_id", r.Caller.Actor)
	add("tenant", r.Caller.Tenant)
	add("transport", r.Caller.Transport)
	if r.Plugin() != "" { // a name that nobody answers to is a stranger's text
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

// ticketOf finds the ticket that a call is about: ticket_id in any tool's arguments, or
// id in what the tickets plugin takes and gives.
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
	var made struct {
		Ticket jsontext.Value `json:"ticket"`
	}
	if len(res.Structured) > 64<<10 || json.Unmarshal(res.Structured, &made) != nil {
		return ""
	}
	return idIn(made.Ticket, "id")
}

// idIn reads a string member that looks like an id from a JSON object of a moderate size.
func idIn(object []byte, key string) string {
	if len(object) > 64<<10 {
		return ""
	}
	var m map[string]jsontext.Value
	var id string
	if json.Unmarshal(object, &m) != nil || json.Unmarshal(m[key], &id) != nil || len(id) > 64 {
		return ""
	}
	for i := 0; i < len(id); i++ {
		if c := id[i]; (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' && c != '_' {
			return ""
		}
	}
	return id
}

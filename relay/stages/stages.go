// Package stages is the middleware that a relay offers around calls and reads of
// resources, and the Manager that switches it at run time.
//
//	k := kernel.New(...)
//	m, err := stages.New(k.Pipeline(), stages.Options{Log: log, KeyDir: dir})
//	err = m.Enable("redact", "transport=http")
//
// The stages in their default order, outermost first:
//
//	trace     log each call with its ids                        on by default
//	metrics   calls, errors, latency and sizes by class         on by default
//	rate      an operator's rate limits by agent, tenant or plugin
//	sign      verify signed requests, sign results (HMAC)
//	compress  unpack packed arguments, pack results (gzip)
//	acl       an operator's rules: allow, deny, transform
//	redact    remove secrets from results and log lines
//
// A request passes the list downwards, its answer upwards. Therefore a request's signature
// covers the bytes that arrive and a result's the bytes that leave, access rules see plain
// arguments, and secrets are removed before anything is packed or signed. The kernel's own
// checks (tenant, scope, schema, limits, audit) are not stages and cannot be switched off.
//
// Stages keep no state per request and the pipeline runs each at most once per request, so
// retries and duplicates are harmless. Frames of metric streams (RFC-0009) pass all stages
// unchanged: they are neither packed nor signed.
//
// Rate, sign, compress and acl do not apply to an administrator's calls of the control
// plane, so that an operator cannot lock himself out. With the scope plugin=kernel they do.
package stages

import (
	"encoding/json"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/pipeline"
)

// stage is a configured piece of middleware. It may be shared by several entries.
type stage interface {
	wrap(next kernel.Handler) kernel.Handler
	// config is the configuration in force, defaults included.
	config() any
}

// refuser is a stage whose refusals do not depend on the content of a request.
type refuser interface {
	refuses(r *kernel.Request) bool
}

// filterer is a stage that also changes answers of methods that do not pass the pipeline, such as
// prompts/get.
type filterer interface {
	filter(r *kernel.Request, res *kernel.Result, err error) (*kernel.Result, error)
}

// kind describes a stage that can be configured.
type kind struct {
	name           string
	isOn           bool // by default
	exemptsControl bool // does not apply to an administrator's calls of the control plane
	decidesLists   bool // what is listed, or how, depends on it
	outerTo        []pipeline.OrderRule
	// make makes a stage from its configuration; empty: its defaults.
	make func(e *env, config []byte) (stage, error)
}

// env is shared by all stages of a Manager.
type env struct {
	opt     Options
	metrics Metrics
}

// Reasons for the order of the stages.
const (
	traceFirst  = "it times and logs what all the others do"
	signSent    = "a signature covers what is sent"
	signArrived = "a signature is checked over the arguments as they came"
	plainRules  = "rules see plain arguments"
	redactFirst = "what is packed or signed must be clean already"
)

// kinds lists the stages in their default order. All but sign, which needs a key, have a
// default configuration.
var kinds = []*kind{
	{name: "trace", isOn: true, make: newTrace, outerTo: []pipeline.OrderRule{{Stage: pipeline.AnyStage, Reason: traceFirst}}},
	{name: "metrics", isOn: true, make: newMetrics},
	{name: "rate", exemptsControl: true, make: newRate},
	{name: "sign", exemptsControl: true, make: newSign, outerTo: []pipeline.OrderRule{
		{Stage: "compress", Reason: signSent}, {Stage: "acl", Reason: signArrived}, {Stage: "redact", Reason: redactFirst}}},
	{name: "compress", exemptsControl: true, decidesLists: true, make: newCompress, outerTo: []pipeline.OrderRule{
		{Stage: "acl", Reason: plainRules}, {Stage: "redact", Reason: redactFirst}}},
	{name: "acl", exemptsControl: true, decidesLists: true, make: newACL},
	{name: "redact", make: newRedact},
}

// MaxConfig bounds the configuration of a stage, bytes.
const MaxConfig = 16 << 10

// matcher returns a function that reports whether a request is in a scope; nil: all are.
// The scope plugin=kernel includes an administrator's calls of the control plane.
func matcher(k *kind, s pipeline.Scope) func(*kernel.Request) bool {
	in := func(*kernel.Request) bool { return true }
	switch s.Kind {
	case pipeline.Transport:
		in = func(r *kernel.Request) bool { return r.Caller.Transport == s.Name }
	case pipeline.Plugin:
		return func(r *kernel.Request) bool { return r.Plugin() == s.Name }
	case pipeline.Connection:
		in = func(r *kernel.Request) bool { return r.ConnID == s.Name }
	case pipeline.Global:
		if !k.exemptsControl {
			return nil
		}
	}
	if !k.exemptsControl {
		return in
	}
	return func(r *kernel.Request) bool {
		return in(r) && (r.Plugin() != kernel.ControlPlugin || !r.Caller.Has(manifest.ScopeKernelAdmin))
	}
}

// encode encodes plain values of this package, which cannot fail.
func encode(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic("stages: " + err.Error())
	}
	return data
}

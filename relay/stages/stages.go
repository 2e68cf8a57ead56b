// Package stages is the middleware that a relay offers around every call and every read
// of a resource, and the Manager that switches it at run time.
//
//	k := kernel.New(...)
//	m, err := stages.New(k.Pipeline(), stages.Options{Log: log, KeyDir: dir})
//	err = m.Enable("redact", "transport=http")
//
// The list in its default order, outermost first, and what it is for:
//
//	trace     log each call with its ids                        on
//	metrics   calls, errors, latency and sizes by class         on
//	rate      an operator's limits by agent, tenant or plugin
//	sign      check signed requests, sign results (HMAC)
//	compress  unpack packed arguments, pack results (gzip)
//	acl       an operator's rules: allow, deny, transform
//	redact    take secrets out of results and log lines
//
// A request passes the list downwards, its answer upwards. So a signature is checked over
// the bytes that came and made over the bytes that go, rules see plain arguments, and a
// secret is gone before anything is packed or signed. The kernel's own checks (tenant,
// scope, schema, limits, audit) are not stages: nothing here can remove them.
//
// Every stage is safe under retries and duplicates: it keeps no state by request, and
// the pipeline never runs it twice on one. Metric streams (RFC-0009) pass all of them
// untouched: their frames are neither packed nor signed.
//
// Rate, sign, compress and acl spare an administrator's calls of the control plane, so
// that none of them can lock the operator out; the scope plugin=kernel alone reaches it.
package stages

import (
	"encoding/json"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/pipeline"
)

// controlPlane is the name of the plugin that administers the kernel.
const controlPlane = "kernel"

// stage is a configured piece of middleware. It may be shared by several entries.
type stage interface {
	wrap(next kernel.Handler) kernel.Handler
	// config is the configuration in force, defaults included.
	config() any
}

// kind is what the program knows of a stage before anybody configures it.
type kind struct {
	name    string
	on      bool // by default
	spares  bool // an administrator's calls of the control plane
	outside []pipeline.OrderRule
	make    func(e *env, config []byte) (stage, error)
}

// env is what stages share.
type env struct {
	opt     Options
	metrics Metrics
	scrub   func(string) string // of a log field
}

const (
	whyTrace  = "it times and logs what all the others do"
	whySign   = "a signature covers what is sent"
	whyCheck  = "a signature is checked over the arguments as they came"
	whyPlain  = "rules see plain arguments"
	whyRedact = "what is packed or signed must be clean already"
)

// kinds in their default order. Each takes an empty configuration as its defaults, but
// sign needs a key.
var kinds = []*kind{
	{name: "trace", on: true, make: newTrace, outside: []pipeline.OrderRule{{Stage: pipeline.AnyStage, Reason: whyTrace}}},
	{name: "metrics", on: true, make: newMetrics},
	{name: "rate", spares: true, make: newRate},
	{name: "sign", spares: true, make: newSign, outside: []pipeline.OrderRule{{Stage: "compress", Reason: whySign}, {Stage: "acl", Reason: whyCheck}, {Stage: "redact", Reason: whyRedact}}},
	{name: "compress", spares: true, make: newCompress, outside: []pipeline.OrderRule{{Stage: "acl", Reason: whyPlain}, {Stage: "redact", Reason: whyRedact}}},
	{name: "acl", spares: true, make: newACL},
	{name: "redact", make: newRedact},
}

// MaxConfig bounds the configuration of a stage, bytes.
const MaxConfig = 16 << 10

// matcher tells whether a request is in a scope; nil: every one.
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
		if !k.spares {
			return nil
		}
	}
	if !k.spares {
		return in
	}
	return func(r *kernel.Request) bool {
		return in(r) && (r.Plugin() != controlPlane || !r.Caller.Has(manifest.ScopeKernelAdmin))
	}
}

func encode(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic("stages: " + err.Error()) // plain structs of this package
	}
	return data
}

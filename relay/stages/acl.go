package stages

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Bounds of acl.
const (
	maxRules = 256
	maxGlob  = 128 // bytes
	maxSet   = 16  // members that a rule sets or removes
)

// aclRule is one rule. Every selector that is given has to fit; * in one stands for any
// run of characters. The first allow or deny that fits decides; a transform that fits
// changes the arguments and goes on.
type aclRule struct {
	Effect    string                     `json:"effect"`           // allow, deny or transform
	Scope     string                     `json:"scope,omitempty"`  // the capability scope that the tool or resource needs
	Method    string                     `json:"method,omitempty"` // tools/call or resources/read
	Tool      string                     `json:"tool,omitempty"`
	URI       string                     `json:"uri,omitempty"`
	Tenant    string                     `json:"tenant,omitempty"`
	Agent     string                     `json:"agent,omitempty"`
	Transport string                     `json:"transport,omitempty"`
	Set       map[string]json.RawMessage `json:"set,omitempty"`    // members of the arguments
	Remove    []string                   `json:"remove,omitempty"` //
}

// acl applies an operator's rules; what none decides goes on to the kernel, which denies
// by default.
type acl struct {
	Rules []aclRule `json:"rules"`
}

func newACL(_ *env, config []byte) (stage, error) {
	var list []strictjson.Raw
	if err := decode("acl", config, field{"rules", &list, "a list of rules"}); err != nil {
		return nil, err
	}
	rules, err := decodeList("acl.rules", list, maxRules, newRule)
	return &acl{rules}, err
}

func newRule(where string, data []byte) (r aclRule, err error) {
	globs := []*string{&r.Scope, &r.Method, &r.Tool, &r.URI, &r.Tenant, &r.Agent, &r.Transport}
	names := []string{"scope", "method", "tool", "uri", "tenant", "agent", "transport"}
	want := fmt.Sprintf("a pattern of 1 to %d bytes, in which * stands for anything", maxGlob)
	fields := []field{{"effect", &r.Effect, "allow, deny or transform"}}
	for i := range globs {
		fields = append(fields, field{names[i], globs[i], want})
	}
	var set map[string]strictjson.Raw
	fields = append(fields, field{"set", &set, "an object of argument names and values"}, field{"remove", &r.Remove, "a list of argument names"})
	if err = decode(where, data, fields...); err != nil {
		return r, err
	}
	if err = oneOf(where+".effect", r.Effect, "allow", "deny", "transform"); err != nil {
		return r, err
	}
	for i, g := range globs {
		if len(*g) > maxGlob {
			return r, wrong(where+"."+names[i], want)
		}
	}
	for k, v := range set {
		if r.Set == nil {
			r.Set = make(map[string]json.RawMessage, len(set))
		}
		r.Set[k] = json.RawMessage(v)
	}
	switch n := len(r.Set) + len(r.Remove); {
	case n > maxSet:
		err = wrong(where, fmt.Sprintf("at most %d members in set and remove", maxSet))
	case r.Effect == "transform" && n == 0:
		err = wrong(where, "a transform needs set or remove")
	case r.Effect != "transform" && n > 0:
		err = wrong(where, "set and remove belong to the effect transform")
	}
	return r, err
}

func (a *acl) config() any { return a }

func (a *acl) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		for i := range a.Rules {
			rule := &a.Rules[i]
			if !rule.fits(r) {
				continue
			}
			switch rule.Effect {
			case "allow":
				return next(ctx, r)
			case "deny":
				return nil, &manifest.Error{Code: manifest.SafetyDenied, Message: "an access rule of this relay refuses this request; ask its operator", Reason: fmt.Sprintf("acl_rule_%d", i)}
			}
			if err := rule.transform(r); err != nil {
				return nil, err
			}
		}
		return next(ctx, r)
	}
}

func (rule *aclRule) fits(r *kernel.Request) bool {
	is := func(pattern, s string) bool { return pattern == "" || glob(pattern, s) }
	return is(rule.Tool, r.Tool) && is(rule.URI, r.URI) && is(rule.Method, r.Method) &&
		is(rule.Tenant, r.Caller.Tenant) && is(rule.Agent, r.Caller.Actor) && is(rule.Transport, r.Caller.Transport) &&
		(rule.Tool == "" || r.Method == kernel.MethodCall) && (rule.URI == "" || r.Method == kernel.MethodRead) &&
		(rule.Scope == "" || r.Plugin() != "" && glob(rule.Scope, r.RequiredScope()))
}

// transform changes the arguments of a call. What comes out is held against the tool's
// schema like any other arguments.
func (rule *aclRule) transform(r *kernel.Request) error {
	if r.Method != kernel.MethodCall {
		return nil
	}
	args := make(map[string]strictjson.Raw)
	if len(r.Arguments) > 0 && strictjson.Unmarshal(r.Arguments, &args) != nil {
		return &manifest.Error{Code: manifest.BadRequest, Message: "the arguments are not a strict JSON object", Reason: "acl"}
	}
	for _, k := range rule.Remove {
		delete(args, k)
	}
	for k, v := range rule.Set {
		args[k] = strictjson.Raw(v)
	}
	keys := make([]string, 0, len(args))
	for k := range args {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	out := []byte{'{'}
	for i, k := range keys {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(append(append(out, encode(k)...), ':'), args[k]...)
	}
	r.Arguments = append(out, '}')
	return nil
}

package stages

import (
	"context"
	"fmt"
	"maps"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Bounds of acl.
const (
	maxRules  = 256
	maxGlob   = 128 // bytes of a selector
	maxEdited = 16  // arguments that a rule sets or removes
)

// aclRule is one rule. All selectors that are given have to match; * in a selector matches
// any run of characters. The first allow or deny rule that matches decides. A transform rule
// that matches changes the arguments, and the next rules are tried.
type aclRule struct {
	Effect    string                    `json:"effect"`           // allow, deny or transform
	Scope     string                    `json:"scope,omitempty"`  // that the tool or resource needs
	Method    string                    `json:"method,omitempty"` // tools/call, resources/read, prompts/get, ...
	Tool      string                    `json:"tool,omitempty"`
	URI       string                    `json:"uri,omitempty"`
	Tenant    string                    `json:"tenant,omitempty"`
	Agent     string                    `json:"agent,omitempty"`
	Transport string                    `json:"transport,omitempty"`
	Set       map[string]strictjson.Raw `json:"set,omitempty"`    // arguments and their new values
	Remove    []string                  `json:"remove,omitempty"` // arguments
}

// acl applies an operator's rules. A request that no rule decides goes on to the kernel,
// which denies by default: a rule allows nothing that the kernel's own checks refuse. An allow
// rule therefore only ends the search, as an exception from the rules after it.
type acl struct {
	Rules []aclRule `json:"rules"`
}

// newACL makes the stage from {"rules": [...]}.
func newACL(_ *env, config []byte) (stage, error) {
	var list []strictjson.Raw
	if err := decode("acl", config, field{"rules", &list, "a list of rules", nil}); err != nil {
		return nil, err
	}
	rules, err := decodeList("acl.rules", list, maxRules, decodeRule)
	return &acl{rules}, err
}

// decodeRule reads one rule. A selector that is not given is empty and matches every
// request.
func decodeRule(where string, data []byte) (r aclRule, err error) {
	selector := func(name string, into *string) field {
		return field{name, into, fmt.Sprintf("a pattern of 1 to %d bytes, in which * stands for anything", maxGlob),
			func() bool { return len(*into) <= maxGlob }}
	}
	err = decode(where, data,
		enumField("effect", &r.Effect, "allow", "deny", "transform"),
		selector("scope", &r.Scope), selector("method", &r.Method), selector("tool", &r.Tool), selector("uri", &r.URI),
		selector("tenant", &r.Tenant), selector("agent", &r.Agent), selector("transport", &r.Transport),
		field{"set", &r.Set, "an object of argument names and values", nil},
		field{"remove", &r.Remove, "a list of argument names", nil})
	switch n := len(r.Set) + len(r.Remove); {
	case err != nil:
	case n > maxEdited:
		err = invalid(where, fmt.Sprintf("at most %d members in set and remove", maxEdited))
	case r.Effect == "transform" && n == 0:
		err = invalid(where, "a transform needs set or remove")
	case r.Effect != "transform" && n > 0:
		err = invalid(where, "set and remove belong to the effect transform")
	}
	return r, err
}

func (a *acl) config() any { return a }

// refuses reports whether the rules deny a request. They look at no argument, so that what they deny
// need not be listed.
func (a *acl) refuses(r *kernel.Request) bool {
	for i := range a.Rules {
		if rule := &a.Rules[i]; rule.Effect != "transform" && rule.matches(r) {
			return rule.Effect == "deny"
		}
	}
	return false
}

// wrap tries the rules in their order. It changes the request in place: the arguments after
// a transform are those that the plugin gets and that later stages see.
func (a *acl) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		for i := range a.Rules {
			rule := &a.Rules[i]
			if !rule.matches(r) {
				continue
			}
			switch rule.Effect {
			case "allow":
				return next(ctx, r)
			case "deny":
				return nil, &manifest.Error{Code: manifest.SafetyDenied, Reason: fmt.Sprintf("acl_rule_%d", i),
					Message: "an access rule of this relay refuses this request; ask its operator"}
			}
			if err := rule.transform(r); err != nil {
				return nil, err
			}
		}
		return next(ctx, r)
	}
}

// matches reports whether all selectors of the rule match. A tool selector matches calls
// only, and a URI selector reads only. A scope selector matches nothing that the caller
// cannot see.
func (rule *aclRule) matches(r *kernel.Request) bool {
	is := func(pattern, s string) bool { return pattern == "" || glob(pattern, s) }
	return is(rule.Tool, r.Tool) && is(rule.URI, r.URI) && is(rule.Method, r.Method) &&
		is(rule.Tenant, r.Caller.Tenant) && is(rule.Agent, r.Caller.Actor) && is(rule.Transport, r.Caller.Transport) &&
		(rule.Tool == "" || r.Method == kernel.MethodCall) && (rule.URI == "" || r.Method == kernel.MethodRead) &&
		(rule.Scope == "" || r.Plugin() != "" && glob(rule.Scope, r.RequiredScope()))
}

// transform changes the arguments of a call. The kernel validates the new arguments
// against the tool's schema like any others. A read has no arguments and passes unchanged. Of a
// name in both lists, Set wins.
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
	maps.Copy(args, rule.Set)
	r.Arguments = encode(args)
	return nil
}

// Package pipeline runs ordered middleware around a handler.
//
// A Pipeline holds its list of stages behind one atomic pointer: Swap and SwapEntries
// replace the whole list at once, and a request keeps the list it began with until it
// ends.
//
//	p := pipeline.New(handler, stages...)
//	res, err := p.Handle(ctx, req)
//
// An Entry puts a stage into the list for a Scope: for every request, or for those of one
// transport, plugin or connection. The entries of one stage are adjacent, and a request
// passes at most one of them, the narrowest that matches: connection before plugin before
// transport before global. A narrow entry that is not enabled therefore switches the stage
// off in its scope, and a stage runs at most once per request.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
)

// Bounds of a list.
const (
	MaxStages = 32 // with different names
	MaxScoped = 64 // entries of one stage for scopes other than global
)

// Handler answers a request.
type Handler[Req, Res any] func(ctx context.Context, req Req) (Res, error)

// Stage is one named piece of middleware. Wrap returns a handler that works before and after
// next. Wrap is called once per swap, not once per request.
type Stage[Req, Res any] struct {
	Name string
	Wrap func(next Handler[Req, Res]) Handler[Req, Res]
	// OuterTo lists the stages that this one has to be outside of: it comes earlier in the
	// list, handles the request earlier and the response later. A list in another order is
	// refused; rules about stages that are not in the list do not apply.
	OuterTo []OrderRule
	// Refuses, when set, reports whether the stage refuses a request whatever its content, so that
	// lists leave out what it would refuse. It is quick and does not change the request.
	Refuses func(req Req) bool
	// Filter, when set, is what the stage does with an answer that a request got past the pipeline.
	Filter func(req Req, res Res, err error) (Res, error)
}

// OrderRule is one constraint on the order of a list.
type OrderRule struct {
	Stage  string // the name of the inner stage; AnyStage: all others
	Reason string // completes "A has to come before B: ..."
}

// AnyStage in an OrderRule stands for all other stages of the list.
const AnyStage = "*"

// Pipeline is a handler inside an ordered list of stages. Make one with New.
type Pipeline[Req, Res any] struct {
	inner Handler[Req, Res]
	list  atomic.Pointer[composed[Req, Res]]
}

// composed is a list and the handler composed from it. It is immutable.
type composed[Req, Res any] struct {
	entries []Entry[Req, Res]
	handle  Handler[Req, Res]
	// enabled has the groups with an enabled entry, the narrowest entry of each first; refusing has
	// those of enabled with a Refuses function.
	enabled, refusing [][]Entry[Req, Res]
}

// New makes a pipeline around inner; the first stage is the outermost. It panics on a
// list that Swap would refuse, since the first list is part of the program.
func New[Req, Res any](inner Handler[Req, Res], stages ...Stage[Req, Res]) *Pipeline[Req, Res] {
	p := &Pipeline[Req, Res]{inner: inner}
	if err := p.Swap(stages...); err != nil {
		panic(err)
	}
	return p
}

// Handle runs req through the stages that are in force now. A swap during the request does
// not affect it.
func (p *Pipeline[Req, Res]) Handle(ctx context.Context, req Req) (Res, error) {
	return p.list.Load().handle(ctx, req)
}

// Swap is SwapEntries with stages that are enabled for every request.
func (p *Pipeline[Req, Res]) Swap(stages ...Stage[Req, Res]) error {
	entries := make([]Entry[Req, Res], len(stages))
	for i, s := range stages {
		entries[i] = Entry[Req, Res]{Stage: s, Enabled: true}
	}
	return p.SwapEntries(entries...)
}

// SwapEntries puts a new list in force for the requests that begin after it. It refuses a
// list, and changes nothing, if a stage has no name or no Wrap, a stage has two entries for
// one scope, the entries of a stage are not adjacent, the order breaks an OrderRule
// (ErrOrder), or a bound is exceeded.
func (p *Pipeline[Req, Res]) SwapEntries(entries ...Entry[Req, Res]) error {
	groups, err := group(entries)
	if err != nil {
		return err
	}
	if err := checkOrder(groups); err != nil {
		return err
	}
	c := &composed[Req, Res]{handle: p.inner, entries: slices.Clone(entries)}
	for _, g := range slices.Backward(groups) {
		narrowestFirst := func(a, b Entry[Req, Res]) int { return int(b.Scope.Kind) - int(a.Scope.Kind) }
		g = slices.Clone(g)
		slices.SortStableFunc(g, narrowestFirst)
		if c.handle, err = wrap(g, c.handle); err != nil {
			return err
		}
		if slices.ContainsFunc(g, func(e Entry[Req, Res]) bool { return e.Enabled }) {
			c.enabled = append(c.enabled, g)
		}
		if slices.ContainsFunc(g, func(e Entry[Req, Res]) bool { return e.Enabled && e.Stage.Refuses != nil }) {
			c.refusing = append(c.refusing, g)
		}
	}
	p.list.Store(c)
	return nil
}

// Entries lists the entries in force, outermost first.
func (p *Pipeline[Req, Res]) Entries() []Entry[Req, Res] {
	return slices.Clone(p.list.Load().entries)
}

// Names lists the stages that are enabled for at least one scope, outermost first.
func (p *Pipeline[Req, Res]) Names() []string {
	var names []string
	for _, e := range p.list.Load().entries {
		if e.Enabled && (len(names) == 0 || names[len(names)-1] != e.Stage.Name) {
			names = append(names, e.Stage.Name)
		}
	}
	return names
}

// MayRefuse reports whether any request could be refused by Refuses. It is cheap, so that lists need
// not ask for each of their elements.
func (p *Pipeline[Req, Res]) MayRefuse() bool { return len(p.list.Load().refusing) > 0 }

// Refuses reports whether a stage that is in force for req refuses it whatever its content.
func (p *Pipeline[Req, Res]) Refuses(req Req) bool {
	return slices.ContainsFunc(p.list.Load().refusing, func(g []Entry[Req, Res]) bool {
		e := narrowest(g, req)
		return e != nil && e.Enabled && e.Stage.Refuses != nil && e.Stage.Refuses(req)
	})
}

// MayApply reports whether the stage of that name is enabled for any request.
func (p *Pipeline[Req, Res]) MayApply(name string) bool {
	return slices.ContainsFunc(p.list.Load().enabled, func(g []Entry[Req, Res]) bool { return g[0].Stage.Name == name })
}

// Applies reports whether the stage of that name is enabled for req.
func (p *Pipeline[Req, Res]) Applies(name string, req Req) bool {
	for _, g := range p.list.Load().enabled {
		if g[0].Stage.Name == name {
			e := narrowest(g, req)
			return e != nil && e.Enabled
		}
	}
	return false
}

// Filter applies the Filter functions of the stages that are in force for req, the innermost first, to
// an answer that did not come through Handle.
func (p *Pipeline[Req, Res]) Filter(req Req, res Res, err error) (Res, error) {
	for _, g := range slices.Backward(p.list.Load().enabled) {
		if e := narrowest(g, req); e != nil && e.Enabled && e.Stage.Filter != nil {
			res, err = e.Stage.Filter(req, res, err)
		}
	}
	return res, err
}

// group checks the entries one by one and gathers the adjacent ones of each stage.
func group[Req, Res any](entries []Entry[Req, Res]) ([][]Entry[Req, Res], error) {
	var groups [][]Entry[Req, Res]
	seen := make(map[string]bool)
	for i, e := range entries {
		name := e.Stage.Name
		switch {
		case name == "" || e.Stage.Wrap == nil:
			return nil, errors.New("pipeline: a stage needs a name and a Wrap function")
		case e.Scope.Kind != Global && e.Match == nil:
			return nil, fmt.Errorf("pipeline: stage %q for %s needs a Match function", name, e.Scope)
		case i > 0 && entries[i-1].Stage.Name == name:
			last := &groups[len(groups)-1]
			if slices.ContainsFunc(*last, func(o Entry[Req, Res]) bool { return o.Scope == e.Scope }) {
				return nil, fmt.Errorf("pipeline: stage %q is twice in the list for %s", name, e.Scope)
			}
			if *last = append(*last, e); len(*last) > MaxScoped+1 {
				return nil, fmt.Errorf("pipeline: more than %d scopes of stage %q", MaxScoped, name)
			}
		case seen[name]:
			return nil, fmt.Errorf("pipeline: the entries of stage %q are not adjacent", name)
		default:
			seen[name] = true
			if groups = append(groups, []Entry[Req, Res]{e}); len(groups) > MaxStages {
				return nil, fmt.Errorf("pipeline: more than %d stages", MaxStages)
			}
		}
	}
	return groups, nil
}

// ErrOrder is in the error of a list whose order breaks a Rule.
var ErrOrder = errors.New("pipeline: incompatible order")

// checkOrder looks for a stage inside of one that it has to be outside of. It also checks
// stages that are not enabled, so that enabling one never breaks the order.
func checkOrder[Req, Res any](groups [][]Entry[Req, Res]) error {
	for i, g := range groups {
		s := g[0].Stage
		for _, r := range s.OuterTo {
			for _, before := range groups[:i] {
				if name := before[0].Stage.Name; r.Stage == name || r.Stage == AnyStage {
					return fmt.Errorf("%w: %s has to come before %s: %s", ErrOrder, s.Name, name, r.Reason)
				}
			}
		}
	}
	return nil
}

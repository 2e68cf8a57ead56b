// Package pipeline runs ordered middleware around a handler.
//
// A Pipeline holds its list of stages behind one atomic pointer: Swap replaces the
// whole list at once, and a request keeps the list it began with until it ends.
//
//	p := pipeline.New(handler, stages...)
//	res, err := p.Handle(ctx, req)
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
)

// MaxStages bounds a list of stages.
const MaxStages = 32

// Handler answers a request.
type Handler[Req, Res any] func(ctx context.Context, req Req) (Res, error)

// Stage is one named piece of middleware. Wrap returns a handler that does its work
// before and after next; it is called once a swap, not once a request.
type Stage[Req, Res any] struct {
	Name string
	Wrap func(next Handler[Req, Res]) Handler[Req, Res]
}

// Pipeline is a handler inside an ordered list of stages. Make one with New.
type Pipeline[Req, Res any] struct {
	inner Handler[Req, Res]
	list  atomic.Pointer[composed[Req, Res]]
}

type composed[Req, Res any] struct {
	names  []string
	handle Handler[Req, Res]
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

// Handle runs req through the stages that are in force at this moment.
func (p *Pipeline[Req, Res]) Handle(ctx context.Context, req Req) (Res, error) {
	return p.list.Load().handle(ctx, req)
}

// Swap puts a new list in force for the requests that begin after it. It refuses a list
// with an unnamed, unusable or repeated stage, or with more than MaxStages, and then
// changes nothing.
func (p *Pipeline[Req, Res]) Swap(stages ...Stage[Req, Res]) error {
	if len(stages) > MaxStages {
		return fmt.Errorf("pipeline: %d stages, at most %d", len(stages), MaxStages)
	}
	c := &composed[Req, Res]{handle: p.inner}
	seen := make(map[string]bool, len(stages))
	for _, s := range stages {
		switch {
		case s.Name == "" || s.Wrap == nil:
			return errors.New("pipeline: a stage needs a name and a Wrap function")
		case seen[s.Name]:
			return fmt.Errorf("pipeline: stage %q stands twice in the list", s.Name)
		}
		seen[s.Name] = true
		c.names = append(c.names, s.Name)
	}
	for i := len(stages) - 1; i >= 0; i-- {
		if c.handle = stages[i].Wrap(c.handle); c.handle == nil {
			return fmt.Errorf("pipeline: the Wrap of stage %q returns no handler", stages[i].Name)
		}
	}
	p.list.Store(c)
	return nil
}

// Names lists the stages in force, outermost first.
func (p *Pipeline[Req, Res]) Names() []string {
	return append([]string(nil), p.list.Load().names...)
}

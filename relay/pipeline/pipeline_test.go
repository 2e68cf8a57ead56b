package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"agentctl/relay/pipeline"
)

type (
	stage   = pipeline.Stage[*call, string]
	handler = pipeline.Handler[*call, string]
)

// call is a request that remembers where it went.
type call struct {
	n     int
	trail []string
}

func (c *call) went(where string) { c.trail = append(c.trail, where) }

// mark is a stage that writes its name before and after.
func mark(name string) stage {
	return stage{Name: name, Wrap: func(next handler) handler {
		return func(ctx context.Context, c *call) (string, error) {
			c.went("+" + name)
			res, err := next(ctx, c)
			c.went("-" + name)
			return res, err
		}
	}}
}

func inner(_ context.Context, c *call) (string, error) {
	c.went("handler")
	return fmt.Sprint("answer ", c.n), nil
}

func TestOrder(t *testing.T) {
	refuse := errors.New("refused")
	gate := stage{Name: "gate", Wrap: func(handler) handler {
		return func(context.Context, *call) (string, error) { return "", refuse }
	}}
	tests := []struct {
		name   string
		stages []stage
		trail  string
		err    error
	}{
		{"none", nil, "handler", nil},
		{"one", []stage{mark("a")}, "+a handler -a", nil},
		{"the first is the outermost", []stage{mark("a"), mark("b"), mark("c")}, "+a +b +c handler -c -b -a", nil},
		{"a stage may answer itself", []stage{mark("a"), gate, mark("b")}, "+a -a", refuse},
	}
	for _, tt := range tests {
		p := pipeline.New(inner, tt.stages...)
		c := &call{n: 7}
		res, err := p.Handle(t.Context(), c)
		if got := strings.Join(c.trail, " "); got != tt.trail || !errors.Is(err, tt.err) {
			t.Errorf("%s: went %s, %v; want %s, %v", tt.name, got, err, tt.trail, tt.err)
		}
		if tt.err == nil && res != "answer 7" {
			t.Errorf("%s: got %q", tt.name, res)
		}
		var names []string
		for _, s := range tt.stages {
			names = append(names, s.Name)
		}
		if !slices.Equal(p.Names(), names) {
			t.Errorf("%s: Names = %v, want %v", tt.name, p.Names(), names)
		}
	}
}

func TestContextPassesThrough(t *testing.T) {
	type key struct{}
	tag := stage{Name: "tag", Wrap: func(next handler) handler {
		return func(ctx context.Context, c *call) (string, error) {
			return next(context.WithValue(ctx, key{}, "tagged"), c)
		}
	}}
	p := pipeline.New(func(ctx context.Context, _ *call) (string, error) {
		s, _ := ctx.Value(key{}).(string)
		return s, nil
	}, tag)
	if got, _ := p.Handle(t.Context(), &call{}); got != "tagged" {
		t.Errorf("got %q", got)
	}
}

func TestRefusedListsChangeNothing(t *testing.T) {
	many := make([]stage, pipeline.MaxStages+1)
	for i := range many {
		many[i] = mark(fmt.Sprint("s", i))
	}
	tests := []struct {
		name   string
		stages []stage
	}{
		{"a stage without a name", []stage{mark("b"), mark("")}},
		{"a stage without Wrap", []stage{mark("b"), {Name: "c"}}},
		{"a stage whose Wrap gives nothing", []stage{mark("b"), {Name: "c", Wrap: func(handler) handler { return nil }}}},
		{"a stage twice", []stage{mark("b"), mark("c"), mark("b")}},
		{"33 stages", many},
	}
	for _, tt := range tests {
		p := pipeline.New(inner, mark("a"))
		if err := p.Swap(tt.stages...); err == nil {
			t.Errorf("%s: accepted", tt.name)
		}
		c := &call{}
		if _, err := p.Handle(t.Context(), c); err != nil || strings.Join(c.trail, " ") != "+a handler -a" {
			t.Errorf("%s: then went %v, %v", tt.name, c.trail, err)
		}
		if !slices.Equal(p.Names(), []string{"a"}) {
			t.Errorf("%s: then Names = %v", tt.name, p.Names())
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: New did not panic", tt.name)
				}
			}()
			pipeline.New(inner, tt.stages...)
		}()
	}
	if err := pipeline.New(inner).Swap(many[1:]...); err != nil {
		t.Errorf("32 stages: %v", err)
	}
}

func TestNamesIsACopy(t *testing.T) {
	p := pipeline.New(inner, mark("a"))
	p.Names()[0] = "changed"
	if got := p.Names(); got[0] != "a" {
		t.Errorf("Names = %v", got)
	}
}

// A request keeps the list it began with, whatever is swapped in meanwhile.
func TestRequestKeepsItsList(t *testing.T) {
	inside, proceed := make(chan struct{}), make(chan struct{})
	p := pipeline.New(func(ctx context.Context, c *call) (string, error) {
		if c.n == 1 {
			close(inside)
			<-proceed
		}
		return inner(ctx, c)
	}, mark("old"))
	first := &call{n: 1}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = p.Handle(context.Background(), first)
	}()
	<-inside
	if err := p.Swap(mark("new")); err != nil {
		t.Fatal(err)
	}
	second := &call{n: 2}
	if _, err := p.Handle(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	close(proceed)
	<-done
	if got := strings.Join(first.trail, " "); got != "+old handler -old" {
		t.Errorf("the first request went %s", got)
	}
	if got := strings.Join(second.trail, " "); got != "+new handler -new" {
		t.Errorf("the second request went %s", got)
	}
}

// 10,000 numbered requests over 100 swaps: each is answered once, with its own answer, by
// one whole list. The requests between two swaps are counted, so that the load surely
// meets every list.
func TestSwapUnderLoad(t *testing.T) {
	const requests, swaps, callers = 10_000, 100, 8
	p := pipeline.New(inner, list(0)...)
	tickets := make(chan int)
	var answered [requests]atomic.Int32
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for n := range tickets {
				c := &call{n: n}
				res, err := p.Handle(context.Background(), c)
				if err != nil || res != fmt.Sprint("answer ", n) {
					t.Errorf("request %d: %q, %v", n, res, err)
				}
				if !oneList(c.trail) {
					t.Errorf("request %d saw parts of two lists: %v", n, c.trail)
				}
				answered[n].Add(1)
			}
		})
	}
	for n := range requests {
		if n%(requests/swaps) == 0 {
			if err := p.Swap(list(n / (requests / swaps))...); err != nil {
				t.Error(err)
			}
		}
		tickets <- n
	}
	close(tickets)
	wg.Wait()
	for n := range answered {
		if got := answered[n].Load(); got != 1 {
			t.Errorf("request %d was answered %d times", n, got)
		}
	}
}

// list is a generation of stages: as many as fit its number, all marked with it.
func list(generation int) []stage {
	stages := make([]stage, 1+generation%5)
	for i := range stages {
		stages[i] = mark(fmt.Sprintf("g%d.%d", generation, i))
	}
	return stages
}

// oneList says whether a trail is the whole of one generation, in its order.
func oneList(trail []string) bool {
	var generation int
	if _, err := fmt.Sscanf(trail[0], "+g%d.0", &generation); err != nil {
		return false
	}
	var want []string
	stages := list(generation)
	for _, s := range stages {
		want = append(want, "+"+s.Name)
	}
	want = append(want, "handler")
	for _, s := range slices.Backward(stages) {
		want = append(want, "-"+s.Name)
	}
	return slices.Equal(trail, want)
}

func BenchmarkHandle(b *testing.B) {
	nop := func(name string) stage {
		return stage{Name: name, Wrap: func(next handler) handler {
			return func(ctx context.Context, c *call) (string, error) { return next(ctx, c) }
		}}
	}
	p := pipeline.New(func(context.Context, *call) (string, error) { return "", nil }, nop("a"), nop("b"), nop("c"))
	c := &call{}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = p.Handle(context.Background(), c)
	}
}

func ExamplePipeline() {
	shout := pipeline.Stage[string, string]{Name: "shout", Wrap: func(next pipeline.Handler[string, string]) pipeline.Handler[string, string] {
		return func(ctx context.Context, req string) (string, error) {
			res, err := next(ctx, req)
			return strings.ToUpper(res), err
		}
	}}
	p := pipeline.New(func(_ context.Context, req string) (string, error) { return "hello " + req, nil })
	before, _ := p.Handle(context.Background(), "board")
	_ = p.Swap(shout)
	after, _ := p.Handle(context.Background(), "board")
	fmt.Println(before, "/", after, p.Names())
	// Output: hello board / HELLO BOARD [shout]
}

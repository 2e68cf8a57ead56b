package fleet

import (
	"context"
	"math"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// fleet.query asks each board for one value of each metric, which the board computes from its
// history, and merges these values:
//
//	query ── newQueryPlan, selectBoards ── what is asked, of which boards
//	      ── askPast or askNow ─────────── a value of each metric of each board, or why there is none
//	      ── findChanges ───────────────── since when the boards that are named are as they are
//	      ── newQueryAnswer ────────────── figures, names, groups, a series; then fit into MaxAnswer

// Times of a query.
const (
	// allTime is for all questions of a query; the rest of kernel.CallBudget is for the answer, which is
	// lost if it comes later. The times below may add up to more, with models and changes: then changes
	// are left out.
	allTime    = 4600 * time.Millisecond
	queryTime  = 3300 * time.Millisecond // for the values of all boards
	boardTime  = 2500 * time.Millisecond // for one board: a page of history takes 2 s at most
	changeTime = time.Second             // for the boards that are named
)

var queryTool = tool{
	name: "fleet.query", title: "Query figures of boards", scope: manifest.ScopeCallReadOnly,
	description: "Figures of many boards in one call, now or over a time: mean, min, max, outliers, the highest and since when. Each board computes its own.",
	input:       queryInput,
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
		return p.query(ctx, r)
	},
}

// boardValues is what a query learned of one board.
type boardValues struct {
	board  Board
	values []float64 // of the plan's metrics, NaN where there is none
	why    string    // there are no values: one of the reasons
	group  []string  // in which the board counts
	change *change   // of the plan's first metric, for a board that is named
	level  float64   // that the change is about
}

// has reports whether the board has a value of the plan's metric i.
func (b *boardValues) has(i int) bool { return b.why == "" && !math.IsNaN(b.values[i]) }

// query answers fleet.query.
func (p *Plugin) query(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	var args queryArguments
	if err := readArguments(r, &args); err != nil {
		return nil, err
	}
	now := p.opt.Now()
	q, err := newQueryPlan(&args, now)
	if err != nil {
		return nil, err
	}
	selected, err := p.selectBoards(r.Caller, args.Boards)
	if err != nil {
		return nil, err
	}
	release, err := p.acquireAsking(r.Caller)
	if err != nil {
		return nil, err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, allTime)
	defer cancel()
	boards := make([]boardValues, len(selected))
	for i := range selected {
		boards[i] = boardValues{board: selected[i], values: nans(len(q.metrics)), why: statusReason(&selected[i])}
	}
	totals := newSeriesTotals(q)
	if q.isNow {
		p.askNow(ctx, r, q, boards)
	} else {
		p.askPast(ctx, r, q, boards, totals)
	}
	// Models come after the values, because a board without a model still counts, in the group noModel.
	p.assignGroups(ctx, r, q, boards)
	named := rank(q, boards)
	p.findChanges(ctx, r, q, boards, named, now)
	return newQueryAnswer(q, boards, named, totals, now).result()
}

// askPast asks the boards for their values over the window of q, those that have no reason not to be asked.
// A board for which there was no time in queryTime gets that as the reason.
func (p *Plugin) askPast(ctx context.Context, r *kernel.Request, q *queryPlan, boards []boardValues, totals *seriesTotals) {
	h := &historyRequest{metrics: q.metrics, from: q.from.UnixMilli(), to: q.to.UnixMilli(), step: q.boardStep().Milliseconds(), aggregate: q.aggregate}
	var asked []*boardValues
	for i := range boards {
		if boards[i].why == "" {
			asked = append(asked, &boards[i])
		}
	}
	ctx, cancel := context.WithTimeout(ctx, queryTime)
	defer cancel()
	started := p.slots.each(ctx, r.Caller.Tenant, len(asked), boardTime, func(ctx context.Context, i int) {
		// Each goroutine writes one element of boards, so only totals needs a lock.
		b := asked[i]
		values, err := p.boardHistory(ctx, r, b.board.ID, h)
		if err != nil {
			b.why = reasonOf(err)
			return
		}
		b.why = reasonNotMeasured
		for i := range values {
			b.values[i] = foldValues(values[i], q.aggregate)
			if !math.IsNaN(b.values[i]) {
				b.why = ""
			}
		}
		totals.add(values)
	})
	for _, b := range asked[started:] {
		b.why = reasonNotAsked
	}
}

// boardHistory is askHistory for a board by its id; errNoHistory if it has no such tool.
func (p *Plugin) boardHistory(ctx context.Context, r *kernel.Request, nodeID string, h *historyRequest) ([][]float64, error) {
	name, ok := p.boardTool(ctx, r.Caller.Tenant, nodeID, manifest.KindHistory, manifest.VerbQuery)
	if !ok {
		return nil, errNoHistory
	}
	return p.askHistory(ctx, r, name, h)
}

// findChanges finds since when the named boards are as they are, from the values of their history: in
// the window of q, or in the last day if q is about now. A board whose value is as usual has no
// change. What a board does not answer in time is left out.
func (p *Plugin) findChanges(ctx context.Context, r *kernel.Request, q *queryPlan, boards []boardValues, named []int, now time.Time) {
	if len(named) == 0 {
		return
	}
	from, to := q.from, q.to
	if q.isNow {
		from, to = now.Add(-sinceWindow), now
	}
	usual := median(valuesOf(boards, 0))
	h := &historyRequest{metrics: q.metrics[:1], from: from.UnixMilli(), to: to.UnixMilli(), aggregate: aggregateLast,
		step: max(minQueryStep, (to.Sub(from)+sincePoints-1)/sincePoints).Milliseconds()}
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	p.slots.each(ctx, r.Caller.Tenant, len(named), changeTime, func(ctx context.Context, i int) {
		b := &boards[named[i]]
		// If top is more than half of the boards, some of them are on the other side of the median. For
		// these a time is of no use.
		up := b.values[0] > usual
		if math.Abs(b.values[0]-usual) <= noticeable*math.Abs(usual) || up != (q.top > 0) {
			return
		}
		values, err := p.boardHistory(ctx, r, b.board.ID, h)
		if err != nil {
			return
		}
		level := (b.values[0] + usual) / 2
		if c, ok := findChange(values[0], h.from, h.step, level, up); ok {
			b.change, b.level = &c, level
		}
	})
}

// noticeable is the part of the usual value by which a board has to differ to be called different.
const noticeable = 0.05

// seriesTotals merges the values of boards step by step, for a query with a step.
type seriesTotals struct {
	mu    sync.Mutex // protects steps
	steps [][]tally  // by metric and step; nil: the query has no step
}

// tally summarizes values that are added one by one. The zero value has none.
type tally struct {
	n        int
	sum      float64
	min, max float64
}

// newSeriesTotals makes the tallies of a series, none for a query without a step.
func newSeriesTotals(q *queryPlan) *seriesTotals {
	o := new(seriesTotals)
	if q.step == 0 {
		return o
	}
	for range q.metrics {
		o.steps = append(o.steps, make([]tally, points(q.to.Sub(q.from), q.step)))
	}
	return o
}

// add adds the values of a board, by metric and step.
func (o *seriesTotals) add(values [][]float64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range o.steps {
		for j := range o.steps[i] {
			o.steps[i][j].add(values[i][j])
		}
	}
}

// add skips NaN, which one board without a value at a step would spread to the sum of all.
func (t *tally) add(v float64) {
	if math.IsNaN(v) {
		return
	}
	if t.n++; t.n == 1 {
		t.min, t.max = v, v
	}
	t.sum, t.min, t.max = t.sum+v, min(t.min, v), max(t.max, v)
}

// value is what stands for the step: the lowest or highest value of a board if the query asks for
// those, else the mean over the boards.
func (t *tally) value(aggregate string) float64 {
	switch {
	case t.n == 0:
		return math.NaN()
	case aggregate == aggregateMin:
		return t.min
	case aggregate == aggregateMax:
		return t.max
	}
	return t.sum / float64(t.n)
}

package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A figure of now comes from the cheapest source that has it:
//
//	the cache, or a frame of an open stream   no question (figureCache.get)
//	system.history, the last seconds          one question for all recorded figures (askRecorded)
//	metrics.snapshot                          figures of a frame
//	system.modules                            a reading of the sensors, which is the most work for a board
//
// The history is asked only if a figure of modules is missing: a frame alone is as cheap.
const (
	// nowTime is for all boards of a question about now; one has askTimeout for each of its tools.
	nowTime = 3 * time.Second
	// freshWearTime is how old a recorded value of wear may be to be one of now: it is recorded once
	// an hour.
	freshWearTime = 2 * time.Hour
)

// askNow fills in the boards' values of now: those that are known and not older than maxFigureAge,
// else those that the boards answer.
//
// Two limits end it: nowTime for all boards, and askTimeout for each tool of a board. A board that was
// not asked in that time is missing with another reason than one that did not answer, so that a caller
// knows that asking fewer boards helps.
func (p *Plugin) askNow(ctx context.Context, r *kernel.Request, q *queryPlan, boards []boardValues) {
	now := p.opt.Now()
	var cold []*boardValues
	for i := range boards {
		if b := &boards[i]; b.why == "" {
			f := p.figures.get(p.opt.Boards, p.cacheKey(r, b.board.ID), now)
			b.takeFigures(q, &f)
			if frame, modules := f.lacks(q.metrics, now); frame || modules {
				cold = append(cold, b)
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, nowTime)
	defer cancel()
	// currentFigures calls three tools at most: history, snapshot, modules.
	started := p.slots.each(ctx, r.Caller.Tenant, len(cold), 3*askTimeout, func(ctx context.Context, i int) {
		b := cold[i]
		f, err := p.currentFigures(ctx, r, b.board.ID, q.metrics)
		if b.takeFigures(q, f); err != nil && b.why != "" {
			b.why = reasonOf(err)
		}
	})
	for _, b := range cold[started:] {
		if b.why != "" {
			b.why = reasonNotAsked
		}
	}
}

// takeFigures takes the values of the plan's metrics. A board without any of them is missing as
// reasonNotMeasured, until an error of one of its tools says more (askNow).
func (b *boardValues) takeFigures(q *queryPlan, f *figures) {
	b.why = reasonNotMeasured
	for i, m := range q.metrics {
		if b.values[i] = metrics[m].possible(f.values[m]); !math.IsNaN(b.values[i]) {
			b.why = ""
		}
	}
}

// lacks reports which sources of figures a board has to be asked for the metrics: a metrics frame, or
// its modules. What it did not measure a moment ago it is not asked for again.
func (f *figures) lacks(list []int, now time.Time) (frame, modules bool) {
	for _, m := range list {
		if !f.isFresh(m, now) {
			frame, modules = frame || !metrics[m].isModule, modules || metrics[m].isModule
		}
	}
	return frame, modules
}

// currentFigures returns the figures of a board that are known, after asking it for those of the
// metrics that are not. What it has recorded a moment ago is one question and costs it less than a
// reading of its sensors; what it does not record it is asked to read. An error is about one of the
// board's tools; the figures of others are there.
func (p *Plugin) currentFigures(ctx context.Context, r *kernel.Request, nodeID string, list []int) (*figures, error) {
	f := p.figures.get(p.opt.Boards, p.cacheKey(r, nodeID), p.opt.Now())
	frame, modules := f.lacks(list, p.opt.Now())
	var err error
	if modules {
		err = p.askRecorded(ctx, r, nodeID, list)
		f = p.figures.get(p.opt.Boards, p.cacheKey(r, nodeID), p.opt.Now())
		frame, modules = f.lacks(list, p.opt.Now())
	}
	if frame {
		err = p.askFigures(ctx, r, nodeID, manifest.KindMetrics, manifest.VerbSnapshot)
	}
	if modules {
		if e := p.askFigures(ctx, r, nodeID, manifest.KindModules, manifest.VerbRead); !errors.Is(e, errNoTool) || err == nil {
			err = e // else the error of the history, which a board without the tool has to have
		}
	}
	f = p.figures.get(p.opt.Boards, p.cacheKey(r, nodeID), p.opt.Now())
	return &f, err
}

// askFigures asks a board with one of its tools and keeps the answer.
func (p *Plugin) askFigures(ctx context.Context, r *kernel.Request, nodeID, kind, verb string) error {
	name, ok := p.boardTool(ctx, r.Caller.Tenant, nodeID, kind, verb)
	if !ok {
		return errNoTool
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	res, err := p.callBoard(ctx, r, name, nil)
	if err == nil {
		p.figures.put(p.cacheKey(r, nodeID), kind, res.Structured, p.opt.Now())
	}
	return err
}

// askRecorded asks a board for what it has recorded of metrics a moment ago, and keeps that. The
// first value of its answer is of most of freshWearTime, which is good enough for wear only, and the
// second of maxFigureAge.
func (p *Plugin) askRecorded(ctx context.Context, r *kernel.Request, nodeID string, list []int) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	now := p.opt.Now()
	h := &historyRequest{metrics: list, from: now.Add(-freshWearTime).UnixMilli(), to: now.UnixMilli(), step: (freshWearTime - maxFigureAge).Milliseconds(), aggregate: aggregateLast}
	found, err := p.boardHistory(ctx, r, nodeID, h)
	if err != nil {
		return err
	}
	values := nans(numMetrics)
	for i, m := range list {
		if values[m] = found[i][1]; math.IsNaN(values[m]) && metrics[m].module == "wear" {
			values[m] = found[i][0]
		}
	}
	p.figures.putValues(p.cacheKey(r, nodeID), values, now)
	return nil
}

// modelCache has the models of boards that this plugin has asked: a board seldom becomes another one.
// The zero value is empty.
type modelCache struct {
	mu     sync.Mutex            // protects models; a leaf
	models map[string]knownModel // by Plugin.cacheKey
}

type knownModel struct {
	model string
	at    time.Time
}

const (
	maxModelAge  = 10 * time.Minute
	maxModelText = 64 // bytes of an answer
	noModel      = "unknown"
	noTag        = "untagged"
)

// get returns a model that is not older than maxModelAge; "" with ok is a board without the tool.
func (c *modelCache) get(key string, now time.Time) (model string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, ok := c.models[key]
	return k.model, ok && now.Sub(k.at) <= maxModelAge
}

// put keeps a model. A full cache is emptied: it fills again with one question to each board.
func (c *modelCache) put(key, model string, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.models == nil || len(c.models) >= maxCachedFigures {
		c.models = make(map[string]knownModel)
	}
	c.models[key] = knownModel{model, now}
}

// assignGroups says in which groups each board counts, with values or without. Models are asked for,
// of boards that are online.
func (p *Plugin) assignGroups(ctx context.Context, r *kernel.Request, q *queryPlan, boards []boardValues) {
	now := p.opt.Now()
	var unknown []*boardValues
	for i := range boards {
		b := &boards[i]
		switch q.groupBy {
		case groupByTag:
			if b.group = b.board.Tags; len(b.group) == 0 {
				b.group = []string{noTag}
			}
		case groupByStatus:
			b.group = []string{string(b.board.Status)}
		case groupByModel:
			model, ok := p.models.get(p.cacheKey(r, b.board.ID), now)
			// A new slice for each board: the answer, below, replaces its element.
			if b.group = []string{cmp.Or(model, noModel)}; !ok && b.board.Status == Online {
				unknown = append(unknown, b)
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	p.slots.each(ctx, r.Caller.Tenant, len(unknown), askTimeout, func(ctx context.Context, i int) {
		if model, err := p.boardModel(ctx, r, unknown[i].board.ID); err == nil {
			unknown[i].group[0] = model
		}
	})
}

// boardModel asks a board for its model, and keeps it: the text of the board, cut to maxModelText bytes.
func (p *Plugin) boardModel(ctx context.Context, r *kernel.Request, nodeID string) (string, error) {
	name, ok := p.boardTool(ctx, r.Caller.Tenant, nodeID, manifest.KindInfo, manifest.VerbGet)
	if !ok {
		// Cached too, so that a board of an older version is not tried again by each query.
		p.models.put(p.cacheKey(r, nodeID), "", p.opt.Now())
		return noModel, nil
	}
	res, err := p.callBoard(ctx, r, name, nil)
	if err != nil {
		return "", err
	}
	var info struct {
		Model string `json:"model"`
	}
	if err := json.Unmarshal(res.Structured, &info); err != nil {
		return "", err
	}
	model := strings.ToValidUTF8(info.Model[:min(maxModelText, len(info.Model))], "")
	p.models.put(p.cacheKey(r, nodeID), model, p.opt.Now())
	return cmp.Or(model, noModel), nil
}

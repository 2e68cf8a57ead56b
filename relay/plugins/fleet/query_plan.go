package fleet

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/duration"
	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
	"agentctl/suggest"
)

// Bounds of a query.
const (
	maxQueryMetrics = 4
	maxQueryWindow  = 366 * 24 * time.Hour
	minQueryWindow  = 10 * time.Second
	minQueryStep    = 10 * time.Second
	maxTop          = 10
	// maxSeriesValues bounds the values of an answer with a step, of all metrics together.
	maxSeriesValues = 120
	// maxWholeStep is the longest part of a window that a board aggregates into one value. A small
	// board reads a day in half the time that a call has.
	maxWholeStep = 24 * time.Hour
	// maxBoardPoints bounds the values of a metric that a board is asked for without a step.
	maxBoardPoints = 48
	// sincePoints are the values of a metric from which the time of a change is taken.
	sincePoints = 288
	// sinceWindow is how far back the time of a change is searched if the question is about now.
	sinceWindow = 24 * time.Hour
)

// Aggregates of a board's values over a window.
const (
	aggregateLast = "last"
	aggregateMean = "mean"
	aggregateMin  = "min"
	aggregateMax  = "max"
)

// Groups of a query.
const (
	groupByTag    = "tag"
	groupByStatus = "status"
	groupByModel  = "model"
)

var (
	selectorPattern = lazyregexp.New(`^[A-Za-z0-9:_-]{1,64}$`)
	keyPattern      = lazyregexp.New(`^[a-z0-9_]{1,32}$`)
)

// What selectors and keys of metrics look like, for errors.
const (
	selectorForm = "names, ids, starts of ids, tag:T, status:online or all"
	keyForm      = "keys of metrics in lower case, of a-z, 0-9 and _"
)

var (
	selectorExample = []string{"attic", "tag:lab"}
	keyExample      = []string{"cpu_pct", "temperature_c"}
)

// queryArguments are those of fleet.query.
type queryArguments struct {
	Boards    []string `json:"boards"`
	Metrics   []string `json:"metrics"`
	From      string   `json:"from"`
	To        string   `json:"to"`
	Step      string   `json:"step"`
	Aggregate string   `json:"aggregate"`
	GroupBy   string   `json:"group_by"`
	Top       int      `json:"top"`
}

var queryInput = arguments.Object{
	{Name: "boards", Type: arguments.Array, Min: 1, Max: 64, Pattern: selectorPattern, Form: selectorForm, Example: selectorExample,
		Description: "names, ids, id prefixes, tag:T, status:online or all (default)"},
	{Name: "metrics", Type: arguments.Array, Min: 1, Max: maxQueryMetrics, Pattern: keyPattern, Form: keyForm, Example: keyExample,
		Description: "cpu_pct, mem_pct, disk_pct, load_1m, temperature_c and others (an unknown one lists all); the first one ranks"},
	{Name: "from", Type: arguments.String, Min: 1, Max: 40, Description: "24h (ago) or RFC 3339; left out: now", Example: "24h"},
	{Name: "to", Type: arguments.String, Min: 1, Max: 40, Description: "as from; default now", Example: "1h"},
	{Name: "step", Type: arguments.String, Min: 1, Max: 20, Description: "also the fleet's values over time, e.g. 1h", Example: "1h"},
	{Name: "aggregate", Type: arguments.String, Enum: []string{aggregateMean, aggregateMin, aggregateMax, aggregateLast}, Default: aggregateMean,
		Description: "of each board's values since from"},
	{Name: "group_by", Type: arguments.String, Enum: []string{groupByTag, groupByStatus, groupByModel}, Description: "figures by group"},
	{Name: "top", Type: arguments.Integer, Min: -maxTop, Max: maxTop, Description: "name the N highest boards and since when; negative: lowest", Example: 3},
}

// queryPlan is a query whose arguments were checked. It is read only from then on, since boards are asked
// concurrently.
type queryPlan struct {
	metrics   []int         // indexes of package's metrics
	isNow     bool          // about the present figures: from, to and step are zero
	from, to  time.Time     // of a query that is not about now
	step      time.Duration // of the series in the answer; 0: none
	aggregate string        // of each board's values, one of the aggregates
	groupBy   string        // "" for no groups
	top       int           // how many of the highest boards are named; negative: of the lowest
}

// defaultQueryMetrics are those of a query without metrics.
var defaultQueryMetrics = []string{"cpu_pct", "mem_pct", "disk_pct", "temperature_c"}

// newQueryPlan checks what the schema cannot.
func newQueryPlan(a *queryArguments, now time.Time) (*queryPlan, error) {
	q := &queryPlan{aggregate: cmp.Or(a.Aggregate, aggregateMean), groupBy: a.GroupBy, top: a.Top}
	var err error
	if q.metrics, err = parseMetrics(a.Metrics, defaultQueryMetrics); err != nil {
		return nil, err
	}
	if a.From == "" {
		if a.To != "" || a.Step != "" {
			return nil, arguments.Invalid("arguments to and step need from; give from, for example 24h")
		}
		q.isNow = true
		return q, nil
	}
	if q.from, err = parseMoment("from", a.From, now); err != nil {
		return nil, err
	}
	if q.to = now; a.To != "" {
		if q.to, err = parseMoment("to", a.To, now); err != nil {
			return nil, err
		}
	}
	if q.to.After(now) {
		q.to = now
	}
	// Boards count in milliseconds. A rest of one would be a step that no board has a value of.
	q.from, q.to = q.from.Truncate(time.Millisecond), q.to.Truncate(time.Millisecond)
	switch window := q.to.Sub(q.from); {
	case !q.from.Before(now):
		return nil, errNotPast("from", now)
	case window < minQueryWindow:
		return nil, arguments.Invalid("arguments from and to: from must be 10 s or more before to, which is now if it is left out or in the future")
	case window > maxQueryWindow:
		return nil, arguments.Invalid("arguments from and to: at most 366 days apart; boards keep 30 days of history by default")
	}
	return q, q.parseStep(a)
}

// parseStep checks the step. A window has at most maxSeriesValues steps, of all metrics together, and the
// error of a shorter step names one that fits.
func (q *queryPlan) parseStep(a *queryArguments) error {
	if a.Step == "" {
		return nil
	}
	if a.GroupBy != "" {
		return arguments.Invalid("arguments step and group_by do not go together; leave one of them out")
	}
	step, err := duration.Parse(a.Step)
	if err != nil || step < minQueryStep {
		return arguments.Invalid("argument step: must be a duration of 10s or more, such as 10m or 1h")
	}
	step = step.Truncate(time.Second) // as the answer says it
	maxPoints := maxSeriesValues / len(q.metrics)
	window := q.to.Sub(q.from)
	if n := points(window, step); n > maxPoints {
		minStep := (window + time.Duration(maxPoints) - 1) / time.Duration(maxPoints)
		return arguments.Invalid("argument step: too short, this makes %d values of each metric and an answer fits %d; use %s or more, a shorter window, or leave step out",
			n, maxPoints, roundUp(minStep))
	}
	q.step = min(step, window)
	return nil
}

// roundUp formats a duration as a step that a person would choose and that is not shorter.
func roundUp(d time.Duration) string {
	unit := time.Minute
	switch {
	case d < 2*time.Minute:
		unit = time.Second
	case d > 3*time.Hour:
		unit = time.Hour
	}
	return duration.Format((d + unit - 1) / unit * unit)
}

// boardStep is the step with which a board is asked: the caller's, or the longest that a board
// aggregates at once.
func (q *queryPlan) boardStep() time.Duration {
	if q.step > 0 {
		return q.step
	}
	window := q.to.Sub(q.from)
	if window <= maxWholeStep {
		return window
	}
	return max(maxWholeStep, (window+maxBoardPoints-1)/maxBoardPoints)
}

// points is how many steps a window has.
func points(window, step time.Duration) int { return int((window + step - 1) / step) }

// parseMetrics returns the indexes of the metrics with these keys, each once; of the defaults if there
// are no keys.
func parseMetrics(keys, defaults []string) (list []int, err error) {
	if len(keys) == 0 {
		keys = defaults
	}
	for _, key := range keys {
		i := metricIndex(key)
		if i < 0 {
			hint := ""
			if near := suggest.Nearest(key, metricKeys); near != "" {
				hint = "; the nearest is " + near
			}
			return nil, arguments.Invalid("argument metrics: one is not known%s; there are %s", hint, metricKeyList)
		}
		if !slices.Contains(list, i) {
			list = append(list, i)
		}
	}
	return list, nil
}

// parseMoment reads a time: a duration before now, RFC 3339, a date (UTC), or milliseconds since 1970. Models
// write times in all of these forms, whatever the description of the argument says.
func parseMoment(argument, s string, now time.Time) (time.Time, error) {
	text := strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(s), "-"), " ago")
	if text == "now" {
		return now, nil
	}
	if d, err := duration.Parse(text); err == nil && text != "0" {
		return now.Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339, time.DateTime, "2006-01-02T15:04:05", time.DateOnly} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, nil
		}
	}
	// Milliseconds since 1970: 12 to 14 digits are the years 1973 to 5138. Seconds have 10 digits and are
	// refused, or they would be taken for a day in January 1970.
	if ms, err := strconv.ParseInt(text, 10, 64); err == nil && len(text) >= 12 && len(text) <= 14 {
		return time.UnixMilli(ms), nil
	}
	return time.Time{}, arguments.Invalid("argument %s: not a time; give a duration before now such as 90m, 24h or 7d, or a time such as %s", argument, now.UTC().Add(-time.Hour).Format(time.RFC3339))
}

// errNotPast refuses a time at which nothing can have happened yet.
func errNotPast(argument string, now time.Time) error {
	return arguments.Invalid("argument %s: not in the past; now is %s", argument, now.UTC().Format(time.RFC3339))
}

// Prefixes of selectors, and the one for every board.
const (
	selectTag    = "tag:"
	selectStatus = "status:"
	selectAll    = "all"
)

// selectBoards returns the boards of a tenant that one selector or more match, ascending by name. It
// is an error if a selector matches none: the caller has probably mistyped it.
func (p *Plugin) selectBoards(c *kernel.Caller, selectors []string) ([]Board, error) {
	if len(selectors) == 0 {
		selectors = []string{selectAll}
	}
	all := p.opt.Boards.List(c.Tenant)
	slices.SortFunc(all, func(a, b Board) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	selected := make([]bool, len(all))
	for _, s := range selectors {
		if err := p.selectInto(c, all, selected, strings.ToLower(s)); err != nil {
			return nil, err
		}
	}
	list := all[:0]
	for i := range all {
		if selected[i] {
			list = append(list, all[i])
		}
	}
	if len(list) == 0 {
		return nil, &manifest.Error{Code: manifest.BadRequest, Reason: "no_boards", Message: "you have no boards yet; an operator adds one with: agentctl invite"}
	}
	return list, nil
}

// selectInto marks the boards that one selector matches, an index of all in selected. A word that is no tag,
// status or "all" names one board, as in Resolve.
func (p *Plugin) selectInto(c *kernel.Caller, all []Board, selected []bool, selector string) error {
	matches := func(b *Board) bool { return true }
	tag, isTag := strings.CutPrefix(selector, selectTag)
	status, isStatus := strings.CutPrefix(selector, selectStatus)
	switch {
	case isTag:
		matches = func(b *Board) bool { return slices.Contains(b.Tags, tag) }
	case isStatus:
		if s := Status(status); s != Online && s != Suspect && s != Offline {
			return arguments.Invalid("argument boards: after status: comes online, suspect or offline")
		}
		matches = func(b *Board) bool { return b.Status == Status(status) }
	case selector != selectAll:
		b, ok := p.opt.Boards.Lookup(c.Tenant, selector)
		if !ok { // the list that is here already spares another one for each of up to 64 selectors
			var err error
			if b, err = resolveStart(all, selector); err != nil {
				return err
			}
		}
		matches = func(o *Board) bool { return o.ID == b.ID }
	}
	found := false
	for i := range all {
		if matches(&all[i]) {
			selected[i], found = true, true
		}
	}
	switch {
	case found || selector == selectAll:
		return nil
	case isTag:
		return arguments.Invalid("argument boards: no board has this tag; %s", tagsOf(all))
	case isStatus:
		return arguments.Invalid("argument boards: no board is %s now; all selects every board", status)
	}
	return nil // it left between the two lookups
}

// tagsOf lists the tags of boards for a message.
func tagsOf(all []Board) string {
	var tags []string
	for i := range all {
		tags = append(tags, all[i].Tags...)
	}
	slices.Sort(tags)
	tags = slices.Compact(tags)
	if len(tags) == 0 {
		return "none of your boards has a tag"
	}
	const maxShown = 12
	more := ""
	if len(tags) > maxShown {
		tags, more = tags[:maxShown], " and others"
	}
	return "there are " + strings.Join(tags, ", ") + more
}

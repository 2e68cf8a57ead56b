package fleet

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"time"

	"agentctl/relay/kernel"
)

// rank returns the indexes of the boards that a query with top names, the highest first, or the lowest.
// Boards of equal value stay in the order of their names, so that the same question has the same answer.
func rank(q *queryPlan, boards []boardValues) []int {
	if q.top == 0 {
		return nil
	}
	list := withValue(boards, 0)
	slices.SortStableFunc(list, func(a, b int) int {
		c := cmp.Compare(boards[b].values[0], boards[a].values[0])
		if q.top < 0 {
			c = -c
		}
		return c
	})
	return list[:min(len(list), max(q.top, -q.top))]
}

// withValue returns the indexes of the boards that have a value of the plan's metric i, by name.
func withValue(boards []boardValues, i int) (list []int) {
	for b := range boards {
		if boards[b].has(i) {
			list = append(list, b)
		}
	}
	return list
}

// valuesOf returns the values of the plan's metric i, ascending.
func valuesOf(boards []boardValues, i int) (list []float64) {
	for _, b := range withValue(boards, i) {
		list = append(list, boards[b].values[i])
	}
	slices.Sort(list)
	return list
}

// median is that of an ascending list; NaN of an empty one.
func median(sorted []float64) float64 { return quantile(sorted, 0.5) }

// quantile is the value below which a part of an ascending list lies, interpolated between the two nearest
// ones; NaN of an empty list.
func quantile(sorted []float64, part float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	at := part * float64(len(sorted)-1)
	i := int(at)
	next := min(i+1, len(sorted)-1)
	return sorted[i] + (sorted[next]-sorted[i])*(at-float64(i))
}

// queryAnswer is the answer of fleet.query. Times are RFC 3339, UTC.
type queryAnswer struct {
	At        string             `json:"at,omitempty"` // of a query about now
	From      string             `json:"from,omitempty"`
	To        string             `json:"to,omitempty"`
	Aggregate string             `json:"aggregate,omitempty"`
	Boards    answered           `json:"boards"`
	Figures   map[string]*figure `json:"figures"`
	Top       []namedBoard       `json:"top,omitempty"`
	Outliers  []outlier          `json:"outliers,omitempty"`
	More      int                `json:"more_outliers,omitempty"`
	Groups    []group            `json:"groups,omitempty"`
	MoreGroup int                `json:"more_groups,omitempty"`
	Series    *fleetSeries       `json:"series,omitempty"`
}

// answered says how many boards the figures are of.
type answered struct {
	Matched  int                 `json:"matched"`
	Answered int                 `json:"answered"`
	Missing  map[string]*missing `json:"missing,omitempty"` // by reason
}

// missing are the boards without a value for one reason.
type missing struct {
	N      int      `json:"n"`
	Boards []string `json:"boards,omitempty"` // some of them
}

// figure describes the boards' values of one metric.
type figure struct {
	N      int     `json:"n"` // boards
	Mean   rounded `json:"mean"`
	Min    rounded `json:"min"`
	Median rounded `json:"median"`
	Max    rounded `json:"max"`
}

// namedBoard is one of the highest boards, or lowest.
type namedBoard struct {
	Name        string             `json:"name,omitempty"`
	ID          string             `json:"id"`
	Values      map[string]rounded `json:"values"`
	Since       string             `json:"since,omitempty"`
	SinceBefore string             `json:"since_before,omitempty"` // it began before the window
	Until       string             `json:"until,omitempty"`
	Level       *rounded           `json:"level,omitempty"` // that the value has been beyond since then
}

// outlier is a board whose value is far from those of most.
type outlier struct {
	Name   string  `json:"name,omitempty"`
	ID     string  `json:"id"`
	Metric string  `json:"metric"`
	Value  rounded `json:"value"`
	beyond float64 // by how many times the spread of the others
}

// group is the boards with a tag, a status or a model.
type group struct {
	Group   string             `json:"group"`
	N       int                `json:"n"` // boards, with or without a value
	Figures map[string]*figure `json:"figures,omitempty"`
}

// fleetSeries has the fleet's values over time: value i is of the step that begins i steps after
// from.
type fleetSeries struct {
	StepS  int64                 `json:"step_s"`
	Values map[string][]*rounded `json:"values"`
}

// rounded is a number with as many digits as say something: two decimals, and none from 10,000 on. It also
// saves bytes of an answer that has to fit MaxAnswer.
type rounded float64

// MarshalJSON implements json.Marshaler.
func (v rounded) MarshalJSON() ([]byte, error) {
	f := float64(v)
	if math.Abs(f) < 10_000 {
		f = math.Round(f*100) / 100
	} else {
		f = math.Round(f)
	}
	return json.Marshal(f)
}

const (
	maxOutliers = 5
	maxGroups   = 12
	maxExamples = 3 // boards that are named for a reason
	// Below minSpread boards nobody can say what is usual. Outliers are farther from the middle
	// half of the boards than farOut times its width.
	minSpread = 8
	farOut    = 3
)

// newQueryAnswer makes the answer of what the boards answered. named are the indexes of the boards of the
// top, totals the values of the steps if the query has some.
func newQueryAnswer(q *queryPlan, boards []boardValues, named []int, totals *seriesTotals, now time.Time) *queryAnswer {
	a := &queryAnswer{Figures: figuresOf(q, boards), Boards: countAnswered(boards)}
	if q.isNow {
		a.At = rfc3339(now)
	} else {
		a.From, a.To, a.Aggregate = rfc3339(q.from), rfc3339(q.to), q.aggregate
	}
	for _, i := range named {
		a.Top = append(a.Top, newNamedBoard(q, &boards[i]))
	}
	a.Outliers = findOutliers(q, boards, named)
	if n := len(a.Outliers); n > maxOutliers {
		a.Outliers, a.More = a.Outliers[:maxOutliers], n-maxOutliers
	}
	a.Groups = groupsOf(q, boards)
	if n := len(a.Groups); n > maxGroups {
		a.Groups, a.MoreGroup = a.Groups[:maxGroups], n-maxGroups
	}
	if q.step > 0 {
		a.Series = &fleetSeries{StepS: int64(q.step / time.Second), Values: make(map[string][]*rounded)}
		for i, m := range q.metrics {
			list := make([]*rounded, len(totals.steps[i]))
			for j := range list {
				list[j] = known(totals.steps[i][j].value(q.aggregate))
			}
			a.Series.Values[metrics[m].key] = list
		}
	}
	return a
}

// rfc3339 is how answers write times, to the second.
func rfc3339(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// known is a value, nil for NaN.
func known(v float64) *rounded {
	if math.IsNaN(v) {
		return nil
	}
	return (*rounded)(&v)
}

// figuresOf describes the values of boards, by the keys of the metrics; those that no board has are
// left out.
func figuresOf(q *queryPlan, boards []boardValues) map[string]*figure {
	figures := make(map[string]*figure)
	for i, m := range q.metrics {
		values := valuesOf(boards, i)
		if len(values) == 0 {
			continue
		}
		sum := 0.0
		for _, v := range values {
			sum += v
		}
		figures[metrics[m].key] = &figure{N: len(values), Mean: rounded(sum / float64(len(values))), Min: rounded(values[0]),
			Median: rounded(median(values)), Max: rounded(values[len(values)-1])}
	}
	return figures
}

// countAnswered counts the boards with a value, and the others by reason.
func countAnswered(boards []boardValues) answered {
	a := answered{Matched: len(boards)}
	for i := range boards {
		b := &boards[i]
		if b.why == "" {
			a.Answered++
			continue
		}
		if a.Missing == nil {
			a.Missing = make(map[string]*missing)
		}
		m := a.Missing[b.why]
		if m == nil {
			m = new(missing)
			a.Missing[b.why] = m
		}
		if m.N++; m.N <= maxExamples {
			m.Boards = append(m.Boards, cmp.Or(b.board.Name, b.board.ID))
		}
	}
	return a
}

// newNamedBoard is a row of the top, with the values of all metrics that the board has, and since when the
// first one has been beyond the level.
func newNamedBoard(q *queryPlan, b *boardValues) namedBoard {
	n := namedBoard{Name: b.board.Name, ID: b.board.ID, Values: make(map[string]rounded)}
	for i, m := range q.metrics {
		if b.has(i) {
			n.Values[metrics[m].key] = rounded(b.values[i])
		}
	}
	if c := b.change; c != nil {
		n.Level = known(b.level)
		if n.Since = rfc3339(c.begin); c.isOlder {
			n.Since, n.SinceBefore = "", n.Since
		}
		if !c.end.IsZero() {
			n.Until = rfc3339(c.end)
		}
	}
	return n
}

// findOutliers returns the boards that are far from the others and not named already, the farthest
// first.
//
// Quartiles and not the standard deviation decide, because one broken board moves the deviation so far
// that it hides itself. A spread of nearly 0, as of idle boards that are the same, is raised to a
// noticeable part of the median: without that, 1.1 % among boards at 1.0 % would be an outlier.
func findOutliers(q *queryPlan, boards []boardValues, named []int) (list []outlier) {
	for i, m := range q.metrics {
		values := valuesOf(boards, i)
		if len(values) < minSpread {
			continue
		}
		low, high := quantile(values, 0.25), quantile(values, 0.75)
		// Where most boards are the same, a small difference is none.
		spread := max(high-low, noticeable*math.Abs(median(values)), 0.01)
		for _, b := range withValue(boards, i) {
			v := boards[b].values[i]
			beyond := max(low-v, v-high) / spread
			if beyond > farOut && (i > 0 || !slices.Contains(named, b)) {
				list = append(list, outlier{Name: boards[b].board.Name, ID: boards[b].board.ID, Metric: metrics[m].key, Value: rounded(v), beyond: beyond})
			}
		}
	}
	slices.SortStableFunc(list, func(a, b outlier) int { return cmp.Compare(b.beyond, a.beyond) })
	return list
}

// groupsOf describes the groups of the boards, the largest first.
func groupsOf(q *queryPlan, boards []boardValues) (list []group) {
	members := make(map[string][]boardValues)
	for i := range boards {
		for _, name := range boards[i].group {
			members[name] = append(members[name], boards[i])
		}
	}
	for name, of := range members {
		list = append(list, group{name, len(of), figuresOf(q, of)})
	}
	slices.SortFunc(list, func(a, b group) int { return cmp.Or(cmp.Compare(b.N, a.N), cmp.Compare(a.Group, b.Group)) })
	return list
}

// result encodes the answer. While it is too long, shorten leaves out what says least.
func (a *queryAnswer) result() (*kernel.Result, error) {
	for {
		data, err := json.Marshal(a)
		if err != nil {
			return nil, err
		}
		if len(data) <= MaxAnswer || !a.shorten() {
			return &kernel.Result{Structured: data}, nil
		}
	}
}

// shorten leaves out one thing and reports whether there was one: in this order the names of boards
// without a value but one for each reason, outliers but one, groups but one, the last of these names,
// and boards of the top but one. What remains fits, with a series of maxSeriesValues as well (TestAnswersFit).
func (a *queryAnswer) shorten() bool {
	reasons := slices.Sorted(maps.Keys(a.Boards.Missing)) // so that the same question has the same answer
	for _, why := range reasons {
		if m := a.Boards.Missing[why]; len(m.Boards) > 1 {
			m.Boards = m.Boards[:len(m.Boards)-1]
			return true
		}
	}
	if n := len(a.Outliers); n > 1 {
		a.Outliers, a.More = a.Outliers[:n-1], a.More+1
		return true
	}
	if n := len(a.Groups); n > 1 {
		a.Groups, a.MoreGroup = a.Groups[:n-1], a.MoreGroup+1
		return true
	}
	for _, why := range reasons {
		if m := a.Boards.Missing[why]; len(m.Boards) > 0 {
			m.Boards = nil
			return true
		}
	}
	if n := len(a.Top); n > 1 {
		a.Top = a.Top[:n-1]
		return true
	}
	return false
}

package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"time"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// Bounds of fleet.find.
const (
	// maxFound is more rows than fit into MaxAnswer: the answer has those that fit, and a cursor.
	maxFound     = 50
	defaultFound = 20
)

// tagPattern is that of auth.ValidTag.
var tagPattern = lazyregexp.New(`^[a-z0-9][a-z0-9-]{0,31}$`)

var findTool = tool{
	name: "fleet.find", title: "Find boards", scope: manifest.ScopeToolsList,
	description: "Find boards by name, tag, status or present figures: who they are, online or not, how they do. Start here. Without arguments: all boards.",
	input: arguments.Object{
		{Name: "text", Type: arguments.String, Min: 1, Max: 100, Description: "part of name, id, tag or description", Example: "attic"},
		{Name: "tag", Type: arguments.String, Min: 1, Max: 32, Pattern: tagPattern, Form: "a tag: a-z, 0-9 and -", Example: "lab"},
		{Name: "status", Type: arguments.String, Enum: []string{string(Online), string(Suspect), string(Offline)}},
		{Name: "where", Type: arguments.String, Min: 1, Max: maxWhere, Description: "comparisons with and, or, (): cpu_pct > 80 and disk_pct > 90; keys: " + metricKeyList, Example: "cpu_pct > 80 and disk_pct > 90"},
		{Name: "limit", Type: arguments.Integer, Min: 1, Max: maxFound, Default: defaultFound},
		{Name: "cursor", Type: arguments.String, Min: 1, Max: 200, Description: "next_cursor of the page before"},
	},
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) { return p.find(ctx, r) },
}

// findArguments are those of fleet.find.
type findArguments struct {
	Text   string `json:"text"`
	Tag    string `json:"tag"`
	Status Status `json:"status"`
	Where  string `json:"where"`
	Limit  int    `json:"limit"`
	Cursor string `json:"cursor"`
}

// foundBoard is a row of fleet.find.
type foundBoard struct {
	Name       string             `json:"name"`
	NameSet    *bool              `json:"name_set,omitempty"` // false: the board proposed the name
	ID         string             `json:"id"`
	Status     Status             `json:"status"`
	Tags       []string           `json:"tags,omitempty"`
	LastSeenMS int64              `json:"last_seen_ms,omitempty"` // of boards that are not online
	Clone      bool               `json:"clone_suspected,omitempty"`
	Figures    map[string]float64 `json:"figures,omitempty"`
	AgeS       *int64             `json:"age_s,omitempty"` // of the oldest of the figures
}

// foundBoards is the answer of fleet.find.
type foundBoards struct {
	Matched int               `json:"matched"` // boards that match, on all pages
	Boards  []json.RawMessage `json:"boards"`
	// Unknown counts the boards of which where could not be decided, by the reason. UnknownBoards
	// are some of them.
	Unknown       map[string]int `json:"unknown,omitempty"`
	UnknownBoards []string       `json:"unknown_boards,omitempty"`
	Next          string         `json:"next_cursor,omitempty"`
}

// maxUnknownBoards bounds foundBoards.UnknownBoards.
const maxUnknownBoards = 5

// find selects boards and returns a page of them in the order of their names:
//
//	all boards of the tenant ── selects ── findWhere, if there is a condition ── findPage
//
// Only findWhere asks boards. A cursor is a position in the order of names and no offset, so boards that come
// and go between two pages shift nothing; with a condition, each page decides it again.
func (p *Plugin) find(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	began := p.opt.Now()
	args := findArguments{Limit: defaultFound}
	if err := readArguments(r, &args); err != nil {
		return nil, err
	}
	after, err := readCursor(args.Cursor)
	if err == nil && after != "" && !strings.Contains(after, " ") {
		err = errCursor // of fleet.events, which would give the first page again
	}
	if err != nil {
		return nil, err
	}
	boards := slices.DeleteFunc(p.opt.Boards.List(r.Caller.Tenant), func(b Board) bool { return !args.selects(&b) })
	var out foundBoards
	var shown [numMetrics]bool // metrics of the rows
	for _, key := range []string{"cpu_pct", "mem_pct", "disk_pct"} {
		shown[metricIndex(key)] = true
	}
	if args.Where != "" {
		if boards, err = p.findWhere(ctx, r, args.Where, boards, &out, &shown); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(boards, func(a, b Board) int { return cmp.Compare(a.position(), b.position()) })
	out.Matched = len(boards)
	i, found := slices.BinarySearchFunc(boards, after, func(b Board, after string) int { return cmp.Compare(b.position(), after) })
	if found {
		i++
	}
	boards = boards[i:]
	return p.findPage(r, boards[:min(args.Limit, len(boards))], len(boards), began, &out, &shown)
}

// findWhere returns the boards that a condition selects, of those that the other arguments did. It marks the
// condition's metrics in shown, and counts the boards of which it could not be decided in out. A board is
// asked only for figures on which the decision depends: for cpu_pct > 80 and temperature_c > 70 the sensors of
// a board that is idle are not read.
func (p *Plugin) findWhere(ctx context.Context, r *kernel.Request, where string, boards []Board, out *foundBoards, shown *[numMetrics]bool) ([]Board, error) {
	c, err := parseWhere(where)
	if err != nil {
		return nil, err
	}
	if !r.Caller.Has(manifest.ScopeCallReadOnly) {
		return nil, errNoFigures
	}
	var used [numMetrics]bool
	c.uses(&used)
	list, err := p.measure(ctx, r, boards, func(f *figures, modules bool) bool {
		return c.eval(f) == isUnknown && misses(f, &used, modules)
	})
	if err != nil {
		return nil, err
	}
	// In place: a board is written at or below the index that was just read.
	matched := boards[:0]
	for i := range boards {
		switch c.eval(&list[i].figures) {
		case isTrue:
			matched = append(matched, boards[i])
		case isUnknown:
			if out.Unknown == nil {
				out.Unknown = make(map[string]int)
			}
			out.Unknown[cmp.Or(list[i].unknown, reasonNotMeasured)]++
			if len(out.UnknownBoards) < maxUnknownBoards {
				out.UnknownBoards = append(out.UnknownBoards, boards[i].Label())
			}
		}
	}
	for i := range used {
		shown[i] = shown[i] || used[i]
	}
	return matched, nil
}

// errNoFigures refuses figures to a caller who could not read them from the boards either.
var errNoFigures = &manifest.Error{Code: manifest.SafetyDenied, Message: "where reads figures of boards, for which the token lacks the scope tools:call:read_only", Reason: "scope"}

// misses reports whether a used figure is unknown that comes from modules, or from a frame.
func misses(f *figures, used *[numMetrics]bool, modules bool) bool {
	for i := range metrics {
		if used[i] && metrics[i].isModule == modules && math.IsNaN(f.values[i]) {
			return true
		}
	}
	return false
}

// findPage makes the answer from the boards that a page may have. remaining is how many there are on
// this page and later ones. Figures that were warm when the call began are shown.
func (p *Plugin) findPage(r *kernel.Request, page []Board, remaining int, began time.Time, out *foundBoards, shown *[numMetrics]bool) (*kernel.Result, error) {
	rows := make([]foundBoard, len(page))
	for i := range page {
		rows[i] = foundRow(&page[i])
		if r.Caller.Has(manifest.ScopeCallReadOnly) {
			f := p.figures.get(p.opt.Boards, p.cacheKey(r, page[i].ID), began)
			rows[i].addFigures(&f, shown, p.opt.Now())
		}
	}
	const others = 480 // bytes of the answer besides the rows
	var err error
	if out.Boards, err = fitRows(rows, MaxAnswer-others); err != nil {
		return nil, err
	}
	if n := len(out.Boards); n > 0 && n < remaining {
		out.Next = makeCursor(page[n-1].position())
	}
	return answer(out)
}

// selects reports whether a board matches the arguments that need nothing but the registry.
func (a *findArguments) selects(b *Board) bool {
	return (a.Tag == "" || slices.Contains(b.Tags, a.Tag)) &&
		(a.Status == "" || a.Status == b.Status) &&
		(a.Text == "" || b.contains(strings.ToLower(a.Text)))
}

// contains reports whether a text in lower case is part of what the board is known by.
func (b *Board) contains(text string) bool {
	return strings.Contains(b.Name, text) || strings.Contains(b.ID, text) || strings.Contains(strings.ToLower(b.Description), text) ||
		slices.ContainsFunc(b.Tags, func(tag string) bool { return strings.Contains(tag, text) })
}

// position orders boards by name, and those of one name by id. It is what a cursor holds.
func (b *Board) position() string { return b.Name + " " + b.ID }

// foundRow is how fleet.find and fleet.describe show a board, without figures.
func foundRow(b *Board) foundBoard {
	row := foundBoard{Name: b.Name, ID: b.ID, Status: b.Status, Tags: b.Tags, Clone: b.CloneSuspected}
	if !b.NameSet {
		row.NameSet = new(bool)
	}
	if b.Status != Online {
		row.LastSeenMS = b.LastSeenMS
	}
	return row
}

// addFigures adds the known figures of the shown metrics.
func (row *foundBoard) addFigures(f *figures, shown *[numMetrics]bool, now time.Time) {
	for i := range metrics {
		if !shown[i] || math.IsNaN(f.values[i]) {
			continue
		}
		if row.Figures == nil {
			row.Figures, row.AgeS = make(map[string]float64), new(int64)
		}
		row.Figures[metrics[i].key] = f.values[i]
		*row.AgeS = max(*row.AgeS, int64(now.Sub(f.at(i))/time.Second))
	}
}

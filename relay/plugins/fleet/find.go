package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// Bounds of fleet.find.
const (
	maxFound     = 50
	defaultFound = 20
)

var tagPattern = lazyregexp.New(`^[a-z0-9][a-z0-9-]{0,31}$`)

var findTool = tool{
	name: "fleet.find", title: "Find boards", scope: manifest.ScopeToolsList,
	description: "Which boards there are, how they are, and which match.",
	input: arguments.Object{
		{Name: "text", Type: arguments.String, Min: 1, Max: 100, Description: "in name, id, tags or description"},
		{Name: "tag", Type: arguments.String, Min: 1, Max: 32, Pattern: tagPattern, Description: "boards that have this tag"},
		{Name: "status", Type: arguments.String, Enum: []string{string(Online), string(Suspect), string(Offline)}, Description: "suspect: connected but silent"},
		{Name: "limit", Type: arguments.Integer, Min: 1, Max: maxFound, Default: defaultFound, Description: "rows"},
		{Name: "cursor", Type: arguments.String, Min: 1, Max: 200, Description: "next_cursor of the page before"},
	},
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) { return p.find(ctx, r) },
}

// findArguments are those of fleet.find.
type findArguments struct {
	Text   string `json:"text"`
	Tag    string `json:"tag"`
	Status Status `json:"status"`
	Limit  int    `json:"limit"`
	Cursor string `json:"cursor"`
}

// foundBoard is a row of fleet.find.
type foundBoard struct {
	Name       string   `json:"name"`
	NameSet    *bool    `json:"name_set,omitempty"` // false: the board proposed the name
	ID         string   `json:"id"`
	Status     Status   `json:"status"`
	Tags       []string `json:"tags,omitempty"`
	LastSeenMS int64    `json:"last_seen_ms,omitempty"` // of boards that are not online
	Clone      bool     `json:"clone_suspected,omitempty"`
}

// foundBoards is the answer of fleet.find.
type foundBoards struct {
	Matched int               `json:"matched"` // boards that match, on all pages
	Boards  []json.RawMessage `json:"boards"`
	Next    string            `json:"next_cursor,omitempty"`
}

// find selects boards and returns a page of them in the order of their names.
func (p *Plugin) find(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	args := findArguments{Limit: defaultFound}
	if err := readArguments(r, &args); err != nil {
		return nil, err
	}
	after, err := readCursor(args.Cursor)
	if err != nil {
		return nil, err
	}
	boards := slices.DeleteFunc(p.opt.Boards.List(r.Caller.Tenant), func(b Board) bool { return !args.selects(&b) })
	slices.SortFunc(boards, func(a, b Board) int { return cmp.Compare(a.position(), b.position()) })
	out := foundBoards{Matched: len(boards)}
	i, found := slices.BinarySearchFunc(boards, after, func(b Board, after string) int { return cmp.Compare(b.position(), after) })
	if found {
		i++
	}
	boards = boards[i:]
	page := boards[:min(args.Limit, len(boards))]
	rows := make([]foundBoard, len(page))
	for i := range page {
		rows[i] = p.row(&page[i])
	}
	if out.Boards, err = fitRows(rows, MaxAnswer-128); err != nil {
		return nil, err
	}
	if n := len(out.Boards); n > 0 && n < len(boards) {
		out.Next = makeCursor(boards[n-1].position())
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

// position orders boards by name, and tells those of one name apart.
func (b *Board) position() string { return b.Name + " " + b.ID }

// row is how fleet.find shows a board.
func (p *Plugin) row(b *Board) foundBoard {
	row := foundBoard{Name: b.Name, ID: b.ID, Status: b.Status, Tags: b.Tags, Clone: b.CloneSuspected}
	if !b.NameSet {
		row.NameSet = new(bool)
	}
	if b.Status != Online {
		row.LastSeenMS = b.LastSeenMS
	}
	return row
}

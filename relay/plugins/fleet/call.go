package fleet

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// fleet.call translates a board's name and a short tool name into the full name of a tool, and calls
// that through the kernel. The kernel checks whether the board is online and the arguments are valid; its
// error for a board that is offline says when it was seen last.

// maxToolName bounds the name of a tool in arguments: the longest one, and some more for flat names
// with a client's prefix.
const maxToolName = 100

var callTool = tool{
	name: "fleet.call", title: "Call a board's tool", scope: manifest.ScopeCallReadOnly, mayStream: true,
	description: "Call one tool of one board, as fleet.describe lists them, such as snapshot, services or journal.",
	input: arguments.Object{
		boardField,
		{Name: "tool", Type: arguments.String, Min: 1, Max: maxToolName, Required: true, Example: "snapshot"},
		{Name: "arguments", Type: arguments.Map, Description: "of that tool"},
	},
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
		return p.callOne(ctx, r)
	},
}

// boardField is the argument that names one board.
var boardField = arguments.Field{Name: "board", Type: arguments.String, Min: 1, Max: 64, Required: true, Description: "name, id or start of an id", Example: "attic"}

// callOne calls a tool of a board as the caller, and answers as that tool does. Over MCP a stream is
// bounded as it is without this tool; plain HTTP has no stream of a plugin's tool.
func (p *Plugin) callOne(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	var args struct {
		Board     string          `json:"board"`
		Tool      string          `json:"tool"`
		Arguments json.RawMessage `json:"arguments"`
	}
	if err := readArguments(r, &args); err != nil {
		return nil, err
	}
	b, err := p.resolve(r.Caller.Tenant, args.Board)
	if err != nil {
		return nil, err
	}
	list, err := p.opt.Boards.Tools(ctx, r.Caller.Tenant, b.ID)
	if err != nil {
		return nil, err
	}
	t, ok := manifest.SelectTool(list, args.Tool)
	if !ok {
		return nil, p.unknownTool(r, &b, list)
	}
	// The kernel refuses this as well, but its error advises an Accept header. That does not help with
	// fleet.call: over plain HTTP only the boards' tools, by their full names, can be streams.
	if t.Verb.Stream() && !r.Stream {
		return nil, &manifest.Error{Code: manifest.BadRequest, Reason: "unary_on_stream", ShowReason: true,
			Message: "this tool is a stream: call it by its full name " + t.Kind.Short + ".NODE_ID.CAPABILITY." + t.Verb.Name + " with Accept: text/event-stream, or call snapshot for one reading"}
	}
	return p.callBoard(ctx, r, t.Canonical, args.Arguments)
}

// unknownTool says which tools a board has. Names with a word that the board chose are left out.
func (p *Plugin) unknownTool(r *kernel.Request, b *Board, list []manifest.Tool) error {
	var names []string
	for i := range list {
		if name := list[i].ShortName(list); list[i].HasOwnWord() && !slices.Contains(names, name) && !p.opt.Refuses(r, list[i].Canonical) {
			names = append(names, name)
		}
	}
	message := b.Label() + " has no such tool; it has " + strings.Join(names, ", ")
	switch {
	case len(list) > 0 && len(names) == 0:
		message = b.Label() + " has no such tool; fleet.describe lists what it has"
	case len(list) == 0:
		message = b.Label() + " has announced no tools yet: it was never connected"
	}
	return &manifest.Error{Code: manifest.BadRequest, Message: message, Reason: "tool"}
}

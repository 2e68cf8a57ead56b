package fleet

import (
	"context"
	"encoding/json"
	"math"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// maxDescription bounds the JSON of an answer of fleet.describe, bytes. It is more than MaxAnswer
// because schemas are part of it.
const maxDescription = 8192

var describeTool = tool{
	name: "fleet.describe", title: "Describe a board", scope: manifest.ScopeToolsList,
	description: "What one board is and how it does: model, OS, kernel, uptime, link, clock, sensors, figures; and its tools with their arguments, for fleet.call.",
	input:       arguments.Object{boardField},
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
		return p.describe(ctx, r)
	},
}

// description is the answer of fleet.describe.
type description struct {
	foundBoard
	Description string `json:"description,omitempty"`
	Link        Link   `json:"link"`
	// Info is what system.info answered, and Clock is made of it.
	Info    json.RawMessage `json:"info,omitempty"`
	Clock   *clock          `json:"clock,omitempty"`
	Modules []string        `json:"modules,omitempty"` // groups of figures that the board has
	Tools   []describedTool `json:"tools"`
	// Missing says why a part is not there: info, modules or figures.
	Missing map[string]string `json:"missing,omitempty"`
}

// Link is what the relay knows about the link of a board.
type Link struct {
	State    Status `json:"state"`
	Protocol string `json:"protocol,omitempty"` // v2 or v2.1, of a board that is connected
}

// clock compares the clock of a board with the relay's.
type clock struct {
	Synchronized *bool  `json:"synchronized,omitempty"` // by NTP; absent: unknown
	OffsetMS     *int64 `json:"offset_ms,omitempty"`    // ahead of the relay's; absent: the board's is not set
}

// describedTool is a tool that fleet.call takes.
type describedTool struct {
	Tool  string `json:"tool"`
	Title string `json:"title"`
	// Arguments is the JSON Schema without what a model does not need; absent if there are none, and
	// in an answer that would be too large.
	Arguments json.RawMessage `json:"arguments,omitempty"`
	// NeedsScope is set if the caller lacks it.
	NeedsScope string `json:"needs_scope,omitempty"`
}

// describe answers from what the relay knows and what the board answers within askTimeout. A part that the
// board does not answer is missing with the reason; only an unknown board, or the caller's share of calls, is
// an error. If the whole does not fit, the arguments of the tools are left out: their names remain.
func (p *Plugin) describe(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	var args struct {
		Board string `json:"board"`
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
	d := description{foundBoard: foundRow(&b), Description: b.Description, Link: Link{State: b.Status}, Tools: p.describeTools(r, list)}
	if b.Status != Offline {
		d.Link.Protocol = p.opt.Boards.Protocol(b.ID)
	}
	if err := p.askDescription(ctx, r, &b, list, &d); err != nil {
		return nil, err
	}
	if size := jsonSize(d); size > maxDescription {
		for i := range d.Tools {
			d.Tools[i].Arguments = nil
		}
	}
	return answer(d)
}

// jsonSize is the length of a value's JSON. A value that cannot be encoded counts as too large; encoding the
// answer then fails as well, and reports the error.
func jsonSize(v any) int {
	data, err := json.Marshal(v)
	if err != nil {
		return math.MaxInt
	}
	return len(data)
}

// askDescription asks the board for its information and its figures, both at a time.
func (p *Plugin) askDescription(ctx context.Context, r *kernel.Request, b *Board, list []manifest.Tool, d *description) error {
	parts := []struct{ part, kind, verb string }{
		// Figures are stored in the cache, so that a fleet.find soon afterwards does not ask again.
		{"info", manifest.KindInfo, manifest.VerbGet},
		{"figures", manifest.KindMetrics, manifest.VerbSnapshot},
		{"modules", manifest.KindModules, manifest.VerbRead},
	}
	missing := make(map[string]string)
	var questions []question
	for i, part := range parts {
		tool, ok := toolOf(list, part.kind, part.verb)
		switch {
		case b.Status != Online:
			missing[part.part] = string(b.Status)
		case !ok:
			missing[part.part] = reasonNotMeasured
		default:
			questions = append(questions, question{tool, i})
		}
	}
	// All parts are asked for even if the cache has the figures: a description says how the board is now.
	err := p.askBoards(ctx, r, questions, func(q question, res *kernel.Result, err error) {
		part := parts[q.about]
		switch {
		case err != nil:
			missing[part.part] = coarseReasonOf(err)
		case part.kind == manifest.KindInfo:
			d.Info = res.Structured
			d.Clock = readClock(res.Structured, p.opt.Now())
		default:
			p.figures.put(p.cacheKey(r, b.ID), part.kind, res.Structured, p.opt.Now())
		}
	})
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		d.Missing = missing
	}
	var shown [numMetrics]bool
	for i := range shown {
		shown[i] = true
	}
	now := p.opt.Now()
	f := p.figures.get(p.opt.Boards, p.cacheKey(r, b.ID), now)
	// Without the scope the kernel has refused the questions, but the cache may have answers that other
	// callers got.
	if r.Caller.Has(manifest.ScopeCallReadOnly) {
		d.addFigures(&f, &shown, now)
		d.Modules = f.modules()
	}
	return nil
}

// readClock reads the clock of a board from its answer to system.info; nil if it has none. The offset
// includes the time that the answer took to come here.
func readClock(info []byte, now time.Time) *clock {
	var v struct {
		TimeMS       *int64 `json:"time_ms"`
		Synchronized *bool  `json:"clock_synchronized"`
	}
	if json.Unmarshal(info, &v) != nil || v.TimeMS == nil && v.Synchronized == nil {
		return nil
	}
	c := &clock{Synchronized: v.Synchronized}
	if v.TimeMS != nil {
		c.OffsetMS = new(*v.TimeMS - now.UnixMilli())
	}
	return c
}

// describeTools lists the tools that fleet.call takes, with their arguments where the caller may
// call them. What a stage refuses to the caller is left out.
func (p *Plugin) describeTools(r *kernel.Request, list []manifest.Tool) []describedTool {
	out := make([]describedTool, 0, len(list))
	for i := range list {
		t := &list[i]
		if p.opt.Refuses(r, t.Canonical) {
			continue
		}
		d := describedTool{Tool: t.ShortName(list), Title: t.Verb.Title}
		for _, scope := range []string{manifest.ScopeForClass(t.Capability.SafetyClass), t.Kind.ExtraScope} {
			if scope != "" && !r.Caller.Has(scope) {
				d.NeedsScope = scope
			}
		}
		if d.NeedsScope == "" {
			d.Arguments = compactSchema(t.Verb.Input)
		}
		out = append(out, d)
	}
	return out
}

// compactSchema returns the properties of an input schema, and which of them are required, without
// the members that only a validator needs, such as $id; nil for a tool without arguments. ref names a schema
// of package manifest.
func compactSchema(ref string) json.RawMessage {
	raw, _ := manifest.Schema(ref)
	var schema struct {
		Type       string                     `json:"type"`
		Required   []string                   `json:"required,omitempty"`
		Properties map[string]json.RawMessage `json:"properties"`
	}
	if json.Unmarshal(raw, &schema) != nil || len(schema.Properties) == 0 {
		return nil
	}
	out, err := json.Marshal(schema)
	if err != nil {
		return nil
	}
	return out
}

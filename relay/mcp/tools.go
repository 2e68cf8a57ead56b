package mcp

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// listTools renders one page of the tools that the caller may call, in the order of
// their names. The schemas are the kernel's bytes.
func (t *tenant) listTools(x *exchange, cursor string) (sdk.Result, error) {
	list := func(c *kernel.Caller, after string, limit int) ([]*kernel.Tool, bool) {
		return t.h.opts.Kernel.ListToolset(c, x.sessionID(), x.toolset, after, limit)
	}
	return listPage(t, x, "tools", cursor, 1024, list,
		func(tool *kernel.Tool) string { return tool.Name },
		func(b *objectBuilder, tool *kernel.Tool) { t.h.appendTool(b, tool, x) })
}

// listPage renders one page of a list as a result. A page continues after a name and not
// at an offset, so entries that come and go between two pages shift nothing.
//
// entrySize estimates the bytes of an entry, key returns the name that orders it, and
// appendEntry appends its members.
func listPage[T any](t *tenant, x *exchange, name, cursor string, entrySize int,
	list func(c *kernel.Caller, after string, limit int) ([]T, bool), key func(T) string, appendEntry func(*objectBuilder, T),
) (sdk.Result, error) {
	after, ok := parseCursor(cursor)
	if !ok {
		return nil, invalidParams("the cursor is not one of this server's; list from the start")
	}
	page, more := list(x.caller, after, pageSize)
	b := newObject(512 + entrySize*len(page))
	b.key(name)
	b.b = append(b.b, '[')
	for i, v := range page {
		if i > 0 {
			b.b = append(b.b, ',')
		}
		e := objectBuilder{b: b.b}
		appendEntry(&e, v)
		b.b = append(e.b, '}')
	}
	b.b = append(b.b, ']')
	if more {
		b.str("nextCursor", makeCursor(key(page[len(page)-1])))
	}
	return t.finishResult(b, x, resultComplete, listTTLMS, nil), nil
}

// toolAnnotations are the hints of MCP for each safety class. Only read-only tools are
// called idempotent; openWorldHint is false because a board acts on itself alone.
var toolAnnotations = map[manifest.SafetyClass][]byte{
	manifest.ReadOnly:    []byte(`{"readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":false}`),
	manifest.Mutating:    []byte(`{"readOnlyHint":false,"destructiveHint":false,"idempotentHint":false,"openWorldHint":false}`),
	manifest.Destructive: []byte(`{"readOnlyHint":false,"destructiveHint":true,"idempotentHint":false,"openWorldHint":false}`),
}

// appendHints appends the annotations of a tool without a safety class.
func appendHints(b []byte, h kernel.Hints) []byte {
	b = strconv.AppendBool(append(b, `{"readOnlyHint":`...), h&kernel.HintReadOnly != 0)
	b = strconv.AppendBool(append(b, `,"destructiveHint":`...), h&kernel.HintSafe == 0)
	b = strconv.AppendBool(append(b, `,"idempotentHint":`...), h&kernel.HintIdempotent != 0)
	return append(strconv.AppendBool(append(b, `,"openWorldHint":`...), h&kernel.HintLocal == 0), '}')
}

// anyObjectSchema is the input schema of a tool without one: MCP requires a schema.
var anyObjectSchema = json.RawMessage(`{"type":"object"}`)

// appendTool appends the members of one tool. The output schema is the tool's own, widened
// to admit the error envelope (withErrorSchema), and a packed result if there may be one.
func (h *Handler) appendTool(b *objectBuilder, tool *kernel.Tool, x *exchange) {
	name := tool.Name
	if x.flatNames {
		name = flatName(name)
	}
	b.str("name", name)
	h.appendTitle(b, tool.Title, tool.NodeID)
	b.optional("description", tool.Description)
	if len(tool.InputSchema) > 0 {
		b.raw("inputSchema", tool.InputSchema)
	} else {
		b.raw("inputSchema", anyObjectSchema)
	}
	if len(tool.OutputSchema) > 0 {
		schema := h.schemas.withErrorSchema(tool.OutputSchema)
		if h.opts.MayPack != nil && h.opts.MayPack(x.caller, x.sessionID(), tool) {
			schema = withPackedSchema(schema)
		}
		b.raw("outputSchema", schema)
	}
	if class := tool.SafetyClass; class != "" {
		b.raw("annotations", toolAnnotations[class])
		// In _meta and not in annotations: clients decode annotations into fixed structs.
		b.key("_meta")
		b.b = append(append(append(b.b, `{"x-safety-class":"`...), class...), `"}`...)
	} else if tool.Hints != 0 {
		b.key("annotations")
		b.b = appendHints(b.b, tool.Hints)
	}
}

// appendTitle appends a title, which names the board that it is about. It is made here and not kept,
// since there is one for each tool of each board.
func (h *Handler) appendTitle(b *objectBuilder, title, nodeID string) {
	if nodeID != "" && h.opts.Label != nil {
		title = h.opts.Label(nodeID) + ": " + title
	}
	b.optional("title", title)
}

// flatName returns the spelling of a tool's name without dots, for clients that refuse
// them.
func flatName(name string) string {
	if n, ok := manifest.ParseToolName(name); ok {
		return n.Alias()
	}
	return strings.ReplaceAll(name, ".", "_")
}

// resolveTool finds the tool that a name in either spelling means, if the caller may use
// it. Otherwise the tool is nil, and the kernel refuses the name.
func (t *tenant) resolveTool(c *kernel.Caller, name string) (string, *kernel.Tool) {
	name = manifest.Canonical(name)
	if tool, ok := t.h.opts.Kernel.Tool(c, name); ok {
		return name, tool
	}
	if strings.Contains(name, ".") {
		return name, nil
	}
	if full, ok := t.flatNames(c)[name]; ok {
		tool, _ := t.h.opts.Kernel.Tool(c, full)
		return full, tool // nil if the caller lacks the scope, which the kernel then says
	}
	return name, nil
}

// flatNames maps the flat spellings of plugin tools to their names; those of devices are
// parsed and not looked up. The map is kept until the list of tools changes
// (toolsGeneration). It holds every tool of the tenant: resolveTool checks with the kernel
// whether the caller may use one.
func (t *tenant) flatNames(c *kernel.Caller) map[string]string {
	t.mu.Lock()
	m, generation := t.flatToName, t.toolsGeneration
	t.mu.Unlock()
	if m != nil {
		return m
	}
	m = make(map[string]string)
	for _, name := range t.h.opts.Kernel.PluginToolNames(c.Tenant) {
		if strings.Contains(name, ".") {
			m[flatName(name)] = name
		}
	}
	t.mu.Lock()
	if t.toolsGeneration == generation { // else the list has changed meanwhile
		t.flatToName = m
	}
	t.mu.Unlock()
	return m
}

// flattenNames gives the tools that a message names the spelling that they have in the caller's list.
func (t *tenant) flattenNames(c *kernel.Caller, message string) string {
	for flat, name := range t.flatNames(c) {
		message = strings.ReplaceAll(message, name, flat)
	}
	return message
}

// dropFlatNames drops the map of flat names when the list of tools has changed. The
// generation keeps a map that was being built meanwhile from being stored.
func (t *tenant) dropFlatNames() {
	t.mu.Lock()
	t.flatToName = nil
	t.toolsGeneration++
	t.mu.Unlock()
}

// makeCursor makes the cursor of a next page, which is opaque to clients: a version and the
// last name of this page.
func makeCursor(last string) string { return base64.RawURLEncoding.EncodeToString([]byte("1" + last)) }

// parseCursor returns the name that a list continues after. A cursor comes from the client,
// so length, version and characters are checked; the name itself need not exist any more.
func parseCursor(s string) (after string, ok bool) {
	if s == "" {
		return "", true
	}
	if len(s) > 1024 {
		return "", false
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(s)
	if err != nil || len(b) < 2 || b[0] != '1' {
		return "", false
	}
	for _, c := range b {
		if c <= ' ' || c > '~' {
			return "", false
		}
	}
	return string(b[1:]), true
}

// callTool is tools/call:
//
//	kernel.Call -> frames, input rounds, or a result
//
// name and tool are what resolveTool made of the name.
//
// A failure of the relay is a result with isError, which the client's model sees. A request that
// no tool could answer (an unknown name, malformed params) gets a JSON-RPC error.
func (t *tenant) callTool(ctx context.Context, x *exchange, cl *client, p *sdk.CallToolParamsRaw, name string, tool *kernel.Tool) (sdk.Result, error) {
	if len(p.Arguments) > 0 && p.Arguments[0] != '{' {
		if string(p.Arguments) != "null" {
			return nil, invalidParams("arguments must be an object")
		}
		p.Arguments = nil
	}
	kr := &kernel.Request{Caller: x.caller, Tool: name, Arguments: p.Arguments, Session: cl, ConnID: x.sessionID(),
		Meta: metaOf(p.Meta), MarkUntrusted: true, TraceID: x.traceID, RequestState: p.RequestState}
	if tp, ok := p.Meta["traceparent"].(string); ok {
		if id, ok := edge.ParseTraceparent(tp); ok {
			kr.TraceID = id
		}
	}
	kr.Traced = kr.TraceID != ""
	var lim streamLimits
	var progress *streamProgress
	if tool != nil && (tool.Streams || tool.MayStream) {
		var err error
		if lim, err = parseStreamLimits(tool, p.Meta); err != nil {
			return nil, err
		}
		kr.Stream = true
		progress = &streamProgress{cl: cl, total: float64(lim.maxFrames)}
		if tool.Streams {
			progress.keepAlive() // at once: the first frame may be a minute away
		}
	}
	if len(p.InputResponses) > 0 || p.RequestState != "" {
		var err error
		if kr.InputResponses, err = json.Marshal(p.InputResponses); err != nil {
			return nil, invalidParams("inputResponses are malformed")
		}
	}
	res, err := t.h.opts.Kernel.Call(ctx, kr)
	// A legacy client gives input by answering requests during the call, a modern one by
	// repeating the call.
	for round := 0; err == nil && len(res.InputRequests) > 0 && !x.modern; round++ {
		if round == maxInputRounds {
			return t.renderError(x, manifest.E(manifest.Internal, "the tool asks for more input again and again"), kr.TraceID), nil
		}
		if kr, err = cl.collectInput(kr, res); err != nil {
			return nil, err
		}
		res, err = t.h.opts.Kernel.Call(ctx, kr)
	}
	if err != nil {
		e := manifest.AsError(err)
		if e.Code == manifest.BadRequest && kr.Target() == nil {
			return nil, invalidParams(e.Message) // the protocol's answer to an unknown tool
		}
		return t.renderError(x, e, kr.TraceID), nil
	}
	if res.Stream != nil {
		return t.relayFrames(ctx, x, progress, kr, res.Stream, lim)
	}
	return t.renderResult(x, res)
}

// metaOf returns a request's _meta if a stage of the kernel may read it, else nil: stages
// read keys that begin with agentctl/.
func metaOf(m sdk.Meta) json.RawMessage {
	for k := range m {
		if strings.HasPrefix(k, "agentctl/") && k != metaMaxFrames && k != metaMaxTime {
			data, err := json.Marshal(m)
			if err != nil {
				return nil
			}
			return data
		}
	}
	return nil
}

// maxInputRounds bounds how often a tool may ask a legacy client for input.
const maxInputRounds = 4

// renderResult renders a kernel result. A tool without content has its
// structured content as text too, for clients of versions without structured content.
func (t *tenant) renderResult(x *exchange, res *kernel.Result) (sdk.Result, error) {
	if f := res.RPCError; f != nil {
		return nil, &jsonrpc.Error{Code: f.Code, Message: f.Message, Data: f.Data}
	}
	b := newObject(256 + 5*len(res.Structured)/2) // twice, once with escapes
	if len(res.InputRequests) > 0 {
		b.raw("inputRequests", res.InputRequests)
		b.optional("requestState", res.RequestState)
		return t.finishResult(b, x, resultInputRequired, -1, res.Meta), nil
	}
	b.key("content")
	b.b = append(b.b, '[')
	for i, c := range res.Content {
		if i > 0 {
			b.b = append(b.b, ',')
		}
		b.b = append(b.b, c...)
	}
	if len(res.Content) == 0 && len(res.Structured) > 0 {
		b.b = appendText(b.b, res.Structured)
	}
	b.b = append(b.b, ']')
	if len(res.Structured) > 0 {
		b.raw("structuredContent", res.Structured)
	}
	if res.IsError {
		b.raw("isError", []byte("true"))
	}
	return t.finishResult(b, x, resultComplete, -1, res.Meta), nil
}

// renderError renders an error of the relay as a tool's result: the envelope that every
// HTTP answer has, as text and as structured content.
func (t *tenant) renderError(x *exchange, e *manifest.Error, trace string) sdk.Result {
	if x.flatNames && strings.Contains(e.Message, ".") {
		c := *e // plugins return shared errors
		c.Message = t.flattenNames(x.caller, e.Message)
		e = &c
	}
	body := edge.AppendError(nil, e, trace)
	b := newObject(384 + 3*len(body))
	b.key("content")
	b.b = append(appendText(append(b.b, '['), body), ']')
	b.raw("structuredContent", body)
	b.raw("isError", []byte("true"))
	return t.finishResult(b, x, resultComplete, -1, nil)
}

package relay

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"unicode"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// MaxBody bounds a request body, in bytes.
const MaxBody = 1 << 20

// callBody is the body of POST /mcp/tools/call (RFC-0009 §3): these keys and no others.
type callBody struct {
	Tool      string         `json:"tool"`
	Arguments strictjson.Raw `json:"arguments"`
}

// parse decodes a body and reports whether it is one.
func (b *callBody) parse(body []byte) bool {
	defer strictjson.AcquireSlot(len(body))()
	return strictjson.Unmarshal(body, b) == nil && b.Tool != "" && (len(b.Arguments) == 0 || b.Arguments[0] == '{')
}

// toolsCall serves POST /mcp/tools/call: a unary call, or a stream.
//
//	readCall ── refused ──────────────> audit, error envelope
//	         └─> kernel.Call ── failed ─> error envelope; the kernel has audited it
//	                         ├─ result ─> answerCall
//	                         └─ stream ─> openStream
//
// Each request gets exactly one audit record for its decision, from here or from the kernel.
func (r *Relay) toolsCall(w http.ResponseWriter, req *http.Request) {
	kr := &kernel.Request{}
	kr.TraceID, kr.Traced = edge.TraceID(req)
	held, status, e := r.readCall(w, req, kr)
	if held > 0 {
		defer r.bodies.Release(identityOf(kr.Caller), held)
	}
	if e != nil {
		rec := kernel.Record{Address: r.clientAddr(req), Transport: endpointHTTP, Decision: kernel.Denied, Code: e.Code, Reason: e.Reason, TraceID: kr.TraceID}
		if kr.Caller != nil {
			rec.Tenant, rec.Actor = kr.Caller.Tenant, kr.Caller.Actor
		}
		r.recordDecision(rec)
		r.writeError(w, status, e, kr.TraceID)
		return
	}
	res, err := r.kernel.Call(req.Context(), kr)
	if err != nil {
		e := manifest.AsError(err)
		r.writeError(w, edge.Status(e.Code), e, kr.TraceID)
		return
	}
	if res.Stream != nil {
		r.openStream(w, req, kr, res.Stream)
		return
	}
	r.answerCall(w, req, kr, res)
}

// readCall fills kr from a request, or returns the error and its status. held is what the body
// holds of r.bodies. The order of the checks decides which error a request with two faults gets
// (docs/protocol.md, "Errors"): size, token, Content-Type, body, Accept, name, and then those of
// the kernel.
func (r *Relay) readCall(w http.ResponseWriter, req *http.Request, kr *kernel.Request) (held int64, status int, e *manifest.Error) {
	bad := func(message string) (int64, int, *manifest.Error) {
		return held, http.StatusBadRequest, &manifest.Error{Code: manifest.BadRequest, Message: message, Reason: "request"}
	}
	tooLarge := func() (int64, int, *manifest.Error) {
		_, _, e := bad("the body is larger than 1 MiB")
		return held, http.StatusRequestEntityTooLarge, e
	}
	// Before the token, because it costs least. A body without a length is bounded by bodies.Read.
	if req.ContentLength > MaxBody {
		return tooLarge()
	}
	var err error
	if kr.Caller, err = r.httpCaller(req); err != nil {
		e, status := denial(err)
		return held, status, e
	}
	if !edge.IsJSON(req.Header.Get("Content-Type")) {
		return bad("send Content-Type: application/json")
	}
	body, held, err := r.bodies.Read(w, req, identityOf(kr.Caller), MaxBody)
	if err != nil {
		if share := (*manifest.Error)(nil); errors.As(err, &share) {
			return held, edge.Status(share.Code), share
		}
		if errors.As(err, new(*http.MaxBytesError)) {
			return tooLarge()
		}
		return bad("the body did not arrive whole and in time")
	}
	var b callBody
	if !b.parse(body) {
		return bad(`the body must be strict JSON of the form {"tool":"...","arguments":{...}} with no other keys`)
	}
	kr.Tool, kr.Arguments, kr.Stream = b.Tool, []byte(b.Arguments), isStreamTool(b.Tool)
	// The name alone says whether the answer is a stream, so Accept can be checked before the kernel
	// looks for the tool.
	wantJSON, wantStream := parseAccept(req.Header.Values("Accept"))
	if kr.Stream && !wantStream {
		return bad("this tool is a stream: send Accept: text/event-stream, or call metrics.snapshot for one reading")
	}
	if !kr.Stream && !wantJSON {
		return bad("this tool answers with application/json; send Accept: application/json")
	}
	if _, ok := manifest.ParseToolName(manifest.Canonical(b.Tool)); !ok && !isPluginTool(b.Tool) {
		return bad("the tool name is malformed; tools/list shows the names")
	}
	var ok bool
	if kr.Meta, ok = requestMeta(req); !ok {
		return bad("the header " + metaHeader + " must be one strict JSON object of at most 4 KiB")
	}
	return held, 0, nil
}

// answerCall writes the result of a unary call: structured content as it is, else the
// content blocks as {"content":[...]}, with "isError":true after them if the tool reports a failure.
// Such a failure has the status of its code.
func (r *Relay) answerCall(w http.ResponseWriter, req *http.Request, kr *kernel.Request, res *kernel.Result) {
	if res.RPCError != nil {
		e := rpcErrorEnvelope(res.RPCError)
		r.writeError(w, edge.Status(e.Code), e, kr.TraceID)
		return
	}
	body := []byte(res.Structured)
	if len(body) == 0 {
		body, _ = json.Marshal(contentBody{append([]json.RawMessage{}, res.Content...), res.IsError}) // cannot fail: the kernel's own JSON
	}
	status := http.StatusOK
	if res.IsError {
		status = toolErrorStatus(body)
	}
	h := w.Header()
	body = edge.CompressLarge(h, req, body)
	h["Content-Type"] = contentJSON
	h["Cache-Control"] = noStore
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	if len(res.Meta) > 0 && len(res.Meta) <= maxMetaSize {
		h.Set(metaHeader, string(res.Meta))
	}
	if status != http.StatusOK {
		w.WriteHeader(status)
	}
	_, _ = w.Write(body)
}

// contentBody is the body of a result without structured content.
type contentBody struct {
	Content []json.RawMessage `json:"content"`
	IsError bool              `json:"isError,omitempty"`
}

// maxRPCMessage bounds the part of a plugin's message that an error envelope repeats, in bytes.
const maxRPCMessage = 500

// rpcErrorEnvelope converts a JSON-RPC error of a plugin. Its message is the plugin's text, which
// the caller of /mcp gets too.
func rpcErrorEnvelope(rpc *kernel.RPCError) *manifest.Error {
	e := manifest.E(manifest.Internal, "the plugin failed to answer this call")
	if rpc.Code == codeInvalidParams {
		e = manifest.E(manifest.BadRequest, "the plugin refuses these arguments")
	}
	e.Reason = "plugin_error"
	text := strings.Map(func(c rune) rune {
		if !unicode.IsGraphic(c) {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(rpc.Message[:min(len(rpc.Message), maxRPCMessage)], ""))
	if text = strings.TrimSpace(text); text != "" {
		e.Message += ": " + text
	}
	return e
}

// toolErrorStatus returns the status of an error that a tool reported, which may be an envelope of ours.
// Any other is 422: the relay served the call, and the body says why the tool failed.
func toolErrorStatus(body []byte) int {
	var envelope struct {
		Error struct{ Code manifest.Code } `json:"error"`
	}
	if json.Unmarshal(body, &envelope) == nil && envelope.Error.Code.Valid() {
		return edge.Status(envelope.Error.Code)
	}
	return http.StatusUnprocessableEntity
}

// Header values that every answer shares, so that none is allocated for a call.
var (
	contentJSON = []string{"application/json"}
	noStore     = []string{"no-store"}
	noSniff     = []string{"nosniff"}
)

// metaHeader carries over plain HTTP what _meta carries in MCP, as a JSON object on one
// line. The stages sign and compress exchange their parameters with clients in it.
const metaHeader = stages.HeaderMeta

// maxMetaSize bounds metaHeader, in bytes.
const maxMetaSize = 4 << 10

const codeInvalidParams = -32602 // of JSON-RPC

// requestMeta returns the metadata of a request, nil for none; ok is false if it is
// malformed: the stages would otherwise see text that MCP could not have carried.
func requestMeta(req *http.Request) (json.RawMessage, bool) {
	v := req.Header[metaHeader]
	switch {
	case len(v) == 0:
		return nil, true
	case len(v) > 1 || len(v[0]) > maxMetaSize || v[0] == "" || v[0][0] != '{' || strictjson.Check([]byte(v[0])) != nil:
		return nil, false
	}
	return json.RawMessage(v[0]), true
}

// isStreamTool reports whether a name, in either spelling, is of a device's stream. A
// plugin's tool is unary, whatever its verb is called.
func isStreamTool(tool string) bool {
	return (strings.HasSuffix(tool, "."+manifest.VerbSubscribe) || strings.HasSuffix(tool, "_"+manifest.VerbSubscribe)) && !isPluginTool(tool)
}

// isPluginTool reports whether s may name a tool of a plugin that is no device, such as
// tickets.create: two or three segments of [a-z0-9_]. The four segments with a node id are
// a rule of device tools only.
func isPluginTool(s string) bool {
	if len(s) > manifest.MaxToolNameLen || strings.HasPrefix(s, "system.") || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_.") != "" {
		return false
	}
	dots := strings.Count(s, ".")
	return dots >= 1 && dots <= 2 && s[0] != '.' && s[len(s)-1] != '.' && !strings.Contains(s, "..")
}

// authenticate returns the caller that a request's token proves. The tenant comes from the
// token only: nothing else in a request can select another one. Caller.Active lets a
// stream end when its token is revoked.
// A bad token is refused even where Options.Anonymous asks for none: its holder should notice that it
// is bad. A good one makes the connection count against the identity's share (edge.Conn).
func (r *Relay) authenticate(req *http.Request, transport string) (*kernel.Caller, error) {
	token, given := edge.Bearer(req)
	if !given && r.opt.Anonymous {
		edge.ConnOf(req).MarkKnown() // whoever reaches loopback may use it
		return &kernel.Caller{Tenant: auth.DefaultTenant, Actor: "anonymous", Address: r.clientAddr(req), Transport: transport, Scopes: anonymousScopes}, nil
	}
	id, err := r.store.Verify(token, auth.ClassAgent)
	if err == nil {
		err = edge.ConnOf(req).Authenticate(edge.Identity{Tenant: id.Tenant, Subject: id.Subject})
	}
	if err != nil {
		return nil, err
	}
	return &kernel.Caller{Tenant: id.Tenant, Actor: id.Subject, JTI: id.JTI, Address: r.clientAddr(req), Transport: transport, Scopes: id,
		Active: r.store.ActiveFromNow(id)}, nil
}

// callerOf authenticates a request and keeps its caller present: an agent has no connection
// whose end could be seen, so its requests are its heartbeats.
func (r *Relay) callerOf(req *http.Request, transport string) (*kernel.Caller, error) {
	c, err := r.authenticate(req, transport)
	if err == nil {
		r.kernel.Heartbeat(kernel.Presence{Tenant: c.Tenant, Kind: kernel.PresenceAgent, ID: c.Actor, Transport: transport})
	}
	return c, err
}

// httpCaller returns the caller of a plain HTTP endpoint.
func (r *Relay) httpCaller(req *http.Request) (*kernel.Caller, error) { return r.callerOf(req, "http") }

// mcpCaller returns the caller of /mcp.
func (r *Relay) mcpCaller(req *http.Request) (*kernel.Caller, error) { return r.callerOf(req, "mcp") }

// identityOf returns the holder of a caller's shares.
func identityOf(c *kernel.Caller) edge.Identity {
	return edge.Identity{Tenant: c.Tenant, Subject: c.Actor}
}

// anonymousScopes are those of a caller without a token, where Options.Anonymous allows it.
var anonymousScopes = func() auth.Scopes {
	s, err := auth.ParseScopes(manifest.ScopeCallReadOnly, manifest.ScopeToolsList)
	if err != nil {
		panic(err)
	}
	return s
}()

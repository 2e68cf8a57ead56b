package relay

import (
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// MaxBody bounds a request body, bytes.
const MaxBody = 1 << 20

// callBody is the body of POST /mcp/tools/call (RFC-0009 §3): these keys and no others.
type callBody struct {
	Tool      string         `json:"tool"`
	Arguments strictjson.Raw `json:"arguments"`
}

// toolsCall is POST /mcp/tools/call. The order of the checks decides the code: size, token,
// Content-Type and body, Accept, name, then the kernel's.
func (r *Relay) toolsCall(w http.ResponseWriter, req *http.Request) {
	trace, traced := edge.TraceID(req)
	var c *kernel.Caller
	fail := func(status int, e *manifest.Error) {
		rec := kernel.Record{Decision: kernel.Denied, Code: e.Code, Reason: e.Reason, TraceID: trace}
		if c != nil {
			rec.Tenant, rec.Actor = c.Tenant, c.Actor
		}
		r.recordDecision(rec)
		r.writeError(w, status, e, trace)
	}
	bad := func(status int, message string) {
		fail(status, &manifest.Error{Code: manifest.BadRequest, Message: message, Reason: "request"})
	}
	if req.ContentLength > MaxBody {
		bad(http.StatusRequestEntityTooLarge, "the body is larger than 1 MiB")
		return
	}
	c, err := r.httpCaller(req)
	if err != nil {
		e, status := denial(err)
		fail(status, e)
		return
	}
	if !edge.IsJSON(req.Header.Get("Content-Type")) {
		bad(http.StatusBadRequest, "send Content-Type: application/json")
		return
	}
	body, err := edge.ReadBody(w, req, MaxBody)
	if err != nil {
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			bad(http.StatusRequestEntityTooLarge, "the body is larger than 1 MiB")
			return
		}
		bad(http.StatusBadRequest, "the body did not arrive whole and in time")
		return
	}
	var b callBody
	if err := strictjson.Unmarshal(body, &b); err != nil || b.Tool == "" || (len(b.Arguments) > 0 && b.Arguments[0] != '{') {
		bad(http.StatusBadRequest, `the body must be strict JSON of the form {"tool":"...","arguments":{...}} with no other keys`)
		return
	}
	wantJSON, wantStream := parseAccept(req.Header.Values("Accept"))
	subscribe := isStreamTool(b.Tool)
	if subscribe && !wantStream {
		bad(http.StatusBadRequest, "this tool is a stream: send Accept: text/event-stream, or call metrics.snapshot for one reading")
		return
	}
	if !subscribe && !wantJSON {
		bad(http.StatusBadRequest, "this tool answers with application/json; send Accept: application/json")
		return
	}
	if _, ok := manifest.ParseToolName(manifest.Canonical(b.Tool)); !ok && !isPluginTool(b.Tool) {
		bad(http.StatusBadRequest, "the tool name is malformed; tools/list shows the names")
		return
	}
	meta, ok := requestMeta(req)
	if !ok {
		bad(http.StatusBadRequest, "the header "+metaHeader+" must be one strict JSON object of at most 4 KiB")
		return
	}
	kr := &kernel.Request{Caller: c, Tool: b.Tool, Arguments: []byte(b.Arguments), Meta: meta, TraceID: trace, Traced: traced, Stream: subscribe}
	res, err := r.kernel.Call(req.Context(), kr)
	if err != nil {
		e := manifest.AsError(err)
		r.writeError(w, edge.Status(e.Code), e, kr.TraceID)
		return
	}
	if res.Stream != nil {
		r.serveStream(w, req, kr, res.Stream)
		return
	}
	r.answerCall(w, kr, res)
}

// answerCall writes the result of an unary call: what is structured as it is, else its
// content blocks as {"content":[...]}. A failure that the tool itself reports has the
// status of its code.
func (r *Relay) answerCall(w http.ResponseWriter, kr *kernel.Request, res *kernel.Result) {
	if res.RPCError != nil {
		e := manifest.E(manifest.Internal, "the plugin failed to answer this call")
		if res.RPCError.Code == codeInvalidParams {
			e = manifest.E(manifest.BadRequest, "the plugin refuses these arguments")
		}
		r.writeError(w, edge.Status(e.Code), e, kr.TraceID)
		return
	}
	body := []byte(res.Structured)
	if len(body) == 0 {
		body, _ = json.Marshal(map[string][]json.RawMessage{"content": res.Content}) // the kernel's own JSON
	}
	h := w.Header()
	h["Content-Type"] = contentJSON
	h["Cache-Control"] = noStore
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	if len(res.Meta) > 0 && len(res.Meta) <= maxMetaSize {
		h.Set(metaHeader, string(res.Meta))
	}
	if res.IsError {
		var own struct {
			Error struct{ Code manifest.Code } `json:"error"`
		}
		status := http.StatusUnprocessableEntity
		if json.Unmarshal(body, &own) == nil && slices.Contains(manifest.Codes, own.Error.Code) {
			status = edge.Status(own.Error.Code)
		}
		w.WriteHeader(status)
	}
	_, _ = w.Write(body)
}

// metaHeader carries on this door what _meta carries in MCP: the stages sign and compress
// speak to their clients through it. A JSON object on one line.
const metaHeader = "Agentctl-Meta"

const maxMetaSize = 4 << 10

const codeInvalidParams = -32602 // of JSON-RPC

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

var (
	contentJSON = []string{"application/json"}
	noStore     = []string{"no-store"}
)

// isStreamTool tells whether a name, in either spelling, is of a device's stream. A plugin's
// tool is unary, whatever its verb is called.
func isStreamTool(tool string) bool {
	return (strings.HasSuffix(tool, "."+manifest.VerbSubscribe) || strings.HasSuffix(tool, "_"+manifest.VerbSubscribe)) && !isPluginTool(tool)
}

// isPluginTool reports whether s looks like a tool of a plugin that is no device, such as
// tickets.create: the four segments are a rule of device tools only.
func isPluginTool(s string) bool {
	if len(s) > manifest.MaxToolNameLen || s == "" {
		return false
	}
	dots := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '.' {
			dots++
		} else if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return dots >= 1 && dots <= 2 && s[0] != '.' && s[len(s)-1] != '.' && !strings.Contains(s, "..") && !strings.HasPrefix(s, "system.")
}

// parseAccept tells which of the two answers a caller takes (RFC 9110 §12.5.1). No Accept,
// and */*, mean JSON, of which the most specific range decides; a type with q=0 is not
// accepted; a stream must be asked for by its name.
func parseAccept(values []string) (wantJSON, wantStream bool) {
	given, best := false, -1 // best is the place of the range that decides about JSON
	rest := strings.Join(values, ",")
	for more := true; more; {
		var item string
		if item, rest, more = cutUnquoted(rest, ','); strings.TrimSpace(item) == "" {
			continue
		}
		given = true
		typ, params, _ := cutUnquoted(item, ';')
		typ = strings.ToLower(strings.TrimSpace(typ))
		yes := hasWeight(params)
		wantStream = wantStream || typ == "text/event-stream" && yes
		switch place := slices.Index(jsonRanges, typ); {
		case place > best:
			best, wantJSON = place, yes
		case place >= 0 && place == best:
			wantJSON = wantJSON || yes
		}
	}
	return wantJSON || !given, wantStream
}

// jsonRanges are the media ranges that take application/json, the vaguest first.
var jsonRanges = []string{"*/*", "application/*", "application/json"}

// hasWeight tells whether the parameters of a media range leave it a weight above 0.
func hasWeight(params string) bool {
	for more := true; more; {
		var p string
		p, params, more = cutUnquoted(params, ';')
		name, q, _ := strings.Cut(p, "=")
		q = strings.TrimSpace(q)
		if strings.EqualFold(strings.TrimSpace(name), "q") && (!qvalue.MatchString(q) || strings.Trim(q, "0.") == "") {
			return false
		}
	}
	return true
}

var qvalue = regexp.MustCompile(`^(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)$`) // RFC 9110 §12.4.2

// cutUnquoted is strings.Cut at a byte that is not inside a quoted string.
func cutUnquoted(s string, sep byte) (before, after string, found bool) {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\' && quoted:
			i++
		case c == sep && !quoted:
			return s[:i], s[i+1:], true
		}
	}
	return s, "", false
}

// authenticate proves who sends a request; the tenant comes from the token only.
func (r *Relay) authenticate(req *http.Request) (*kernel.Caller, error) {
	token, given := edge.Bearer(req)
	if !given && r.opt.Anonymous {
		return &kernel.Caller{Tenant: auth.DefaultTenant, Actor: "anonymous", Transport: "http", Scopes: anonymousScopes}, nil
	}
	id, err := r.store.Verify(token, auth.ClassAgent)
	if err != nil {
		return nil, err
	}
	return &kernel.Caller{Tenant: id.Tenant, Actor: id.Subject, JTI: id.JTI, Transport: "http", Scopes: id.Scopes,
		Active: func() error { return r.store.Active(id) }}, nil
}

// httpCaller is caller for the plain HTTP doors, and a sign of life.
func (r *Relay) httpCaller(req *http.Request) (*kernel.Caller, error) {
	c, err := r.authenticate(req)
	if err == nil {
		r.agentHeartbeat(c)
	}
	return c, err
}

// mcpCaller is caller for /mcp.
func (r *Relay) mcpCaller(req *http.Request) (*kernel.Caller, error) {
	c, err := r.authenticate(req)
	if err == nil {
		c.Transport = "mcp"
		r.agentHeartbeat(c)
	}
	return c, err
}

// anonymousScopes are those of a caller without a token, on loopback and only with
// --anonymous.
var anonymousScopes = func() auth.Scopes {
	s, err := auth.ParseScopes(manifest.ScopeCallReadOnly, manifest.ScopeToolsList)
	if err != nil {
		panic(err)
	}
	return s
}()

// writeDenied answers a request whose token is not good.
func (r *Relay) writeDenied(w http.ResponseWriter, req *http.Request, err error) {
	e, status := denial(err)
	trace, _ := edge.TraceID(req)
	r.recordDecision(kernel.Record{Decision: kernel.Denied, Code: e.Code, Reason: e.Reason, TraceID: trace})
	r.writeError(w, status, e, trace)
}

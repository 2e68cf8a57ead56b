package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
)

// A plain request is one message that wants one answer of the kernel: a list, a resource
// or a tool, with headers that say what the body says, from a client that takes JSON and
// events. It needs nothing of a session, so it is answered in its own goroutine. The SDK
// would parse it up to ten times, with 32 KB of garbage a parse, and hand it through
// three goroutines; that is four fifths of the CPU of a call.
//
// All else goes to the SDK: handshakes, notifications, requests to clients, listening,
// prompts, batches, and whatever has to be refused in the protocol's words. The two ways
// share everything behind the message, and a test holds them against each other.

var plainMethods = []string{"tools/call", "tools/list", "resources/list", "resources/read"}

var legacyVersions = slices.DeleteFunc(sdk.SupportedProtocolVersions(), func(v string) bool { return v >= modernVersion })

// plainModern tells whether a request of the modern era is plain.
func plainModern(r *http.Request, m *envelope) bool {
	if !plainMessage(r, m) || m.era != modernVersion || r.Header.Get(headerVersion) != modernVersion || r.Header.Get("Mcp-Method") != m.method {
		return false
	}
	if (m.method == "tools/call" || m.method == "resources/read") && r.Header.Get("Mcp-Name") != m.name {
		return false
	}
	return len(m.caps) > 0 && m.caps[0] == '{' && (len(m.info) == 0 || m.info[0] == '{') && (len(m.level) == 0 || m.level[0] == '"')
}

// plainLegacy tells whether a request of a session is plain. A plugin's tool may ask the
// client for something, which takes the SDK; a device's never does.
func plainLegacy(r *http.Request, m *envelope) bool {
	if !plainMessage(r, m) {
		return false
	}
	if v := r.Header.Get(headerVersion); v != "" && !slices.Contains(legacyVersions, v) {
		return false
	}
	if m.method == "tools/call" {
		_, device := manifest.ParseToolName(manifest.Canonical(m.name))
		return device
	}
	return true
}

func plainMessage(r *http.Request, m *envelope) bool {
	if len(m.id) == 0 || !(m.id[0] == '"' || m.id[0] == '-' || m.id[0] >= '0' && m.id[0] <= '9') ||
		m.version != "2.0" || !slices.Contains(plainMethods, m.method) || !acceptsBoth(r.Header) || r.Header.Get("Last-Event-ID") != "" {
		return false
	}
	if m.method == "tools/call" || m.method == "resources/read" {
		return m.name != ""
	}
	return len(m.params) == 0 || m.params[0] == '{'
}

// plainly answers a plain request of the session. Its id can be cancelled by a
// notification, as long as it runs.
func (s *session) plainly(w http.ResponseWriter, x *exchange, m *envelope, other func()) {
	id := string(m.id)
	s.mu.Lock()
	_, twice := s.plain[id]
	if !twice && !s.ended {
		s.plain[id] = x.cancel
	}
	s.mu.Unlock()
	if twice {
		refuseRPC(w, http.StatusBadRequest, m.id, codeRefused, "a request with this id is in progress")
		return
	}
	defer func() {
		s.mu.Lock()
		delete(s.plain, id)
		s.mu.Unlock()
	}()
	s.tenant.plainly(w, x, m, other)
}

// cancelPlain ends the plain request that notifications/cancelled names, if there is one.
func (s *session) cancelPlain(m *envelope) {
	if len(m.params) == 0 || m.params[0] != '{' {
		return
	}
	members(m.params, func(key string, v []byte) {
		if key != "requestId" {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if cancel := s.plain[string(v)]; cancel != nil {
			cancel()
		}
	})
}

// plainly answers a plain request; other serves a resource that is not listed.
func (t *tenant) plainly(w http.ResponseWriter, x *exchange, m *envelope, other func()) {
	p := &plainClient{x: x, m: m, w: w, rc: http.NewResponseController(w)}
	defer p.end()
	res, checked, err := t.plain(p)
	switch {
	case errors.Is(err, errUnlisted):
		other()
	case err != nil:
		p.fault(err)
	default:
		p.result(res.body, checked)
	}
}

// plain does what a plain request asks for. checked tells that the result is known to be
// valid JSON on one line.
func (t *tenant) plain(p *plainClient) (res *result, checked bool, err error) {
	defer func() {
		if v := recover(); v != nil {
			res, err = nil, t.h.panicked(p.m.method, v)
		}
	}()
	x, m := p.x, p.m
	switch m.method {
	case "tools/list", "resources/list":
		cursor, ok := m.cursor()
		if !ok {
			return nil, false, invalidParams("the cursor must be a string")
		}
		if m.method == "tools/list" {
			res, err = t.listTools(x, cursor)
		} else {
			res, err = t.listResources(x, cursor)
		}
		return res, false, err
	case "resources/read":
		res, err = t.readResource(x.ctx, x, m.name)
		return res, false, err
	}
	call, err := m.toolCall()
	if err != nil {
		return nil, false, err
	}
	res, err = t.callTool(x.ctx, x, call, p)
	_, device := manifest.ParseToolName(manifest.Canonical(m.name)) // the hub has checked what devices say
	return res, device, err
}

// cursor is params.cursor; not ok when it is no string.
func (m *envelope) cursor() (cursor string, ok bool) {
	ok = true
	if len(m.params) > 0 {
		members(m.params, func(key string, v []byte) {
			if key == "cursor" {
				cursor, ok = text(v), v[0] == '"'
			}
		})
	}
	return cursor, ok
}

// toolCall is the params of tools/call.
func (m *envelope) toolCall() (*toolCall, error) {
	c := &toolCall{name: m.name, meta: m.rest()}
	bad := ""
	members(m.params, func(key string, v []byte) {
		switch key {
		case "arguments":
			c.args = v
		case "inputResponses":
			if c.responses = v; v[0] != '{' {
				bad = key
			}
		case "requestState":
			if c.state = text(v); v[0] != '"' {
				bad = key
			}
		}
	})
	if bad != "" {
		return nil, invalidParams(bad + " is of the wrong type")
	}
	return c, nil
}

// plainClient is the client of a plain request. Its answer is JSON until the first
// notification makes it a stream of events.
type plainClient struct {
	x  *exchange
	m  *envelope
	w  http.ResponseWriter
	rc *http.ResponseController

	mu     sync.Mutex // protects w and the fields below: a plugin may notify from anywhere
	events bool
	timed  bool
	over   bool
}

var _ peer = (*plainClient)(nil)

var errOver = errors.New("mcp: the request has ended")

// token is the JSON of the request's progress token; nil if there is none.
func (p *plainClient) token() (token []byte) {
	if len(p.m.meta) > 0 {
		members(p.m.meta, func(key string, v []byte) {
			if key == "progressToken" && (v[0] == '"' || v[0] == '-' || v[0] >= '0' && v[0] <= '9') {
				token = v
			}
		})
	}
	return token
}

// ProgressToken implements kernel.Session.
func (p *plainClient) ProgressToken() any {
	var v any
	if tok := p.token(); tok == nil || json.Unmarshal(tok, &v) != nil {
		return nil
	}
	return v
}

// Capabilities implements kernel.Session.
func (p *plainClient) Capabilities() json.RawMessage {
	if !p.x.modern {
		c := client{x: p.x, ss: p.x.session.ss}
		return c.Capabilities()
	}
	return p.m.caps
}

// Ask implements kernel.Session.
func (p *plainClient) Ask(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	return nil, errNoAsk
}

// Notify implements kernel.Session.
func (p *plainClient) Notify(_ context.Context, method string, params json.RawMessage) error {
	var in map[string]json.RawMessage
	if err := json.Unmarshal(params, &in); err != nil || in == nil {
		return errors.New("notify " + method + ": params are no object")
	}
	switch method {
	case "notifications/progress":
		tok := p.token()
		if tok == nil {
			return nil
		}
		in["progressToken"] = tok
	case "notifications/message":
		if !logs(p.m.level, in["level"]) {
			return nil
		}
	case "notifications/elicitation/complete":
	default:
		return errors.New("notify " + method + ": not a notification of a request")
	}
	data, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return p.event(append(append(append(append(make([]byte, 0, len(data)+80), `{"jsonrpc":"2.0","method":"`...), method...), `","params":`...), append(data, '}')...))
}

var levels = []string{"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"}

// logs tells whether a client that asked for a level (none: for nothing) gets a message
// of another. Both are JSON strings.
func logs(asked, level []byte) bool {
	at := slices.Index(levels, text(asked))
	return at >= 0 && slices.Index(levels, text(level)) >= at
}

func (p *plainClient) progress(done, total float64, message []byte) {
	tok := p.token()
	if tok == nil {
		return
	}
	b := make([]byte, 0, 2*len(message)+160)
	b = append(b, `{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":`...)
	b = append(b, tok...)
	b = append(b, `,"progress":`...)
	b = strconv.AppendFloat(b, done, 'g', -1, 64)
	b = append(b, `,"total":`...)
	b = strconv.AppendFloat(b, total, 'g', -1, 64)
	b = append(b, `,"message":`...)
	_ = p.event(append(appendString(b, message), `}}`...)) // its failing ends ctx
}

// event sends one message as an event. A reader that takes longer than writeWait for it
// ends its request.
func (p *plainClient) event(data []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.x.ctx.Err() != nil {
		return errOver
	}
	return p.eventLocked(data)
}

func (p *plainClient) eventLocked(data []byte) error {
	if p.over {
		return errOver
	}
	if !p.events {
		p.events = true
		h := p.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache, no-transform")
	}
	b := make([]byte, 0, len(data)+32)
	b = append(b, "event: message\ndata: "...)
	b = append(b, data...)
	b = append(b, "\n\n"...)
	p.timed = true
	_ = p.rc.SetWriteDeadline(time.Now().Add(writeWait))
	_, err := p.w.Write(b)
	if err == nil {
		err = p.rc.Flush()
	}
	if err != nil {
		p.over = true
	}
	return err
}

// result answers with a result.
func (p *plainClient) result(body []byte, checked bool) {
	b := make([]byte, 0, len(body)+len(p.m.id)+40)
	b = append(b, `{"jsonrpc":"2.0","id":`...)
	b = append(b, p.m.id...)
	b = append(b, `,"result":`...)
	b = append(b, body...)
	b = append(b, '}')
	if !checked || bytes.IndexByte(b, '\n') >= 0 || bytes.IndexByte(b, '\r') >= 0 { // a line end would end the event
		var one bytes.Buffer
		one.Grow(len(b))
		if json.Compact(&one, b) != nil {
			p.fault(&jsonrpc.Error{Code: codeInternal, Message: "a plugin answered with malformed JSON"})
			return
		}
		b = one.Bytes()
	}
	p.answer(http.StatusOK, b)
}

// codeInternal is JSON-RPC's "internal error".
const codeInternal = -32603

// fault answers with a JSON-RPC error.
func (p *plainClient) fault(err error) {
	var f *jsonrpc.Error
	if !errors.As(err, &f) {
		f = &jsonrpc.Error{Code: codeInternal, Message: "the request was given up"}
	}
	status := http.StatusOK
	if p.x.modern {
		status = modernStatus(f.Code)
	}
	p.answer(status, appendFault(nil, p.m.id, f.Code, f.Message, f.Data))
}

var (
	contentJSON = []string{"application/json"}
	noStore     = []string{"no-store"}
)

func (p *plainClient) answer(status int, b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.events {
		_ = p.eventLocked(b)
		return
	}
	h := p.w.Header()
	h["Content-Type"] = contentJSON
	h["Cache-Control"] = noStore
	if status != http.StatusOK {
		p.w.WriteHeader(status)
	}
	if len(b) > 2048 { // less fits into any buffer
		p.timed = true
		_ = p.rc.SetWriteDeadline(time.Now().Add(writeWait))
	}
	_, _ = p.w.Write(b)
}

func (p *plainClient) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	if p.timed {
		_ = p.rc.SetWriteDeadline(time.Time{}) // the connection may serve another request
	}
}

// modernStatus is the HTTP status that the protocol wants for its errors.
func modernStatus(code int64) int {
	switch code {
	case jsonrpc.CodeMethodNotFound:
		return http.StatusNotFound
	case jsonrpc.CodeInvalidParams, sdk.CodeUnsupportedProtocolVersion, sdk.CodeMissingRequiredClientCapabilities:
		return http.StatusBadRequest
	}
	return http.StatusOK
}

package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// Most requests are calls of a board's tool, and the largest answers are lists. The SDK would cost
// more than the rest of such a request: it decodes the message several times, hands it from
// goroutine to goroutine and encodes the answer twice. So these requests do not go through it:
//
//	POST ── isDirect ─┬─ answerDirectly ── callTool, listTools, listResources ── the response
//	                  └─ anything unusual: the SDK, which answers or refuses it
//
// A request is served directly if nothing happens during it that the SDK has to carry, and if the
// SDK would accept the message. A board's tool that is not a stream sends no progress and asks for
// no input. Authentication, the checks of the body and the kernel are the same for both
// paths, and so is the answer (TestDirectIsTheSame). The SDK does not know the ids of direct
// requests, so the session keeps those of all its requests (claimIDs, cancelRequest).

// isDirect reports whether a request is served directly. For a call it returns the tool, with its
// name.
func (t *tenant) isDirect(x *exchange, m *envelope) (name string, tool *kernel.Tool, ok bool) {
	switch {
	case m.isUnusual || t.h.neverDirect:
	case m.method == "tools/call" && m.name != "":
		name, tool = t.resolveTool(x.caller, m.name)
		ok = tool != nil && tool.NodeID != "" && !tool.Streams
	case isList[m.method]:
		ok = true
	}
	return name, tool, ok
}

// isList has the methods whose results are lists of the kernel. Their results are compressed for
// clients that accept gzip also in a session, where each is one event: a page of 200 tools is 300 KB,
// and its schemas are those of every board of a model. Other events are never compressed.
var isList = map[string]bool{"tools/list": true, "resources/list": true}

// sessionVersions are the protocol versions that the header of a request in a session may name.
// The value says whether the version has batches.
var sessionVersions = map[string]bool{"": true, "2024-11-05": true, "2025-03-26": true, "2025-06-18": false, "2025-11-25": false}

// isSessionPost reports whether the SDK would accept a POST in a session, by its headers.
func isSessionPost(r *http.Request, isBatch bool) bool {
	hasBatches, known := sessionVersions[r.Header.Get(headerVersion)]
	return known && (hasBatches || !isBatch) && len(r.Header["Last-Event-Id"]) == 0
}

// answerDirectly returns the result of a request that isDirect has accepted. The error is a
// *jsonrpc.Error.
func (t *tenant) answerDirectly(x *exchange, m *envelope, name string, tool *kernel.Tool) (body []byte, err error) {
	defer t.recoverPanic(m.method, &err)
	var res sdk.Result
	switch m.method {
	case "tools/list":
		res, err = t.listTools(x, m.cursor)
	case "resources/list":
		res, err = t.listResources(x, m.cursor)
	default:
		res, err = t.callDirectly(x, m, name, tool)
	}
	if err != nil {
		return nil, err
	}
	r, ok := res.(*result)
	if !ok {
		return nil, &jsonrpc.Error{Code: codeInternal, Message: "the relay failed to answer this request"}
	}
	if bytes.IndexByte(r.body, '\n') >= 0 || bytes.IndexByte(r.body, '\r') >= 0 { // an event has none
		var compact bytes.Buffer
		if err := json.Compact(&compact, r.body); err != nil {
			return nil, &jsonrpc.Error{Code: codeInternal, Message: "the relay failed to answer this request"}
		}
		return compact.Bytes(), nil
	}
	return r.body, nil
}

// callDirectly calls a board's tool.
func (t *tenant) callDirectly(x *exchange, m *envelope, name string, tool *kernel.Tool) (sdk.Result, error) {
	req := &sdk.CallToolRequest{Params: &sdk.CallToolParamsRaw{Name: m.name, Arguments: m.arguments}}
	if x.session != nil {
		req.Session = x.session.ss
	}
	if len(m.meta) > 2 { // not {}
		if x.modern {
			req.Params.Meta = m.extraMeta()
		} else if err := json.Unmarshal(m.meta, &req.Params.Meta); err != nil {
			return nil, invalidParams("_meta is malformed")
		}
	}
	return t.callTool(x.ctx, x, &client{x: x, req: req, ctx: x.ctx, direct: m}, req.Params, name, tool)
}

// recoverPanic turns a panic of a handler into an error that tells the client nothing.
func (t *tenant) recoverPanic(method string, err *error) {
	if p := recover(); p != nil {
		t.h.log.Error("mcp handler panicked", zap.String("method", method), zap.String("type", fmt.Sprintf("%T", p)), zap.Stack("stack"))
		*err = &jsonrpc.Error{Code: codeInternal, Message: "the relay failed to answer this request"}
	}
}

// serveDirect answers a plain modern request directly, if it is one that may be; else it does
// nothing and returns false.
func (t *tenant) serveDirect(w http.ResponseWriter, r *http.Request, x *exchange, m *envelope) bool {
	name, tool, ok := t.isDirect(x, m)
	if !ok {
		return false
	}
	body, err := t.answerDirectly(x, m, name, tool)
	if x.ctx.Err() != nil {
		return true // nobody reads it
	}
	b := appendResponse(nil, m.id, body, err)
	if err == nil {
		b = edge.CompressLarge(w.Header(), r, b)
	}
	writeResponse(w, b, err)
	return true
}

// serveDirectInSession answers a request of a session directly.
func (t *tenant) serveDirectInSession(w http.ResponseWriter, r *http.Request, x *exchange, m *envelope, name string, tool *kernel.Tool) {
	body, err := t.answerDirectly(x, m, name, tool)
	if x.ctx.Err() != nil && !x.canceledByClient.Load() && !errors.Is(context.Cause(x.ctx), kernel.ErrStopping) {
		if r.Context().Err() == nil { // the client is there: the session has ended, or the relay stops
			edge.WriteJSON(w, http.StatusOK, t.h.endOfSession(m.id))
		}
		return
	}
	b := makeEvent(m.canonicalID(), body, err)
	if isList[m.method] && err == nil {
		b = edge.Compress(w.Header(), r, b)
	}
	h := w.Header()
	h["Content-Type"], h["Cache-Control"], h["Connection"] = contentEvents, noTransform, keepAlive
	writeBody(w, http.StatusOK, b)
}

// Header values that responses share, so that none is allocated. Those of a session are the SDK's.
var (
	contentJSON   = []string{"application/json"}
	noStore       = []string{"no-store"}
	contentEvents = []string{"text/event-stream"}
	noTransform   = []string{"no-cache, no-transform"}
	keepAlive     = []string{"keep-alive"}
)

// appendResponse appends a JSON-RPC response: the error, if there is one, else the result.
func appendResponse(b, id, result []byte, err error) []byte {
	if err != nil {
		code, data := codeOf(err)
		return appendRPCError(b, id, code, err.Error(), data)
	}
	if b == nil {
		b = make([]byte, 0, len(result)+len(id)+40)
	}
	b = append(b, `{"jsonrpc":"2.0","id":`...)
	b = append(b, id...)
	b = append(b, `,"result":`...)
	b = append(b, result...)
	return append(b, '}')
}

// codeOf returns code and data of the JSON-RPC error that err becomes.
func codeOf(err error) (int64, json.RawMessage) {
	if f, ok := errors.AsType[*jsonrpc.Error](err); ok {
		return f.Code, f.Data
	}
	return codeInternal, nil
}

// writeResponse writes a modern response as JSON, with the HTTP status of its error.
func writeResponse(w http.ResponseWriter, message []byte, err error) {
	status := http.StatusOK
	if err != nil {
		code, _ := codeOf(err)
		status = modernStatus(code)
	}
	h := w.Header()
	h["Content-Type"], h["Cache-Control"] = contentJSON, noStore
	writeBody(w, status, message)
}

// makeEvent makes the event that answers a request in a session.
func makeEvent(id, result []byte, err error) []byte {
	const head, end = "event: message\ndata: ", "\n\n"
	b := append(make([]byte, 0, len(head)+len(id)+len(result)+40), head...)
	return append(appendResponse(b, id, result, err), end...)
}

// maxUndelayed is the size of a response that any send buffer takes at once; its write
// needs no deadline.
const maxUndelayed = 2048

// writeBody writes a whole response. A client that does not read a large one has writeTimeout.
func writeBody(w http.ResponseWriter, status int, b []byte) {
	if status != http.StatusOK {
		w.WriteHeader(status)
	}
	if len(b) <= maxUndelayed {
		_, _ = w.Write(b)
		return
	}
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, _ = w.Write(b)
	_ = rc.Flush()
	_ = rc.SetWriteDeadline(time.Time{})
}

// canonicalID returns the id of a request in a session as the SDK would write it: a number as
// an integer, a string with as few escapes as possible. Two ids are the same if it is the same.
func (m *envelope) canonicalID() []byte {
	if m.id[0] != '"' {
		if len(m.id) < 16 && isDigits(m.id) && (m.id[0] != '0' || len(m.id) == 1) {
			return m.id
		}
		return canonicalNumber(m.id)
	}
	for _, c := range m.id {
		if c == '\\' || c > '~' {
			return canonicalString(m.id)
		}
	}
	return m.id
}

func isDigits(b []byte) bool {
	for _, c := range b {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

func canonicalNumber(id []byte) []byte {
	f, err := strconv.ParseFloat(string(id), 64)
	if err != nil || math.Abs(f) >= 1<<63 {
		return nil
	}
	return strconv.AppendInt(nil, int64(f), 10)
}

func canonicalString(id []byte) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if e.Encode(stringValue(id)) != nil {
		return nil
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// claimIDs registers the requests of an exchange in its session, until releaseIDs. A request
// whose id is in use is not registered; it is returned if the SDK cannot notice that,
// because one of the two calls is direct. The SDK refuses the other duplicates itself.
func (s *session) claimIDs(x *exchange, msgs []envelope) (duplicate *envelope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range msgs {
		m := &msgs[i]
		if m.isResponse || len(m.id) == 0 {
			continue
		}
		id := m.canonicalID()
		if other := s.requests[string(id)]; other != nil {
			if other != x && (other.isDirect || x.isDirect) {
				return m
			}
			continue
		}
		key := string(id)
		if s.requests == nil {
			s.requests = make(map[string]*exchange)
		}
		s.requests[key] = x
		x.requestIDs = append(x.requestIDs, key)
	}
	return nil
}

// refuseDuplicate refuses a request whose id is in use, in the words of the SDK.
func refuseDuplicate(w http.ResponseWriter, m *envelope) {
	id := m.canonicalID()
	text := string(id)
	if id[0] == '"' {
		text = stringValue(id)
	}
	refuseRPC(w, http.StatusBadRequest, id, codeInvalidRequest, "duplicate in-flight request ID "+text)
}

// releaseIDs ends what claimIDs has begun.
func (s *session) releaseIDs(x *exchange) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range x.requestIDs {
		delete(s.requests, key)
	}
}

// cancelRequest cancels the direct request that a notifications/cancelled names. The SDK does that for
// the others.
func (s *session) cancelRequest(m *envelope) {
	if m.method != "notifications/cancelled" || len(m.requestID) == 0 {
		return
	}
	id := (&envelope{id: m.requestID}).canonicalID()
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.requests[string(id)]; x != nil && x.isDirect {
		x.canceledByClient.Store(true)
		x.cancel(nil)
	}
}

// cutDirect ends the direct requests of the session because the relay stops. The SDK's end with
// Handler.calls.
func (s *session) cutDirect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.requests {
		if x.isDirect {
			x.cancel(kernel.ErrStopping)
		}
	}
}

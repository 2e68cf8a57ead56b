package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// mux joins the modern requests of one tenant to one SDK session: each HTTP request is a
// message on the session's connection, under an id of the mux's own, and gets back what
// is written under that id. The protocol without sessions keeps nothing between
// requests, so sharing one is invisible; it spares the SDK a connection, three goroutines
// and most of its parsing for every call (ten parses, 32 KB of garbage each). The session
// is told once which protocol it speaks; _meta, which says so in every request, is read
// here and does not go through.
//
// Only plain requests come here (takes). Everything else, and so every refusal that the
// protocol words, goes through the SDK's own handler.
type mux struct {
	in   chan jsonrpc.Message
	over chan struct{} // closed by end
	once sync.Once
	next atomic.Int64

	mu      sync.Mutex // protects waiting
	waiting map[int64]*call
}

// call is one request in the mux.
type call struct {
	*envelope
	given  bool                   // there are params beside _meta
	answer chan *jsonrpc.Response // holds one
	notes  chan []byte            // notifications before the answer, as SSE data
	gone   chan struct{}          // closed when the HTTP request ends
}

// maxNotes is how many notifications of a call wait for its reader; then the call waits.
const maxNotes = 16

type callKey struct{}

func newMux() *mux {
	return &mux{in: make(chan jsonrpc.Message), over: make(chan struct{}), waiting: make(map[int64]*call)}
}

var (
	_ sdk.Transport                = (*mux)(nil)
	_ sdk.Connection               = (*mux)(nil)
	_ sdk.ProtocolVersionSupporter = (*mux)(nil)
)

// modernSession is the state of a session that speaks the modern protocol from its start.
func modernSession() *sdk.ServerSessionOptions {
	return &sdk.ServerSessionOptions{State: &sdk.ServerSessionState{
		InitializeParams:  &sdk.InitializeParams{ProtocolVersion: modernVersion, Capabilities: &sdk.ClientCapabilities{}},
		InitializedParams: &sdk.InitializedParams{},
	}}
}

// Connect implements sdk.Transport; the mux is its own connection.
func (m *mux) Connect(context.Context) (sdk.Connection, error) { return m, nil }

// SupportsProtocolVersion tells what /mcp serves, which is both eras.
func (m *mux) SupportsProtocolVersion(string) bool { return true }

// SessionID implements sdk.Connection: there is no session to name.
func (m *mux) SessionID() string { return "" }

// Close implements sdk.Connection.
func (m *mux) Close() error { m.end(); return nil }

func (m *mux) end() { m.once.Do(func() { close(m.over) }) }

// Read implements sdk.Connection.
func (m *mux) Read(ctx context.Context) (jsonrpc.Message, error) {
	select {
	case msg := <-m.in:
		return msg, nil
	case <-m.over:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// errGone has the code of the SDK's "rejected by transport": the message is lost, the
// connection is not.
var errGone = &jsonrpc.Error{Code: -32005, Message: "the request has ended"}

// Write implements sdk.Connection. It blocks only the call whose notification it is.
func (m *mux) Write(ctx context.Context, msg jsonrpc.Message) error {
	switch msg := msg.(type) {
	case *jsonrpc.Response:
		n, _ := msg.ID.Raw().(int64)
		m.mu.Lock()
		c := m.waiting[n]
		delete(m.waiting, n)
		m.mu.Unlock()
		if c == nil {
			return errGone
		}
		c.answer <- msg
		return nil
	case *jsonrpc.Request:
		c, _ := ctx.Value(callKey{}).(*call)
		if c == nil || msg.IsCall() {
			return errGone
		}
		data, err := jsonrpc.EncodeMessage(msg)
		if err != nil {
			return errGone
		}
		select {
		case c.notes <- data:
			return nil
		case <-c.gone:
		case <-m.over:
		}
	}
	return errGone
}

// takes tells whether a message is a plain modern request: a call of a method that
// answers at once, whose headers say what the body says.
func takes(r *http.Request, m *envelope) bool {
	switch m.method {
	case "tools/call", "resources/read", "prompts/get":
		if m.name == "" || r.Header.Get("Mcp-Name") != m.name {
			return false
		}
	case "tools/list", "resources/list", "resources/templates/list", "prompts/list", "completion/complete":
	default:
		return false
	}
	return len(m.id) > 0 && (m.id[0] == '"' || m.id[0] == '-' || m.id[0] >= '0' && m.id[0] <= '9') &&
		len(m.caps) > 0 && m.caps[0] == '{' && (len(m.info) == 0 || m.info[0] == '{') &&
		m.era == modernVersion && r.Header.Get(headerVersion) == modernVersion &&
		r.Header.Get("Mcp-Method") == m.method && acceptsBoth(r.Header)
}

// serve answers one plain modern request: with JSON, or with a stream of events if the
// handler has something to say before its answer.
func (m *mux) serve(w http.ResponseWriter, x *exchange, e *envelope) {
	n := m.next.Add(1)
	id, _ := jsonrpc.MakeID(float64(n))
	params := e.withoutMeta()
	c := &call{envelope: e, given: params != nil, answer: make(chan *jsonrpc.Response, 1), notes: make(chan []byte, maxNotes), gone: make(chan struct{})}
	x.call = c
	m.mu.Lock()
	m.waiting[n] = c
	m.mu.Unlock()
	defer func() {
		close(c.gone)
		m.mu.Lock()
		delete(m.waiting, n)
		m.mu.Unlock()
	}()
	msg := &jsonrpc.Request{ID: id, Method: e.method, Params: params, Extra: &sdk.RequestExtra{TokenInfo: tokenInfo(x)}}
	select {
	case m.in <- msg:
	case <-x.ctx.Done():
		return
	case <-m.over:
		refuseRPC(w, http.StatusServiceUnavailable, e.id, codeInternal, errStopping)
		return
	}
	out := answerWriter{w: w, rc: http.NewResponseController(w)}
	defer out.done()
	for {
		select {
		case note := <-c.notes:
			if out.event(note) != nil {
				return
			}
		case resp := <-c.answer:
			for more := true; more; {
				select {
				case note := <-c.notes:
					if out.event(note) != nil {
						return
					}
				default:
					more = false
				}
			}
			out.answer(e.id, resp)
			return
		case <-x.ctx.Done():
			return
		case <-m.over:
			if !out.events {
				refuseRPC(w, http.StatusServiceUnavailable, e.id, codeInternal, errStopping)
				return
			}
			_ = out.event(appendFault(nil, e.id, codeInternal, errStopping, nil)) // a client waits for its answer
			return
		}
	}
}

// codeInternal is JSON-RPC's "internal error".
const codeInternal = -32603

const errStopping = "the relay is stopping; call again shortly"

// answerWriter writes a modern answer. It is JSON until the first event.
type answerWriter struct {
	w      http.ResponseWriter
	rc     *http.ResponseController
	events bool
	timed  bool
}

func (a *answerWriter) event(data []byte) error {
	if !a.events {
		a.events = true
		h := a.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache, no-transform")
	}
	b := make([]byte, 0, len(data)+32)
	b = append(b, "event: message\ndata: "...)
	b = append(b, data...)
	b = append(b, "\n\n"...)
	a.timed = true
	_ = a.rc.SetWriteDeadline(time.Now().Add(writeWait))
	if _, err := a.w.Write(b); err != nil {
		return err
	}
	return a.rc.Flush()
}

func (a *answerWriter) answer(id []byte, resp *jsonrpc.Response) {
	status := http.StatusOK
	var b []byte
	if resp.Error != nil {
		var f *jsonrpc.Error
		code, data := int64(codeInternal), json.RawMessage(nil)
		if errors.As(resp.Error, &f) {
			code, data = f.Code, f.Data
		}
		status = modernStatus(code)
		b = appendFault(nil, id, code, resp.Error.Error(), data)
	} else {
		b = make([]byte, 0, len(resp.Result)+len(id)+40)
		b = append(b, `{"jsonrpc":"2.0","id":`...)
		b = append(b, id...)
		b = append(b, `,"result":`...)
		b = append(b, resp.Result...)
		b = append(b, '}')
	}
	if a.events {
		_ = a.event(b)
		return
	}
	h := a.w.Header()
	h["Content-Type"] = contentJSON
	h["Cache-Control"] = noStore
	if status != http.StatusOK {
		a.w.WriteHeader(status)
	}
	if len(b) > 2048 { // less fits into any buffer
		a.timed = true
		_ = a.rc.SetWriteDeadline(time.Now().Add(writeWait))
	}
	_, _ = a.w.Write(b)
}

var (
	contentJSON = []string{"application/json"}
	noStore     = []string{"no-store"}
)

func (a *answerWriter) done() {
	if a.timed {
		_ = a.rc.SetWriteDeadline(time.Time{})
	}
}

// modernStatus is the HTTP status that the protocol wants for its errors.
func modernStatus(code int64) int {
	switch code {
	case jsonrpc.CodeMethodNotFound:
		return http.StatusNotFound
	case jsonrpc.CodeInvalidParams, jsonrpc.CodeInvalidRequest, sdk.CodeUnsupportedProtocolVersion,
		sdk.CodeMissingRequiredClientCapabilities, sdk.CodeHeaderMismatch:
		return http.StatusBadRequest
	}
	return http.StatusOK
}

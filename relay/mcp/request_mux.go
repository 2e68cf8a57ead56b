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

// requestMux joins the modern requests of one tenant to one SDK session: each HTTP request is a
// message on the session's connection, under an id of the mux's own, and gets back what
// is written under that id. The protocol without sessions keeps nothing between
// requests, so sharing one is invisible; it spares the SDK a connection, three goroutines
// and most of its parsing for every call (ten parses, 32 KB of garbage each). The session
// is told once which protocol it speaks; _meta, which says so in every request, is read
// here and does not go through.
//
// Only plain requests come here (takes). Everything else, and so every refusal that the
// protocol words, goes through the SDK's own handler.
type requestMux struct {
	in        chan jsonrpc.Message
	closed    chan struct{} // closed by end
	closeOnce sync.Once
	lastID    atomic.Int64

	mu      sync.Mutex // protects waiting
	pending map[int64]*muxCall
}

// muxCall is one request in the mux.
type muxCall struct {
	*envelope
	hasParams     bool                   // there are params beside _meta
	response      chan *jsonrpc.Response // holds one
	notifications chan []byte            // notifications before the answer, as SSE data
	requestDone   chan struct{}          // closed when the HTTP request ends
}

// maxQueuedNotifications is how many notifications of a call wait for its reader; then the call waits.
const maxQueuedNotifications = 16

type callKey struct{}

func newRequestMux() *requestMux {
	return &requestMux{in: make(chan jsonrpc.Message), closed: make(chan struct{}), pending: make(map[int64]*muxCall)}
}

var (
	_ sdk.Transport                = (*requestMux)(nil)
	_ sdk.Connection               = (*requestMux)(nil)
	_ sdk.ProtocolVersionSupporter = (*requestMux)(nil)
)

// modernSession is the state of a session that speaks the modern protocol from its start.
func modernSession() *sdk.ServerSessionOptions {
	return &sdk.ServerSessionOptions{State: &sdk.ServerSessionState{
		InitializeParams:  &sdk.InitializeParams{ProtocolVersion: modernVersion, Capabilities: &sdk.ClientCapabilities{}},
		InitializedParams: &sdk.InitializedParams{},
	}}
}

// Connect implements sdk.Transport; the mux is its own connection.
func (m *requestMux) Connect(context.Context) (sdk.Connection, error) { return m, nil }

// SupportsProtocolVersion tells what /mcp serves, which is both eras.
func (m *requestMux) SupportsProtocolVersion(string) bool { return true }

// SessionID implements sdk.Connection: there is no session to name.
func (m *requestMux) SessionID() string { return "" }

// Close implements sdk.Connection.
func (m *requestMux) Close() error { m.shutDown(); return nil }

func (m *requestMux) shutDown() { m.closeOnce.Do(func() { close(m.closed) }) }

// Read implements sdk.Connection.
func (m *requestMux) Read(ctx context.Context) (jsonrpc.Message, error) {
	select {
	case msg := <-m.in:
		return msg, nil
	case <-m.closed:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// errRequestEnded has the code of the SDK's "rejected by transport": the message is lost, the
// connection is not.
var errRequestEnded = &jsonrpc.Error{Code: -32005, Message: "the request has ended"}

// Write implements sdk.Connection. It blocks only the call whose notification it is.
func (m *requestMux) Write(ctx context.Context, msg jsonrpc.Message) error {
	switch msg := msg.(type) {
	case *jsonrpc.Response:
		n, _ := msg.ID.Raw().(int64)
		m.mu.Lock()
		c := m.pending[n]
		delete(m.pending, n)
		m.mu.Unlock()
		if c == nil {
			return errRequestEnded
		}
		c.response <- msg
		return nil
	case *jsonrpc.Request:
		c, _ := ctx.Value(callKey{}).(*muxCall)
		if c == nil || msg.IsCall() {
			return errRequestEnded
		}
		data, err := jsonrpc.EncodeMessage(msg)
		if err != nil {
			return errRequestEnded
		}
		select {
		case c.notifications <- data:
			return nil
		case <-c.requestDone:
		case <-m.closed:
		}
	}
	return errRequestEnded
}

// isPlainRequest tells whether a message is a plain modern request: a call of a method that
// answers at once, whose headers say what the body says.
func isPlainRequest(r *http.Request, m *envelope) bool {
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
		len(m.capabilities) > 0 && m.capabilities[0] == '{' && (len(m.clientInfo) == 0 || m.clientInfo[0] == '{') &&
		m.version == modernVersion && r.Header.Get(headerVersion) == modernVersion &&
		r.Header.Get("Mcp-Method") == m.method && acceptsBoth(r.Header)
}

// serve answers one plain modern request: with JSON, or with a stream of events if the
// handler has something to say before its answer.
func (m *requestMux) serve(w http.ResponseWriter, x *exchange, e *envelope) {
	n := m.lastID.Add(1)
	id, _ := jsonrpc.MakeID(float64(n))
	params := e.withoutMeta()
	c := &muxCall{envelope: e, hasParams: params != nil, response: make(chan *jsonrpc.Response, 1), notifications: make(chan []byte, maxQueuedNotifications), requestDone: make(chan struct{})}
	x.call = c
	m.mu.Lock()
	m.pending[n] = c
	m.mu.Unlock()
	defer func() {
		close(c.requestDone)
		m.mu.Lock()
		delete(m.pending, n)
		m.mu.Unlock()
	}()
	msg := &jsonrpc.Request{ID: id, Method: e.method, Params: params, Extra: &sdk.RequestExtra{TokenInfo: tokenInfo(x)}}
	select {
	case m.in <- msg:
	case <-x.ctx.Done():
		return
	case <-m.closed:
		refuseRPC(w, http.StatusServiceUnavailable, e.id, codeInternal, stoppingMessage)
		return
	}
	out := muxResponse{w: w, rc: http.NewResponseController(w)}
	defer out.clearDeadline()
	for {
		select {
		case note := <-c.notifications:
			if out.writeEvent(note) != nil {
				return
			}
		case resp := <-c.response:
			for more := true; more; {
				select {
				case note := <-c.notifications:
					if out.writeEvent(note) != nil {
						return
					}
				default:
					more = false
				}
			}
			out.writeResponse(e.id, resp)
			return
		case <-x.ctx.Done():
			return
		case <-m.closed:
			if !out.isStream {
				refuseRPC(w, http.StatusServiceUnavailable, e.id, codeInternal, stoppingMessage)
				return
			}
			_ = out.writeEvent(appendFault(nil, e.id, codeInternal, stoppingMessage, nil)) // a client waits for its answer
			return
		}
	}
}

// codeInternal is JSON-RPC's "internal error".
const codeInternal = -32603

const stoppingMessage = "the relay is stopping; call again shortly"

// muxResponse writes a modern answer. It is JSON until the first event.
type muxResponse struct {
	w           http.ResponseWriter
	rc          *http.ResponseController
	isStream    bool
	deadlineSet bool
}

func (a *muxResponse) writeEvent(data []byte) error {
	if !a.isStream {
		a.isStream = true
		h := a.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache, no-transform")
	}
	b := make([]byte, 0, len(data)+32)
	b = append(b, "event: message\ndata: "...)
	b = append(b, data...)
	b = append(b, "\n\n"...)
	a.deadlineSet = true
	_ = a.rc.SetWriteDeadline(time.Now().Add(writeWait))
	if _, err := a.w.Write(b); err != nil {
		return err
	}
	return a.rc.Flush()
}

func (a *muxResponse) writeResponse(id []byte, resp *jsonrpc.Response) {
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
	if a.isStream {
		_ = a.writeEvent(b)
		return
	}
	h := a.w.Header()
	h["Content-Type"] = contentJSON
	h["Cache-Control"] = noStore
	if status != http.StatusOK {
		a.w.WriteHeader(status)
	}
	if len(b) > 2048 { // less fits into any buffer
		a.deadlineSet = true
		_ = a.rc.SetWriteDeadline(time.Now().Add(writeWait))
	}
	_, _ = a.w.Write(b)
}

var (
	contentJSON = []string{"application/json"}
	noStore     = []string{"no-store"}
)

func (a *muxResponse) clearDeadline() {
	if a.deadlineSet {
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

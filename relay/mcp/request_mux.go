package mcp

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/transport/edge"
)

// requestMux joins the plain modern requests of one tenant to one SDK session. Each HTTP
// request becomes a message on the session's connection under an id of the mux's own, and
// gets back what is written under that id:
//
//	serve ── in ──> Read ── SDK ── middleware ── kernel
//	      <── response, notifications ── Write
//
// The protocol without sessions keeps nothing between requests, so sharing a session is
// invisible. It spares the SDK a connection, three goroutines and most of its parsing for
// every call (ten parses, 32 KB of garbage each). The session gets its protocol version
// once (modernSession); the _meta of each request, which repeats it, is not passed to
// the SDK, nor are large arguments.
//
// Only plain requests come here (isPlainRequest). Everything else goes through the SDK's own
// handler, which also makes the refusals that the protocol defines.
type requestMux struct {
	in        chan jsonrpc.Message
	closed    chan struct{} // closed by shutDown
	closeOnce sync.Once
	lastID    atomic.Int64

	mu      sync.Mutex // protects pending
	pending map[int64]*muxCall
}

// muxCall is one request in the mux.
type muxCall struct {
	*envelope
	hasParams     bool                   // there are params beside _meta
	response      chan *jsonrpc.Response // holds one
	notifications chan []byte            // messages before the response; nil is a comment
	requestDone   chan struct{}          // closed when the HTTP request ends
}

// queueComment sends a comment to the client.
func (c *muxCall) queueComment() {
	select {
	case c.notifications <- nil:
	default: // the queued one resets the client's timers as well
	}
}

// maxQueuedNotifications is how many notifications of a call wait for its reader; then the
// call waits.
const maxQueuedNotifications = 16

// callKey carries a *muxCall in the context of its handler, so that Write finds the request
// that a notification belongs to.
type callKey struct{}

// newRequestMux makes a mux; tenant.run connects it to a server.
func newRequestMux() *requestMux {
	return &requestMux{in: make(chan jsonrpc.Message), closed: make(chan struct{}), pending: make(map[int64]*muxCall)}
}

var (
	_ sdk.Transport                = (*requestMux)(nil)
	_ sdk.Connection               = (*requestMux)(nil)
	_ sdk.ProtocolVersionSupporter = (*requestMux)(nil)
)

// modernSession returns the state of a session that speaks the modern protocol from its
// start, without a handshake.
func modernSession() *sdk.ServerSessionOptions {
	return &sdk.ServerSessionOptions{State: &sdk.ServerSessionState{
		InitializeParams:  &sdk.InitializeParams{ProtocolVersion: modernVersion, Capabilities: &sdk.ClientCapabilities{}},
		InitializedParams: &sdk.InitializedParams{},
	}}
}

// Connect implements sdk.Transport. The mux is its own connection, and the SDK connects it
// once, in tenant.run.
func (m *requestMux) Connect(context.Context) (sdk.Connection, error) { return m, nil }

// SupportsProtocolVersion implements sdk.ProtocolVersionSupporter.
func (m *requestMux) SupportsProtocolVersion(string) bool { return true }

// SessionID implements sdk.Connection: there is no session to name.
func (m *requestMux) SessionID() string { return "" }

// Close implements sdk.Connection. Requests in the mux are answered with an error.
func (m *requestMux) Close() error { m.shutDown(); return nil }

// shutDown ends the connection and every request in the mux.
func (m *requestMux) shutDown() { m.closeOnce.Do(func() { close(m.closed) }) }

// Read implements sdk.Connection: the SDK reads the next request of any client. in is not
// buffered, so a request whose client goes away first is not read at all.
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

// Write implements sdk.Connection. A notification whose reader is slow blocks the call that
// sent it, and no other.
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

// isPlainRequest reports whether a message is a modern call of a method that answers at
// once, whose headers repeat the body, and whose Accept header plainly names
// both kinds of answer. All other messages go to the SDK, which refuses those that are not
// valid.
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
	accept := r.Header["Accept"]
	return len(m.id) > 0 && (m.id[0] == '"' || m.id[0] == '-' || m.id[0] >= '0' && m.id[0] <= '9') &&
		len(m.capabilities) > 0 && m.capabilities[0] == '{' && (len(m.clientInfo) == 0 || m.clientInfo[0] == '{') &&
		m.version == modernVersion && r.Header.Get(headerVersion) == modernVersion &&
		r.Header.Get("Mcp-Method") == m.method &&
		len(accept) == 1 && strings.Contains(accept[0], "application/json") && strings.Contains(accept[0], "text/event-stream")
}

// serve answers one plain modern request: with JSON, or with a stream of events if the
// handler sends notifications before its response.
func (m *requestMux) serve(w http.ResponseWriter, r *http.Request, x *exchange, e *envelope) {
	n := m.lastID.Add(1)
	id, _ := jsonrpc.MakeID(float64(n))
	params := e.sdkParams()
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
	out := muxResponse{w: w, r: r, rc: http.NewResponseController(w)}
	defer out.clearDeadline()
	// in is nil after the message was taken: a send on a nil channel is never ready.
	in, msg := m.in, &jsonrpc.Request{ID: id, Method: e.method, Params: params, Extra: &sdk.RequestExtra{TokenInfo: tokenInfo(x)}}
	for {
		select {
		case in <- msg:
			in = nil // once
		case note := <-c.notifications:
			if out.writeEvent(note) != nil {
				return
			}
		case resp := <-c.response:
			for len(c.notifications) > 0 { // sent before the response
				if out.writeEvent(<-c.notifications) != nil {
					return
				}
			}
			out.writeResponse(e.id, resp)
			return
		case <-x.ctx.Done():
			return
		case <-m.closed:
			code, message, data := stoppedError()
			answer := appendRPCError(nil, e.id, code, message, data)
			if !out.isStream {
				edge.WriteJSON(w, http.StatusServiceUnavailable, answer)
				return
			}
			_ = out.writeEvent(answer) // the client waits for an answer
			return
		}
	}
}

// muxResponse writes the response of a plain request. It is JSON until the first event.
type muxResponse struct {
	w           http.ResponseWriter
	r           *http.Request
	rc          *http.ResponseController
	isStream    bool
	deadlineSet bool
}

// setDeadline sets the deadline of the next write to writeTimeout.
func (a *muxResponse) setDeadline() {
	a.deadlineSet = true
	_ = a.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
}

// writeEvent writes a message as an event, or a comment without one, and flushes it; the first one
// makes the response an event stream.
func (a *muxResponse) writeEvent(data []byte) error {
	if !a.isStream {
		a.isStream = true
		h := a.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache, no-transform")
	}
	a.setDeadline()
	event := eventComment
	if data != nil {
		event = appendEvent(make([]byte, 0, len(data)+32), data)
	}
	if _, err := a.w.Write(event); err != nil {
		return err
	}
	return a.rc.Flush()
}

// writeResponse writes the response under the id that the client sent, byte for byte: as
// the last event of a stream, or as JSON with the HTTP status of its error.
func (a *muxResponse) writeResponse(id []byte, resp *jsonrpc.Response) {
	b := appendResponse(nil, id, resp.Result, resp.Error)
	if a.isStream {
		_ = a.writeEvent(b)
		return
	}
	if resp.Error == nil {
		b = edge.CompressLarge(a.w.Header(), a.r, b)
	}
	writeResponse(a.w, b, resp.Error)
}

// clearDeadline frees the connection of the deadline: it may serve another request.
func (a *muxResponse) clearDeadline() {
	if a.deadlineSet {
		_ = a.rc.SetWriteDeadline(time.Time{})
	}
}

// modernStatus returns the HTTP status that the protocol wants for its errors.
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

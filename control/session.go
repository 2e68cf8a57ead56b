package control

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/creachadair/jrpc2"
	"go.uber.org/zap"
)

// session handles the requests of a connection. They come one at a time, so its fields need
// no lock. The goroutine of writeEvents learns of the subscription through subscribed.
//
//	connected ── hello within 5 s ──> open ── hello with metrics_stream ──> subscribed
type session struct {
	srv *Server
	c   *serverChannel
	// id is a UUID v4. It is empty until a valid hello.
	id string
	// requestID is that of the current request, as JSON; empty for a notification.
	requestID string
	// sub is nil until the client takes events. It is sent to subscribed when the answer to
	// hello was written, so that no event comes before it.
	sub        *subscription
	subscribed chan *subscription
}

// methodFunc handles a method. The result is encoded as JSON.
type methodFunc func(*session, context.Context, *params) (any, error)

// methods are all methods except hello.
var methods = map[string]methodFunc{
	MethodSnapshot:  (*session).snapshot,
	MethodStart:     (*session).start,
	MethodStop:      (*session).stop,
	MethodSetConfig: (*session).setConfig,
	MethodBurst:     (*session).burst,
	MethodSubscribe: (*session).subscribe,
	MethodHistory:   (*session).history,

	MethodStatus:       (*session).status,
	MethodGetConfig:    (*session).getConfig,
	MethodCapabilities: (*session).capabilities,
	MethodCall:         (*session).callTool,
}

// capabilities are those that hello may ask for. The set is that of the frozen protocol; a
// client finds additions to it by calling them.
var capabilities = []string{CapMetricsStream, CapBurstMode, CapHistoryQuery}

// servedCapabilities are those that a client can use.
func (s *Server) servedCapabilities() []string {
	if s.o.History == nil {
		return []string{CapMetricsStream, CapBurstMode}
	}
	return capabilities
}

// writeEvents writes the events of the connection until it is closed.
func (ss *session) writeEvents() {
	var sub *subscription
	var events, notices <-chan struct{}
	var ping <-chan time.Time
	for {
		var e event
		select {
		case <-ss.c.closed:
			return
		case sub = <-ss.subscribed:
			events, notices = sub.events.Ready(), sub.notices.Ready()
			ping = time.Tick(pingInterval)
			for _, alert := range sub.standing {
				if ss.c.write(alert.frame) != nil {
					break // the write of the next event fails as well
				}
			}
			sub.standing = nil
			e = sub.lastUpdate
		case <-events:
			e, _ = sub.events.Next()
		case <-notices:
			e, _ = sub.notices.Next()
		case <-ping:
			e = pingEvent
		}
		if e.frame != nil && ss.c.write(e.frame) != nil {
			events, notices, ping = nil, nil, nil // the connection is broken; jrpc2 will close it
		}
	}
}

// Assign returns the same handler for each method.
func (ss *session) Assign(context.Context, string) jrpc2.Handler { return ss.handle }

// handle calls a method within its timeout. A panic becomes an error.
func (ss *session) handle(ctx context.Context, req *jrpc2.Request) (result any, err error) {
	if req.IsNotification() {
		defer ss.c.finishRequest() // there is no answer, whose Send would do it
	}
	defer func() {
		if p := recover(); p != nil {
			ss.srv.log.Error("control method panicked", zap.String("panic", fmt.Sprint(p)), zap.ByteString("stack", debug.Stack()))
			result, err = nil, wireError(newError(CodeInternal, "a bug in the daemon; see its log"))
		}
	}()
	ss.srv.stats.requests.Add(1)
	timeout := callTimeout
	if req.Method() == MethodHistory {
		timeout = queryTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	result, err = ss.call(ctx, req)
	if err != nil {
		return nil, wireError(err)
	}
	return result, nil
}

// call finds the method and calls it. Before hello all others are refused.
func (ss *session) call(ctx context.Context, req *jrpc2.Request) (any, error) {
	var raw json.RawMessage
	if err := req.UnmarshalParams(&raw); err != nil {
		return nil, errParams("params", "must be an object")
	}
	if req.Method() == MethodHello {
		return ss.hello(parseParams(raw))
	}
	if ss.id == "" {
		return nil, newError(CodeUnauthorized, "say hello first")
	}
	method, ok := methods[req.Method()]
	if !ok {
		return nil, newError(CodeMethodNotFound, "see docs/control.md for the methods")
	}
	ss.requestID = req.ID()
	return method(ss, ctx, parseParams(raw))
}

// wireError is an error as jrpc2 sends it. Any other than an *Error is internal; its text goes
// to the client, which is a local one that Options.Allow has accepted.
func wireError(err error) *jrpc2.Error {
	var e *Error
	if !errors.As(err, &e) {
		e = newError(CodeInternal, err.Error())
	}
	o := e.object()
	w := &jrpc2.Error{Code: jrpc2.Code(o.Code), Message: o.Message}
	if o.Data == nil {
		return w
	}
	return w.WithData(o.Data)
}

// hello opens the session. It may be repeated, to take events later; the session id stays.
func (ss *session) hello(p *params) (any, error) {
	// The version comes first: what else a later version sends is not known here.
	var version integer
	hasVersion := p.take("protocol_version", &version)
	if hasVersion && p.err == nil && version != ProtocolVersion {
		err := newError(CodeNotSupported, fmt.Sprintf("this server speaks %d", ProtocolVersion))
		err.Field = "protocol_version"
		return nil, err
	}
	p.text("app_version", 256)
	if !hasVersion {
		p.fail(errParams("protocol_version", "is missing"))
	}
	var token string
	p.take("token", &token)
	if len(token) > 4<<10 {
		p.fail(errParams("token", "is longer than 4096 bytes"))
	}
	if p.err == nil && !ss.srv.isTokenValid(token) {
		p.fail(newError(CodeUnauthorized, "hello needs the token; any non-empty one will do where none is configured"))
	}
	requested := p.choices("capabilities", capabilities)
	if err := p.finish(); err != nil {
		return nil, err
	}

	if err := ss.srv.admitClient(ss.c); err != nil {
		return nil, err
	}
	if slices.Contains(requested, CapMetricsStream) {
		if err := ss.joinEvents(); err != nil {
			return nil, err
		}
	}
	ss.c.helloDone = true
	if ss.id == "" {
		ss.id = newSessionID()
	}
	return Hello{ss.srv.o.Version, ProtocolVersion, ss.srv.servedCapabilities(), ss.id}, nil
}

// isTokenValid compares in constant time, so that a client cannot guess the token byte by
// byte.
func (s *Server) isTokenValid(token string) bool {
	if s.o.Token == "" {
		return token != ""
	}
	return subtle.ConstantTimeCompare([]byte(token), []byte(s.o.Token)) == 1
}

// joinEvents subscribes this connection to events, which begin after the answer to hello.
func (ss *session) joinEvents() error {
	if ss.sub != nil {
		return nil
	}
	sub, set, err := ss.srv.subscribe()
	if err != nil {
		return err
	}
	ss.sub = sub
	ss.c.afterAnswer(func() {
		ss.subscribed <- sub
		ss.srv.publishState("start", MethodHello, startExtra{set.Names()})
	})
	return nil
}

// newSessionID is a UUID v4 (RFC 9562 §5.4).
func newSessionID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

package stdio

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"
)

const (
	maxSubscribed    = 1024             // resources that a new session is subscribed to again
	closeTimeout     = 2 * time.Second  // for the DELETE of a session
	minListenBackoff = time.Second      // before the session's stream is opened again
	maxListenBackoff = 30 * time.Second // grows twofold up to here
	steadyListen     = time.Minute      // a stream that lasted longer resets the back-off
)

// session is the bridge's record of the client's session with the server. bridge.mu
// protects its fields. The zero value is no session: before the first initialize, after
// closeSession, and in the era without sessions.
//
//	no session ── initialize ──> open ── errSessionLost, renewSession ──> open, with another id
//	open ── initialize, end of Serve ──> no session (closeSession)
//
// If the server answers initialize without a session id, the bridge sends the protocol version only, and
// there is no session to lose.
type session struct {
	sessionRef
	initMessage   *message        // the client's initialize, to open a new session with
	subscribed    map[string]bool // URIs that the client has subscribed to
	unknown       map[string]bool // of these, the ones to subscribe to again: see resubscribeUnknown
	stopListening context.CancelFunc
}

// errSessionLost reports that the server does not know the session any more: it was
// restarted, or it closed the session as idle.
var errSessionLost = errors.New("the server has lost the session")

// initialize opens a session in place of the one before. It runs on the goroutine that
// reads lines: no other message of the client is sent before it has an answer.
func (b *bridge) initialize(ctx context.Context, m *message) {
	b.closeSession(ctx)
	answer, err := b.openSession(ctx, m)
	if err != nil {
		b.answerError(m.ID, err)
		return
	}
	b.write(answer)
}

// openSession sends an initialize and takes the session from its answer, which it returns.
// With the initMessage of the present session it keeps the subscriptions.
func (b *bridge) openSession(ctx context.Context, m *message) (answer []byte, err error) {
	resp, err := b.send(ctx, http.MethodPost, m, sessionRef{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := readMessages(resp, func(msg []byte) { answer = msg }); err != nil {
		return nil, err
	}
	var a struct {
		Result struct {
			ProtocolVersion string `json:"protocolVersion"`
		} `json:"result"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return nil, errors.New("the server's answer to initialize is not a JSON-RPC message")
	}
	if a.Result.ProtocolVersion == "" { // an error, which is the client's
		return answer, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &b.session
	s.sessionRef = sessionRef{resp.Header.Get(headerSession), a.Result.ProtocolVersion}
	if s.initMessage != m {
		s.initMessage, s.subscribed, s.unknown = m, make(map[string]bool), make(map[string]bool)
	}
	return answer, nil
}

// post sends a message and writes out each message of the response as it arrives. answered
// reports whether the answer to m was among them. A session that was lost is renewed once, and a
// request is sent again when the relay is restarting (retry.go).
func (b *bridge) post(ctx context.Context, m *message) (answered bool, err error) {
	var again retries
	for renewed := false; ; {
		s := b.sessionFor(m)
		answered, err = b.postOnce(ctx, m, s)
		if errors.Is(err, errSessionLost) && !renewed {
			renewed = true
			if err = b.renewSession(ctx, s.id); err == nil {
				continue
			}
			err = connectionLost(ctx, err)
		}
		if !again.wait(ctx, b, m, err) {
			break
		}
	}
	if outage, ok := errors.AsType[*outageError](err); ok && outage.answer != nil && ctx.Err() == nil {
		b.freeID(m.ID)
		b.write(outage.answer)
		return true, nil
	}
	if err == nil {
		b.trackSubscription(m)
	}
	return answered, err
}

// postOnce sends a message in a given session and writes out the messages of the response. An
// outageError means that it wrote none. Any other error after the first message means that the rest is
// lost, and m is not sent again.
func (b *bridge) postOnce(ctx context.Context, m *message, s sessionRef) (answered bool, err error) {
	resp, err := b.send(ctx, http.MethodPost, m, s)
	if err != nil {
		return false, connectionLost(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }()
	b.noteAnswer()
	written := false
	var outage *outageError
	err = readMessages(resp, func(msg []byte) {
		var a message
		if json.Unmarshal(msg, &a) == nil && a.Method == "" && bytes.Equal(a.ID, m.ID) {
			if !written {
				if outage = parseOutage(msg, b.hasRecentOutage()); outage != nil {
					outage.answer = bytes.Clone(msg)
					return
				}
			}
			answered = true
			if m.Method == "tools/list" {
				b.trackTools(msg)
			}
			b.freeID(m.ID)
		}
		written = true
		b.write(msg)
	})
	switch {
	case outage != nil:
		return false, outage
	case written || !m.isRequest():
		return answered, err
	case err == nil:
		err = errNoAnswer
	}
	return false, connectionLost(ctx, err)
}

// currentSession returns the session as it is now. A renewal may replace it at any time;
// the server then answers errSessionLost, and the caller asks again.
func (b *bridge) currentSession() sessionRef {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.session.sessionRef
}

// sessionFor returns the session for a message; in the era without sessions it has only
// the version.
func (b *bridge) sessionFor(m *message) sessionRef {
	if m.version != "" {
		return sessionRef{version: m.version}
	}
	return b.currentSession()
}

// trackSubscription records the resources that a new session has to be subscribed to. Beyond
// maxSubscribed the client's subscription works, and is lost with the session.
func (b *bridge) trackSubscription(m *message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch s := &b.session; {
	case m.version != "" || s.subscribed == nil:
	case m.Method == "resources/subscribe" && len(s.subscribed) < maxSubscribed:
		s.subscribed[m.name] = true
	case m.Method == "resources/unsubscribe":
		delete(s.subscribed, m.name)
	}
}

// renewSession opens a new session in place of the one with the id lost, unless another
// caller just has. After a restart of the server every request in flight and listen come
// here at once; renewSlot serializes them, and all but the first find a new id.
//
//	initialize (the client's own) -> notifications/initialized -> resources/subscribe ...
//
// The client does not see these. It gets list_changed notifications, since tools and
// resources may differ from what it knows.
func (b *bridge) renewSession(ctx context.Context, lost string) error {
	select {
	case b.renewSlot <- struct{}{}:
		defer func() { <-b.renewSlot }()
	case <-ctx.Done():
		return ctx.Err()
	}
	b.mu.Lock()
	current, init := b.session.id, b.session.initMessage
	uris := slices.Collect(maps.Keys(b.session.subscribed))
	b.mu.Unlock()
	if current != lost || init == nil {
		return nil
	}
	if _, err := b.openSession(ctx, init); err != nil {
		return err
	}
	s := b.currentSession()
	// The answer to initialize was an error. It is not passed on, since the client has sent no request.
	if s.id == lost {
		return errSessionLost
	}
	_, err := b.postOnce(ctx, &message{raw: []byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)}, s)
	if err == nil {
		err = b.resubscribe(ctx, s, uris)
	}
	b.log.Info("mcp session renewed")
	// What the client knows of the lists may be out of date.
	b.write([]byte(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`))
	b.write([]byte(`{"jsonrpc":"2.0","method":"notifications/resources/list_changed"}`))
	return err
}

// resubscribe subscribes a new session to resources. One that the server does not know, such
// as that of a board that has not reconnected yet, is recorded in session.unknown.
func (b *bridge) resubscribe(ctx context.Context, s sessionRef, uris []string) error {
	for _, u := range uris {
		uri, _ := json.Marshal(u) // a string
		resp, err := b.send(ctx, http.MethodPost, &message{raw: fmt.Appendf(nil, `{"jsonrpc":"2.0","id":"agentctl-renew","method":"resources/subscribe","params":{"uri":%s}}`, uri)}, s)
		if err != nil {
			return err
		}
		isKnown := false
		err = readMessages(resp, func(msg []byte) {
			var a struct{ Result json.RawMessage }
			isKnown = json.Unmarshal(msg, &a) == nil && a.Result != nil
		})
		_ = resp.Body.Close()
		if err != nil {
			return err
		}
		b.mu.Lock()
		if isKnown {
			delete(b.session.unknown, u)
		} else if b.session.unknown != nil {
			b.session.unknown[u] = true
		}
		b.mu.Unlock()
	}
	return nil
}

// resubscribeUnknown subscribes again to the resources that the server did not know, since a board that was
// offline may have come back, and to those that it may have forgotten. A failure is logged; the next change
// of the list tries again.
func (b *bridge) resubscribeUnknown(ctx context.Context, s sessionRef) {
	b.mu.Lock()
	var uris []string
	for u := range b.session.unknown {
		if b.session.subscribed[u] {
			uris = append(uris, u)
		}
	}
	b.mu.Unlock()
	if err := b.resubscribe(ctx, s, uris); err != nil {
		b.log.Warn("mcp resources are not watched", zap.String("error", b.describeError(err)))
	}
}

// doubtSubscriptions has every resource subscribed to again when the stream of a session is open
// again. A server that was restarted may know the session and not its subscriptions; to others a
// repeated subscription changes nothing.
func (b *bridge) doubtSubscriptions(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.session.id != id { // a new session, which renewSession has subscribed
		return
	}
	for u := range b.session.subscribed {
		b.session.unknown[u] = true
	}
}

// startListening starts the goroutine that reads the session's own stream, unless it runs.
func (b *bridge) startListening(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.session.id == "" || b.session.stopListening != nil {
		return
	}
	ctx, b.session.stopListening = context.WithCancel(ctx)
	b.wg.Go(func() { b.listen(ctx) })
}

// listen reads the session's stream and opens it again when it breaks, until ctx ends or
// the server refuses it: a server need not offer such a stream.
//
// Between two attempts it waits half to all of the back-off, at random, so that a
// restarted relay does not get all its clients at one moment. A stream that lasted a
// minute, or a renewal that succeeded, resets the back-off.
func (b *bridge) listen(ctx context.Context) {
	for backoff := minListenBackoff; ctx.Err() == nil; {
		begin := time.Now()
		s := b.currentSession()
		err := b.readStream(ctx, s)
		if ctx.Err() == nil && !errors.As(err, new(*rpcError)) {
			b.noteOutage()
		}
		if errors.Is(err, errSessionLost) {
			err = b.renewSession(ctx, s.id)
		} else if _, ok := errors.AsType[*rpcError](err); ok {
			return
		}
		if time.Since(begin) > steadyListen || err == nil {
			backoff = minListenBackoff
		}
		b.doubtSubscriptions(s.id)
		select {
		case <-time.After(backoff/2 + rand.N(backoff/2)):
			backoff = min(2*backoff, maxListenBackoff)
		case <-ctx.Done():
		}
	}
}

// resourcesChanged is searched for in the bytes of a notification; a false match costs one
// more attempt to subscribe.
var resourcesChanged = []byte(`"notifications/resources/list_changed"`)

// readStream reads the session's stream until it breaks. It first tries the subscriptions
// that a renewal could not make: a break of the stream often is a restart of the server.
func (b *bridge) readStream(ctx context.Context, s sessionRef) error {
	resp, err := b.send(ctx, http.MethodGet, nil, s)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b.resubscribeUnknown(ctx, s)
	return readMessages(resp, func(msg []byte) {
		b.write(msg)
		if bytes.Contains(msg, resourcesChanged) {
			b.resubscribeUnknown(ctx, s)
		}
	})
}

// closeSession runs at the end of Serve and before another initialize. It cancels listen requests and the
// session's stream, and ends the session at the server. Its request has a new context with closeTimeout,
// since ctx may have ended. Other requests in flight go on; Serve drains them before it closes.
func (b *bridge) closeSession(ctx context.Context) {
	b.mu.Lock()
	s := b.session
	b.session = session{}
	for _, r := range b.inFlight {
		if !r.endsByItself {
			r.cancel()
		}
	}
	b.mu.Unlock()
	if s.stopListening != nil {
		s.stopListening()
	}
	if s.id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	resp, err := b.send(ctx, http.MethodDelete, nil, s.sessionRef)
	if err != nil {
		b.log.Debug("mcp session not ended", zap.Error(err))
		return
	}
	_ = resp.Body.Close()
}

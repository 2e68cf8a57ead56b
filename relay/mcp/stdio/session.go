package stdio

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"agentctl/transport/sse"
)

const (
	headerVersion = "Mcp-Protocol-Version"
	headerSession = "Mcp-Session-Id"
)

// session is what a client of the versions with sessions has with the server.
type session struct {
	id, version   string
	initMessage   *message        // the client's initialize, to begin again with
	subscribed    map[string]bool // URIs
	unknown       map[string]bool // of watched, what the server did not know when it was told again
	stopListening context.CancelFunc
	renewed       chan struct{} // closed when the renewal in progress has ended
}

// errSessionLost says that the server does not know the session any more.
var errSessionLost = errors.New("the server has lost the session")

// initialize opens a session and remembers how.
func (b *bridge) initialize(ctx context.Context, m *message) {
	b.closeSession(ctx) // of a session before
	answer, err := b.openSession(ctx, m)
	if err != nil {
		b.answerError(m.ID, err)
		return
	}
	b.write(answer)
}

// openSession sends an initialize and takes the session from its answer.
func (b *bridge) openSession(ctx context.Context, m *message) (answer []byte, err error) {
	resp, err := b.send(ctx, http.MethodPost, m, "", "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	err = readMessages(resp, func(msg []byte) { answer = msg })
	if err != nil {
		return nil, err
	}
	var a struct {
		Result struct {
			ProtocolVersion string `json:"protocolVersion"`
		} `json:"result"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return nil, errors.New("the server's answer to initialize is no JSON-RPC message")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.Result.ProtocolVersion != "" {
		watched := b.session.subscribed
		if watched == nil || b.session.initMessage != m {
			watched = make(map[string]bool)
		}
		b.session.id, b.session.version, b.session.initMessage, b.session.subscribed = resp.Header.Get(headerSession), a.Result.ProtocolVersion, m, watched
	}
	return answer, nil
}

// post sends a message and writes out what comes back; answered tells whether the
// message's own answer was among it. A session that was lost is made anew once.
func (b *bridge) post(ctx context.Context, m *message) (answered bool, err error) {
	for try := 0; ; try++ {
		id, version := b.sessionFor(m)
		answered, err = b.postOnce(ctx, m, id, version)
		if !errors.Is(err, errSessionLost) || try > 0 {
			break
		}
		if err = b.renewSession(ctx, id); err != nil {
			break
		}
	}
	if err == nil {
		b.trackSubscription(m)
	}
	return answered, err
}

func (b *bridge) postOnce(ctx context.Context, m *message, id, version string) (answered bool, err error) {
	resp, err := b.send(ctx, http.MethodPost, m, id, version)
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }()
	err = readMessages(resp, func(msg []byte) {
		var a struct {
			ID     json.RawMessage `json:"id"`
			Method string          `json:"method"`
		}
		if json.Unmarshal(msg, &a) == nil && a.Method == "" && bytes.Equal(a.ID, m.ID) {
			answered = true
		}
		b.write(msg)
	})
	return answered, err
}

// sessionFor is the session for a message: none in the modern era.
func (b *bridge) sessionFor(m *message) (id, version string) {
	if m.version != "" {
		return "", m.version
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.session.id, b.session.version
}

// trackSubscription keeps what a new session would have to be told.
func (b *bridge) trackSubscription(m *message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case m.version != "" || b.session.subscribed == nil:
	case m.Method == "resources/subscribe" && len(b.session.subscribed) < 1024:
		b.session.subscribed[m.name] = true
	case m.Method == "resources/unsubscribe":
		delete(b.session.subscribed, m.name)
	}
}

// renewSession makes the session anew that had the id lost, unless somebody has.
func (b *bridge) renewSession(ctx context.Context, lost string) error {
	b.mu.Lock()
	for b.session.renewed != nil {
		wait := b.session.renewed
		b.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return ctx.Err()
		}
		b.mu.Lock()
	}
	init := b.session.initMessage
	if b.session.id != lost || init == nil {
		b.mu.Unlock()
		return nil
	}
	done := make(chan struct{})
	b.session.renewed = done
	var uris []string
	for u := range b.session.subscribed {
		uris = append(uris, u)
	}
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.session.renewed = nil
		b.mu.Unlock()
		close(done)
	}()
	if _, err := b.openSession(ctx, init); err != nil {
		return err
	}
	b.mu.Lock()
	id, version := b.session.id, b.session.version
	b.mu.Unlock()
	if id == lost {
		return errSessionLost
	}
	_, err := b.postOnce(ctx, &message{raw: []byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)}, id, version)
	if err == nil {
		err = b.resubscribe(ctx, id, version, uris)
	}
	b.log.Info("mcp session made anew")
	// What the client knew may be old.
	b.write([]byte(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`))
	b.write([]byte(`{"jsonrpc":"2.0","method":"notifications/resources/list_changed"}`))
	return err
}

// resubscribe subscribes to what the client watches. What the server does not know, such as
// the resource of a board that has not come back either, is kept for later.
func (b *bridge) resubscribe(ctx context.Context, id, version string, uris []string) error {
	for _, u := range uris {
		uri, _ := json.Marshal(u) // a string
		resp, err := b.send(ctx, http.MethodPost, &message{raw: fmt.Appendf(nil, `{"jsonrpc":"2.0","id":"agentctl-renew","method":"resources/subscribe","params":{"uri":%s}}`, uri)}, id, version)
		if err != nil {
			return err
		}
		known := false
		err = readMessages(resp, func(msg []byte) {
			var a struct{ Result json.RawMessage }
			known = json.Unmarshal(msg, &a) == nil && a.Result != nil
		})
		_ = resp.Body.Close()
		if err != nil {
			return err
		}
		b.mu.Lock()
		switch {
		case known:
			delete(b.session.unknown, u)
		case b.session.unknown == nil:
			b.session.unknown = map[string]bool{u: true}
		default:
			b.session.unknown[u] = true
		}
		b.mu.Unlock()
	}
	return nil
}

// resubscribeUnknown tries again what was lost, as there may be something new.
func (b *bridge) resubscribeUnknown(ctx context.Context, id, version string) {
	b.mu.Lock()
	var uris []string
	for u := range b.session.unknown {
		if b.session.subscribed[u] {
			uris = append(uris, u)
		}
	}
	b.mu.Unlock()
	if err := b.resubscribe(ctx, id, version, uris); err != nil {
		b.log.Warn("mcp resources are not watched", zap.String("error", b.describeError(err)))
	}
}

var resourcesChanged = []byte(`"notifications/resources/list_changed"`)

// listen reads the session's own stream, for as long as the session lasts.
func (b *bridge) listen(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.session.id == "" || b.session.stopListening != nil {
		return
	}
	ctx, b.session.stopListening = context.WithCancel(ctx)
	b.wg.Go(func() {
		for wait := time.Second; ctx.Err() == nil; {
			begin := time.Now()
			b.mu.Lock()
			id, version := b.session.id, b.session.version
			b.mu.Unlock()
			resp, err := b.send(ctx, http.MethodGet, nil, id, version)
			if err == nil {
				b.resubscribeUnknown(ctx, id, version)
				err = readMessages(resp, func(msg []byte) {
					b.write(msg)
					if bytes.Contains(msg, resourcesChanged) {
						b.resubscribeUnknown(ctx, id, version)
					}
				})
				_ = resp.Body.Close()
			}
			var f *rpcError
			switch {
			case errors.Is(err, errSessionLost):
				err = b.renewSession(ctx, id)
			case errors.As(err, &f):
				return // the server has no such stream, or refuses it
			}
			if time.Since(begin) > time.Minute || err == nil {
				wait = time.Second
			}
			select {
			case <-time.After(wait/2 + rand.N(wait/2)):
				wait = min(2*wait, 30*time.Second)
			case <-ctx.Done():
			}
		}
	})
}

// closeSession closes the session.
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
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	resp, err := b.send(ctx, http.MethodDelete, nil, s.id, s.version)
	if err != nil {
		b.log.Debug("mcp session not ended", zap.Error(err))
		return
	}
	_ = resp.Body.Close()
}

// send makes an HTTP request of a message. An answer that is neither a message nor a
// stream of them is an error.
func (b *bridge) send(ctx context.Context, method string, m *message, id, version string) (*http.Response, error) {
	var body io.Reader
	if m != nil {
		body = bytes.NewReader(m.raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, b.opts.URL, body)
	if err != nil {
		return nil, err
	}
	h := req.Header
	h.Set("Accept", "application/json, text/event-stream")
	if method == http.MethodGet {
		h.Set("Accept", "text/event-stream")
	}
	if m != nil {
		h.Set("Content-Type", "application/json")
	}
	if version != "" {
		h.Set(headerVersion, version)
	}
	if id != "" {
		h.Set(headerSession, id)
	}
	if m != nil && m.version != "" {
		h.Set("Mcp-Method", m.Method)
		if m.name != "" && isHeaderSafe(m.name) {
			h.Set("Mcp-Name", m.name)
		}
	}
	if b.opts.Token != nil {
		token, err := b.opts.Token()
		if err != nil {
			return nil, err
		}
		if token != "" {
			h.Set("Authorization", "Bearer "+token)
		}
	}
	resp, err := b.opts.Client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return b.parseRefusal(resp, m, id)
}

// parseRefusal sorts an answer that is no success: a JSON-RPC error is the client's, the rest
// is told in our words.
func (b *bridge) parseRefusal(resp *http.Response, m *message, id string) (*http.Response, error) {
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode == http.StatusNotFound && id != "" {
		return nil, errSessionLost
	}
	var a struct {
		JSONRPC string `json:"jsonrpc"`
		Error   struct {
			Code    json.RawMessage `json:"code"`
			Message string          `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(raw, &a) == nil {
		switch {
		case a.JSONRPC != "" && m != nil && len(m.ID) > 0:
			resp.Body = io.NopCloser(bytes.NewReader(raw))
			resp.Header.Set("Content-Type", "application/json")
			return resp, nil
		case a.JSONRPC != "":
			return nil, &rpcError{codeInvalid, a.Error.Message}
		case a.Error.Message != "":
			var code string
			_ = json.Unmarshal(a.Error.Code, &code)
			return nil, &rpcError{-31000 - int64(resp.StatusCode), code + ": " + a.Error.Message + nextStep(resp.StatusCode)}
		}
	}
	return nil, &rpcError{-31000 - int64(resp.StatusCode), fmt.Sprintf("the server answered HTTP %d; is this the URL of an MCP endpoint?", resp.StatusCode)}
}

// nextStep is the next step for a status.
func nextStep(status int) string {
	if status == http.StatusUnauthorized {
		return "; agentctl mcp reads it from --token-file or MCP_TOKEN"
	}
	return ""
}

// isHeaderSafe tells whether a name can stand in a header as it is.
func isHeaderSafe(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < '!' || r > '~' }) < 0
}

// readMessages hands on the messages of an answer: one as JSON, many as an event stream, none
// for anything else.
func readMessages(resp *http.Response, fn func([]byte)) error {
	switch typ, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";"); typ {
	case "application/json":
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		if err != nil {
			return err
		}
		if len(body) > maxAnswer {
			return errors.New("the server's answer is larger than 16 MiB")
		}
		if len(body) > 0 {
			fn(body)
		}
	case "text/event-stream":
		rd := sse.NewReader(resp.Body, sse.ReaderOptions{MaxLine: maxAnswer, MaxEvent: maxAnswer})
		for {
			e, err := rd.Next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if len(e.Data) > 0 {
				fn(e.Data)
			}
		}
	}
	return nil
}

package stdio

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"

	"agentctl/transport/sse"
)

const (
	headerVersion = "Mcp-Protocol-Version"
	headerSession = "Mcp-Session-Id"
	// maxRefusal bounds the bytes that are read of an answer that is not a success: it may be
	// the page of a proxy.
	maxRefusal = 64 << 10
)

// sessionRef names a session in a request; the zero value names none. It is a copy: a
// renewal does not change requests that are in flight.
type sessionRef struct{ id, version string }

// send makes one HTTP request: POST with a message as its body, or GET or DELETE of a
// session with m nil. The response is a success, or a JSON-RPC error that answers m. The caller
// closes its body.
//
// send sets no time-out: a call may take as long as the server allows, and a stream stays open. ctx
// ends the request and the reading of its body.
func (b *bridge) send(ctx context.Context, method string, m *message, s sessionRef) (*http.Response, error) {
	var body io.Reader
	accept := "text/event-stream"
	if m != nil {
		body, accept = bytes.NewReader(m.raw), "application/json, text/event-stream"
	}
	req, err := http.NewRequestWithContext(ctx, method, b.opts.URL, body)
	if err != nil {
		return nil, err
	}
	// set leaves out headers without a value.
	set := func(key, value string) {
		if value != "" {
			req.Header.Set(key, value)
		}
	}
	set("Accept", accept)
	set(headerVersion, s.version)
	set(headerSession, s.id)
	if m != nil {
		set("Content-Type", "application/json")
		if m.version != "" { // the headers repeat the body, for proxies
			set("Mcp-Method", m.Method)
			if isHeaderSafe(m.name) {
				set("Mcp-Name", m.name)
			}
		}
	}
	resp, err := b.sendWithToken(ctx, req)
	if err != nil || resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, err
	}
	return b.parseRefusal(resp, m, s)
}

// sendWithToken sends a request with the newest token. One that is refused with 401 had no
// effect, and is sent again if there is a newer token.
func (b *bridge) sendWithToken(ctx context.Context, req *http.Request) (*http.Response, error) {
	if b.opts.Token == nil {
		return b.opts.Client.Do(req)
	}
	token, err := b.opts.Token(ctx, "") // each time: it may have been refreshed
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := b.opts.Client.Do(req)
	if err != nil || resp.StatusCode != http.StatusUnauthorized {
		return resp, err
	}
	newer, err := b.opts.Token(ctx, token)
	if err != nil || newer == token {
		return resp, nil // which has the server's own words
	}
	if req.GetBody != nil {
		if req.Body, err = req.GetBody(); err != nil {
			return resp, nil
		}
	}
	_ = resp.Body.Close()
	req.Header.Set("Authorization", "Bearer "+newer)
	return b.opts.Client.Do(req)
}

// isHeaderSafe reports whether a name can be in a header as it is. Without the header the
// server reads the name from the body.
func isHeaderSafe(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < '!' || r > '~' }) < 0
}

// parseRefusal handles a response that is not a success. A JSON-RPC error that answers m is
// passed on as it is; a refusal of the session is errSessionLost; everything else becomes
// an error under the code -31000 - status, with the relay's message if there is one.
func (b *bridge) parseRefusal(resp *http.Response, m *message, s sessionRef) (*http.Response, error) {
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusal))
	_ = resp.Body.Close()
	// MCP 2025-11-25, Streamable HTTP: a server answers 404 if it does not know the session id.
	if resp.StatusCode == http.StatusNotFound && s.id != "" {
		return nil, errSessionLost
	}
	code := -31000 - int64(resp.StatusCode)
	var a struct {
		JSONRPC string `json:"jsonrpc"`
		Error   struct {
			Code    json.RawMessage `json:"code"`
			Message string          `json:"message"`
		} `json:"error"`
	}
	err := json.Unmarshal(raw, &a)
	switch {
	case err != nil || a.JSONRPC == "" && a.Error.Message == "":
		return nil, &rpcError{code, fmt.Sprintf("the server answered HTTP %d; is this the URL of an MCP endpoint?", resp.StatusCode)}
	case a.JSONRPC != "" && m != nil && len(m.ID) > 0:
		resp.Body = io.NopCloser(bytes.NewReader(raw))
		resp.Header.Set("Content-Type", "application/json")
		return resp, nil
	case a.JSONRPC != "":
		return nil, &rpcError{codeInvalid, a.Error.Message}
	}
	var refused struct{ Error callError }
	if json.Unmarshal(raw, &refused) == nil {
		if outage := refused.Error.outage(nil, b.hasRecentOutage()); outage != nil {
			outage.err = &rpcError{code, refused.Error.Code + ": " + a.Error.Message}
			return nil, outage
		}
	}
	var name string // the relay's envelope: code is a word
	_ = json.Unmarshal(a.Error.Code, &name)
	msg := name + ": " + a.Error.Message
	if resp.StatusCode == http.StatusUnauthorized && b.opts.TokenHint != "" {
		msg += "; " + b.opts.TokenHint
	}
	return nil, &rpcError{code, msg}
}

var (
	errAnswerTooLarge = errors.New("the server's answer is larger than 16 MiB")
	errNoAnswer       = errors.New("the server ended the stream without an answer")
)

// isBrokenStream reports whether a response was cut off.
func isBrokenStream(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// readMessages calls fn with the messages of a response: one as JSON, many as an event
// stream, none for any other type. It returns when the response has ended.
func readMessages(resp *http.Response, fn func([]byte)) error {
	switch typ, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";"); typ {
	case "application/json":
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		if err != nil {
			return err
		}
		if len(body) > maxAnswer {
			return errAnswerTooLarge
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

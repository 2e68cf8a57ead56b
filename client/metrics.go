package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
	"agentctl/transport/sse"
)

// Metrics subscribes to the metric stream of a tool and calls fn with each frame, a JSON
// object. It returns nil when the stream is closed normally, when ctx ends after the
// stream began, or when fn returns ErrStop; another error of fn is returned as it is.
//
// The events of a stream are a closed set (RFC-0009 §5): metric, ping and close. Any other one is
// a *ProtocolError, and so are a ping or close with other data than RFC-0009 has, and a frame that
// violates the schema of frames or is of another node than the tool's: a program that reads frames
// needs no further checks.
func (c *Client) Metrics(ctx context.Context, tool string, arguments any, fn func(frame []byte) error) error {
	resp, err := c.do(ctx, http.MethodPost, c.URL()+toolsPath, "text/event-stream", newToolCall(tool, arguments))
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := wantEventStream(resp); err != nil {
		return err
	}
	name, _ := manifest.ParseToolName(manifest.Canonical(tool)) // the relay has accepted it
	reader := sse.NewReader(resp.Body, sse.ReaderOptions{})
	for {
		ev, err := reader.Next()
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case errors.Is(err, sse.ErrTooLong):
			return &ProtocolError{"protocol error: the stream sent a frame", err}
		case err != nil:
			return &TransportError{Broken, origin(resp.Request.URL), fmt.Errorf("the stream ended without a close event: %w", err)}
		}
		switch ev.Type {
		case "metric":
			if manifest.CheckFrame(ev.Data, name.NodeID) != nil { // its message is for the relay's operator
				return &ProtocolError{What: "protocol error: the stream sent a frame that violates its schema, or that is of another node; closed"}
			}
			if err := fn(ev.Data); errors.Is(err, ErrStop) {
				return nil
			} else if err != nil {
				return err
			}
		case "ping":
			if strictjson.Unmarshal(ev.Data, &struct{}{}) != nil {
				return &ProtocolError{What: "protocol error: a malformed ping event"}
			}
		case "close":
			return c.closeError(ev.Data)
		default:
			return &ProtocolError{What: "protocol error: the stream sent an event that RFC-0009 does not know; closed"}
		}
	}
}

// isTemporary reports whether a new attempt may succeed after err. It cannot after a refused
// token, an untrusted certificate, a protocol violation or an error of the caller's callback.
func isTemporary(err error) bool {
	var answer *Error
	var closed *StreamClosedError
	var transport *TransportError
	switch {
	case errors.As(err, &answer):
		return answer.isTemporary() || answer.Code == manifest.NodeOffline
	case errors.As(err, &closed):
		return closed.Code != sse.RateLimited
	case errors.As(err, &transport):
		return transport.Kind <= TimedOut
	}
	return isTemporaryRefresh(err)
}

// wantEventStream refuses an answer that is not an event stream.
func wantEventStream(resp *http.Response) error {
	if ct := resp.Header.Get("Content-Type"); !strings.HasPrefix(ct, "text/event-stream") {
		return &ProtocolError{What: fmt.Sprintf("the server answered with %q, not with an event stream", ct)}
	}
	return nil
}

// closeError returns the end that a close event announces, {"code", "reason"}; nil for a
// normal one. Codes and their reasons are a closed set (RFC-0009 §7). The relay closes a stream
// normally when its token expires. A client that gets new tokens can go on, so that this end is an
// error for it, which Follow handles.
func (c *conn) closeError(data []byte) error {
	var e StreamClosedError
	if strictjson.Unmarshal(data, &e) != nil || e.Reason == "" || e.Reason != e.Code.Reason() {
		return &ProtocolError{What: "protocol error: a malformed close event"}
	}
	if e.Code == sse.Normal && c.newToken == nil {
		return nil
	}
	return &e
}

const (
	firstWait      = 250 * time.Millisecond // before the second attempt; doubled from there
	maxWait        = 15 * time.Second
	maxServersWait = time.Minute // bound of a wait that the server asks for
)

// backoff spaces attempts to connect. Waits double from firstWait to maxWait; half of each
// is random, so that the clients of a relay that restarts do not come back at once. Its
// zero value is ready.
type backoff struct{ wait time.Duration }

// next returns how long to wait after err: at least what the server asked for with
// Retry-After, within maxServersWait.
func (b *backoff) next(err error) time.Duration {
	b.wait = min(max(2*b.wait, firstWait), maxWait)
	pause := b.wait/2 + rand.N(b.wait/2)
	var answer *Error
	if errors.As(err, &answer) {
		pause = max(pause, min(answer.RetryAfter, maxServersWait))
	}
	return pause
}

func (b *backoff) reset() { b.wait = 0 }

// sleep waits and reports whether ctx is still live.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

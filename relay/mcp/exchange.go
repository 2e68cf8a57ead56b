package mcp

import (
	"context"
	"sync/atomic"

	"agentctl/relay/kernel"
)

// exchange is one HTTP request on /mcp. The SDK carries it to the middleware (bindSDK), so
// that a message's caller is that of its request, even if another request opened the session.
type exchange struct {
	caller    *kernel.Caller
	tenant    *tenant  // the caller's
	session   *session // legacy, once it is known
	modern    bool
	flatNames bool           // ?names=flat
	toolset   kernel.Toolset // ?toolset=
	traceID   string         // from the traceparent header, or ""
	id        []byte         // of a single message, as it was sent
	bodyHeld  int64          // what its body holds of Options.Bodies

	// ctx ends when the client goes away; cancel ends it from here (nil on short
	// requests). It is in a struct because the SDK runs the handler under another one.
	ctx    context.Context
	cancel context.CancelCauseFunc

	call   *muxCall       // of a request that the mux carries
	writer *timeoutWriter // of a request that the SDK answers, unless it is a stream

	opened    *session // by its initialize
	recreates string   // the id of the session to open, for openAgain

	// Of a request in a session:
	requestIDs       []string    // claimed by claimIDs
	isDirect         bool        // the SDK does not know it
	canceledByClient atomic.Bool // by notifications/cancelled
}

// sendComment sends a comment to the client, if the response is or may become an event stream:
// the headers reach the client, and its timers start again.
func (x *exchange) sendComment() {
	switch {
	case x.call != nil:
		x.call.queueComment()
	case x.writer != nil:
		x.writer.writeComment()
	}
}

// join returns a context that ends with ctx, which is the SDK's, when the client of this exchange
// goes away, and when the relay cuts its calls.
func (x *exchange) join(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.WithValue(ctx, callKey{}, x.call))
	leave := context.AfterFunc(x.ctx, func() { cancel(nil) })
	stop := context.AfterFunc(x.tenant.h.calls, func() { cancel(kernel.ErrStopping) })
	return ctx, func() { stop(); leave(); cancel(nil) }
}

// sessionID names the session for stages that act on one; modern requests have none.
func (x *exchange) sessionID() string {
	if x.session == nil {
		return ""
	}
	return x.session.id
}

// Package sse writes and reads event streams (server-sent events, as the HTML standard
// defines them). Its writers decide what happens to a subscriber that reads more slowly
// than events arrive:
//
//	policy  subscriber is slow                       used by             connection
//	Cut     the stream ends with close code 4413     metric stream       taken over from net/http
//	Drop    events are dropped, counted, reported    event gateway       taken over from net/http
//	Queue   a bounded queue; when full, it ends      MCP notifications   left to net/http
//
// Cut and Drop are policies of Writer. A Writer takes its connection over (Hijack),
// because that halves what an event costs above the system call, and because both
// policies need to know what the connection has not taken: Cut counts the bytes that the
// peer's TCP has not acknowledged, so it finds a stalled subscriber within a few frames
// although 18,000 of them fit into the kernel's buffers; Drop never waits, so a few
// goroutines can serve thousands of subscribers. Queue is QueuedWriter, a separate type:
// the MCP SDK writes the response itself, with its own headers and status and on a
// connection that serves further requests, so net/http has to keep the connection.
// All share the encoding of events and the queue with its bounds.
//
// An Engine serves the Writers of both policies from a few goroutines. A metric stream:
//
//	listener  sse.NewListener(tcp), with tls.NewListener above it or not
//	engine    e := sse.NewEngine(); e.AddShard(nil); go e.Run(ctx)
//	request   wr, err := streams.Open(w, r, sse.Options{})
//	          err = e.Next().Add(&sse.Stream{Writer: wr, Handler: h})
//	source    st.Wake() when there is a frame
//	handler   h.OnReady calls st.Send(frame, 1); h.OnEnd(err) calls st.Close(sse.CodeOf(err))
//
// Wire of that stream (RFC-0009 §3, §5, §7):
//
//	HTTP/1.1 200 OK, Content-Type: text/event-stream; charset=utf-8, Connection: close
//	event: metric    data: {...}                      a frame, always one write
//	event: ping      data: {}                         every 25 s after opening
//	event: close     data: {"code":N,"reason":"..."}  the last event, then FIN
//
// After a Hijack, net/http neither cancels the request's context when the client
// disconnects (an Engine notices that) nor waits for the stream on Shutdown
// (Streams.Drain does).
//
// Limits: a program that stops reading is not noticed while its kernel has buffer space and keeps
// acknowledging; behind a proxy, the acknowledgements are the proxy's. On a connection
// that is not TCP, and on systems other than Linux, acknowledgements cannot be read;
// there "acknowledged" means accepted by the connection.
package sse

import "errors"

// Why a stream ends, or a call is refused.
var (
	ErrBackpressure = errors.New("sse: subscriber reads too slowly")
	ErrIdle         = errors.New("sse: no read progress")
	ErrPeerClosed   = errors.New("sse: client closed")
	ErrClosed       = errors.New("sse: stream closed")
	ErrDraining     = errors.New("sse: shutting down")
	ErrField        = errors.New("sse: CR, LF or NUL in a field")
	ErrFrame        = errors.New("sse: frame is not one whole event")
)

// Package mcp serves the kernel's tools and resources to MCP clients at one path, /mcp.
//
//	h := mcp.New(mcp.Options{Kernel: k, Authenticate: ..., OnDenied: ...})
//	go h.Run(ctx)              // owns every goroutine of the package
//	mux.Handle("/mcp", h)
//
// # Two eras of the protocol
//
// Versions up to 2025-11-25 (legacy here) have sessions: the client sends initialize, gets an
// Mcp-Session-Id, opens a GET stream for notifications, and ends the session with DELETE.
// Version 2026-07-28 (modern) has none: every request says in _meta which version and
// client it is from, and subscriptions/listen is a request that stays open. Both are
// served at once:
//
//	POST /mcp ── edge.Guard ── token ── strict JSON ── era? ─┬─ call of a board's tool, list: direct, both eras
//	                                                         ├─ legacy  SDK, stateful handler
//	                                                         ├─ listen  SDK, stateless handler
//	                                                         ├─ plain   requestMux: all requests of a
//	                                                         │          tenant share one SDK session
//	                                                         └─ other   SDK, stateless handler
//	GET, DELETE /mcp ── legacy only
//	      middleware: tools/*, resources/*, subscriptions/* -> kernel;
//	                  prompts/*, completion/*, templates -> the plugin that serves the method
//
// The era is chosen by the header MCP-Protocol-Version or by the body's _meta, not by
// Mcp-Method.
//
// # Division of work with the SDK
//
// The official SDK does the wire: JSON-RPC, framing, sessions, version negotiation, and
// the refusals that the protocol defines. The kernel decides which tools and resources a caller
// may use. One receiving middleware joins them; no tool or resource is registered with the
// SDK. Beside that, this package does itself:
//
//   - Strict JSON and the choice of the era, before the SDK parses: the SDK takes the last
//     of two equal keys and ignores what follows the first value (envelope.go).
//   - Calls of boards' tools, which are nearly all requests, and the two lists of the kernel are
//     parsed once and answered here, in a session only after the SDK has opened it (direct.go).
//   - Results as bytes: schemas and device answers pass without being decoded (result.go).
//   - Plain modern requests on one shared session: a separate session for each would
//     cost the SDK a connection, three goroutines and ten parses (request_mux.go).
//   - Queued writers for streams: the SDK writes a notification to one stream after the
//     other, and a stalled one would stop them all. A stream whose queue exceeds
//     1024 writes or 256 KiB is cut (stream_writer.go, sse.QueuedWriter).
//   - Change notifications, at most one round a second for each tenant: the SDK's own
//     debounce never fires while devices come and go (tenant.go).
//   - Session ownership, limits and idle time-outs (session.go).
//
// # Identity
//
// The caller of every message is the one whose token this HTTP request carries. A session
// answers only to the tenant and subject that opened it; for others it does not exist. A
// refreshed token of the same subject keeps the session. Tokens of open streams are
// checked again each second.
//
// # Streams
//
// A tool with a stream (metrics.subscribe) answers tools/call with one
// notifications/progress a frame, if the request has a progressToken, and with the last
// frame as its result; the text of the result is a summary and the frames. It ends after
// 20 frames or 20 s; the request's _meta may lower both: "agentctl/max_frames" (1..20) and
// "agentctl/max_ms" (1..20000). The headers are sent before the stream is open, and then
// something at least every 5 s, progress or a comment (streamProgress). When the device
// goes away the result is an error E_NODE_OFFLINE, also after some frames, because half
// an answer would pass for a whole one.
//
// # Toolsets
//
// ?toolset= selects what tools/list has, in both eras (readQuery): nothing, echo and metrics of the
// boards and the relay's own tools; fleet, the tools for many boards, which are as many for any
// number of boards; boards, all kinds of the boards; all; and the names of plugins. A tool outside
// of the selection can be called by its name: the scopes decide what a caller may do, and the
// toolset only what its model has to read.
//
// # Compression
//
// A modern answer in JSON of 2 KiB or more has gzip if the client accepts it (edge.Compress). Of the
// events of a session only those that answer tools/list and resources/list have: every board of a model
// has the same schemas (isList).
//
// # Restarts
//
// A session id is signed and holds what it takes to make the session again, so that a restart of
// the relay ends none (session_id.go, session_recreate.go). The SDK has its own id for each
// session, which no client sees.
//
// # Files
//
//	handler.go        options, bounds, start, stop and order of checks; exchange.go is one HTTP request
//	post.go           reads a POST and chooses the era; envelope.go scans its messages
//	direct.go         requests that do not go through the SDK
//	request_mux.go    plain modern requests, on one SDK session of the tenant
//	session*.go       legacy sessions, their ids, and how they survive a restart
//	middleware.go     what the SDK has decoded goes to the methods in tools.go, resources.go and
//	                  plugin_methods.go; toolset.go reads ?toolset=
//	call_stream.go    tools with a stream; frame_text.go is the text of their results
//	client.go         the client as a plugin sees it: progress, log messages, input
//	tenant.go         the SDK servers and the change notifications of a tenant
//	stream_writer.go  writers that a slow client does not block
//	result.go         renders results as bytes; errors.go and error_schema.go failures
//
// # Locks and goroutines
//
// The order is recreations.mu, then Handler.mu, then tenant.mu or session.mu, which are leaves.
// recreations.mu is held while the SDK opens a session, which waits for no client. Handler.mu is held
// while the kernel subscribes a tenant or ends a watch, and while an identity is checked: none of these
// calls back into the handler.
//
// Run owns one goroutine for each tenant (tenant.run) and one for each session that is
// closing; requests run on net/http's goroutines, and those that are not direct are handled on
// the SDK's.
//
// # Bounds
//
// handler.go and stream_writer.go bound what a client can make many of: tenants, sessions, streams,
// watches, queued bytes. Beyond a bound, requests get 429 or the stream is cut.
package mcp

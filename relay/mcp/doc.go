// Package mcp serves the kernel's tools and resources to MCP clients at one path, /mcp.
//
//	h := mcp.New(mcp.Options{Kernel: k, Authenticate: ..., OnDenied: ...})
//	go h.Run(ctx)              // owns every goroutine of the package
//	mux.Handle("/mcp", h)
//
// The official SDK owns the wire: framing, sessions, the two eras of the protocol. The
// kernel owns what is offered and who may use it. Between them stands one receiving
// middleware; nothing is ever registered with the SDK.
//
//	POST /mcp ── guard ── strict JSON ── era? ─┬─ legacy  (<= 2025-11-25)  SDK, sessions
//	                                           ├─ listen  (2026-07-28)     SDK, one stream a request
//	                                           └─ call    (2026-07-28)     mux: all requests of a
//	                                              tenant share one SDK session in memory
//	      middleware: tools/*, resources/*, subscriptions/* -> kernel;
//	                  prompts/*, completion/*, templates -> a kernel.Methods plugin
//
// The era is chosen by the header MCP-Protocol-Version or by the body's _meta, never by
// Mcp-Method. The caller of every message is the one that this HTTP request's token
// proved; a session answers only to the identity that opened it.
//
// # Streams
//
// A tool with a stream (metrics.subscribe) answers tools/call with one
// notifications/progress a frame, if the request has a progressToken, and with the last
// frame as its result. It ends after 20 frames or 60 s; the request's _meta may lower
// both: "agentctl/max_frames" (1..20) and "agentctl/max_ms" (1..60000). When the device
// goes away the result is an error E_NODE_OFFLINE, also after some frames, because half
// an answer would pass for a whole one.
package mcp

// Package stdio lets a program that speaks MCP over stdin and stdout use a server that
// speaks MCP over HTTP, as /mcp does. It forwards messages unchanged.
//
//	err := stdio.Serve(ctx, os.Stdin, os.Stdout, stdio.Options{URL: "https://relay/mcp?names=flat", Client: c})
//
// Messages are JSON, one per line. Each is sent as a POST; the answer, one message or an
// event stream of them, is written out line by line:
//
//	stdin ── readLines ── handleLine ──┬─ request       a goroutine each, 64 at most
//	                                   └─ notification  delivered before the next line is read
//	stdout <── write <── readMessages <── the answers, and the session's own stream (listen)
//
// # Sessions
//
// In versions with sessions (up to 2025-11-25) the bridge keeps the session for the client. It
// reads the session's stream of notifications and opens it again when it breaks, and then
// subscribes to the same resources again: a relay keeps its sessions over a restart, but not
// their subscriptions. When the server has lost the session, the bridge opens a new one with the
// client's own initialize, subscribes likewise and reports that the lists changed. A
// resource that the server does not know yet is tried again whenever its list changes.
//
// A request whose answer was lost gets an error; it is not sent twice, as it may have
// taken effect. Only a request that the server refused with "no such session" is repeated.
//
// Version 2026-07-28 has no sessions: its requests carry their version in _meta and pass as
// they are, with the headers that the version wants.
//
// # Goroutines
//
// Serve waits for the goroutines of requests and of listen. Two may outlive it, since a
// read or write of a pipe cannot be interrupted: the read of stdin, which ends with the
// process or when its owner closes it, and a blocked write of stdout (abortableWriter).
package stdio

// Package clientcmd has the commands that use a relay from any machine: ls, describe, call, tickets,
// login, context and verify.
//
// They run on Linux, macOS and Windows, and all but verify are in the build for boards. Package client
// makes their requests; here are their flags and what they print. Results go to stdout, and what people
// should know besides goes to stderr, so that a pipe gets results only.
//
// # Files
//
//	ls.go, describe.go             boards: GET /v1/nodes
//	call.go, call_result.go        one call of any tool: POST /mcp/tools/call
//	call_stream.go                 the same for a metric stream, which reconnects
//	tickets.go, tickets_*.go       the tools tickets.* with flags in place of JSON
//	login.go, context.go           package login: an identity at a relay, kept in a file of this user
//	verify.go, input.go            the signature of a saved answer; needs no relay
//
// # Which relay, and who calls
//
// cli.RelayFlags decides both, for all commands but login, context and verify: flag, environment, context,
// default. The next commands that tickets prints repeat the flags that were given (cli.RelayHint), since
// without them they would go to another relay.
//
// # Untrusted text
//
// Boards, plugins, agents and the relay write names, messages and results. What goes to a terminal is
// escaped (term.SafeLine, term.SafeText, term.JSONWriter); into a pipe JSON goes as it came.
//
// # Errors
//
// Package client returns typed errors, and cli.Explain gives them exit codes: 2 for what was typed, 3 for a
// relay that does not answer, 4 for the token, 5 for the board, 7 when --for or the relay's deadline is over,
// and 1 for others, such as an error that a tool answers with.
package clientcmd

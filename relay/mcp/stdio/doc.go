// Package stdio lets a program that speaks MCP over stdin and stdout use a server that
// speaks MCP over HTTP, as /mcp does. It carries messages, and changes none.
//
//	err := stdio.Serve(ctx, os.Stdin, os.Stdout, stdio.Options{URL: "https://relay/mcp?names=flat", Client: c})
//
// Messages are JSON, one a line. Each goes out as a POST; what comes back, one message
// or a stream of them, is written out line by line. Requests run side by side; a
// notification is delivered before the message behind it is read.
//
// Sessions (versions up to 2025-11-25) are kept here: the session's stream of
// notifications is read and opened again, and when the server has lost the session, by a
// restart say, it is made anew with the client's own initialize and subscriptions. A
// request whose answer was lost gets an error; it is not sent twice.
package stdio

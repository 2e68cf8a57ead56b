// Package client calls a relay: its HTTP API, its metric streams and its event gateway.
//
//	c, err := client.New(client.Options{URL: "https://relay.example:8460", Token: token})
//	nodes, err := c.Nodes(ctx)
//	answer, err := c.Call(ctx, tool, map[string]any{"message": "hello"})
//	err = c.Metrics(ctx, tool, nil, func(frame []byte) error { ... })
//
// A Client calls tools, lists nodes, plugins and tickets, and reads metric streams. A
// Gateway publishes topic events and follows them (docs/events.md).
//
// # Errors
//
// Callers decide by type, with errors.As:
//
//   - *Error: the server answered with an error; it has the code and the HTTP status.
//   - *ToolError: a tool answered with an error.
//   - *TransportError: there was no response; its Kind says why.
//   - *StreamClosedError: the relay ended a metric stream.
//   - *ProtocolError: the response violates the protocol.
//   - *RefError: a name or a part of an id does not identify exactly one node or ticket.
//
// When the context of a call ends, the call returns the context's error.
//
// # Bounds
//
// An answer is read up to 64 MiB, an error answer up to 1 MiB, an event up to 256 KiB.
// A server must begin to answer within 15 s. A token is sent in the clear to loopback
// addresses only.
//
// # Streams
//
// Metrics and Tail run in the goroutine that calls them, and so do their callbacks. A slow
// callback is back-pressure: the relay then closes a metric stream, and the gateway drops
// events. A callback ends its stream by returning ErrStop. Follow and Tail reconnect
// automatically.
package client

package mcp

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	"agentctl/manifest"
	"agentctl/transport/edge"
)

// acceptsBoth tells whether an Accept header plainly names both answers of the
// protocol. Anything less plain goes to the SDK, which refuses what has to be refused.
func acceptsBoth(h http.Header) bool {
	v := h["Accept"]
	return len(v) == 1 && strings.Contains(v[0], "application/json") && strings.Contains(v[0], "text/event-stream")
}

// refuse answers a request before any of its messages was handled.
func refuse(w http.ResponseWriter, r *http.Request, status int, e *manifest.Error) {
	trace, _ := edge.TraceID(r)
	edge.WriteError(w, status, e, trace)
}

// refuseRPC answers a POST that carries no usable message with a JSON-RPC error.
func refuseRPC(w http.ResponseWriter, status int, id []byte, code int64, message string) {
	edge.WriteJSON(w, status, appendFault(nil, id, code, message, nil))
}

// appendFault appends a whole JSON-RPC error message; a nil id becomes null.
func appendFault(b, id []byte, code int64, message string, data json.RawMessage) []byte {
	b = append(b, `{"jsonrpc":"2.0","id":`...)
	if len(id) == 0 {
		id = []byte("null")
	}
	b = append(b, id...)
	b = append(b, `,"error":{"code":`...)
	b = strconv.AppendInt(b, code, 10)
	b = append(b, `,"message":`...)
	b = appendString(b, message)
	if len(data) > 0 {
		b = append(b, `,"data":`...)
		b = append(b, data...)
	}
	return append(b, `}}`...)
}

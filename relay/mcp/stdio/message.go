package stdio

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"

	"agentctl/strictjson"
)

// Error codes of JSON-RPC, and that of a server that cannot be reached, which lies outside
// the range that JSON-RPC and MCP keep for themselves.
const (
	codeParse       = -32700
	codeInvalid     = -32600
	codeUnreachable = -31503
)

// message is the part of a client's message that the bridge reads; raw is what it sends.
type message struct {
	ID     json.RawMessage `json:"id"` // nil for a notification
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`

	raw     []byte
	name    string // params.name or params.uri
	version string // the protocol version in params._meta; empty in the era with sessions
}

const metaVersionKey = "io.modelcontextprotocol/protocolVersion"

// parseMessage checks a line strictly and reads the parts that decide how to send it. The
// server would refuse what fails here; checking it first gives an error without a round
// trip, and keeps a malformed line from being taken for a notification.
func parseMessage(line []byte) (*message, error) {
	if line[0] == '[' {
		return nil, errors.New("batches are not supported: send one message a line")
	}
	if err := strictjson.Check(line); err != nil {
		return nil, err
	}
	m := &message{raw: line}
	if json.Unmarshal(line, m) != nil {
		return nil, errors.New("a message is a JSON object with a method, a result or an error")
	}
	if string(m.ID) == "null" {
		m.ID = nil
	}
	var p struct {
		Name string                     `json:"name"`
		URI  string                     `json:"uri"`
		Meta map[string]json.RawMessage `json:"_meta"`
	}
	if json.Unmarshal(m.Params, &p) == nil {
		m.name = cmp.Or(p.Name, p.URI)
		_ = json.Unmarshal(p.Meta[metaVersionKey], &m.version)
	}
	return m, nil
}

// isRequest reports whether a message wants an answer.
func (m *message) isRequest() bool { return len(m.ID) > 0 && m.Method != "" }

// rpcError is an error of the server, or of the way to it, as the client gets it. The code
// of an HTTP status is -31000 - status, outside the range that JSON-RPC reserves.
type rpcError struct {
	code int64
	msg  string
}

func (e *rpcError) Error() string { return e.msg }

// writeError answers a request with an error. Without an id the answer has id null, as
// JSON-RPC wants for a message that could not be read.
func (b *bridge) writeError(id json.RawMessage, code int64, msg string) {
	if len(id) == 0 {
		id = json.RawMessage("null")
	}
	text, _ := json.Marshal(msg) // a string
	b.write(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":%s}}`, id, code, text))
}

// answerError answers a request that err has ended, with the server's own code if it gave
// one.
func (b *bridge) answerError(id json.RawMessage, err error) {
	if e, ok := errors.AsType[*rpcError](err); ok {
		b.writeError(id, e.code, e.msg)
		return
	}
	b.writeError(id, codeUnreachable, b.describeError(err))
}

// describeError describes a failed HTTP request for the client's user, without the query
// of the URL, which may hold a secret, and without net/http's wrapping.
func (b *bridge) describeError(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		u, _, _ := strings.Cut(b.opts.URL, "?")
		return fmt.Sprintf("no relay answers at %s (%v); is it running, and is this its URL?", u, op.Err)
	}
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	return err.Error()
}

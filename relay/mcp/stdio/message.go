package stdio

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"

	"agentctl/strictjson"
)

// Codes of JSON-RPC, and the one for a server that cannot be reached, which lies outside
// what JSON-RPC and MCP keep for themselves.
const (
	codeParse       = -32700
	codeInvalid     = -32600
	codeUnreachable = -31503
)

// message is what the bridge looks at in a client's message; raw is what it sends.
type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`

	raw     []byte
	name    string // params.name or params.uri
	version string // the protocol version in params._meta, which the modern era has
}

const metaVersionKey = "io.modelcontextprotocol/protocolVersion"

func parseMessage(line []byte) (*message, error) {
	if line[0] == '[' {
		return nil, errors.New("batches are not carried: send one message a line")
	}
	if err := strictjson.Check(line); err != nil {
		return nil, err
	}
	m := &message{raw: line}
	if err := json.Unmarshal(line, m); err != nil {
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
		if m.name = p.Name; m.name == "" {
			m.name = p.URI
		}
		_ = json.Unmarshal(p.Meta[metaVersionKey], &m.version)
	}
	return m, nil
}

// rpcError is an error of the server, or of the way to it, as JSON-RPC has it.
type rpcError struct {
	code int64
	msg  string
}

func (f *rpcError) Error() string { return f.msg }

// writeError answers a request with an error.
func (b *bridge) writeError(id json.RawMessage, code int64, msg string) {
	if len(id) == 0 {
		id = json.RawMessage("null")
	}
	text, _ := json.Marshal(msg) // a string
	b.write(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":%s}}`, id, code, text))
}

func (b *bridge) answerError(id json.RawMessage, err error) {
	var f *rpcError
	if errors.As(err, &f) {
		b.writeError(id, f.code, f.msg)
		return
	}
	b.writeError(id, codeUnreachable, b.describeError(err))
}

// describeError tells of a failed HTTP request without the request's own name for it.
func (b *bridge) describeError(err error) string {
	var op *net.OpError
	var ue *url.Error
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		u, _, _ := strings.Cut(b.opts.URL, "?")
		return fmt.Sprintf("no relay answers at %s (%v); is it running, and is this its URL?", u, op.Err)
	case errors.As(err, &ue):
		return ue.Err.Error()
	}
	return err.Error()
}

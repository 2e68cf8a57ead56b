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

	raw  []byte
	name string // params.name or params.uri
	era  string // the protocol version in params._meta, which the modern era has
}

const eraKey = "io.modelcontextprotocol/protocolVersion"

func parse(line []byte) (*message, error) {
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
		_ = json.Unmarshal(p.Meta[eraKey], &m.era)
	}
	return m, nil
}

// fault is an error of the server, or of the way to it, as JSON-RPC has it.
type fault struct {
	code int64
	msg  string
}

func (f *fault) Error() string { return f.msg }

// fail answers a request with an error.
func (b *bridge) fail(id json.RawMessage, code int64, msg string) {
	if len(id) == 0 {
		id = json.RawMessage("null")
	}
	text, _ := json.Marshal(msg) // a string
	b.write(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":%s}}`, id, code, text))
}

func (b *bridge) failWith(id json.RawMessage, err error) {
	var f *fault
	if errors.As(err, &f) {
		b.fail(id, f.code, f.msg)
		return
	}
	b.fail(id, codeUnreachable, b.said(err))
}

// said tells of a failed HTTP request without the request's own name for it.
func (b *bridge) said(err error) string {
	var op *net.OpError
	var ue *url.Error
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		u, _, _ := strings.Cut(b.o.URL, "?")
		return fmt.Sprintf("no relay answers at %s (%v); is it running, and is this its URL?", u, op.Err)
	case errors.As(err, &ue):
		return ue.Err.Error()
	}
	return err.Error()
}

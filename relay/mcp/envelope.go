package mcp

import (
	"encoding/json"
	"math"
	"strconv"

	"agentctl/strictjson"
)

// envelope is the part of a JSON-RPC message that is read before the SDK parses it. The
// byte slices are parts of the message itself.
type envelope struct {
	id           []byte // nil for a notification
	method       string
	params       []byte
	name         string     // params.name, or params.uri for resources/read
	meta         []byte     // params._meta
	version      string     // its protocolVersion
	clientInfo   []byte     // its clientInfo
	capabilities []byte     // its clientCapabilities
	arguments    []byte     // params.arguments
	requestID    []byte     // params.requestId of a cancellation: a string or a number
	cursor       string     // params.cursor
	isUnusual    bool       // has inputResponses, requestState, or a _meta or cursor of a wrong type
	isResponse   bool       // has a result or an error
	invalid      shapeError // why it is not a JSON-RPC message; "" for one that is
}

// shapeError reports JSON that is not a message.
type shapeError string

func (s shapeError) Error() string { return string(s) }

// Why a body is not a message. The texts go to the client.
const (
	errBatchSize = shapeError("a batch holds 1 to 32 messages")
	errNotObject = shapeError("a message is a JSON object with a method, a result or an error")
	errVersion   = shapeError(`a message has "jsonrpc":"2.0"`)
	errID        = shapeError("an id is a string or a whole number below 2^53")
	errParams    = shapeError("params are an object")
)

// Keys of _meta in the modern era.
const (
	metaVersionKey      = "io.modelcontextprotocol/protocolVersion"
	metaClientInfoKey   = "io.modelcontextprotocol/clientInfo"
	metaCapabilitiesKey = "io.modelcontextprotocol/clientCapabilities"
	metaLogLevelKey     = "io.modelcontextprotocol/logLevel"
)

// scanBody checks a body strictly (exact keys, no duplicates, UTF-8, no trailing bytes,
// bounded depth) and returns the envelopes of its messages. The SDK alone would take the
// last of two equal keys and ignore what follows the first value. A single message that
// is a shapeError is returned with the error, for its id.
func scanBody(body []byte) (msgs []envelope, batch bool, err error) {
	defer strictjson.AcquireSlot(len(body))()
	if err := strictjson.Check(body); err != nil {
		return nil, false, err
	}
	switch body = strictjson.SkipSpace(body); body[0] {
	case '{':
		m := scanMessage(body)
		if m.invalid != "" {
			err = m.invalid
		}
		return []envelope{m}, false, err
	case '[':
		msgs, err = scanBatch(body)
		return msgs, true, err
	}
	return nil, false, errNotObject
}

// scanBatch scans the messages of a batch. It refuses a batch with one that is not valid.
func scanBatch(body []byte) (msgs []envelope, err error) {
	var elements []strictjson.Raw
	if err := strictjson.Unmarshal(body, &elements); err != nil {
		return nil, err
	}
	for _, e := range elements {
		switch {
		case e[0] != '{':
			return msgs, errNotObject
		case len(msgs) == maxBatch:
			return msgs, errBatchSize
		}
		m := scanMessage(e)
		if m.invalid != "" {
			return msgs, m.invalid
		}
		msgs = append(msgs, m)
	}
	if len(msgs) == 0 {
		return nil, errBatchSize
	}
	return msgs, nil
}

// scanMessage reads one message. It descends into params and into _meta for the members
// that choose the era and the handler, and decodes no value that is not needed for that.
// A message with an error keeps its id, unless the id itself is wrong.
func scanMessage(obj []byte) (m envelope) {
	hasVersion := false
	m.invalid = errNotObject
	for key, v := range strictjson.Object(obj).Members {
		switch string(key) {
		case "jsonrpc":
			version, _ := strictjson.Text(v)
			hasVersion = string(version) == "2.0"
		case "id":
			if string(v) != "null" {
				m.id = v
			}
		case "method":
			m.method = stringValue(v)
		case "params":
			m.params = v
		case "result", "error":
			m.isResponse = true
		}
	}
	switch {
	case m.method == "" && !m.isResponse: // errNotObject, as set above
	case !hasVersion:
		m.invalid = errVersion
	case len(m.params) > 0 && m.params[0] != '{' && string(m.params) != "null":
		m.invalid = errParams
	default:
		m.invalid = ""
	}
	if len(m.id) > 0 && !isID(m.id) {
		m.id, m.invalid = nil, errID
	}
	if len(m.params) == 0 || m.params[0] != '{' {
		return m
	}
	name := "name"
	if m.method == "resources/read" {
		name = "uri"
	}
	for key, v := range strictjson.Object(m.params).Members {
		switch {
		case string(key) == name:
			m.name = stringValue(v)
		case string(key) == "_meta" && v[0] == '{':
			m.meta = v
			m.scanMeta()
		case string(key) == "arguments":
			m.arguments = v
		case string(key) == "requestId" && isID(v):
			m.requestID = v
		case string(key) == "cursor" && v[0] == '"':
			m.cursor = stringValue(v)
		case string(key) == "inputResponses", string(key) == "requestState", string(key) == "_meta", string(key) == "cursor":
			m.isUnusual = true
		}
	}
	return m
}

// isID reports whether a value is a string or a number.
func isID(v []byte) bool {
	return v[0] == '"' || v[0] == '-' || v[0] >= '0' && v[0] <= '9'
}

// scanMeta reads the protocol's own members of _meta.
func (m *envelope) scanMeta() {
	for key, v := range strictjson.Object(m.meta).Members {
		switch string(key) {
		case metaVersionKey:
			m.version = stringValue(v)
		case metaClientInfoKey:
			m.clientInfo = v
		case metaCapabilitiesKey:
			m.capabilities = v
		}
	}
}

// idRoundTrips reports whether the SDK would answer under the same id: it reads numbers as
// float64 and keeps them as integers, so that 1.5 becomes 1.
func (m *envelope) idRoundTrips() bool {
	if len(m.id) == 0 || m.id[0] == '"' {
		return true
	}
	n, err := strconv.ParseFloat(string(m.id), 64)
	return err == nil && n == math.Trunc(n) && math.Abs(n) < 1<<53
}

// maxSDKArguments is the size of arguments up to which the SDK gets them, which reads them three
// times. Larger ones take milliseconds of it.
const maxSDKArguments = 4 << 10

// hasLargeArguments reports whether the arguments, an object, are kept from the SDK.
func (m *envelope) hasLargeArguments() bool {
	return m.method == "tools/call" && len(m.arguments) > maxSDKArguments && m.arguments[0] == '{'
}

// sdkParams returns the params without _meta, and without the members of large arguments; nil if nothing
// else is in them. The SDK would decode _meta of every request into maps, which is most of the garbage
// of a call.
func (m *envelope) sdkParams() []byte {
	size, large := len(m.params)-len(m.meta), m.hasLargeArguments()
	if large {
		size -= len(m.arguments)
	}
	b := append(make([]byte, 0, size+2), '{')
	for key, v := range strictjson.Object(m.params).Members {
		switch {
		case string(key) == "_meta":
			continue
		case large && string(key) == "arguments":
			v = emptyObject
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(appendString(b, key), ':'), v...)
	}
	if len(b) == 1 {
		return nil
	}
	return append(b, '}')
}

var emptyObject = []byte("{}")

// extraMeta decodes the members of _meta that are not the protocol's own; nil if there are
// none, which is the rule.
func (m *envelope) extraMeta() (extra map[string]any) {
	if len(m.meta) == 0 {
		return nil
	}
	for name, v := range strictjson.Object(m.meta).Members {
		switch key := string(name); key {
		case metaVersionKey, metaClientInfoKey, metaCapabilitiesKey:
		default:
			if extra == nil {
				extra = make(map[string]any)
			}
			var value any
			_ = json.Unmarshal(v, &value) // the body was checked
			extra[key] = value
		}
	}
	return extra
}

// stringValue decodes a JSON string; it returns "" for any other value.
func stringValue(v []byte) string {
	s, _ := strictjson.Text(v)
	return string(s)
}

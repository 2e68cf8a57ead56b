package mcp

import (
	"bytes"
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
	if err := strictjson.Check(body); err != nil {
		return nil, false, err
	}
	i := skipSpace(body, 0)
	switch body[i] {
	case '{':
		m := scanMessage(body[i:])
		if m.invalid != "" {
			err = m.invalid
		}
		return []envelope{m}, false, err
	case '[':
		err = forEachElement(body[i:], func(e []byte) error {
			if e[0] != '{' {
				return errNotObject
			}
			if len(msgs) == maxBatch {
				return errBatchSize
			}
			m := scanMessage(e)
			if m.invalid != "" {
				return m.invalid
			}
			msgs = append(msgs, m)
			return nil
		})
		if err == nil && len(msgs) == 0 {
			err = errBatchSize
		}
		return msgs, true, err
	}
	return nil, false, errNotObject
}

// scanMessage reads one message. It descends into params and into _meta for the members
// that choose the era and the handler, and decodes no value that is not needed for that.
// A message with an error keeps its id, unless the id itself is wrong.
func scanMessage(obj []byte) (m envelope) {
	version := ""
	m.invalid = errNotObject
	forEachMember(obj, func(key string, v []byte) {
		switch key {
		case "jsonrpc":
			version = stringValue(v)
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
	})
	switch {
	case m.method == "" && !m.isResponse: // errNotObject, as set above
	case version != "2.0":
		m.invalid = errVersion
	case len(m.params) > 0 && m.params[0] != '{' && string(m.params) != "null":
		m.invalid = errParams
	default:
		m.invalid = ""
	}
	if len(m.id) > 0 && m.id[0] != '"' && m.id[0] != '-' && (m.id[0] < '0' || m.id[0] > '9') {
		m.id, m.invalid = nil, errID
	}
	if len(m.params) == 0 || m.params[0] != '{' {
		return m
	}
	name := "name"
	if m.method == "resources/read" {
		name = "uri"
	}
	forEachMember(m.params, func(key string, v []byte) {
		switch {
		case key == name:
			m.name = stringValue(v)
		case key == "_meta" && v[0] == '{':
			m.meta = v
			forEachMember(v, func(key string, v []byte) {
				switch key {
				case metaVersionKey:
					m.version = stringValue(v)
				case metaClientInfoKey:
					m.clientInfo = v
				case metaCapabilitiesKey:
					m.capabilities = v
				}
			})
		}
	})
	return m
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

// withoutMeta returns the params without _meta; nil if nothing else is in them. The SDK
// would decode _meta of every request into maps, which is most of the garbage of a call.
func (m *envelope) withoutMeta() []byte {
	b := make([]byte, 0, len(m.params)-len(m.meta))
	b = append(b, '{')
	forEachMember(m.params, func(key string, v []byte) {
		if key == "_meta" {
			return
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(appendString(b, key), ':'), v...)
	})
	if len(b) == 1 {
		return nil
	}
	return append(b, '}')
}

// extraMeta decodes the members of _meta that are not the protocol's own; nil if there are
// none, which is the rule.
func (m *envelope) extraMeta() (extra map[string]any) {
	if len(m.meta) == 0 {
		return nil
	}
	forEachMember(m.meta, func(key string, v []byte) {
		if key == metaVersionKey || key == metaClientInfoKey || key == metaCapabilitiesKey {
			return
		}
		var value any
		if json.Unmarshal(v, &value) != nil {
			return
		}
		if extra == nil {
			extra = make(map[string]any)
		}
		extra[key] = value
	})
	return extra
}

// The scanner below finds members without decoding values. It does not check bounds or
// syntax: its input has passed strictjson.Check, or json.Valid.

// forEachMember calls yield for each member of an object.
func forEachMember(obj []byte, yield func(key string, value []byte)) {
	i := skipSpace(obj, 1)
	for obj[i] != '}' {
		end := skipValue(obj, i)
		key := stringValue(obj[i:end])
		i = skipSpace(obj, skipSpace(obj, end)+1) // behind the colon
		end = skipValue(obj, i)
		yield(key, obj[i:end])
		if i = skipSpace(obj, end); obj[i] == ',' {
			i = skipSpace(obj, i+1)
		}
	}
}

// forEachElement calls yield for each element of an array until it returns an error.
func forEachElement(arr []byte, yield func([]byte) error) error {
	i := skipSpace(arr, 1)
	for arr[i] != ']' {
		end := skipValue(arr, i)
		if err := yield(arr[i:end]); err != nil {
			return err
		}
		if i = skipSpace(arr, end); arr[i] == ',' {
			i = skipSpace(arr, i+1)
		}
	}
	return nil
}

// skipValue returns the index behind the value that begins at i.
func skipValue(b []byte, i int) int {
	switch b[i] {
	case '"':
		for i++; b[i] != '"'; i++ {
			if b[i] == '\\' {
				i++
			}
		}
		return i + 1
	case '{', '[':
		for depth := 0; ; i++ {
			switch b[i] {
			case '"':
				i = skipValue(b, i) - 1
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
		}
	}
	for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] > ' ' {
		i++
	}
	return i
}

// skipSpace returns the index of the first byte from i on that is not white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r') {
		i++
	}
	return i
}

// stringValue decodes a JSON string; any other value gives "".
func stringValue(v []byte) string {
	if len(v) < 2 || v[0] != '"' {
		return ""
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1])
	}
	var s string
	_ = json.Unmarshal(v, &s) // leaves "" on an error
	return s
}

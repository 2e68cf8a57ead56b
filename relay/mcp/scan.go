package mcp

import (
	"encoding/json"
	"math"
	"strconv"
	"unicode/utf8"

	"agentctl/strictjson"
)

// envelope is what the door looks at in a JSON-RPC message before the SDK parses it. The
// parts are the message's own bytes.
type envelope struct {
	id     []byte // nil for a notification
	method string
	params []byte
	name   string // params.name, or params.uri for resources/read
	meta   []byte // params._meta
	era    string // its protocolVersion
	info   []byte // its clientInfo
	caps   []byte // its clientCapabilities
	answer bool   // has a result or an error
	wrong  shape  // why it is no message of JSON-RPC; "" for one that is
}

// shape says why JSON is no message.
type shape string

func (s shape) Error() string { return string(s) }

const (
	errBatchSize = shape("a batch holds 1 to 32 messages")
	errNotObject = shape("a message is a JSON object with a method, a result or an error")
	errVersion   = shape(`a message has "jsonrpc":"2.0"`)
	errID        = shape("an id is a string or a whole number below 2^53")
	errParams    = shape("params are an object")
)

// Keys of _meta in the modern era.
const (
	eraKey   = "io.modelcontextprotocol/protocolVersion"
	infoKey  = "io.modelcontextprotocol/clientInfo"
	capsKey  = "io.modelcontextprotocol/clientCapabilities"
	levelKey = "io.modelcontextprotocol/logLevel"
)

// scanBody checks a body strictly (exact keys, no duplicates, UTF-8, no trailing bytes,
// bounded depth) and returns the envelopes of its messages. The SDK alone would take the
// last of two equal keys and ignore what follows the first value. With an error of the
// shape of a single message comes that message.
func scanBody(body []byte) (msgs []envelope, batch bool, err error) {
	if err := strictjson.Check(body); err != nil {
		return nil, false, err
	}
	i := space(body, 0)
	switch body[i] {
	case '{':
		m := scanMessage(body[i:])
		if m.wrong != "" {
			err = m.wrong
		}
		return []envelope{m}, false, err
	case '[':
		err = elements(body[i:], func(e []byte) error {
			if e[0] != '{' {
				return errNotObject
			}
			if len(msgs) == maxBatch {
				return errBatchSize
			}
			m := scanMessage(e)
			if m.wrong != "" {
				return m.wrong
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

func scanMessage(obj []byte) (m envelope) {
	version := ""
	m.wrong = errNotObject
	members(obj, func(key string, v []byte) {
		switch key {
		case "jsonrpc":
			version = text(v)
		case "id":
			if string(v) != "null" {
				m.id = v
			}
		case "method":
			m.method = text(v)
		case "params":
			m.params = v
		case "result", "error":
			m.answer = true
		}
	})
	switch {
	case m.method == "" && !m.answer: // what is said already
	case version != "2.0":
		m.wrong = errVersion
	case len(m.params) > 0 && m.params[0] != '{' && string(m.params) != "null":
		m.wrong = errParams
	default:
		m.wrong = ""
	}
	if len(m.id) > 0 && m.id[0] != '"' && m.id[0] != '-' && (m.id[0] < '0' || m.id[0] > '9') {
		m.id, m.wrong = nil, errID
	}
	if len(m.params) == 0 || m.params[0] != '{' {
		return m
	}
	name := "name"
	if m.method == "resources/read" {
		name = "uri"
	}
	members(m.params, func(key string, v []byte) {
		switch {
		case key == name:
			m.name = text(v)
		case key == "_meta" && v[0] == '{':
			m.meta = v
			members(v, func(key string, v []byte) {
				switch key {
				case eraKey:
					m.era = text(v)
				case infoKey:
					m.info = v
				case capsKey:
					m.caps = v
				}
			})
		}
	})
	return m
}

// keepsID tells whether the SDK would answer under the same id: it reads numbers as
// float64 and keeps them as integers, so that 1.5 becomes 1.
func (m *envelope) keepsID() bool {
	if len(m.id) == 0 || m.id[0] == '"' {
		return true
	}
	n, err := strconv.ParseFloat(string(m.id), 64)
	return err == nil && n == math.Trunc(n) && math.Abs(n) < 1<<53
}

// withoutMeta is the params without _meta; nil if nothing else is in them.
func (m *envelope) withoutMeta() []byte {
	b := make([]byte, 0, len(m.params)-len(m.meta))
	b = append(b, '{')
	members(m.params, func(key string, v []byte) {
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

// rest decodes the members of _meta that are not the protocol's own; nil if there are
// none, which is the rule.
func (m *envelope) rest() map[string]any {
	var rest map[string]any
	if len(m.meta) == 0 {
		return nil
	}
	members(m.meta, func(key string, v []byte) {
		if key == eraKey || key == infoKey || key == capsKey {
			return
		}
		var value any
		if json.Unmarshal(v, &value) != nil {
			return
		}
		if rest == nil {
			rest = make(map[string]any)
		}
		rest[key] = value
	})
	return rest
}

// members calls yield for each member of an object. Its input has passed
// strictjson.Check, so the walk only has to find the borders of values.
func members(obj []byte, yield func(key string, value []byte)) {
	i := space(obj, 1)
	for obj[i] != '}' {
		end := skip(obj, i)
		key := text(obj[i:end])
		i = space(obj, space(obj, end)+1) // behind the colon
		end = skip(obj, i)
		yield(key, obj[i:end])
		if i = space(obj, end); obj[i] == ',' {
			i = space(obj, i+1)
		}
	}
}

func elements(arr []byte, yield func([]byte) error) error {
	i := space(arr, 1)
	for arr[i] != ']' {
		end := skip(arr, i)
		if err := yield(arr[i:end]); err != nil {
			return err
		}
		if i = space(arr, end); arr[i] == ',' {
			i = space(arr, i+1)
		}
	}
	return nil
}

// skip returns the index behind the value that begins at i.
func skip(b []byte, i int) int {
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
				i = skip(b, i) - 1
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

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r') {
		i++
	}
	return i
}

// text is the Go string of a JSON string; "" for any other value.
func text(v []byte) string {
	if len(v) < 2 || v[0] != '"' {
		return ""
	}
	for _, c := range v {
		if c == '\\' {
			var s string
			if json.Unmarshal(v, &s) != nil {
				return ""
			}
			return s
		}
	}
	return string(v[1 : len(v)-1])
}

const hexDigits = "0123456789abcdef"

// appendString appends s as a JSON string; bytes that are no UTF-8 become U+FFFD.
func appendString[S ~string | ~[]byte](b []byte, s S) []byte {
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
			if r != utf8.RuneError || n > 1 {
				i += n
				continue
			}
			b = append(append(b, s[start:i]...), "\ufffd"...)
		} else {
			b = append(b, s[start:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\n':
				b = append(b, '\\', 'n')
			default:
				b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			}
		}
		i++
		start = i
	}
	b = append(b, s[start:]...)
	return append(b, '"')
}

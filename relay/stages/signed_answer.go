package stages

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/textproto"
	"os"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/strictjson"
)

// HeaderMeta is the header that has over plain HTTP what _meta has in MCP.
const HeaderMeta = "Agentctl-Meta"

// MaxAnswer bounds a saved answer, bytes.
const MaxAnswer = 64 << 20

// Errors of saved answers.
var (
	ErrUnsigned  = errors.New("the answer has no signature")
	ErrNotAnswer = errors.New("not an answer of a relay")
	ErrRPCError  = errors.New("the answer is an error, which is never signed")
)

// SignedAnswer is a saved answer with what its signature covers. Tool, or URI, and Nonce of Message are
// not part of an answer: whoever made the request adds them. The URI of a read is.
type SignedAnswer struct {
	Message   Message
	Signature Signature
	// repeats says that the content may be the copy of the structured result that /mcp adds for clients
	// of old versions. The signature does not cover that copy.
	repeats bool
}

// Verify checks the signature with a key. The error is ErrSignature, or that the answer is not JSON.
func (a *SignedAnswer) Verify(key []byte) error {
	err := a.Message.Verify(a.Signature, key)
	if err != nil && a.repeats {
		m := a.Message
		m.Content = nil
		return m.Verify(a.Signature, key)
	}
	return err
}

// ParseAnswer reads a saved answer in one of these forms:
//
//	HTTP/1.1 200 OK ...   a response with its headers, as of curl -i
//	{"jsonrpc": ...}      a message of MCP, or several as events (event: message, data: ...)
//	{"_meta": ...}        a result of MCP
//
// The error is ErrNotAnswer, ErrRPCError or ErrUnsigned, or wraps one of them.
func ParseAnswer(data []byte) (*SignedAnswer, error) {
	head, body, err := splitHTTP(data)
	if err != nil {
		return nil, err
	}
	if events := eventData(body); events != nil {
		body = events
	}
	object, ok := members(body)
	if !ok {
		return nil, fmt.Errorf("%w: no JSON object with each name once", ErrNotAnswer)
	}
	a := new(SignedAnswer)
	a.Message.Kind = "result"
	meta := object["_meta"]
	switch {
	case head != nil && head.meta != "":
		meta = json.RawMessage(head.meta)
		a.readBody(head, body, object)
	case object["jsonrpc"] != nil && object["error"] != nil:
		return nil, ErrRPCError
	case object["jsonrpc"] != nil:
		result, ok := members(object["result"])
		if !ok {
			return nil, fmt.Errorf("%w: a JSON-RPC message without a result", ErrNotAnswer)
		}
		meta, err = result["_meta"], a.readResult(result)
	default:
		err = a.readResult(object)
	}
	if err != nil {
		return nil, err
	}
	raw := metaMember(meta, MetaSignature)
	if raw == nil {
		return nil, ErrUnsigned
	}
	if strictjson.Unmarshal(raw, &a.Signature) != nil {
		return nil, fmt.Errorf("%w: %s is malformed", ErrUnsigned, MetaSignature)
	}
	return a, nil
}

// members returns the members of a JSON object that has each name once. Names are compared exactly: a
// reader that took "Text" for "text" would verify another value than the client uses.
func members(doc []byte) (m map[string]json.RawMessage, ok bool) {
	ok = jsontext.Value(doc).IsValid() && json.Unmarshal(doc, &m) == nil && m != nil
	return m, ok
}

// readBody reads the body of an answer of POST /mcp/tools/call: the structured content as it is, or
// {"content": [...]}.
func (a *SignedAnswer) readBody(head *httpHead, body []byte, object map[string]json.RawMessage) {
	a.Message.IsError = head.status >= 400
	if content := object["content"]; content != nil && (len(object) == 1 || len(object) == 2 && object["isError"] != nil) &&
		json.Unmarshal(content, &a.Message.Content) == nil {
		return
	}
	a.Message.Structured = body
}

// readResult reads a result of MCP: of a call, or of a read.
func (a *SignedAnswer) readResult(object map[string]json.RawMessage) error {
	m := &a.Message
	if object["contents"] != nil {
		return a.readContents(object["contents"])
	}
	if raw := object["isError"]; raw != nil && json.Unmarshal(raw, &m.IsError) != nil {
		return fmt.Errorf("%w: isError is not true or false", ErrNotAnswer)
	}
	if raw := object["content"]; raw != nil && json.Unmarshal(raw, &m.Content) != nil {
		return fmt.Errorf("%w: content is not a list", ErrNotAnswer)
	}
	m.Structured, m.Input = object["structuredContent"], object["inputRequests"]
	if len(m.Content) == 0 {
		m.Content = nil
	}
	a.repeats = len(m.Content) == 1 && len(m.Structured) > 0 && repeatsJSON(m.Content[0], m.Structured)
	return nil
}

// readContents reads the content of a resource: one text, or one blob in base64.
func (a *SignedAnswer) readContents(contents json.RawMessage) error {
	var list []json.RawMessage
	if json.Unmarshal(contents, &list) != nil || len(list) != 1 {
		return fmt.Errorf("%w: contents has not one element", ErrNotAnswer)
	}
	object, ok := members(list[0])
	var uri, text string
	var data []byte
	switch {
	case !ok || json.Unmarshal(object["uri"], &uri) != nil || (object["text"] == nil) == (object["blob"] == nil):
		return fmt.Errorf("%w: contents has no uri, or not either text or blob", ErrNotAnswer)
	case object["text"] != nil && json.Unmarshal(object["text"], &text) == nil:
		data = []byte(text)
	case object["text"] != nil || json.Unmarshal(object["blob"], &data) != nil:
		return fmt.Errorf("%w: contents is malformed", ErrNotAnswer)
	}
	sum := sha256.Sum256(data)
	a.Message.URI, a.Message.Data = uri, hex.EncodeToString(sum[:])
	return nil
}

// repeatsJSON reports whether a content block is a text that has the same JSON as doc.
func repeatsJSON(block, doc json.RawMessage) bool {
	b, ok := members(block)
	var text string
	if !ok || len(b) != 2 || string(b["type"]) != `"text"` || json.Unmarshal(b["text"], &text) != nil || !json.Valid([]byte(text)) {
		return false
	}
	got, err := (&Message{Structured: json.RawMessage(text)}).Canonical()
	want, wantErr := (&Message{Structured: doc}).Canonical()
	return err == nil && wantErr == nil && bytes.Equal(got, want)
}

// httpHead is what is needed of the status line and the headers of a saved response.
type httpHead struct {
	status int
	meta   string // of HeaderMeta
}

// splitHTTP splits a response that was saved with its headers, and unpacks the body if it is compressed.
// head is nil for data without headers. Interim responses (100 Continue) are skipped.
func splitHTTP(data []byte) (head *httpHead, body []byte, err error) {
	for bytes.HasPrefix(data, []byte("HTTP/")) {
		r := bufio.NewReaderSize(bytes.NewReader(data), 16)
		tr := textproto.NewReader(r)
		line, _ := tr.ReadLine()
		fields := strings.Fields(line)
		header, err := tr.ReadMIMEHeader()
		if err != nil || len(fields) < 2 {
			return nil, nil, fmt.Errorf("%w: headers of HTTP without an end", ErrNotAnswer)
		}
		status, err := strconv.Atoi(fields[1])
		if err != nil {
			return nil, nil, fmt.Errorf("%w: an HTTP status line without a status", ErrNotAnswer)
		}
		if data, err = io.ReadAll(r); err != nil {
			return nil, nil, err
		}
		head = &httpHead{status, header.Get(HeaderMeta)}
		if header.Get("Content-Encoding") == "gzip" && bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
			zr, err := gzip.NewReader(bytes.NewReader(data))
			if err == nil {
				data, err = io.ReadAll(io.LimitReader(zr, MaxAnswer))
			}
			if err != nil {
				return nil, nil, fmt.Errorf("%w: the compressed body is damaged", ErrNotAnswer)
			}
		}
	}
	return head, data, nil
}

// eventData returns the last message of an event stream that has a result or an error; nil for data
// that is no event stream.
func eventData(data []byte) (message []byte) {
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		return nil
	}
	for line := range bytes.Lines(data) {
		if d, ok := bytes.CutPrefix(line, []byte("data:")); ok && (bytes.Contains(d, []byte(`"result"`)) || bytes.Contains(d, []byte(`"error"`))) {
			message = d
		}
	}
	return message
}

// ReadKeyFile reads a key from a file, as the stage reads those of its key directory: without line ends
// at its end.
func ReadKeyFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	key, err := io.ReadAll(io.LimitReader(f, maxKey+1))
	if err != nil {
		return nil, err
	}
	size := len(key)
	if key = bytes.TrimRight(key, "\r\n"); len(key) < minKey || size > maxKey {
		return nil, fmt.Errorf("%s has no key: a key has %d to %d bytes", path, minKey, maxKey)
	}
	return key, nil
}

package stages

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"sync"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// A tool with an output schema promises that its structured result matches it, and clients refuse a
// result that does not. "[redacted]" is a string, though, and the secret may have been a number or an
// object. So what redact has rewritten is validated against the schema, and there are three outcomes:
//
// 	"[redacted]" matches     the result has it
// 	another value matches    values that are no strings keep their type: 0, false, null, and objects and
// 	                         arrays of redacted values; _meta agentctl/redacted lists where
// 	none does (an enum, a    the result is an error envelope, which the announced schema admits, and the
// 	pattern)                 redacted answer is text beside it

// MetaRedacted of a result lists the JSON pointers (RFC 6901) of redacted values that are no strings,
// such as a number that is now 0.
const MetaRedacted = "agentctl/redacted"

// maxPointers bounds the list of MetaRedacted, bytes.
const maxPointers = 1024

// fitSchema returns a redacted result in a form that matches the output schema of its tool. original
// is the structured content before redaction.
func (r *redactor) fitSchema(req *kernel.Request, original json.RawMessage, res *kernel.Result) *kernel.Result {
	tool := req.Target()
	if tool == nil || len(tool.OutputSchema) == 0 || res.IsError || bytes.Equal(original, res.Structured) {
		return res
	}
	schema := r.schemas.get(tool.OutputSchema)
	if schema == nil || matches(schema, res.Structured) {
		return res
	}
	typed, pointers, err := r.cleanTyped(original)
	if err == nil && matches(schema, typed) {
		out := *res
		out.Structured = typed
		return withMeta(&out, MetaRedacted, pointers)
	}
	out := *res
	e := &manifest.Error{Code: manifest.Internal, Reason: "redact", ShowReason: true, NoRetry: true,
		Message: "the tool ran, but its output schema allows no replacement for a secret in its answer; the text beside this error has the redacted answer"}
	if len(out.Content) == 0 {
		out.Content = []json.RawMessage{encode(textBlock{"text", string(res.Structured)})}
	}
	out.IsError, out.Structured = true, edge.AppendError(nil, e, req.TraceID)
	out.Content = slices.Concat([]json.RawMessage{encode(textBlock{"text", string(out.Structured)})}, out.Content)
	return &out
}

// textBlock is a content block of MCP.
type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// cleanTyped is cleanJSON with values that keep their type, and the pointers of those that are no strings.
func (r *redactor) cleanTyped(doc []byte) (out []byte, pointers []jsontext.Pointer, err error) {
	var buf bytes.Buffer
	w := r.newRewriter(doc, &buf, r.clean)
	w.keepsTypes = true
	if err := w.value(); err != nil {
		return nil, nil, err
	}
	size := 0
	for i, p := range w.pointers {
		if size += len(p); size > maxPointers {
			w.pointers = w.pointers[:i]
			break
		}
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), w.pointers, nil
}

// blank copies a value whose strings, numbers and booleans are all replaced, and cleans names.
func (w *rewriter) blank() error {
	var token jsontext.Token
	switch w.dec.PeekKind() {
	case '{':
		return w.container('}', func() error {
			tok, err := w.dec.ReadToken()
			if err != nil {
				return err
			}
			if err := w.enc.WriteToken(jsontext.String(w.cleanString(tok.String()))); err != nil {
				return err
			}
			return w.blank()
		})
	case '[':
		return w.container(']', w.blank)
	case '"':
		token = jsontext.String(Redacted)
	case '0':
		token = jsontext.Int(0)
	case 't', 'f':
		token = jsontext.False
	default:
		token = jsontext.Null
	}
	kind := w.dec.PeekKind()
	if _, err := w.dec.ReadToken(); err != nil {
		return err
	}
	if err := w.enc.WriteToken(token); err != nil {
		return err
	}
	if kind != '"' {
		w.pointers = append(w.pointers, w.enc.StackPointer())
	}
	return nil
}

// schemas caches compiled output schemas: a stage rewrites many results of a few tools. The zero value
// is ready. Plugins choose their schemas, so a full cache is emptied.
type schemas struct {
	mu       sync.Mutex                    // protects compiled
	compiled map[string]*jsonschema.Schema // by source text; nil: it cannot be compiled
}

// maxSchemas bounds a cache of schemas.
const maxSchemas = 512

// get returns a compiled schema; nil for one that cannot be compiled, which no client can check either.
func (c *schemas) get(raw []byte) *jsonschema.Schema {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.compiled[string(raw)]; ok {
		return s
	}
	if c.compiled == nil || len(c.compiled) >= maxSchemas {
		c.compiled = make(map[string]*jsonschema.Schema)
	}
	s := compile(raw)
	c.compiled[string(raw)] = s
	return s
}

// compile compiles a schema that may refer to its own parts only. Formats are checked, as clients do.
func compile(raw []byte) *jsonschema.Schema {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.AssertFormat()
	c.UseLoader(noLoader{})
	if c.AddResource("output.json", doc) != nil {
		return nil
	}
	s, err := c.Compile("output.json")
	if err != nil {
		return nil
	}
	return s
}

// noLoader refuses references to other documents: a schema must not make the relay open a file or a
// connection.
type noLoader struct{}

// Load implements jsonschema.URLLoader.
func (noLoader) Load(string) (any, error) {
	return nil, errors.New("an output schema may refer to itself only")
}

// matches reports whether a JSON document matches a schema.
func matches(s *jsonschema.Schema, doc []byte) bool {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	return err == nil && s.Validate(v) == nil
}

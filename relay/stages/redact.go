package stages

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Redacted replaces a secret.
const Redacted = "[redacted]"

// Bounds of redact.
const (
	maxFields    = 64
	maxPatterns  = 32
	maxPattern   = 256 // bytes of a field name or pattern
	maxNestedDoc = 4   // levels of JSON inside of JSON strings
)

// redactor removes secrets from everything that is sent to a client: results, content, the
// data of resources, error messages, and the messages of a plugin during a call. The trace
// stage uses it for log fields.
//
// In JSON it replaces the values of named members at any depth, whatever their type, and
// the matches of its patterns in strings, names and numbers. A string that is a JSON document
// is searched as JSON. Frames of streams and binary data pass unchanged: encoded or encrypted
// data cannot be searched.
type redactor struct {
	cfg struct {
		// Fields are names of members, compared without regard to case.
		Fields []string `json:"fields"`
		// Patterns are regular expressions (RE2).
		Patterns []string `json:"patterns"`
	}
	fields   map[string]bool
	patterns []*regexp.Regexp
	schemas  schemas
	// assignments finds named fields with their values in text; nil: no fields.
	assignments *regexp.Regexp
}

// newRedact makes the stage. Its default fields and patterns cover passwords, tokens, JWTs
// and private keys.
func newRedact(_ *env, config []byte) (stage, error) {
	r := &redactor{fields: make(map[string]bool)}
	r.cfg.Fields = []string{"password", "passwd", "secret", "token", "authorization", "api_key", "private_key"}
	r.cfg.Patterns = []string{
		`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, // JWT
		`-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?`,
	}
	wantFields := fmt.Sprintf("a list of at most %d names of 1 to %d bytes", maxFields, maxPattern)
	wantPatterns := fmt.Sprintf("a list of at most %d patterns (RE2) of 1 to %d bytes", maxPatterns, maxPattern)
	err := decode("redact", config,
		field{"fields", &r.cfg.Fields, wantFields, func() bool { return len(r.cfg.Fields) <= maxFields }},
		field{"patterns", &r.cfg.Patterns, wantPatterns, func() bool { return len(r.cfg.Patterns) <= maxPatterns }})
	if err != nil {
		return nil, err
	}
	for i, f := range r.cfg.Fields {
		if f == "" || len(f) > maxPattern {
			return nil, invalid(fmt.Sprintf("redact.fields[%d]", i), wantFields)
		}
		r.fields[strings.ToLower(f)] = true
	}
	for i, p := range r.cfg.Patterns {
		where := fmt.Sprintf("redact.patterns[%d]", i)
		re, err := regexp.Compile(p)
		if err != nil || p == "" || len(p) > maxPattern {
			return nil, invalid(where, wantPatterns)
		}
		if re.MatchString("") || re.MatchString(Redacted) {
			return nil, invalid(where, "a pattern that matches neither the empty text nor "+Redacted)
		}
		r.patterns = append(r.patterns, re)
	}
	r.assignments = assignment(r.fields)
	return r, nil
}

func (r *redactor) config() any { return r.cfg }

// wrap removes secrets from the answer, and wraps the request's session in one that does the
// same. Requests are not changed: a plugin gets the arguments as the client sent them.
func (r *redactor) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, req *kernel.Request) (*kernel.Result, error) {
		if s, isOurs := req.Session.(*session); isOurs { // a further round of the same call
			req.Session = s.Session
		}
		if req.Session != nil {
			req.Session = &session{Session: req.Session, r: r}
		}
		res, err := next(ctx, req)
		return r.filter(req, res, err)
	}
}

// filter removes secrets from an answer.
func (r *redactor) filter(req *kernel.Request, res *kernel.Result, err error) (*kernel.Result, error) {
	if err != nil {
		return nil, r.cleanError(err)
	}
	if res == nil {
		return nil, nil
	}
	out, err := r.cleanResult(res)
	if err != nil {
		return nil, err
	}
	return r.fitSchema(req, res.Structured, out), nil
}

// errUnsearchable ends a call whose answer cannot be searched: redaction fails closed.
var errUnsearchable = &manifest.Error{Code: manifest.Internal, Message: "the answer is not valid JSON, so secrets cannot be removed from it", Reason: "redact"}

// cleanResult returns a copy of a result without secrets.
func (r *redactor) cleanResult(res *kernel.Result) (*kernel.Result, error) {
	out := *res
	ok := r.cleanDocument(&out.Structured) && r.cleanDocument(&out.Meta) && r.cleanDocument(&out.InputRequests)
	if res.Content != nil {
		out.Content = make([]json.RawMessage, len(res.Content))
		for i, block := range res.Content {
			out.Content[i] = block
			ok = ok && r.cleanDocument(&out.Content[i])
		}
	}
	if res.RPCError != nil {
		var clean bool
		out.RPCError, clean = r.cleanRPCError(res.RPCError)
		ok = ok && clean
	}
	if !ok {
		return nil, errUnsearchable
	}
	out.RequestState = r.clean(res.RequestState)
	if utf8.Valid(res.Data) {
		if s := string(res.Data); r.clean(s) != s {
			out.Data = []byte(r.clean(s))
		}
	}
	return &out, nil
}

// cleanError returns a copy of an error without secrets.
func (r *redactor) cleanError(err error) error {
	var f *kernel.RPCError
	var e *manifest.Error
	switch {
	case errors.As(err, &f):
		c, ok := r.cleanRPCError(f)
		if !ok {
			c.Data = nil
		}
		return c
	case errors.As(err, &e):
		c := *e
		c.Message = r.clean(e.Message)
		return &c
	}
	return err // the kernel's own, which quotes nothing
}

// cleanRPCError returns a copy without secrets; false when its data is malformed.
func (r *redactor) cleanRPCError(e *kernel.RPCError) (*kernel.RPCError, bool) {
	c := *e
	c.Message = r.clean(e.Message)
	ok := r.cleanDocument(&c.Data)
	return &c, ok
}

// cleanDocument removes the secrets from *doc; false when it is malformed.
func (r *redactor) cleanDocument(doc *json.RawMessage) bool {
	if len(*doc) == 0 {
		return true
	}
	out, changed, err := r.cleanJSON(*doc, 0)
	if changed {
		*doc = out
	}
	return err == nil
}

// clean removes the secrets from a text.
func (r *redactor) clean(s string) string { return r.cleanNested(s, 0) }

// cleanNested is clean for a string inside of `nested` levels of JSON strings. The bound on the levels
// also bounds the work: each level decodes the string once more. Below it only the patterns
// apply.
func (r *redactor) cleanNested(s string, nested int) string {
	if t := strings.TrimSpace(s); len(t) > 1 && (t[0] == '{' || t[0] == '[') && nested < maxNestedDoc {
		if out, changed, err := r.cleanJSON([]byte(t), nested+1); err == nil && changed {
			s = string(out)
		}
	}
	for _, p := range r.patterns {
		s = p.ReplaceAllLiteralString(s, Redacted)
	}
	return s
}

// lenient accepts any JSON that a client might be able to read.
var lenient = []jsontext.Options{jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)}

// cleanJSON removes the secrets from one document. changed reports whether there were any; if
// not, the caller keeps the original bytes.
func (r *redactor) cleanJSON(doc []byte, nested int) (out []byte, changed bool, err error) {
	return r.rewrite(doc, func(s string) string { return r.cleanNested(s, nested) })
}

// rewrite is cleanJSON with a function that cleans strings and names.
func (r *redactor) rewrite(doc []byte, clean func(string) string) (out []byte, changed bool, err error) {
	var buf bytes.Buffer
	w := r.newRewriter(doc, &buf, clean)
	if err := w.value(); err != nil {
		return nil, false, err
	}
	if _, err := w.dec.ReadToken(); err == nil {
		return nil, false, errUnsearchable // trailing data
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), w.changed, nil
}

// rewriter copies a JSON document token by token, without its secrets.
type rewriter struct {
	r       *redactor
	clean   func(string) string // of strings and names
	dec     *jsontext.Decoder
	enc     *jsontext.Encoder
	changed bool

	// keepsTypes makes the replacement of a secret have the same JSON type; pointers lists the
	// replacements that are no strings.
	keepsTypes bool
	pointers   []jsontext.Pointer
}

// newRewriter copies doc to out.
func (r *redactor) newRewriter(doc []byte, out *bytes.Buffer, clean func(string) string) *rewriter {
	return &rewriter{r: r, clean: clean, dec: jsontext.NewDecoder(bytes.NewReader(doc), lenient...), enc: jsontext.NewEncoder(out, lenient...)}
}

// value copies one value.
func (w *rewriter) value() error {
	switch w.dec.PeekKind() {
	case '{':
		return w.container('}', w.member)
	case '[':
		return w.container(']', w.value)
	case '"':
		tok, err := w.dec.ReadToken()
		if err != nil {
			return err
		}
		return w.enc.WriteToken(jsontext.String(w.cleanString(tok.String())))
	}
	v, err := w.dec.ReadValue()
	if err != nil {
		return err
	}
	s := string(v)
	if w.r.cleanNested(s, maxNestedDoc) == s {
		return w.enc.WriteValue(v)
	}
	w.changed = true // a number
	if !w.keepsTypes {
		return w.enc.WriteToken(jsontext.String(Redacted))
	}
	if err := w.enc.WriteToken(jsontext.Int(0)); err != nil {
		return err
	}
	w.pointers = append(w.pointers, w.enc.StackPointer())
	return nil
}

// container copies an object or an array up to its end.
func (w *rewriter) container(end jsontext.Kind, element func() error) error {
	if err := w.copyToken(); err != nil {
		return err
	}
	for w.dec.PeekKind() != end {
		if err := element(); err != nil {
			return err
		}
	}
	return w.copyToken()
}

// copyToken copies the delimiter of an object or array.
func (w *rewriter) copyToken() error {
	tok, err := w.dec.ReadToken()
	if err != nil {
		return err
	}
	return w.enc.WriteToken(tok)
}

// member copies one member of an object. It replaces the whole value of a secret field.
func (w *rewriter) member() error {
	tok, err := w.dec.ReadToken()
	if err != nil {
		return err
	}
	name := tok.String()
	if err := w.enc.WriteToken(jsontext.String(w.cleanString(name))); err != nil {
		return err
	}
	if !w.r.fields[strings.ToLower(name)] {
		return w.value()
	}
	if w.keepsTypes {
		return w.blank()
	}
	old, err := w.dec.ReadValue()
	if err != nil {
		return err
	}
	w.changed = w.changed || string(old) != `"`+Redacted+`"`
	return w.enc.WriteToken(jsontext.String(Redacted))
}

// cleanString removes the secrets from a string or a name, and sets changed if there were any.
func (w *rewriter) cleanString(s string) string {
	clean := w.clean(s)
	w.changed = w.changed || clean != s
	return clean
}

// session removes the secrets from the messages that a plugin sends to the client during a
// call.
type session struct {
	kernel.Session
	r *redactor
}

// Notify implements kernel.Session. A message that cannot be searched is not sent.
func (s *session) Notify(ctx context.Context, method string, params json.RawMessage) error {
	if !s.r.cleanDocument(&params) {
		return errUnsearchable
	}
	return s.Session.Notify(ctx, method, params)
}

// Request implements kernel.Session. Only the request is searched: the answer goes from the
// client to the plugin.
func (s *session) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	if !s.r.cleanDocument(&params) {
		return nil, errUnsearchable
	}
	return s.Session.Request(ctx, method, params)
}

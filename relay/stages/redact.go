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

// Redacted stands where a secret was.
const Redacted = "[redacted]"

// Bounds of redact.
const (
	maxFields    = 64
	maxPatterns  = 32
	maxPattern   = 256 // bytes of a field name or pattern
	maxNestedDoc = 4   // JSON inside strings of JSON
)

// redactor takes secrets out of whatever goes to a client: results, content, the data of
// resources, messages of errors, and what a plugin tells the client during a call. The
// trace stage asks it about log fields. In JSON it replaces the values of named members
// at any depth, whatever their type, and what its patterns find in strings, names and
// numbers; a string that holds nothing but a JSON document is treated as one. Frames of
// streams and binary data pass untouched: what is encoded or encrypted cannot be searched.
type redactor struct {
	cfg struct {
		Fields   []string `json:"fields"`   // member names, in any case
		Patterns []string `json:"patterns"` // RE2
	}
	fields   map[string]bool
	patterns []*regexp.Regexp
}

func newRedact(_ *env, config []byte) (stage, error) {
	r := &redactor{fields: make(map[string]bool)}
	r.cfg.Fields = []string{"password", "passwd", "secret", "token", "authorization", "api_key", "private_key"}
	r.cfg.Patterns = []string{
		`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, // JWT
		`-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?`,
	}
	wantFields := fmt.Sprintf("a list of at most %d names of 1 to %d bytes", maxFields, maxPattern)
	wantPatterns := fmt.Sprintf("a list of at most %d patterns (RE2) of 1 to %d bytes", maxPatterns, maxPattern)
	if err := decode("redact", config, field{"fields", &r.cfg.Fields, wantFields}, field{"patterns", &r.cfg.Patterns, wantPatterns}); err != nil {
		return nil, err
	}
	if len(r.cfg.Fields) > maxFields {
		return nil, wrong("redact.fields", wantFields)
	}
	for i, f := range r.cfg.Fields {
		if f == "" || len(f) > maxPattern {
			return nil, wrong(fmt.Sprintf("redact.fields[%d]", i), wantFields)
		}
		r.fields[strings.ToLower(f)] = true
	}
	if len(r.cfg.Patterns) > maxPatterns {
		return nil, wrong("redact.patterns", wantPatterns)
	}
	for i, p := range r.cfg.Patterns {
		where := fmt.Sprintf("redact.patterns[%d]", i)
		re, err := regexp.Compile(p)
		if err != nil || p == "" || len(p) > maxPattern {
			return nil, wrong(where, wantPatterns)
		}
		if re.MatchString("") || re.MatchString(Redacted) {
			return nil, wrong(where, "a pattern that matches neither the empty text nor "+Redacted)
		}
		r.patterns = append(r.patterns, re)
	}
	return r, nil
}

func (r *redactor) config() any { return r.cfg }

func (r *redactor) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, req *kernel.Request) (*kernel.Result, error) {
		if s, again := req.Session.(*session); again { // a further round of the same call
			req.Session = &session{Session: s.Session, r: r}
		} else if req.Session != nil {
			req.Session = &session{Session: req.Session, r: r}
		}
		res, err := next(ctx, req)
		if err != nil {
			return nil, r.err(err)
		}
		if res == nil {
			return nil, nil
		}
		return r.result(res)
	}
}

// errUnclean ends a call whose answer cannot be searched; it fails closed.
var errUnclean = &manifest.Error{Code: manifest.Internal, Message: "the answer is not the JSON that it should be, so it cannot be cleared of secrets", Reason: "redact"}

func (r *redactor) result(res *kernel.Result) (*kernel.Result, error) {
	out := *res
	ok := r.document(&out.Structured) && r.document(&out.Meta) && r.document(&out.InputRequests)
	if res.Content != nil {
		out.Content = make([]json.RawMessage, len(res.Content))
		for i, block := range res.Content {
			out.Content[i] = block
			ok = ok && r.document(&out.Content[i])
		}
	}
	if res.RPCError != nil {
		f := *res.RPCError
		f.Message = r.clean(f.Message)
		ok = ok && r.document(&f.Data)
		out.RPCError = &f
	}
	if !ok {
		return nil, errUnclean
	}
	out.RequestState = r.clean(res.RequestState)
	if utf8.Valid(res.Data) {
		if s := string(res.Data); r.clean(s) != s {
			out.Data = []byte(r.clean(s))
		}
	}
	return &out, nil
}

func (r *redactor) err(err error) error {
	var f *kernel.RPCError
	var e *manifest.Error
	switch {
	case errors.As(err, &f):
		c := *f
		c.Message = r.clean(f.Message)
		if !r.document(&c.Data) {
			c.Data = nil
		}
		return &c
	case errors.As(err, &e):
		c := *e
		c.Message = r.clean(e.Message)
		return &c
	}
	return err // the kernel's own, which quotes nothing
}

// document cleans a JSON document in place of the old one; false when it is malformed.
func (r *redactor) document(doc *json.RawMessage) bool {
	if len(*doc) == 0 {
		return true
	}
	out, changed, err := r.json(*doc, 0)
	if changed {
		*doc = out
	}
	return err == nil
}

// clean takes the secrets out of a text.
func (r *redactor) clean(s string) string { return r.text(s, 0) }

func (r *redactor) text(s string, nested int) string {
	if t := strings.TrimSpace(s); len(t) > 1 && (t[0] == '{' || t[0] == '[') && nested < maxNestedDoc {
		if out, changed, err := r.json([]byte(t), nested+1); err == nil && changed {
			s = string(out)
		}
	}
	for _, p := range r.patterns {
		s = p.ReplaceAllLiteralString(s, Redacted)
	}
	return s
}

// lenient lets whatever a client might still read pass the search.
var lenient = []jsontext.Options{jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)}

// json cleans one document. changed tells whether anything had to go; otherwise the
// bytes may stay as they are.
func (r *redactor) json(doc []byte, nested int) (out []byte, changed bool, err error) {
	var buf bytes.Buffer
	w := &walker{r: r, nested: nested, dec: jsontext.NewDecoder(bytes.NewReader(doc), lenient...), enc: jsontext.NewEncoder(&buf, lenient...)}
	if err := w.value(); err != nil {
		return nil, false, err
	}
	if _, err := w.dec.ReadToken(); err == nil {
		return nil, false, errUnclean // more behind the document
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), w.changed, nil
}

type walker struct {
	r       *redactor
	nested  int
	dec     *jsontext.Decoder
	enc     *jsontext.Encoder
	changed bool
}

func (w *walker) value() error {
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
		return w.enc.WriteToken(jsontext.String(w.text(tok.String())))
	}
	v, err := w.dec.ReadValue()
	if err != nil {
		return err
	}
	if s := string(v); w.r.text(s, maxNestedDoc) != s { // a number
		w.changed = true
		return w.enc.WriteToken(jsontext.String(Redacted))
	}
	return w.enc.WriteValue(v)
}

func (w *walker) container(end jsontext.Kind, element func() error) error {
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

func (w *walker) copyToken() error {
	tok, err := w.dec.ReadToken()
	if err != nil {
		return err
	}
	return w.enc.WriteToken(tok)
}

// member cleans one member of an object.
func (w *walker) member() error {
	tok, err := w.dec.ReadToken()
	if err != nil {
		return err
	}
	name := tok.String()
	if err := w.enc.WriteToken(jsontext.String(w.text(name))); err != nil {
		return err
	}
	if !w.r.fields[strings.ToLower(name)] {
		return w.value()
	}
	old, err := w.dec.ReadValue()
	if err != nil {
		return err
	}
	w.changed = w.changed || string(old) != `"`+Redacted+`"`
	return w.enc.WriteToken(jsontext.String(Redacted))
}

func (w *walker) text(s string) string {
	clean := w.r.text(s, w.nested)
	w.changed = w.changed || clean != s
	return clean
}

// session cleans what a plugin tells the client during a call.
type session struct {
	kernel.Session
	r *redactor
}

// Notify implements kernel.Session.
func (s *session) Notify(ctx context.Context, method string, params json.RawMessage) error {
	if !s.r.document(&params) {
		return errUnclean
	}
	return s.Session.Notify(ctx, method, params)
}

// Request implements kernel.Session.
func (s *session) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	if !s.r.document(&params) {
		return nil, errUnclean
	}
	return s.Session.Request(ctx, method, params)
}

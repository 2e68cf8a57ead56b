package control

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"agentctl/prober"

	"agentctl/strictjson"
)

// Error is an error of the socket. The server sends it; the client returns it.
type Error struct {
	Code    int
	Message string // one of a few words, for programs: invalid_params, …
	Field   string // the parameter it is about, if any
	Detail  string // for people

	ToolCode string // of the method call: the tool's own code, such as E_RATE_LIMITED
}

// Error says it to a person.
func (e *Error) Error() string {
	s := e.Message
	if e.ToolCode != "" {
		s += ": " + e.ToolCode
	}
	if e.Field != "" {
		s += ": " + e.Field
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// errorData is the data of an error object.
type errorData struct {
	Field  string `json:"field,omitempty"`
	Detail string `json:"detail,omitempty"`
	Code   string `json:"code,omitempty"`
}

type errorObject struct {
	Code    int        `json:"code"`
	Message string     `json:"message"`
	Data    *errorData `json:"data,omitempty"`
}

func (e *Error) object() errorObject {
	o := errorObject{Code: e.Code, Message: e.Message}
	if d := (errorData{e.Field, e.Detail, e.ToolCode}); d != (errorData{}) {
		o.Data = &d
	}
	return o
}

// answer is the whole message that gives e to the request id; nil: none is known.
func (e *Error) answer(id strictjson.Raw) []byte {
	if id == nil {
		id = strictjson.Raw("null")
	}
	b, err := json.Marshal(struct {
		JSONRPC string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Error   errorObject     `json:"error"`
	}{"2.0", json.RawMessage(id), e.object()})
	if err != nil {
		panic(err) // id was valid JSON before it came here
	}
	return b
}

func errParse(detail string) *Error {
	return &Error{Code: CodeParse, Message: "parse_error", Detail: detail}
}

func errRequest(detail string) *Error {
	return &Error{Code: CodeInvalidRequest, Message: "invalid_request", Detail: detail}
}

func errParams(field, format string, args ...any) *Error {
	return &Error{Code: CodeInvalidParams, Message: "invalid_params", Field: field, Detail: fmt.Sprintf(format, args...)}
}

func errUnauthorized(detail string) *Error {
	return &Error{Code: CodeUnauthorized, Message: "unauthorized", Detail: detail}
}

func errNotSupported(field, detail string) *Error {
	return &Error{Code: CodeNotSupported, Message: "not_supported", Field: field, Detail: detail}
}

func errRate(detail string) *Error {
	return &Error{Code: CodeRateLimited, Message: "rate_limited", Detail: detail}
}

func errInternal(detail string) *Error {
	return &Error{Code: CodeInternal, Message: "internal", Detail: detail}
}

// paramFields are the members of a params object that were not asked for yet. Whoever
// takes one says whether it must be there; end refuses what nobody took. Only the
// first error is kept, so that a method can take all and look once.
type paramFields struct {
	m   map[string]strictjson.Raw
	err *Error
}

func parseParams(params []byte) *paramFields {
	f := &paramFields{}
	if len(params) == 0 {
		return f
	}
	if err := strictjson.Unmarshal(params, &f.m); err != nil {
		f.fail(errParams("params", "must be an object"))
	}
	return f
}

func (f *paramFields) fail(err *Error) {
	if f.err == nil {
		f.err = err
	}
}

// take decodes a member into v and tells whether it was there; null is not there.
func (f *paramFields) take(name string, v any) bool {
	raw, ok := f.m[name]
	if !ok {
		return false
	}
	delete(f.m, name)
	if string(raw) == "null" {
		return false
	}
	if err := strictjson.Unmarshal(raw, v); err != nil {
		f.fail(errParams(name, "has the wrong type"))
	}
	return true
}

// require is take for a member that must be there.
func (f *paramFields) require(name string, v any) {
	if !f.take(name, v) {
		f.fail(errParams(name, "is missing"))
	}
}

// text is need for a string of at most limit bytes.
func (f *paramFields) text(name string, limit int) (s string) {
	f.require(name, &s)
	if len(s) > limit {
		f.fail(errParams(name, "is longer than %d bytes", limit))
	}
	return s
}

// millis takes a duration in whole milliseconds, least..most, and tells whether it was
// there.
func (f *paramFields) millis(name string, least, most time.Duration) (time.Duration, bool) {
	var n integer
	if !f.take(name, &n) {
		return 0, false
	}
	d, err := n.millis(name, least, most)
	if err != nil {
		f.fail(err)
	}
	return d, true
}

// needMillis is millis for a member that must be there.
func (f *paramFields) needMillis(name string, least, most time.Duration) time.Duration {
	d, ok := f.millis(name, least, most)
	if !ok {
		f.fail(errParams(name, "is missing"))
	}
	return d
}

// integer takes a number that is not negative and has no fraction; 0 when it is not there.
func (f *paramFields) integer(name string, must bool) int64 {
	var n integer
	if !f.take(name, &n) && must {
		f.fail(errParams(name, "is missing"))
	}
	if n < 0 {
		f.fail(errParams(name, "is negative"))
	}
	return int64(n)
}

// finish refuses what was not taken and returns the first error.
func (f *paramFields) finish() error {
	left := ""
	for name := range f.m {
		if left == "" || name < left { // the same answer each time
			left = name
		}
	}
	if len(f.m) > 0 {
		f.fail(errParams(left[:min(len(left), 64)], "is not known here"))
	}
	if f.err != nil {
		return f.err
	}
	return nil
}

// integer is an integer, however it is written: 1000, 1000.0 and 1e3 are the same.
type integer int64

// UnmarshalJSON decodes a number without a fraction, within ±2^53.
func (n *integer) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseFloat(string(b), 64)
	if err != nil || v != math.Trunc(v) || math.Abs(v) > 1<<53 {
		return fmt.Errorf("not a whole number")
	}
	*n = integer(v)
	return nil
}

func (n integer) millis(name string, least, most time.Duration) (time.Duration, *Error) {
	if int64(n) < least.Milliseconds() || int64(n) > most.Milliseconds() {
		return 0, errParams(name, "must be %d..%d", least.Milliseconds(), most.Milliseconds())
	}
	return time.Duration(n) * time.Millisecond, nil
}

// modules takes a list of modules; none, or an empty one, is def.
func (f *paramFields) modules(name string, def prober.ModuleSet) prober.ModuleSet {
	var names []string
	if !f.take(name, &names) || len(names) == 0 {
		return def
	}
	if len(names) > 64 {
		f.fail(errParams(name, "has more than 64 entries"))
		return def
	}
	var set prober.ModuleSet
	for _, n := range names {
		m, ok := prober.ModuleByName(n)
		if !ok {
			f.fail(errParams(name, "knows only %s", moduleChoice))
			return def
		}
		set |= 1 << m
	}
	return set
}

// choices takes a list of words out of known; another one is not supported.
func (f *paramFields) choices(name string, known []string) []string {
	var list []string
	f.take(name, &list)
	for _, w := range list {
		if !slices.Contains(known, w) {
			f.fail(errNotSupported(name, fmt.Sprintf("knows only %q", known)))
		}
	}
	return list
}

package control

import (
	"encoding/json"
	"fmt"

	"agentctl/strictjson"
)

// Error is an error of the socket. The server sends it; the client returns it.
type Error struct {
	Code int
	// Message is the word for Code: invalid_params, …
	Message string
	// Field is the parameter that is wrong, if any.
	Field string
	// Detail is for people.
	Detail string
	// ToolCode is the tool's code in an error of the method call, such as E_RATE_LIMITED.
	ToolCode string
}

// codeNames are the messages of errors, by code.
var codeNames = map[int]string{
	CodeParse:          "parse_error",
	CodeInvalidRequest: "invalid_request",
	CodeMethodNotFound: "method_not_found",
	CodeInvalidParams:  "invalid_params",
	CodeUnauthorized:   "unauthorized",
	CodeNotSupported:   "not_supported",
	CodeRateLimited:    "rate_limited",
	CodeInternal:       "internal",
}

// newError returns an error that is not about a parameter. Its detail is a sentence for people;
// programs decide by the code.
func newError(code int, detail string) *Error {
	return &Error{Code: code, Message: codeNames[code], Detail: detail}
}

// errParams returns an invalid_params about a parameter; what format makes is for people.
func errParams(field, format string, args ...any) *Error {
	return &Error{Code: CodeInvalidParams, Message: codeNames[CodeInvalidParams], Field: field, Detail: fmt.Sprintf(format, args...)}
}

// Error joins the parts with colons.
func (e *Error) Error() string {
	s := e.Message
	for _, part := range []string{e.ToolCode, e.Field, e.Detail} {
		if part != "" {
			s += ": " + part
		}
	}
	return s
}

// errorObject is the error object of JSON-RPC 2.0.
type errorObject struct {
	Code    int        `json:"code"`
	Message string     `json:"message"`
	Data    *errorData `json:"data,omitempty"`
}

// errorData is the data of an error object; it is left out when it is empty.
type errorData struct {
	Field  string `json:"field,omitempty"`
	Detail string `json:"detail,omitempty"`
	Code   string `json:"code,omitempty"`
}

// object is e as it is sent.
func (e *Error) object() errorObject {
	o := errorObject{Code: e.Code, Message: e.Message}
	if d := (errorData{e.Field, e.Detail, e.ToolCode}); d != (errorData{}) {
		o.Data = &d
	}
	return o
}

// answer is the message that answers the request id with e; id is nil when it is unknown.
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
		panic(err) // id was checked to be valid JSON
	}
	return b
}

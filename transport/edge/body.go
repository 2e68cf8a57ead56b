package edge

import (
	"io"
	"mime"
	"net/http"
	"strings"
	"time"
)

// SetBodyDeadline bounds the time to read r's body. Call it before anything is written:
// before it sends a response, net/http reads the rest of the body, and waits for it without
// a limit. ReadBody removes the deadline.
func SetBodyDeadline(w http.ResponseWriter, r *http.Request, timeout time.Duration) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(timeout))
	}
}

// maxPreallocated bounds the memory that a Content-Length header alone can claim, in bytes;
// for a larger body, memory is allocated as it arrives.
const maxPreallocated = 16 << 10

// ReadBody reads a body of at most limit bytes. The error wraps *http.MaxBytesError when
// there are more. After any error the connection is closed and the deadline of
// SetBodyDeadline stays in force, so the server does not wait for the rest.
func ReadBody(w http.ResponseWriter, r *http.Request, limit int64) (body []byte, err error) {
	in := http.MaxBytesReader(w, r.Body, limit)
	if n := r.ContentLength; n >= 0 && n <= min(limit, maxPreallocated) {
		body = make([]byte, n)
		_, err = io.ReadFull(in, body)
	} else {
		body, err = io.ReadAll(in)
	}
	if err != nil {
		w.Header().Set("Connection", "close")
		return nil, err
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	return body, nil
}

// IsJSON reports whether a Content-Type is JSON in UTF-8. A web page cannot send this type to
// another origin without a CORS preflight.
func IsJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	t, params, err := mime.ParseMediaType(contentType)
	charset, given := params["charset"]
	return err == nil && t == "application/json" && (!given || strings.EqualFold(charset, "utf-8"))
}

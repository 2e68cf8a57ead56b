package edge

import (
	"io"
	"mime"
	"net/http"
	"strings"
	"time"
)

// SetBodyDeadline bounds the reading of r's body. It is called before the first answer to
// r: net/http waits for an unread body before it sends an answer, without end. ReadBody
// lifts the deadline.
func SetBodyDeadline(w http.ResponseWriter, r *http.Request, timeout time.Duration) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(timeout))
	}
}

// maxBodyAhead bounds the memory that a Content-Length alone can claim, in bytes; a larger
// body gets memory as it arrives.
const maxBodyAhead = 16 << 10

// ReadBody reads a body of at most limit bytes. The error wraps *http.MaxBytesError when
// there are more. After any error the connection is closed, with the deadline of
// SetBodyDeadline in force, so nobody waits for the rest.
func ReadBody(w http.ResponseWriter, r *http.Request, limit int64) (body []byte, err error) {
	in := http.MaxBytesReader(w, r.Body, limit)
	if n := r.ContentLength; n >= 0 && n <= min(limit, maxBodyAhead) {
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

// IsJSON reports whether a Content-Type is JSON in UTF-8. A page cannot send it to another
// origin without a preflight.
func IsJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	t, params, err := mime.ParseMediaType(contentType)
	charset, given := params["charset"]
	return err == nil && t == "application/json" && (!given || strings.EqualFold(charset, "utf-8"))
}

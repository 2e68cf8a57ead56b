package edge

import (
	"net/http"
	"strings"

	"agentctl/manifest"
)

// Bearer returns the token of a request (RFC 6750 §2.1), "" for none. given reports
// whether there was an Authorization header at all: a server that needs no token still
// refuses a bad one. Two Authorization headers yield no token.
func Bearer(r *http.Request) (token string, given bool) {
	h := r.Header["Authorization"]
	if len(h) == 1 {
		if scheme, rest, ok := strings.Cut(h[0], " "); ok && strings.EqualFold(scheme, "Bearer") {
			token = strings.TrimLeft(rest, " ")
		}
	}
	return token, len(h) > 0
}

// TraceID returns the trace id of a request's traceparent header (W3C Trace Context), or
// a new one; fromCaller is true for the former.
func TraceID(r *http.Request) (id string, fromCaller bool) {
	if id := CallerTraceID(r); id != "" {
		return id, true
	}
	return manifest.NewTraceID(), false
}

// CallerTraceID returns the trace id of a request's traceparent header, "" when there is
// none. More than one header counts as none.
func CallerTraceID(r *http.Request) string {
	if h := r.Header["Traceparent"]; len(h) == 1 {
		id, _ := ParseTraceparent(h[0])
		return id
	}
	return ""
}

// ParseTraceparent returns the trace id of a traceparent header:
//
//	VERSION "-" TRACE-ID "-" PARENT-ID "-" FLAGS    2, 32, 16 and 2 lower case hex digits
//
// A version above 00 may append more fields after another "-", which are ignored; version
// ff and ids of zeros are invalid.
func ParseTraceparent(tp string) (id string, ok bool) {
	const length = 55
	if len(tp) < length || tp[2] != '-' || tp[35] != '-' || tp[52] != '-' {
		return "", false
	}
	version, id, parent, flags := tp[:2], tp[3:35], tp[36:52], tp[53:length]
	if version == "ff" || (len(tp) > length && (version == "00" || tp[length] != '-')) {
		return "", false
	}
	for _, field := range []string{version, id, parent, flags} {
		if strings.Trim(field, "0123456789abcdef") != "" {
			return "", false
		}
	}
	if strings.Trim(id, "0") == "" || strings.Trim(parent, "0") == "" {
		return "", false
	}
	return strings.Clone(id), true // queues keep the id, and would keep the whole request with it
}

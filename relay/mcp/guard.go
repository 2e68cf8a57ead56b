package mcp

import (
	"encoding/json"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// guard refuses what a browser page of somebody else could send. It looks at every
// method: a GET opens a stream and is no less dangerous than a POST.
type guard struct {
	origins map[string]bool
	hosts   map[string]bool
}

func newGuard(origins, hosts []string) guard {
	g := guard{origins: make(map[string]bool), hosts: make(map[string]bool)}
	for _, o := range origins {
		g.origins[strings.ToLower(strings.TrimSuffix(o, "/"))] = true
	}
	for _, h := range hosts {
		g.hosts[strings.ToLower(h)] = true
	}
	return g
}

// check returns why r is refused, or "".
func (g guard) check(r *http.Request) string {
	host := strings.ToLower(r.Host)
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok && loopbackAddr(local.String()) {
		if h := hostname(host); !loopbackHost(h) && !g.hosts[h] {
			return "the Host header names another machine than this one"
		}
	}
	origins := r.Header.Values("Origin")
	switch {
	case len(origins) == 0:
		return ""
	case len(origins) > 1:
		return "the request comes from a page of another origin"
	}
	origin := strings.ToLower(origins[0])
	if g.origins[origin] {
		return ""
	}
	u, err := url.Parse(origin)
	if err != nil || u.Host == "" || u.Host != host {
		return "the request comes from a page of another origin"
	}
	return ""
}

func hostname(hostport string) string {
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		return h
	}
	return strings.Trim(hostport, "[]")
}

func loopbackAddr(addr string) bool {
	ap, err := netip.ParseAddrPort(addr)
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

func loopbackHost(h string) bool {
	if h == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(h)
	return err == nil && ip.Unmap().IsLoopback()
}

// isJSON tells whether the body is said to be JSON; browsers cannot send that across
// origins without asking first.
func isJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	mt, params, err := mime.ParseMediaType(contentType)
	if err != nil || mt != "application/json" {
		return false
	}
	cs, ok := params["charset"]
	return !ok || strings.EqualFold(cs, "utf-8")
}

// acceptsBoth tells whether an Accept header plainly names both answers of the
// protocol. Anything less plain goes to the SDK, which refuses what has to be refused.
func acceptsBoth(h http.Header) bool {
	v := h["Accept"]
	return len(v) == 1 && strings.Contains(v[0], "application/json") && strings.Contains(v[0], "text/event-stream")
}

// traceOf takes the trace id out of a traceparent; "" when there is none.
func traceOf(parent string) string {
	id, _ := kernel.ParseTraceparent(parent)
	return id
}

// refuse answers a request before any of its messages was handled.
func refuse(w http.ResponseWriter, status int, e *manifest.Error) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if e.RetryAfterMS > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt((e.RetryAfterMS+999)/1000, 10))
	}
	w.WriteHeader(status)
	_, _ = w.Write(appendError(nil, e, kernel.NewTraceID()))
}

// appendError appends {"error":{...}}, the shape of every failure of the relay.
func appendError(b []byte, e *manifest.Error, trace string) []byte {
	b = append(b, `{"error":{"code":"`...)
	b = append(b, e.Code...)
	b = append(b, `","message":`...)
	b = appendString(b, e.Message)
	b = append(b, `,"retryable":`...)
	b = strconv.AppendBool(b, e.Code.Retryable())
	if e.RetryAfterMS > 0 {
		b = append(b, `,"retry_after_ms":`...)
		b = strconv.AppendInt(b, e.RetryAfterMS, 10)
	}
	b = append(b, `,"trace_id":"`...)
	b = append(b, trace...)
	return append(b, `"}}`...)
}

// refuseRPC answers a POST that carries no usable message with a JSON-RPC error.
func refuseRPC(w http.ResponseWriter, status int, id []byte, code int64, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(appendFault(nil, id, code, message, nil))
}

// appendFault appends a whole JSON-RPC error message; a nil id becomes null.
func appendFault(b, id []byte, code int64, message string, data json.RawMessage) []byte {
	b = append(b, `{"jsonrpc":"2.0","id":`...)
	if len(id) == 0 {
		id = []byte("null")
	}
	b = append(b, id...)
	b = append(b, `,"error":{"code":`...)
	b = strconv.AppendInt(b, code, 10)
	b = append(b, `,"message":`...)
	b = appendString(b, message)
	if len(data) > 0 {
		b = append(b, `,"data":`...)
		b = append(b, data...)
	}
	return append(b, `}}`...)
}

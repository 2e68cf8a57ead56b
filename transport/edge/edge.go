// Package edge is what every HTTP listener of the product does with a request before its
// own work, and with an error after it. The relay, the event gateway and the MCP handler
// share it, so that one request gets one answer from all of them.
//
//	guard := edge.NewGuard(edge.GuardOptions{CheckHost: onLoopback, Origins: allowed})
//	...
//	edge.SetBodyDeadline(w, r, edge.BodyTimeout) // before anything is answered
//	err := guard.Check(r)                        // Host and Origin: 403
//	token, given := edge.Bearer(r)               // who: 401
//	body, err := edge.ReadBody(w, r, maxBody)    // 413, or 400
//	trace, given := edge.TraceID(r)
//	edge.WriteError(w, edge.Status(e.Code), e, trace)
//
// IsLoopback and Limiter serve other packages as well. The package links nothing but
// net/http and small libraries: the daemon's board build contains it.
package edge

import (
	"log"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// Bounds of every listener.
const (
	BodyTimeout    = 10 * time.Second // to read a request body
	headerTimeout  = 10 * time.Second // to read the request line and headers
	idleTimeout    = 2 * time.Minute  // of a kept-alive connection between requests
	maxHeaderBytes = 16 << 10
)

// NewServer returns a server with these bounds. It has no write timeout, which would cut
// event streams, and speaks HTTP/1.1 only: a stream needs a connection of its own, whose
// unacknowledged bytes show a stalled reader.
func NewServer(h http.Handler, errorLog *log.Logger) *http.Server {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          errorLog,
		Protocols:         new(http.Protocols),
	}
	s.Protocols.SetHTTP1(true)
	return s
}

// IsLoopback reports whether a host name, without port, is this machine's own: localhost
// in any case, or a loopback address, also as IPv4 mapped into IPv6.
func IsLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

// Package edge has the checks that every HTTP listener of the product makes before it handles
// a request, and the error response that it sends. The relay, the event gateway and the MCP
// handler share it, so that all of them answer the same request in the same way.
//
//	guard := edge.NewGuard(edge.GuardOptions{CheckHost: onLoopback, Origins: allowed})
//	...
//	edge.SetBodyDeadline(w, r, edge.BodyTimeout) // before anything is written
//	err := guard.Check(r)                        // Host and Origin: 403
//	token, given := edge.Bearer(r)               // identity: 401
//	body, held, err := bodies.Read(w, r, id, maxBody) // 413, 429 or 400
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
// event streams, and speaks HTTP/1.1 only: each stream needs its own connection, whose
// unacknowledged bytes reveal a stalled reader.
func NewServer(h http.Handler, errorLog *log.Logger) *Server {
	s := &http.Server{
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          errorLog,
		Protocols:         new(http.Protocols),
		ConnContext:       connContext,
	}
	s.Protocols.SetHTTP1(true)
	srv := &Server{Server: s, direct: directConns{conns: make(map[uint64]*directConn), draining: make(chan struct{})}}
	s.Handler = srv.delayRefusals(h)
	return srv
}

// IsLoopback reports whether a host name without a port is localhost, in upper or lower case,
// or a loopback address; IPv4 addresses mapped into IPv6 are included.
func IsLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

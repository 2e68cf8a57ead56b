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
// Three things come before these checks:
//
//	NewServer  bounds headers and idle time, refuses requests of ambiguous length (framing.go),
//	           and serves plain POST requests faster than net/http does (direct.go)
//	Conns      bounds the connections of strangers by address and in all (conns.go), and lets the
//	           kernel drop the attempts of those that keep on (block.go)
//	Refusals   delays the answers to clients that are refused again and again (refusal.go)
//
// IsLoopback, Limiter and Pool serve other packages as well. The package links nothing but
// net/http and small libraries: the daemon's board build contains it.
package edge

import (
	"net/netip"
	"strings"
)

// IsLoopback reports whether a host name without a port is localhost, in upper or lower case,
// or a loopback address; IPv4 addresses mapped into IPv6 are included.
func IsLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

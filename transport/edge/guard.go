package edge

import (
	"errors"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
)

// A browser sends requests on behalf of any page that it shows. Two headers, which a page
// cannot forge, identify such requests:
//
//   - Host. An attacker may resolve his page's name to 127.0.0.1 (DNS rebinding). The page
//     then has the same origin as a server on loopback, but its requests still carry the
//     page's name as Host.
//   - Origin. A browser sends the page's scheme, host and port; programs send none.

// The refusals of Guard.Check.
var (
	ErrHost   = errors.New("this Host is not served here; the operator can add it as the public name")
	ErrOrigin = errors.New("this Origin may not use this server; the operator can allow it")
)

// GuardOptions configure a Guard.
type GuardOptions struct {
	// CheckHost refuses a Host that is neither a loopback name nor in Hosts. It is for
	// listeners on loopback; elsewhere TLS and tokens protect from rebinding.
	CheckHost bool
	Hosts     []string // names without port
	// Origins are the origins of pages that may send requests, as SCHEME://HOST[:PORT]. A
	// page that this server served itself, under an accepted Host, is always allowed.
	Origins []string
}

// Guard decides which Host and Origin headers a listener accepts. Both compare
// case-insensitively. SetOrigins may be called while it is in use.
type Guard struct {
	checkHost bool
	hosts     map[string]bool                 // lower case
	origins   atomic.Pointer[map[string]bool] // the same
}

// NewGuard makes a Guard.
func NewGuard(o GuardOptions) *Guard {
	g := &Guard{checkHost: o.CheckHost, hosts: lowerSet(o.Hosts)}
	g.SetOrigins(o.Origins)
	return g
}

// SetOrigins replaces GuardOptions.Origins.
func (g *Guard) SetOrigins(origins []string) {
	set := lowerSet(origins)
	g.origins.Store(&set)
}

func lowerSet(list []string) map[string]bool {
	set := make(map[string]bool, len(list))
	for _, s := range list {
		set[strings.ToLower(strings.TrimSuffix(s, "/"))] = true
	}
	return set
}

// Check returns nil, ErrHost or ErrOrigin. It applies to every method: a GET opens a
// stream and is as dangerous as a POST.
func (g *Guard) Check(r *http.Request) error {
	if g.checkHost && !g.hostAllowed(r.Host) {
		return ErrHost
	}
	if !g.OriginAllowed(r) {
		return ErrOrigin
	}
	return nil
}

func (g *Guard) hostAllowed(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	return g.hosts[host] || IsLoopback(host)
}

// OriginAllowed reports whether a request has no Origin, the server's own or an allowed
// one. A request with two Origin headers is refused.
func (g *Guard) OriginAllowed(r *http.Request) bool {
	origins := r.Header["Origin"]
	if len(origins) != 1 {
		return len(origins) == 0
	}
	if (*g.origins.Load())[strings.ToLower(origins[0])] {
		return true
	}
	u, err := url.Parse(origins[0])
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

// IsPreflight reports whether a request is a CORS preflight, with which a browser asks
// whether a page may send the actual request. It carries no token.
func IsPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

// CORS lists the methods and request headers that pages may send, and the response headers
// that they may read, each as a comma-separated list.
type CORS struct {
	Methods, Headers, Expose string
}

// SetHeaders adds the headers that let a page read the response to r, whose Origin must have
// passed Guard.Check. Without an Origin it adds nothing.
func (c *CORS) SetHeaders(h http.Header, r *http.Request) {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return
	}
	h.Set("Access-Control-Allow-Origin", origin)
	h.Add("Vary", "Origin")
	h.Set("Access-Control-Expose-Headers", c.Expose)
	if IsPreflight(r) {
		h.Set("Access-Control-Allow-Methods", c.Methods)
		h.Set("Access-Control-Allow-Headers", c.Headers)
		h.Set("Access-Control-Max-Age", "600") // seconds
	}
}

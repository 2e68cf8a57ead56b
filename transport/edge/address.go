package edge

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// TrustedProxies are the networks of the proxies whose X-Forwarded-For is believed. Without
// any, that header is ignored: every client could write it.
type TrustedProxies []netip.Prefix

// ParseTrustedProxies parses networks in CIDR notation. A single address is a network of one.
func ParseTrustedProxies(networks []string) (TrustedProxies, error) {
	var t TrustedProxies
	for _, s := range networks {
		p, err := netip.ParsePrefix(s)
		if a, aerr := netip.ParseAddr(s); aerr == nil && a.Zone() == "" {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		switch {
		case err != nil:
			return nil, fmt.Errorf("not a network: %q (use 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32)", s)
		case p.Addr().Is4In6():
			return nil, fmt.Errorf("write the IPv4 network %q without ::ffff", s)
		}
		t = append(t, p.Masked())
	}
	return t, nil
}

// Contains reports whether an address is that of a trusted proxy.
func (t TrustedProxies) Contains(a netip.Addr) bool {
	for _, p := range t {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// ClientAddr returns the address of a request's client: the peer's, or, when the peer is a
// trusted proxy, the rightmost entry of X-Forwarded-For that is not a trusted proxy. What is left
// of that entry was written by the client. An entry that is not an address ends the search: the
// proxy that passed it on counts as the client. IPv4 addresses in IPv6 form are returned as IPv4,
// without a zone. The result is invalid when the connection has no IP address.
func (t TrustedProxies) ClientAddr(r *http.Request) netip.Addr {
	client := parseAddr(r.RemoteAddr)
	headers := r.Header["X-Forwarded-For"]
	for i := len(headers) - 1; i >= 0; i-- {
		for rest, more := headers[i], true; more; {
			if !t.Contains(client) {
				return client
			}
			var entry string
			if at := strings.LastIndexByte(rest, ','); at >= 0 {
				rest, entry = rest[:at], rest[at+1:]
			} else {
				entry, more = rest, false
			}
			a := parseAddr(strings.TrimSpace(entry))
			if !a.IsValid() {
				return client
			}
			client = a
		}
	}
	return client
}

// parseAddr parses an address with or without a port.
func parseAddr(s string) netip.Addr {
	p, err := netip.ParseAddrPort(s)
	a := p.Addr()
	if err != nil {
		if a, err = netip.ParseAddr(strings.Trim(s, "[]")); err != nil {
			return netip.Addr{}
		}
	}
	return a.Unmap().WithZone("")
}

// AddressKey is what limits by address count by: an IPv4 address itself, and the /64 of an IPv6
// address, which is what one subscriber gets. It is the zero Prefix for an invalid address.
func AddressKey(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // fails for an invalid address only
	return p
}

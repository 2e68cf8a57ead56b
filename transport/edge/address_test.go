package edge

import (
	"net/http"
	"net/netip"
	"testing"
)

func TestClientAddr(t *testing.T) {
	trusted, err := ParseTrustedProxies([]string{"10.0.0.0/8", "192.0.2.7", "2001:db8:1::/48"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		peer    string
		headers []string
		want    string
	}{
		{"203.0.113.5:1234", nil, "203.0.113.5"},
		{"203.0.113.5:1234", []string{"198.51.100.1"}, "203.0.113.5"}, // not from a proxy: ignored
		{"10.1.2.3:1", nil, "10.1.2.3"},
		{"10.1.2.3:1", []string{"198.51.100.1"}, "198.51.100.1"},
		{"10.1.2.3:1", []string{"1.1.1.1, 198.51.100.1"}, "198.51.100.1"}, // the client wrote 1.1.1.1
		{"10.1.2.3:1", []string{"1.1.1.1,198.51.100.1 , 10.9.9.9"}, "198.51.100.1"},
		{"10.1.2.3:1", []string{"1.1.1.1, 198.51.100.1", "192.0.2.7"}, "198.51.100.1"},
		{"10.1.2.3:1", []string{"10.0.0.4, 10.0.0.5"}, "10.0.0.4"}, // all of them proxies
		{"10.1.2.3:1", []string{"unknown"}, "10.1.2.3"},
		{"10.1.2.3:1", []string{"1.1.1.1, , 10.0.0.5"}, "10.0.0.5"},
		{"10.1.2.3:1", []string{""}, "10.1.2.3"},
		{"10.1.2.3:1", []string{"198.51.100.1:443"}, "198.51.100.1"},
		{"[2001:db8:1::9]:1", []string{"[2001:db8:2::1]:443"}, "2001:db8:2::1"},
		{"[::ffff:10.1.2.3]:1", []string{"::ffff:198.51.100.1"}, "198.51.100.1"},
		{"[fe80::1%eth0]:1", []string{"198.51.100.1"}, "fe80::1"},
	} {
		r := &http.Request{RemoteAddr: tt.peer, Header: http.Header{"X-Forwarded-For": tt.headers}}
		if got := trusted.ClientAddr(r).String(); got != tt.want {
			t.Errorf("peer %s, X-Forwarded-For %q: %s, want %s", tt.peer, tt.headers, got, tt.want)
		}
		if got := TrustedProxies(nil).ClientAddr(r); got != parseAddr(tt.peer) {
			t.Errorf("without trusted proxies peer %s is %s", tt.peer, got)
		}
	}
	if a := trusted.ClientAddr(&http.Request{RemoteAddr: "pipe"}); a.IsValid() {
		t.Errorf("a connection without an address has %s", a)
	}
}

func TestParseTrustedProxies(t *testing.T) {
	for _, s := range []string{"", "proxy.example", "10.0.0.0/33", "::ffff:10.0.0.0/104", "fe80::1%eth0"} {
		if _, err := ParseTrustedProxies([]string{"10.0.0.0/8", s}); err == nil {
			t.Errorf("%q was accepted", s)
		}
	}
}

func TestAddressKey(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		same bool
	}{
		{"192.0.2.1", "192.0.2.1", true},
		{"192.0.2.1", "192.0.2.2", false},
		{"192.0.2.1", "::ffff:192.0.2.1", true},
		{"fe80::1%eth0", "fe80::2", true},
		{"2001:db8::1", "2001:db8::ffff:1", true},
		{"2001:db8::1", "2001:db8:0:1::1", false},
	} {
		a, b := AddressKey(netip.MustParseAddr(tt.a)), AddressKey(netip.MustParseAddr(tt.b))
		if (a == b) != tt.same {
			t.Errorf("keys of %s and %s: %s, %s", tt.a, tt.b, a, b)
		}
	}
	if AddressKey(netip.Addr{}).IsValid() {
		t.Error("no address has a key")
	}
}

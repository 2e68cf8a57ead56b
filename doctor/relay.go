package doctor

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"agentctl/config"
	"agentctl/daemon"
	"agentctl/transport/link"
	"agentctl/transport/pin"
)

// certificateWarning and tokenWarning are the numbers of days before expiry from which a
// certificate or a token is a warning.
//
// Two weeks are enough to renew by hand, and longer than the retries of ACME clients take.
const (
	certificateWarning = 14
	tokenWarning       = 14
)

// createToken is the next step for a token that is missing, expired or of another kind.
const createToken = "create one on the relay: agentctl token create --class device"

// checkRelay follows the steps of the link: DNS, TCP, TLS. It stops at the first failure.
// st is the daemon's status, or nil; its relay is used when no other is configured.
//
// The findings are relay_dns, relay_tcp and relay_tls, as far as the steps came. With a proxy
// the connection ends at the proxy: only the link itself can show what lies behind it.
func (t *target) checkRelay(ctx context.Context, st *daemon.Status) []Finding {
	relay, origin := t.relay, t.relayOrigin
	if relay == "" && st != nil && st.Link.Relay != "" {
		relay, origin = st.Link.Relay, "the running daemon"
	}
	if relay == "" && st == nil { // a daemon that answers knows it, and whether its disk can be read
		if c := t.credential(); c != nil {
			relay, origin = c.Relay, "the join of this board"
		}
	}
	if relay == "" {
		return []Finding{skip("relay", "no relay configured; this board works alone", "")}
	}
	normalized, err := link.NormalizeRelayURL(relay)
	if err != nil {
		return []Finding{fail("relay", err.Error(), "correct it in "+origin)}
	}
	u, err := url.Parse(normalized)
	if err != nil {
		return []Finding{fail("relay", err.Error(), "correct it in "+origin)}
	}
	host, port := hostPort(u)
	out := []Finding{checkDNS(ctx, host)}
	if out[0].Status == Fail {
		return out
	}
	if proxy := proxyOf(u); proxy != nil {
		proxyHost, proxyPort := hostPort(proxy)
		c, f := dialRelay(ctx, proxyHost, proxyPort)
		if c != nil {
			_ = c.Close()
			f.Message = "through the proxy " + proxy.Host + ": " + f.Message
		}
		return append(out, f)
	}
	conn, f := dialRelay(ctx, host, port)
	out = append(out, f)
	if conn == nil {
		return out
	}
	defer func() { _ = conn.Close() }()
	if u.Scheme != "wss" {
		return append(out, skip("relay_tls", "in the clear, on this machine only", ""))
	}
	return append(out, t.checkTLS(ctx, conn, host, t.authorityPin(st)))
}

// proxyOf returns the proxy that the environment names for a relay, nil for none.
//
// It maps the scheme because net/http chooses between HTTPS_PROXY and HTTP_PROXY by it, and does
// not know ws and wss.
func proxyOf(u *url.URL) *url.URL {
	scheme := map[string]string{"wss": "https", "ws": "http"}[u.Scheme]
	proxy, _ := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: scheme, Host: u.Host}})
	return proxy
}

// checkDNS resolves the relay's name with the resolver that the daemon uses.
//
// A name that does not exist is distinguished from a resolver that fails: the first is an
// error in the URL, the second one of the network. At most three addresses are shown.
func checkDNS(ctx context.Context, host string) Finding {
	const name = "relay_dns"
	if net.ParseIP(host) != nil {
		return ok(name, host+" is an address")
	}
	addrs, err := net.DefaultResolver.LookupHost(ctx, host)
	var de *net.DNSError
	switch {
	case err == nil:
		return ok(name, host+" is "+strings.Join(addrs[:min(len(addrs), 3)], ", "))
	case errors.As(err, &de) && de.IsNotFound:
		return fail(name, "no such name: "+host, "check the name in the relay's URL; try: getent hosts "+host)
	}
	return fail(name, fmt.Sprintf("look up %s: %v", host, err), "check the network and /etc/resolv.conf; try: getent hosts "+host)
}

// dialRelay opens a TCP connection, which the caller closes; nil when it failed. Its timeout
// leaves time for the TLS handshake.
//
// The time of the connect is part of the message, as a first hint of a slow path.
func dialRelay(ctx context.Context, host, port string) (net.Conn, Finding) {
	const name = "relay_tcp"
	addr := net.JoinHostPort(host, port)
	start := time.Now()
	conn, err := (&net.Dialer{Timeout: checkTimeout - time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fail(name, err.Error(), "check the address, a firewall on the way, and that the relay runs: curl -v telnet://"+addr)
	}
	return conn, ok(name, fmt.Sprintf("%s in %d ms", addr, time.Since(start).Milliseconds()))
}

// checkTLS does a TLS handshake without verification and then verifies the certificate
// itself, to report what exactly is wrong with it.
//
// The standard verification stops at its first error, which for a board with a wrong clock is
// often not the cause. Nothing is sent on this connection, so that the missing verification
// during the handshake reveals nothing.
//
// For a board that joined with the hash of the relay's own authority, that is all that counts.
func (t *target) checkTLS(ctx context.Context, conn net.Conn, host, authority string) Finding {
	const name = "relay_tls"
	cfg, err := config.ClientTLS(t.caFile, t.caSHA256)
	if err != nil {
		return fail(name, err.Error(), "correct ca_file or ca_sha256")
	}
	roots := cfg.RootCAs
	cfg.VerifyConnection = nil
	cfg.ServerName = host
	cfg.InsecureSkipVerify = true // certificateFinding verifies; no data is sent
	client := tls.Client(conn, cfg)
	if err := client.HandshakeContext(ctx); err != nil {
		return fail(name, "TLS: "+err.Error(), "is this a relay with TLS? try: openssl s_client -connect "+conn.RemoteAddr().String())
	}
	chain := client.ConnectionState().PeerCertificates
	next := "agentctl leave, then join with the new line"
	if authority == "" {
		authority, next = t.caSHA256, "set ca_sha256 to the hash that the relay's operator names; the relay prints it when it starts"
	}
	if authority == "" {
		return certificateFinding(chain, roots, host, time.Now())
	}
	p, err := pin.Parse(authority)
	if err == nil {
		err = p.Verify(chain)
	}
	if err != nil {
		return fail(name, err.Error(), next)
	}
	return ok(name, "the relay's own authority is the one that this board trusts")
}

// certificateFinding verifies a chain whose first certificate is the relay's. The dates come
// before the signature, because a wrong clock explains both. roots is nil for the system's
// authorities.
func certificateFinding(chain []*x509.Certificate, roots *x509.CertPool, host string, now time.Time) Finding {
	const name, setAuthority = "relay_tls", "set ca_file to the authority's certificate"
	leaf := chain[0]
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots, Intermediates: intermediates, CurrentTime: now})
	day := func(t time.Time) string { return t.UTC().Format(time.DateOnly) }
	var authority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	switch {
	// Verify reports one error only, so the dates are compared here, whatever it found.
	case now.After(leaf.NotAfter):
		return fail(name, "the relay's certificate expired on "+day(leaf.NotAfter), "renew it on the relay; or is this board's clock wrong? see the line clock")
	case now.Before(leaf.NotBefore):
		return fail(name, "the relay's certificate is not valid before "+day(leaf.NotBefore), "is this board's clock wrong? see the line clock")
	case errors.As(err, &authority):
		return fail(name, "the relay's certificate is signed by an authority that is not known here: "+leaf.Issuer.String(), setAuthority+", for the service AGENTCTL_CA_FILE in "+serviceEnvFile)
	case errors.As(err, &hostname):
		return fail(name, "the relay's certificate is for another name: "+err.Error(), "use that name in the relay's URL, or a certificate for this one")
	case err != nil:
		return fail(name, err.Error(), setAuthority)
	}
	left := int(leaf.NotAfter.Sub(now).Hours() / 24)
	text := fmt.Sprintf("certificate by %s until %s (%s)", leaf.Issuer.CommonName, day(leaf.NotAfter), days(left))
	if left < certificateWarning {
		return warn(name, text, "renew it on the relay soon")
	}
	return ok(name, text)
}

// checkToken examines the device token: who can read it, and until when it is valid. Only
// the relay can verify its signature.
//
// The file is examined as this user sees it. A person who may not read it gets a skip and not
// a failure: the daemon may well be able to.
func (t *target) checkToken(known *daemon.Status, now time.Time) Finding {
	const name = "token"
	if t.isJoined(known) {
		return skip(name, "the board has joined; see the line join", "")
	}
	if t.tokenFile == "" {
		switch {
		case t.relay == "" && known != nil && known.Link.Relay != "":
			return skip(name, "the daemon has one; set token_file to examine it too", "")
		case t.relay == "":
			return skip(name, "none is needed without a relay", "")
		}
		return fail(name, "no token_file is set", "join with a line of: agentctl invite, and leave relay out; or "+createToken+", put it into a file and set token_file")
	}
	token, err := config.ReadToken(t.tokenFile)
	var exposed *config.ExposedError
	switch {
	case errors.As(err, &exposed):
	case errors.Is(err, fs.ErrPermission):
		return skip(name, t.tokenFile+" is not readable by this user", "sudo agentctl doctor")
	case err != nil:
		return fail(name, err.Error(), createToken)
	}
	// The mode of the file is mentioned only when the token itself is good: a bad token is replaced
	// anyway.
	f := tokenFinding(token, now)
	if f.Status == OK && exposed != nil {
		return warn(name, f.Message+"; "+exposed.Error(), "chmod 0600 "+t.tokenFile)
	}
	return f
}

// tokenFinding reports the claims of a token (RFC 7519), whose signature it cannot verify.
//
// A minute of clock difference is allowed for "not before", as the relay allows it. The relay
// refuses a token without an expiry, so that one is a failure here.
func tokenFinding(token string, now time.Time) Finding {
	const name = "token"
	parts := strings.Split(token, ".")
	if len(token) > 4<<10 || len(parts) != 3 {
		return fail(name, "the file does not hold an agentctl token", createToken)
	}
	b, err := base64.RawURLEncoding.DecodeString(parts[1])
	var c struct {
		Class string  `json:"cls"`
		Sub   string  `json:"sub"`
		Exp   float64 `json:"exp"`
		Nbf   float64 `json:"nbf"`
	}
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		return fail(name, "the file does not hold an agentctl token", createToken)
	}
	exp, nbf := time.Unix(int64(c.Exp), 0), time.Unix(int64(c.Nbf), 0)
	left := int(exp.Sub(now).Hours() / 24)
	text := fmt.Sprintf("for %s until %s (%s)", c.Sub, exp.UTC().Format(time.DateOnly), days(left))
	switch {
	case c.Class != "device_runtime":
		return fail(name, "the token is of class "+c.Class+", not for a board", createToken)
	case c.Exp == 0:
		return fail(name, "the token never expires, which no relay accepts", createToken)
	case !now.Before(exp):
		return fail(name, "the token expired on "+exp.UTC().Format(time.DateOnly), createToken+"; or is this board's clock wrong? see the line clock")
	case c.Nbf > 0 && now.Add(time.Minute).Before(nbf):
		return fail(name, "the token is not valid before "+nbf.UTC().Format(time.DateOnly), "is this board's clock wrong? see the line clock")
	case left < tokenWarning:
		return warn(name, text, createToken+" before it expires")
	}
	return ok(name, text)
}

// hostPort returns the host of a URL, and its port or the default one of its scheme.
func hostPort(u *url.URL) (host, port string) {
	defaultPort := "443"
	if u.Scheme == "ws" || u.Scheme == "http" {
		defaultPort = "80"
	}
	return u.Hostname(), cmp.Or(u.Port(), defaultPort)
}

// days returns a number of days as text, for the time that a certificate or a token has left.
func days(n int) string {
	if n == 1 {
		return "1 day"
	}
	return fmt.Sprintf("%d days", n)
}

package main

import (
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
	"os"
	"strings"
	"time"

	"agentctl/config"
	"agentctl/transport/link"
)

// checkRelay goes the way the link goes: name, TCP, TLS. st is what the daemon said, or nil.
func (p *patient) checkRelay(ctx context.Context, st *boxStatus) []finding {
	relay, from := p.relay, p.relayFrom
	if relay == "" && st != nil && st.Link.Relay != "" {
		relay, from = st.Link.Relay, "the running daemon"
	}
	if relay == "" {
		return []finding{{"relay", findSkip, "no relay configured; this board works alone", ""}}
	}
	target, err := link.NormalizeRelayURL(relay)
	if err != nil {
		return []finding{{"relay", findFail, err.Error(), "correct it in " + from}}
	}
	u, err := url.Parse(target)
	if err != nil {
		return []finding{{"relay", findFail, err.Error(), "correct it in " + from}}
	}
	host, port := relayHost(u)
	out := []finding{checkName(ctx, host)}
	if out[0].Status == findFail {
		return out
	}
	if proxy := proxyOf(u); proxy != nil {
		ph, pp := relayHost(proxy)
		c, f := dialRelay(ctx, "relay_tcp", ph, pp)
		if c != nil {
			_ = c.Close()
			f.Message = "through the proxy " + proxy.Host + ": " + f.Message
		}
		return append(out, f)
	}
	conn, f := dialRelay(ctx, "relay_tcp", host, port)
	out = append(out, f)
	if conn == nil {
		return out
	}
	defer func() { _ = conn.Close() }()
	if u.Scheme != "wss" {
		return append(out, finding{"relay_tls", findSkip, "in the clear, on this machine only", ""})
	}
	return append(out, p.checkTLS(ctx, conn, host))
}

func proxyOf(u *url.URL) *url.URL {
	scheme := map[string]string{"wss": "https", "ws": "http"}[u.Scheme]
	proxy, _ := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: scheme, Host: u.Host}})
	return proxy
}

func checkName(ctx context.Context, host string) finding {
	const name = "relay_dns"
	if net.ParseIP(host) != nil {
		return finding{name, findOK, host + " is an address", ""}
	}
	addrs, err := net.DefaultResolver.LookupHost(ctx, host)
	var de *net.DNSError
	switch {
	case err == nil:
		return finding{name, findOK, host + " is " + strings.Join(addrs[:min(len(addrs), 3)], ", "), ""}
	case errors.As(err, &de) && de.IsNotFound:
		return finding{name, findFail, "nobody knows " + host, "check the name in the relay's URL; try: getent hosts " + host}
	}
	return finding{name, findFail, fmt.Sprintf("look up %s: %v", host, err), "check the network and /etc/resolv.conf; try: getent hosts " + host}
}

func dialRelay(ctx context.Context, name, host, port string) (net.Conn, finding) {
	addr := net.JoinHostPort(host, port)
	start := time.Now()
	conn, err := (&net.Dialer{Timeout: checkTime - time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, finding{name, findFail, err.Error(), "check the address, a firewall on the way, and that the relay runs: curl -v telnet://" + addr}
	}
	return conn, finding{name, findOK, fmt.Sprintf("%s in %d ms", addr, time.Since(start).Milliseconds()), ""}
}

// checkTLS shakes hands and judges the certificate itself, to say what exactly is wrong.
func (p *patient) checkTLS(ctx context.Context, conn net.Conn, host string) finding {
	const name = "relay_tls"
	cfg, err := config.ClientTLS(p.caFile)
	if err != nil {
		return finding{name, findFail, err.Error(), "correct --ca-file"}
	}
	roots := cfg.RootCAs
	cfg.ServerName = host
	cfg.InsecureSkipVerify = true // verified below; nothing is sent
	tc := tls.Client(conn, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		return finding{name, findFail, "TLS: " + err.Error(), "is this a relay with TLS? try: openssl s_client -connect " + conn.RemoteAddr().String()}
	}
	return certificateFinding(tc.ConnectionState().PeerCertificates, roots, host, time.Now())
}

func certificateFinding(chain []*x509.Certificate, roots *x509.CertPool, host string, now time.Time) finding {
	const name = "relay_tls"
	leaf := chain[0]
	rest := x509.NewCertPool()
	for _, c := range chain[1:] {
		rest.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots, Intermediates: rest, CurrentTime: now})
	day := func(t time.Time) string { return t.UTC().Format(time.DateOnly) }
	var authority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	switch {
	case now.After(leaf.NotAfter):
		return finding{name, findFail, "the relay's certificate ended on " + day(leaf.NotAfter), "renew it on the relay; or is this board's clock wrong? see the line clock"}
	case now.Before(leaf.NotBefore):
		return finding{name, findFail, "the relay's certificate begins on " + day(leaf.NotBefore), "is this board's clock wrong? see the line clock"}
	case errors.As(err, &authority):
		return finding{name, findFail, "the relay's certificate is signed by an authority that is not known here: " + leaf.Issuer.String(), "pass the authority with --ca-file, for the service AGENTCTL_CA_FILE in " + serviceEnvFile}
	case errors.As(err, &hostname):
		return finding{name, findFail, "the relay's certificate is for another name: " + err.Error(), "use that name in the relay's URL, or a certificate for this one"}
	case err != nil:
		return finding{name, findFail, err.Error(), "pass the authority with --ca-file"}
	}
	left := int(leaf.NotAfter.Sub(now).Hours() / 24)
	text := fmt.Sprintf("certificate by %s until %s (%s)", leaf.Issuer.CommonName, day(leaf.NotAfter), counted(left, "day"))
	if left < 14 {
		return finding{name, findWarn, text, "renew it on the relay soon"}
	}
	return finding{name, findOK, text, ""}
}

// checkToken looks at the device token: whether it can be read, by whom, and until when it
// is good. Only the relay can tell whether it is genuine.
func (p *patient) checkToken(known *boxStatus, now time.Time) finding {
	const name, mint = "token", "mint one on the relay: agentctl token create --class device"
	if p.tokenFile == "" {
		switch {
		case p.relay == "" && known != nil && known.Link.Relay != "":
			return finding{name, findSkip, "the daemon has one; to look at it too, name it with --token-file", ""}
		case p.relay == "":
			return finding{name, findSkip, "none is needed without a relay", ""}
		}
		return finding{name, findFail, "no --token-file is named", mint + ", put it into a file and name it with --token-file"}
	}
	st, err := os.Stat(p.tokenFile)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return finding{name, findSkip, p.tokenFile + " may not be read by this user", "sudo agentctl doctor"}
	case err != nil:
		return finding{name, findFail, err.Error(), mint}
	}
	token, err := config.ReadToken(p.tokenFile)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return finding{name, findSkip, p.tokenFile + " may not be read by this user", "sudo agentctl doctor"}
	case err != nil:
		return finding{name, findFail, err.Error(), ""}
	}
	f := tokenFinding(token, now)
	if f.Status == findOK && st.Mode().Perm()&0o077 != 0 {
		return finding{name, findWarn, fmt.Sprintf("%s; %s has mode %04o: others may read it", f.Message, p.tokenFile, st.Mode().Perm()), "chmod 0600 " + p.tokenFile}
	}
	return f
}

// tokenFinding judges the claims of a token.
func tokenFinding(token string, now time.Time) finding {
	const name, mint = "token", "mint one on the relay: agentctl token create --class device"
	parts := strings.Split(token, ".")
	if len(token) > 4<<10 || len(parts) != 3 {
		return finding{name, findFail, "the file holds no agentctl token", mint}
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
		return finding{name, findFail, "the file holds no agentctl token", mint}
	}
	exp, nbf := time.Unix(int64(c.Exp), 0), time.Unix(int64(c.Nbf), 0)
	left := int(exp.Sub(now).Hours() / 24)
	text := fmt.Sprintf("for %s until %s (%s)", c.Sub, exp.UTC().Format(time.DateOnly), counted(left, "day"))
	switch {
	case c.Class != "device_runtime":
		return finding{name, findFail, "the token is of class " + c.Class + ", not for a board", mint}
	case c.Exp == 0:
		return finding{name, findFail, "the token has no end, which no relay accepts", mint}
	case !now.Before(exp):
		return finding{name, findFail, "the token ended on " + exp.UTC().Format(time.DateOnly), mint + "; or is this board's clock wrong? see the line clock"}
	case c.Nbf > 0 && now.Add(time.Minute).Before(nbf):
		return finding{name, findFail, "the token begins on " + nbf.UTC().Format(time.DateOnly), "is this board's clock wrong? see the line clock"}
	case left < 14:
		return finding{name, findWarn, text, mint + " before it ends"}
	}
	return finding{name, findOK, text, ""}
}

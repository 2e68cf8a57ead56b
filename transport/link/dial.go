package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/gorilla/websocket"

	"agentctl/transport/pin"
)

// DialOptions configure Dial.
type DialOptions struct {
	TLS *tls.Config // nil: the system's roots
	// Subprotocols are those to offer, the preferred one first; nil: Subprotocol21 and
	// Subprotocol.
	Subprotocols []string
}

// ErrInsecure is returned for a relay URL without TLS that is not on a loopback address.
var ErrInsecure = errors.New("http:// and ws:// are allowed for loopback addresses only; use https:// or wss://")

// NormalizeRelayURL turns a URL as people write it (http, https, ws or wss, with or without
// the link's path) into the link's URL. Schemes without TLS are accepted for loopback
// addresses only. No error quotes a URL that may contain a password.
func NormalizeRelayURL(raw string) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return "", errors.New("the relay URL is malformed; write https://HOST[:PORT] or wss://HOST[:PORT]")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return "", errors.New("the relay URL contains a user, a query or a fragment; remove it (the token is configured separately)")
	case u.Hostname() == "":
		return "", fmt.Errorf("relay URL %q is not of the form https://HOST[:PORT] or wss://HOST[:PORT]", raw)
	}
	switch u.Scheme {
	case "https", "wss":
		u.Scheme = "wss"
	case "http", "ws":
		u.Scheme = "ws"
		if !isLoopback(u.Hostname()) {
			return "", fmt.Errorf("relay URL %q: %w", raw, ErrInsecure)
		}
	default:
		return "", fmt.Errorf("relay URL %q: scheme %q is not https or wss", raw, u.Scheme)
	}
	if !strings.HasSuffix(u.Path, Path) {
		u.Path = strings.TrimSuffix(u.Path, "/") + Path
	}
	return u.String(), nil
}

// isLoopback does not resolve names: a resolver could be wrong about any of them.
func isLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.IsLoopback()
}

// Dial opens the WebSocket of a link. It honors HTTPS_PROXY and NO_PROXY.
func Dial(ctx context.Context, relayURL string, opt DialOptions) (Conn, error) {
	target, err := NormalizeRelayURL(relayURL)
	if err != nil {
		return nil, err
	}
	d := websocket.Dialer{
		Proxy:            http.ProxyFromEnvironment,
		TLSClientConfig:  opt.TLS,
		Subprotocols:     opt.Subprotocols,
		ReadBufferSize:   bufferSize,
		WriteBufferSize:  bufferSize,
		HandshakeTimeout: 2 * AuthTimeout,
	}
	if d.Subprotocols == nil {
		d.Subprotocols = []string{Subprotocol21, Subprotocol}
	}
	ws, resp, err := d.DialContext(ctx, target, nil)
	switch {
	case err != nil && resp != nil:
		return nil, fmt.Errorf("the relay at %s answered HTTP %d to the device link: %w", target, resp.StatusCode, err)
	case err != nil:
		return nil, fmt.Errorf("dial %s: %w", target, err)
	case !slices.Contains(d.Subprotocols, ws.Subprotocol()):
		_ = ws.Close()
		return nil, fmt.Errorf("%s does not speak %s", target, Subprotocol)
	}
	return newDeviceConn(ws), nil
}

// IsUntrustedCertificate reports whether a dial failed because the relay's certificate is
// not trusted: unknown authority, wrong name, not valid at this time, or not of the authority
// that was pinned.
func IsUntrustedCertificate(err error) bool {
	var verification *tls.CertificateVerificationError
	var mismatch *pin.MismatchError
	return errors.As(err, &verification) || errors.As(err, &mismatch)
}

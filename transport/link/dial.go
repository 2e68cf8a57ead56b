package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/gorilla/websocket"

	"agentctl/transport/edge"
)

// DialOptions configure Dial.
type DialOptions struct {
	TLS *tls.Config // nil: the system's roots
}

// ErrInsecure is returned for ws:// to anything but loopback.
var ErrInsecure = errors.New("ws:// is only for loopback addresses; use wss:// (and --ca-file for a private certificate)")

// NormalizeRelayURL turns what a person writes (http, https, ws or wss, with or without the
// link's path) into the link's URL. Plain schemes are accepted for loopback only.
func NormalizeRelayURL(raw string) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil: // it may hold a password, so it is not quoted
		return "", errors.New("the relay URL is malformed; write wss://HOST[:PORT]")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return "", errors.New("a relay URL carries no user, query or fragment; the token comes from --token-file")
	case u.Hostname() == "":
		return "", fmt.Errorf("relay URL %q is not of the form wss://HOST[:PORT]", raw)
	}
	switch u.Scheme {
	case "https", "wss":
		u.Scheme = "wss"
	case "http", "ws":
		u.Scheme = "ws"
		if !edge.IsLoopback(u.Hostname()) {
			return "", fmt.Errorf("relay URL %q: %w", raw, ErrInsecure)
		}
	default:
		return "", fmt.Errorf("relay URL %q: scheme %q is not wss or https", raw, u.Scheme)
	}
	if !strings.HasSuffix(u.Path, Path) {
		u.Path = strings.TrimSuffix(u.Path, "/") + Path
	}
	return u.String(), nil
}

// Dial opens the WebSocket of a link. HTTPS_PROXY and NO_PROXY are honoured.
func Dial(ctx context.Context, relayURL string, opt DialOptions) (Conn, error) {
	target, err := NormalizeRelayURL(relayURL)
	if err != nil {
		return nil, err
	}
	d := websocket.Dialer{
		Proxy:             http.ProxyFromEnvironment,
		TLSClientConfig:   opt.TLS,
		Subprotocols:      []string{Subprotocol},
		ReadBufferSize:    bufferSize,
		WriteBufferSize:   bufferSize,
		HandshakeTimeout:  2 * AuthTimeout,
		EnableCompression: false,
	}
	ws, resp, err := d.DialContext(ctx, target, nil)
	if err != nil {
		if resp != nil {
			return nil, fmt.Errorf("the relay at %s answered HTTP %d to the device link: %w", target, resp.StatusCode, err)
		}
		return nil, fmt.Errorf("dial %s: %w", target, err)
	}
	if ws.Subprotocol() != Subprotocol {
		_ = ws.Close()
		return nil, fmt.Errorf("%s does not speak %s", target, Subprotocol)
	}
	return newDeviceConn(ws), nil
}

// IsUntrustedCertificate tells whether err means that the relay's certificate is not
// trusted (unknown authority, wrong name, not valid now).
func IsUntrustedCertificate(err error) bool {
	var (
		unknown x509.UnknownAuthorityError
		name    x509.HostnameError
		invalid x509.CertificateInvalidError
		verify  *tls.CertificateVerificationError
	)
	return errors.As(err, &unknown) || errors.As(err, &name) || errors.As(err, &invalid) || errors.As(err, &verify)
}

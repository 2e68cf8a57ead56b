package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"agentctl/transport/edge"
)

// Bounds of a request. The body of a response has no timeout, since it may be a stream; the
// context of the call bounds it.
const (
	maxAnswer     = 64 << 20         // bytes read of a response
	headerTimeout = 15 * time.Second // until a response begins
	// callTimeout is headerTimeout of HTTP: an earlier relay answers a stream of an MCP client
	// without progress only at its end, after up to a minute.
	callTimeout = 75 * time.Second
)

// Options name a server and the caller's credentials. Share one Client per server: it keeps
// connections open for the next request.
type Options struct {
	URL   string
	Token string // bearer token; "" for none
	// NewToken, unless nil, returns the token of each request in place of Token. refused is
	// the token that the server has just answered with 401, "" at first; the request is sent
	// once more if another one is returned. It may be called concurrently.
	NewToken func(ctx context.Context, refused string) (string, error)
	TLS      *tls.Config // nil: the system's certificate authorities
}

// Client calls one relay. It may be used concurrently.
type Client struct{ conn }

// New makes a client; it opens no connection. Its errors are ErrURL and ErrCleartext.
func New(o Options) (*Client, error) {
	c, err := newConn(o)
	if err != nil {
		return nil, err
	}
	return &Client{*c}, nil
}

// URL returns the relay's URL, without a trailing slash.
func (c *Client) URL() string { return strings.TrimSuffix(c.url.String(), "/") }

// HTTP returns the client's HTTP client, for protocols that this package does not speak, such
// as MCP at URL()+"/mcp". It adds no token: the caller may have a newer one. Its connections are
// not those of the Client's own requests, and a response may begin later.
func (c *Client) HTTP() *http.Client { return c.raw }

// Ready returns nil when the relay can serve: GET /readyz.
//
// A relay that runs but cannot serve yet answers with another status, which is an *Error.
func (c *Client) Ready(ctx context.Context) error {
	resp, err := c.do(ctx, http.MethodGet, c.URL()+"/readyz", "text/plain", nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// getJSON requests a path of the API and decodes the answer into v.
func (c *Client) getJSON(ctx context.Context, path string, v any) error {
	return c.request(ctx, http.MethodGet, path, nil, v)
}

// request sends a request to the API and decodes the answer into v. Unknown members are ignored,
// so that a newer relay can add some.
func (c *Client) request(ctx context.Context, method, path string, body, v any) error {
	resp, err := c.do(ctx, method, c.URL()+path, "application/json", body)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(v); err != nil {
		return &ProtocolError{"unexpected answer to " + path, err}
	}
	return nil
}

// conn sends requests to one server, with its token. Client and Gateway are built on it.
type conn struct {
	url      *url.URL
	token    string
	newToken func(ctx context.Context, refused string) (string, error) // nil: always token
	http     *http.Client
	raw      *http.Client // see Client.HTTP
}

// newConn checks the address before anything is sent: a token must not cross a network in
// the clear, not even to a server that would redirect to TLS.
func newConn(o Options) (*conn, error) {
	u, err := url.Parse(o.URL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("%q is %w", o.URL, ErrURL)
	}
	if u.Scheme == "http" && (o.Token != "" || o.NewToken != nil) && !edge.IsLoopback(u.Hostname()) {
		return nil, fmt.Errorf("%s: %w", origin(u), ErrCleartext)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = o.TLS
	tr.ResponseHeaderTimeout = headerTimeout
	tr.ForceAttemptHTTP2 = false // the board build has no HTTP/2
	raw := tr.Clone()
	raw.ResponseHeaderTimeout = callTimeout
	return &conn{u, o.Token, o.NewToken, &http.Client{Transport: tr}, &http.Client{Transport: raw}}, nil
}

// do sends a request, with body as JSON unless it is nil, and returns a response with status
// 2xx. Any other response is an *Error. The caller closes the body.
func (c *conn) do(ctx context.Context, method, to, accept string, body any) (*http.Response, error) {
	var encoded bytes.Buffer
	if body != nil {
		enc := json.NewEncoder(&encoded)
		enc.SetEscapeHTML(false) // raw JSON in body is sent as it is
		if err := enc.Encode(body); err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, to, &encoded)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Accept", accept)
	return c.send(req)
}

// send adds the token to a request and sends it; see do. A request that is refused with 401
// had no effect, so it is sent again if there is a newer token.
func (c *conn) send(req *http.Request) (*http.Response, error) {
	if c.newToken == nil {
		return c.sendWith(req, c.token)
	}
	token, err := c.newToken(req.Context(), "")
	if err != nil {
		return nil, err
	}
	resp, err := c.sendWith(req, token)
	var refused *Error
	if !errors.As(err, &refused) || refused.Status != http.StatusUnauthorized {
		return resp, err
	}
	newer, tokenErr := c.newToken(req.Context(), token)
	switch {
	case tokenErr != nil:
		return nil, tokenErr
	case newer == token || req.GetBody == nil:
		return nil, err
	}
	if req.Body, err = req.GetBody(); err != nil {
		return nil, err
	}
	return c.sendWith(req, newer)
}

// sendWith is send with one token. net/http drops the header when it follows a redirect to
// another host.
func (c *conn) sendWith(req *http.Request, token string) (*http.Response, error) {
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, transportError(req.Context(), req.URL, err)
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return nil, answerError(resp, token != "")
}

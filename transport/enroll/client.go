package enroll

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/transport/link"
)

// An exchange with a relay (docs/protocol.md, "Joining"). The nonce keeps a recorded message from being
// used again:
//
//	Enroll    GET /v1/enroll   ──> nonce
//	          POST /v1/enroll  code, public key, proof of the key ──> identity and first token
//	Refresh   GET /v1/enroll   ──> nonce
//	          POST /v1/token   identity, generation, request id, proof ──> next token

// Bounds of one exchange.
const (
	exchangeTimeout = 30 * time.Second // of both requests, and their repeat with another nonce
	maxAnswer       = 64 << 10         // bytes of a body
	maxTokenLen     = 4096             // bytes of a token (docs/protocol.md, Tokens)
)

// Client makes and refreshes identities at one relay. It keeps no connection open. It may be
// used concurrently.
type Client struct {
	URL string      // as people write it; see link.NormalizeRelayURL
	TLS *tls.Config // nil: the system's authorities
}

// BaseURL is the http or https URL of a relay, without a trailing slash, for any form of its
// URL that the link accepts. Like the link it refuses cleartext beyond loopback.
func BaseURL(relay string) (string, error) {
	u, err := link.NormalizeRelayURL(relay)
	if err != nil {
		return "", err
	}
	return "http" + strings.TrimSuffix(strings.TrimPrefix(u, "ws"), link.Path), nil
}

// EnrollOptions describe a new board or agent.
type EnrollOptions struct {
	Code       string // canonical, see enrollment.ParseCode
	InstanceID string // 32 hex digits
	Name       string // wanted name; "": none
	Version    string // of this binary
	Token      string // an existing device token, whose node is kept; "": a new node
	// Key returns the key to enroll. It is called once, when the relay has answered the
	// nonce: an image that is booted without a relay in reach, and copied afterwards, must not
	// hold a key that all copies share. The key must be stored when Key returns, so that the
	// same code and key can be sent again after a lost answer.
	Key func() (ed25519.PrivateKey, error)
}

// Enroll exchanges a code for an identity. Its errors are those of Key, ctx's and *Error. The
// same code and key may be sent again: the answer is the same identity and costs no use.
func (c *Client) Enroll(ctx context.Context, o EnrollOptions) (*enrollment.EnrollAnswer, error) {
	var answer enrollment.EnrollAnswer
	var key ed25519.PrivateKey
	err := c.exchange(ctx, enrollment.EnrollPath, &answer, func(nonce string) (body any, err error) {
		if key == nil {
			if key, err = o.Key(); err != nil {
				return nil, err
			}
		}
		return &enrollment.EnrollRequest{
			Nonce: nonce, Code: o.Code, PublicKey: enrollment.EncodeKey(key.Public().(ed25519.PublicKey)),
			InstanceID: o.InstanceID, Name: o.Name, AgentVersion: o.Version, Token: o.Token,
			Proof: enrollment.Sign(key, enrollment.EnrollMessage(nonce, o.Code, o.InstanceID)),
		}, nil
	})
	if err != nil {
		return nil, err
	}
	// The code decides whether the answer is for a board or for an agent; it is never for both.
	isBoard := manifest.ValidNodeID(answer.NodeID) && validToken(answer.DeviceToken)
	isAgent := answer.AgentID != "" && validToken(answer.Token)
	if answer.Gen < 1 || answer.TenantID == "" || isBoard == isAgent {
		return nil, c.fail(Malformed, errors.New("the answer to the code has no identity"))
	}
	return &answer, nil
}

// RefreshOptions identify what is refreshed: NodeID for a board, AgentID for an agent.
type RefreshOptions struct {
	NodeID, AgentID string
	Gen             int    // of the token that is stored
	RequestID       string // stored before the call, and the same in a repeat
	// SessionID returns the session of the board's link, "" for none; nil: none. It is called
	// when the request is made, after the nonce has come: the link may have come back meanwhile,
	// and the relay serves the present session only.
	SessionID func() string
	Key       ed25519.PrivateKey // the one that was enrolled
}

// Refresh exchanges the proof of a key for the next token. Its errors are ctx's and *Error.
func (c *Client) Refresh(ctx context.Context, o RefreshOptions) (*enrollment.TokenAnswer, error) {
	var answer enrollment.TokenAnswer
	err := c.exchange(ctx, enrollment.TokenPath, &answer, func(nonce string) (any, error) {
		r := &enrollment.TokenRequest{
			NodeID: o.NodeID, AgentID: o.AgentID, Gen: o.Gen, RequestID: o.RequestID, Nonce: nonce,
			Proof: enrollment.Sign(o.Key, enrollment.TokenMessage(nonce, o.NodeID+o.AgentID, o.Gen, o.RequestID)),
		}
		if o.SessionID != nil {
			r.SessionID = o.SessionID()
		}
		return r, nil
	})
	if err != nil {
		return nil, err
	}
	if answer.Gen < 1 || !validToken(answer.Token) {
		return nil, c.fail(Malformed, errors.New("the answer to the refresh has no token"))
	}
	return &answer, nil
}

// validToken reports whether a token fits a header and a token file.
func validToken(s string) bool {
	return s != "" && len(s) <= maxTokenLen && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// exchange gets a nonce, posts the body that newBody returns for it, and decodes the answer. If the
// relay no longer accepts the nonce, because it was restarted for instance, exchange gets another one
// and repeats, once.
func (c *Client) exchange(ctx context.Context, path string, answer any, newBody func(nonce string) (any, error)) error {
	base, err := BaseURL(c.URL)
	if err != nil {
		return err
	}
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	// A transport for each exchange: the next one is hours away, so a connection is not worth keeping.
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = c.TLS.Clone() // nil stays nil
	tr.ForceAttemptHTTP2 = false       // the board build has no HTTP/2
	defer tr.CloseIdleConnections()
	hc := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // a redirect is never a relay's answer: a code must not follow it
	}}
	for attempt := 1; ; attempt++ {
		var nonce enrollment.Nonce
		err := c.roundTrip(ctx, hc, base+enrollment.EnrollPath, nil, &nonce)
		if err == nil && nonce.Nonce == "" {
			err = c.fail(NotRelay, errors.New("no nonce in the answer"))
		}
		if err == nil {
			var body any
			if body, err = newBody(nonce.Nonce); err != nil {
				return err
			}
			err = c.roundTrip(ctx, hc, base+path, body, answer)
		}
		var refused *Error
		if attempt == 1 && errors.As(err, &refused) && refused.Reason == enrollment.ReasonNonce {
			continue
		}
		// If the caller gave up, that is the error, and not a Kind such as TimedOut.
		if err != nil && caller.Err() != nil {
			return caller.Err()
		}
		return err
	}
}

// roundTrip sends one request, GET without a body, and decodes the JSON answer.
//
// Unknown members are ignored, so that a newer relay can add some.
func (c *Client) roundTrip(ctx context.Context, hc *http.Client, to string, body, answer any) error {
	method, encoded := http.MethodGet, []byte(nil)
	if body != nil {
		method = http.MethodPost
		encoded, _ = json.Marshal(body) // strings and numbers always encode
	}
	req, err := http.NewRequestWithContext(ctx, method, to, bytes.NewReader(encoded))
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Accept", "application/json")
	resp, err := hc.Do(req)
	if err != nil {
		return c.transportError(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return c.transportError(err)
	}
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusCreated {
		return c.answerError(resp, b)
	}
	// Captive portals answer 200 with their page in place of any server.
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t != "application/json" {
		return c.fail(Portal, errors.New("a web page came in place of the relay's answer"))
	}
	if json.Unmarshal(b, answer) != nil {
		return c.fail(NotRelay, errors.New("the answer is not the JSON of an agentctl relay"))
	}
	return nil
}

// origin is the relay's URL as errors name it: a URL with a password is not quoted.
func (c *Client) origin() string {
	base, err := BaseURL(c.URL)
	if err != nil {
		return "the relay"
	}
	u, err := url.Parse(base)
	if err != nil {
		return "the relay"
	}
	return u.Scheme + "://" + u.Host
}

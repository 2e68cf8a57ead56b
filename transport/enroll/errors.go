package enroll

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"agentctl/enrollment"
	"agentctl/transport/pin"
)

// Kind is the way in which an exchange with a relay failed. Each one has another next step.
type Kind int

// The kinds of failures.
const (
	Broken          Kind = iota // the connection was lost; whether the relay acted is not known
	Refused                     // the relay said no, see Error.Reason
	RateLimited                 // too many failures from this address, see Error.RetryAfter
	Unavailable                 // the relay, or a proxy before it, has a passing failure
	NoDNS                       // the relay's name cannot be resolved
	Unreachable                 // no connection could be opened
	TimedOut                    // no answer in time
	Untrusted                   // the certificate's authority is not trusted
	WrongAuthority              // the authority is not the one of --ca-sha256
	WrongName                   // the certificate is for another host
	CertificateDate             // the certificate is not valid at this machine's time
	NotTLS                      // https:// to a server that speaks plain HTTP
	NeedsTLS                    // http:// to a server that speaks TLS
	Portal                      // a web page or a redirect, as a captive portal sends
	NotRelay                    // some other server
	NoEnrollment                // an agentctl relay that is too old for joining
	ForAgent                    // the code is of an invite for agents; it is used up
	Malformed                   // an agentctl relay whose answer makes no sense
)

// Error is a failed Enroll or Refresh. Its text says what failed and why, not what to do.
type Error struct {
	Kind       Kind
	URL        string        // of the relay, without a path
	Status     int           // of HTTP; 0 without an answer
	Reason     string        // of a refusal, one of enrollment.Reason…
	RetryAfter time.Duration // that the relay asks for; 0: not given
	Err        error         // the cause
}

func (e *Error) Error() string { return e.URL + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

func (c *Client) fail(k Kind, err error) *Error { return &Error{Kind: k, URL: c.origin(), Err: err} }

// reasons are our words for refusals. A relay's own message may name a next step that does not
// fit the caller; it is used for reasons that are not known here.
var reasons = map[string]string{
	enrollment.ReasonUsed:           "the code has no uses left",
	enrollment.ReasonExpired:        "the code has expired",
	enrollment.ReasonRevoked:        "the invite or the identity that was made with it has been revoked",
	enrollment.ReasonCodeUnknown:    "this relay does not know the code",
	enrollment.ReasonKeyInUse:       "the key is registered under another code",
	enrollment.ReasonGenerationUsed: "the credential was used elsewhere, or is an old copy",
	enrollment.ReasonProof:          "the relay does not know this identity, or knows another key of it",
	enrollment.ReasonTokenInvalid:   "the token to be replaced is not valid there, or of another tenant",
	enrollment.ReasonSession:        "this identity is linked elsewhere",
}

// maxRetryAfter bounds the wait that a relay may ask for.
const maxRetryAfter = time.Hour

// answerError is the error of an answer without the status of success. An answer without the
// error envelope (docs/protocol.md, Errors) does not come from an agentctl relay.
func (c *Client) answerError(resp *http.Response, body []byte) error {
	e := c.fail(NotRelay, fmt.Errorf("the server answered HTTP %d, and not as an agentctl relay does", resp.StatusCode))
	e.Status = resp.StatusCode
	var env struct {
		Error *struct {
			Code         string `json:"code"`
			Reason       string `json:"reason"`
			Message      string `json:"message"`
			RetryAfterMS int64  `json:"retry_after_ms"`
		} `json:"error"`
	}
	isEnvelope := json.Unmarshal(body, &env) == nil && env.Error != nil && env.Error.Code != ""
	// What cannot be a relay's comes first, since a portal may answer with any status. 5xx, and 429 without
	// an envelope, may be a proxy's: the relay behind it is there again in a moment.
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400, resp.StatusCode == http.StatusNetworkAuthenticationRequired:
		e.Kind, e.Err = Portal, errors.New("a redirect came in place of the relay's answer")
	case bytes.Contains(body, []byte("HTTP request to an HTTPS server")): // Go's HTTPS server
		e.Kind, e.Err = NeedsTLS, errors.New("the server speaks TLS")
	case isEnvelope && resp.StatusCode == http.StatusTooManyRequests:
		e.Kind, e.Err = RateLimited, errors.New(env.Error.Message)
	case resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode >= 500:
		e.Kind, e.Err = Unavailable, fmt.Errorf("the relay answered HTTP %d", resp.StatusCode)
	case isEnvelope && resp.StatusCode == http.StatusNotFound && env.Error.Reason == "":
		e.Kind, e.Err = NoEnrollment, errors.New("this relay does not know invite codes")
	case isEnvelope:
		e.Kind, e.Reason, e.Err = Refused, env.Error.Reason, errors.New(cmp.Or(reasons[env.Error.Reason], env.Error.Message))
	}
	// The envelope has milliseconds, the header seconds, which a proxy may send too: the longer wait
	// counts. The bound keeps a wrong answer from silencing a board for days.
	if isEnvelope {
		e.RetryAfter = time.Duration(env.Error.RetryAfterMS) * time.Millisecond
	}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 && s <= int(maxRetryAfter/time.Second) {
		e.RetryAfter = max(e.RetryAfter, time.Duration(s)*time.Second)
	}
	e.RetryAfter = min(max(e.RetryAfter, 0), maxRetryAfter)
	return e
}

// transportError classifies the failure of a request that has no answer. What the resolver
// and the dialer say comes before the timeout: a dial that timed out means an unreachable server, and
// not one that is slow to answer.
func (c *Client) transportError(err error) error {
	e := c.fail(Broken, err)
	var request *url.Error
	if errors.As(err, &request) {
		e.Err = request.Err // without the request's URL, which is in the text already
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		e.Err = fmt.Errorf("the connection was lost before the answer: %w", e.Err)
	}
	var dns *net.DNSError
	var op *net.OpError
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	var record tls.RecordHeaderError
	var mismatch *pin.MismatchError
	switch {
	case errors.As(err, &mismatch):
		e.Kind = WrongAuthority
	case errors.As(err, &dns):
		e.Kind = NoDNS
	case errors.As(err, &op) && op.Op == "dial":
		e.Kind, e.Err = Unreachable, op.Err
	case errors.As(err, &authority):
		e.Kind = Untrusted
	case errors.As(err, &name):
		e.Kind = WrongName
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired: // not yet valid, too
		e.Kind = CertificateDate
	case errors.As(err, &invalid):
		e.Kind = Untrusted
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, &record):
		e.Kind = NotTLS
	case request != nil && request.Timeout():
		e.Kind = TimedOut
	}
	return e
}

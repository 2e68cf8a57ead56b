package gateway

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/transport/edge"
)

// Scopes that the gateway asks for.
const (
	ScopeSubscribe = "events:subscribe"
	ScopeIngest    = "events:ingest"
	ScopeAdmin     = "kernel:admin"
)

// Identity is who makes a request.
type Identity struct {
	Tenant  string
	Subject string // rates are counted by tenant and subject
	Scopes  interface{ Has(scope string) bool }
	Topics  []string     // topics and prefixes ("log/*") that the token is bound to; nil: all
	Active  func() error // whether it is still good; asked once a second; nil: it cannot end

	open bool // of the configured tokens, or of an open gateway
}

// Authenticator judges bearer tokens that are not the configured ones.
type Authenticator interface {
	// Authenticate returns ErrNoToken when the request has none, an error that wraps
	// ErrForbidden for a good token of the wrong kind, any other for a bad one.
	Authenticate(r *http.Request) (Identity, error)
}

// Errors of an Authenticator.
var (
	ErrNoToken   = errors.New("a bearer token is needed")
	ErrForbidden = errors.New("this token may not do that")
)

var errBadToken = errors.New("the token is not good for this")

// requestError is an error of the request itself, not of its identity.
type requestError struct{ err *manifest.Error }

func (e requestError) Error() string { return e.err.Message }

func refused(code manifest.Code, message string) error {
	return requestError{manifest.E(code, message)}
}

// openScopes are those of the configured tokens' holders, who have shown the one that
// the request needs, and of everybody where there are none.
type openScopes struct{}

func (openScopes) Has(scope string) bool { return scope == ScopeSubscribe || scope == ScopeIngest }

func openIdentity(subject string) Identity {
	return Identity{Tenant: DefaultTenant, Subject: subject, Scopes: openScopes{}, open: true}
}

// identify says who makes the request and that they may do what scope covers.
func (g *Gateway) identify(r *http.Request, scope string) (Identity, error) {
	want := g.opts.SubscribeToken
	if scope == ScopeIngest {
		want = g.opts.IngestToken
	}
	if scope == ScopeSubscribe {
		if t := r.URL.Query().Get("ticket"); t != "" {
			id, ok := g.tickets.look(t, time.Now())
			if !ok || (id.Active != nil && id.Active() != nil) {
				return Identity{}, errBadToken
			}
			return id, nil
		}
	}
	if want == "" && g.opts.Identities == nil {
		return openIdentity("anonymous"), nil
	}
	token, _ := edge.Bearer(r)
	if token == "" {
		return Identity{}, ErrNoToken
	}
	if want != "" && equal(token, want) {
		return openIdentity("token"), nil
	}
	if g.opts.Identities == nil {
		return Identity{}, errBadToken
	}
	id, err := g.opts.Identities.Authenticate(r)
	if err != nil {
		return Identity{}, err
	}
	if id.Scopes == nil || !id.Scopes.Has(scope) {
		return Identity{}, fmt.Errorf("%w: it lacks the scope %s", ErrForbidden, scope)
	}
	return id, nil
}

// equal compares in a time that tells nothing, not even about the length.
func equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// denied answers a request whose identity is not good for it.
func (g *Gateway) denied(w http.ResponseWriter, r *http.Request, err error) {
	var e requestError
	switch {
	case errors.As(err, &e):
		g.fail(w, r, edge.Status(e.err.Code), e.err.Code, e.err.Message)
	case errors.Is(err, ErrForbidden):
		g.fail(w, r, http.StatusForbidden, manifest.SafetyDenied, err.Error())
	default:
		edge.SetChallenge(w.Header(), "agentctl events", !errors.Is(err, ErrNoToken), "")
		g.fail(w, r, http.StatusUnauthorized, manifest.SafetyDenied, err.Error())
	}
}

// maxTickets bounds the tickets that are good at a time.
const maxTickets = 4096

// tickets stand for an identity in a URL, for a short time: a browser's EventSource
// cannot send a header. They may be used more than once.
type tickets struct {
	ttl time.Duration

	mu   sync.Mutex // protects good
	good map[[sha256.Size]byte]grant
}

type grant struct {
	id      Identity
	expires time.Time
}

func (t *tickets) issue(id Identity, now time.Time) (ticket string, expires time.Time, ok bool) {
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails
	ticket = base64.RawURLEncoding.EncodeToString(b[:])
	expires = now.Add(t.ttl)
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.good) >= maxTickets {
		for k, g := range t.good {
			if !g.expires.After(now) {
				delete(t.good, k)
			}
		}
		if len(t.good) >= maxTickets {
			return "", time.Time{}, false
		}
	}
	if t.good == nil {
		t.good = make(map[[sha256.Size]byte]grant)
	}
	t.good[sha256.Sum256([]byte(ticket))] = grant{id, expires}
	return ticket, expires, true
}

// look finds by hash, so that the time it takes tells nothing about the ticket.
func (t *tickets) look(ticket string, now time.Time) (Identity, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	g, ok := t.good[sha256.Sum256([]byte(ticket))]
	return g.id, ok && g.expires.After(now)
}

// ticket gives a ticket to whoever may subscribe.
func (g *Gateway) ticket(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Has("ticket") {
		g.fail(w, r, http.StatusForbidden, manifest.SafetyDenied, "a ticket cannot be had for a ticket")
		return
	}
	id, err := g.identify(r, ScopeSubscribe)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	if wait := g.limits.Take("ticket\n"+id.Tenant+"\n"+id.Subject, ticketRate, burst(ticketRate), time.Now()); wait > 0 {
		g.slowDown(w, r, wait, "too many tickets for this identity")
		return
	}
	ticket, expires, ok := g.tickets.issue(id, time.Now())
	if !ok {
		g.slowDown(w, r, g.opts.TicketTTL, "too many tickets are open")
		return
	}
	edge.WriteJSON(w, http.StatusOK, fmt.Appendf(nil, `{"ticket":%q,"expires_at":%d}`, ticket, expires.UnixMilli()))
}

// maxLimited bounds the identities whose rate is remembered.
const maxLimited = 4096

// ticketRate is how many tickets an identity may have a second.
const ticketRate = 10

// burst is what an identity may do at once: the rate of two seconds.
func burst(rate float64) int { return max(1, int(math.Ceil(2*rate))) }

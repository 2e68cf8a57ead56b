package gateway

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
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

// refusal is an error that knows its answer.
type refusal struct {
	status        int
	code, message string
}

func (e *refusal) Error() string { return e.message }

func refused(status int, code, message string) error { return &refusal{status, code, message} }

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
	token, err := bearer(r)
	if err != nil {
		return Identity{}, err
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

// bearer is the request's token.
func bearer(r *http.Request) (string, error) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(scheme, "Bearer") || token == "" {
		return "", ErrNoToken
	}
	return token, nil
}

// equal compares in a time that tells nothing, not even about the length.
func equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// denied answers a request whose identity is not good for it.
func (g *Gateway) denied(w http.ResponseWriter, r *http.Request, err error) {
	var e *refusal
	switch {
	case errors.As(err, &e):
		g.fail(w, r, e.status, e.code, e.message)
		return
	case errors.Is(err, ErrForbidden):
		g.fail(w, r, http.StatusForbidden, codeDenied, err.Error())
		return
	case errors.Is(err, ErrNoToken): // RFC 6750 section 3.1: no error code for who sent none
		w.Header().Set("WWW-Authenticate", `Bearer realm="agentctl events"`)
	default:
		w.Header().Set("WWW-Authenticate", `Bearer realm="agentctl events", error="invalid_token"`)
	}
	g.fail(w, r, http.StatusUnauthorized, codeDenied, err.Error())
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
		g.fail(w, r, http.StatusForbidden, codeDenied, "a ticket cannot be had for a ticket")
		return
	}
	id, err := g.identify(r, ScopeSubscribe)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	if wait := g.limits.take("ticket\n"+id.Tenant+"\n"+id.Subject, 10, time.Now()); wait > 0 {
		g.slowDown(w, r, wait, "too many tickets for this identity")
		return
	}
	ticket, expires, ok := g.tickets.issue(id, time.Now())
	if !ok {
		g.slowDown(w, r, g.opts.TicketTTL, "too many tickets are open")
		return
	}
	writeJSON(w, http.StatusOK, strconv.AppendInt([]byte(`{"ticket":"`+ticket+`","expires_at":`), expires.UnixMilli(), 10))
}

// limits are token buckets by key. The zero value is ready.
type limits struct {
	mu      sync.Mutex // protects buckets
	buckets map[string]*bucket
}

type bucket struct {
	left float64
	at   time.Time
}

// maxBuckets bounds the identities that are remembered. A full bucket is forgotten: a
// new one is as good.
const maxBuckets = 4096

// take takes one from key's bucket, or says when there will be one. A bucket holds what
// comes in two seconds.
func (l *limits) take(key string, rate float64, now time.Time) (wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.buckets[key]
	if b == nil {
		if len(l.buckets) >= maxBuckets {
			for k, b := range l.buckets {
				if now.Sub(b.at) > 2*time.Second {
					delete(l.buckets, k)
				}
			}
			if len(l.buckets) >= maxBuckets {
				return time.Second
			}
		}
		if l.buckets == nil {
			l.buckets = make(map[string]*bucket)
		}
		b = &bucket{left: 2 * rate, at: now}
		l.buckets[key] = b
	}
	b.left = min(2*rate, b.left+rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.left < 1 {
		return time.Duration((1 - b.left) / rate * float64(time.Second))
	}
	b.left--
	return 0
}

// charge takes n more from key's bucket, which may then owe; whoever comes next waits.
func (l *limits) charge(key string, n float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.buckets[key]; b != nil {
		b.left -= n
	}
}

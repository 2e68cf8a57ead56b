package gateway

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"time"

	"agentctl/transport/edge"
)

const (
	maxTickets = 4096 // valid at a time
	ticketRate = 10   // per second and identity
)

// tickets are short-lived credentials for use in a URL, because a browser's EventSource
// cannot send a header. A ticket may be used more than once: EventSource reconnects with
// the same URL. It ends with the identity that it was issued to.
type tickets struct {
	ttl time.Duration

	mu     sync.Mutex                      // protects byHash
	byHash map[[sha256.Size]byte]ticketFor // by hash, so that the time of a lookup reveals nothing
}

// ticketFor is what a ticket stands for.
type ticketFor struct {
	id      Identity
	expires time.Time
}

func newTickets(ttl time.Duration) *tickets {
	return &tickets{ttl: ttl, byHash: make(map[[sha256.Size]byte]ticketFor)}
}

// issue makes a ticket; ok is false while maxTickets are valid.
func (t *tickets) issue(id Identity, now time.Time) (ticket string, expires time.Time, ok bool) {
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails
	ticket = base64.RawURLEncoding.EncodeToString(b[:])
	expires = now.Add(t.ttl)
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.byHash) >= maxTickets {
		maps.DeleteFunc(t.byHash, func(_ [sha256.Size]byte, f ticketFor) bool { return !f.expires.After(now) })
	}
	if len(t.byHash) >= maxTickets {
		return "", time.Time{}, false
	}
	t.byHash[sha256.Sum256([]byte(ticket))] = ticketFor{id, expires}
	return ticket, expires, true
}

// identity returns the identity of a valid ticket, unless that identity has ended.
func (t *tickets) identity(ticket string, now time.Time) (Identity, error) {
	t.mu.Lock()
	f := t.byHash[sha256.Sum256([]byte(ticket))]
	t.mu.Unlock()
	if !f.expires.After(now) || (f.id.Active != nil && f.id.Active() != nil) {
		return Identity{}, errInvalidToken
	}
	return f.id, nil
}

// issueTicket answers with a ticket for the identity of a request that may subscribe. A ticket
// cannot be used to get another one: anyone who saw a URL could renew its access without end.
func (g *Gateway) issueTicket(w http.ResponseWriter, r *http.Request) error {
	if r.URL.Query().Has("ticket") {
		return denied("a ticket cannot be exchanged for another one; send the token")
	}
	id, err := g.identify(r, ScopeSubscribe)
	if err != nil {
		return unauthorized(err)
	}
	if wait := g.limits.Take("ticket\n"+id.key(), ticketRate, burst(ticketRate), time.Now()); wait > 0 {
		return rateLimited("too many tickets for this identity", wait)
	}
	ticket, expires, ok := g.tickets.issue(id, time.Now())
	if !ok {
		return rateLimited("too many tickets are open", g.opts.TicketTTL)
	}
	edge.WriteJSON(w, http.StatusOK, fmt.Appendf(nil, `{"ticket":%q,"expires_at":%d}`, ticket, expires.UnixMilli()))
	return nil
}

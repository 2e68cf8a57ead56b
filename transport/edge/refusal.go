package edge

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"net/netip"
	"time"

	"golang.org/x/time/rate"
)

// A client that is refused may ask again at once, and hundreds of such clients keep a CPU busy with
// refusals. So refusals beyond a rate are answered late. Whoever waits costs nothing but the
// connection, and a request that is not refused never waits.
const (
	// An identity, or an address without one, may be refused this many times a second, after a burst.
	refusalRate  = 50
	refusalBurst = 200
	// An address may have this many requests served for which no identity was needed, on connections
	// without a token; more wait in the same way.
	openRequestRate  = 100
	openRequestBurst = 500
	// All clients without an identity together may be refused this often: floods have many addresses.
	strangersRefusalRate  = 200
	strangersRefusalBurst = 1000
	// maxRefusalDelay is below the 5 s in which a client of ours expects the head of a response.
	maxRefusalDelay = 2 * time.Second
	// Above this many refusals that wait at a time, a Pool, the connection is closed instead.
	maxDelayedRefusals = 4096
	maxRefusalKeys     = 4096 // identities and addresses whose rate is tracked; the one used last is dropped first
)

// Refusals delays refusals. Its methods may be called from any goroutine.
type Refusals struct {
	rates     *Limiter // by Identity
	strangers *rate.Limiter
	waiting   *Pool
}

// NewRefusals makes Refusals.
func NewRefusals() *Refusals {
	return &Refusals{NewLimiter(maxRefusalKeys, true), rate.NewLimiter(strangersRefusalRate, strangersRefusalBurst), NewPool(maxDelayedRefusals)}
}

// Stats returns the figures of refusals that wait.
func (f *Refusals) Stats() PoolStats { return f.waiting.Stats() }

// OfAddress is the Identity of a client that proved none.
func OfAddress(a netip.Addr) Identity { return Identity{Subject: "address " + AddressKey(a).String()} }

// Delay counts a refusal and waits, if there were too many, up to 2 s or until ctx ends or stop is
// closed. It returns false when the client is not worth an answer: it has left, or too many wait.
func (f *Refusals) Delay(ctx context.Context, stop <-chan struct{}, id Identity) bool {
	return f.wait(ctx, stop, id, f.count(id, time.Now()))
}

// delayOpen is Delay for a request of an address that was served without an identity.
func (f *Refusals) delayOpen(ctx context.Context, stop <-chan struct{}, address Identity) bool {
	now := time.Now()
	return f.wait(ctx, stop, address, refusalDelay(f.rates.Bucket("open\n"+address.Subject, openRequestRate, openRequestBurst, now), now))
}

// wait waits in one of the places of an identity.
func (f *Refusals) wait(ctx context.Context, stop <-chan struct{}, id Identity, delay time.Duration) bool {
	if delay == 0 {
		return true
	}
	if !f.waiting.TryAcquire(id, 1) {
		return false
	}
	defer f.waiting.Release(id, 1)
	t := time.NewTimer(delay)
	defer t.Stop()
	select {
	case <-t.C:
	case <-stop:
	case <-ctx.Done():
		return false
	}
	return true
}

// count counts a refusal, and returns how long its answer waits.
func (f *Refusals) count(id Identity, now time.Time) time.Duration {
	delay := refusalDelay(f.rates.Bucket(id.Tenant+"\n"+id.Subject, refusalRate, refusalBurst, now), now)
	if id.Tenant == "" {
		delay = max(delay, refusalDelay(f.strangers, now))
	}
	return delay
}

// refusalDelay takes a token from a bucket, and returns how long to wait for it. A refusal that waits
// for the maximum takes none: a flood that has ended slows nobody for longer than that.
func refusalDelay(b *rate.Limiter, now time.Time) time.Duration {
	res := b.ReserveN(now, 1)
	delay := res.DelayFrom(now)
	if delay > maxRefusalDelay {
		res.CancelAt(now)
		return maxRefusalDelay
	}
	return delay
}

// delayRefusals returns a handler that delays answers beyond their rate: refusals (4xx), and all answers
// to strangers. It waits after next has written the answer, which works because neither net/http nor
// directConn sends a small response before its handler has returned. A request whose connection was
// hijacked has its answer already.
func (s *Server) delayRefusals(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := ConnOf(r)
		if conn == nil {
			next.ServeHTTP(w, r)
			return
		}
		// Of the request before, which behind a proxy may be another client's. Authenticate sets it if
		// this one has a token.
		conn.current = nil
		var status int
		if d, ok := w.(*directWriter); ok {
			next.ServeHTTP(d, r)
			if d.isHijacked {
				return
			}
			status = d.status
		} else {
			sw := &statusWriter{ResponseWriter: w}
			next.ServeHTTP(sw, r)
			if sw.isHijacked {
				return
			}
			status = sw.status
		}
		isRefusal := status >= 400 && status < 500
		if !isRefusal && !conn.isStranger() {
			return
		}
		var inTime bool
		switch id := conn.current; {
		case id != nil && isRefusal:
			inTime = conn.conns.refusals.Delay(r.Context(), s.direct.draining, *id)
		case isRefusal:
			inTime = conn.conns.refusals.Delay(r.Context(), s.direct.draining, conn.client(r))
		default:
			inTime = conn.conns.refusals.delayOpen(r.Context(), s.direct.draining, conn.client(r))
		}
		if !inTime {
			conn.chargeAddress()
			_ = conn.Close()
		}
	})
}

// client is the Identity of the address that a request comes from.
func (c *Conn) client(r *http.Request) Identity { return OfAddress(c.conns.o.Proxies.ClientAddr(r)) }

// statusWriter notes what became of a response.
type statusWriter struct {
	http.ResponseWriter
	status     int // 0: none was set, or 200
	isHijacked bool
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	if w.status == 0 && status >= 200 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Flush implements http.Flusher.
func (w *statusWriter) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// Hijack implements http.Hijacker, which the WebSocket library asks for.
func (w *statusWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.isHijacked = true
	return http.NewResponseController(w.ResponseWriter).Hijack()
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

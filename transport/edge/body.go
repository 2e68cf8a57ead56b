package edge

import (
	"context"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// SetBodyDeadline bounds the time to read r's body. Call it before anything is written:
// before it sends a response, net/http reads the rest of the body, and waits for it without
// a limit. Bodies.Read removes the deadline.
func SetBodyDeadline(w http.ResponseWriter, r *http.Request, timeout time.Duration) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(timeout))
	}
}

// Bodies bounds the memory of the request bodies of a server, by identity (Pool), and how fast a
// tenant sends them, by size and by what they take to decode. A body counts from before it is read until
// Release.
type Bodies struct {
	pool *Pool
	pace *Limiter // of bytes, by tenant
}

// Bounds of Bodies, in bytes.
const (
	maxBodies = 64 << 20
	// bodyRate is what a tenant may send in a second, of bodies above uncountedBody. Reading and
	// checking a megabyte takes 3 to 15 ms of a CPU: without this bound the bodies of one tenant made
	// every other request wait for a second.
	bodyRate  = 4 << 20
	bodyBurst = 8 << 20 // above every limit of one body
	// A member of an object takes 0.8 us to decode and check, as long as a hundred bytes of a string,
	// and an element of an array a tenth of that. They count as somewhat more, because such work delays
	// everybody else's.
	memberBytes  = 256
	elementBytes = 16
	maxMembers   = 10_000 // of one body: 8 ms

	maxPacedTenants = 4096
	// uncountedBody is the size up to which a body counts as part of its connection: the reader
	// of the connection has such a buffer anyway.
	uncountedBody = 4 << 10
)

// bodyWait is how long a request waits for the rate and the memory of its body.
const bodyWait = 2 * time.Second

// NewBodies makes Bodies.
func NewBodies() *Bodies { return &Bodies{NewPool(maxBodies), NewLimiter(maxPacedTenants, true)} }

// Stats returns the figures, in bytes.
func (b *Bodies) Stats() PoolStats { return b.pool.Stats() }

// Read reads the body of an identity's request, of at most limit bytes. It first waits up to 2 s
// for its rate and for the memory that Content-Length announces; without that header it does so as
// the body arrives. The caller passes held to Release when it no longer uses the body.
//
// The error wraps *http.MaxBytesError when there are more than limit bytes. It is a *manifest.Error,
// to be answered with its Status, when the identity or its tenant has its share already (429), or when
// the body has more than 10,000 members (400). After any
// error the connection is closed and the deadline of SetBodyDeadline stays in force, so the
// server does not wait for the rest.
func (b *Bodies) Read(w http.ResponseWriter, r *http.Request, id Identity, limit int64) (body []byte, held int64, err error) {
	if n := r.ContentLength; n >= 0 && n <= min(limit, uncountedBody) { // nearly all of them
		if d, ok := r.Body.(*directBody); ok {
			return d.take(), 0, nil
		}
		body = make([]byte, n)
		if _, err = io.ReadFull(r.Body, body); err != nil {
			w.Header().Set("Connection", "close")
			return nil, 0, err
		}
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
		return body, 0, nil
	}
	return b.readCounted(w, r, id, limit)
}

// readCounted is Read for a body that may be large.
func (b *Bodies) readCounted(w http.ResponseWriter, r *http.Request, id Identity, limit int64) (body []byte, held int64, err error) {
	grow := func(size int64) error {
		if size <= max(held, uncountedBody) {
			return nil
		}
		ctx, cancel := context.WithTimeout(r.Context(), bodyWait)
		defer cancel()
		// Only what exceeds held: a body that arrives in pieces is charged once for each byte.
		if !b.take(ctx, id, size-held) {
			<-ctx.Done() // a client that tries again at once waits here, where it costs least
			// net/http would read 256 KiB of the body before it answers.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now())
			return errTooManyBodies
		}
		held = size
		return nil
	}
	in := http.MaxBytesReader(w, r.Body, limit)
	if n := r.ContentLength; n >= 0 && n <= limit {
		if err = grow(n); err == nil {
			body = make([]byte, n)
			_, err = io.ReadFull(in, body)
		}
	} else {
		body, err = readGrowing(in, limit, grow)
	}
	if err == nil && held > 0 {
		err = b.chargeValues(r.Context(), id, body)
	}
	if err != nil {
		w.Header().Set("Connection", "close")
		b.Release(id, held)
		return nil, 0, err
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	return body, held, nil
}

// chargeValues charges the members and elements of a body before it is decoded.
func (b *Bodies) chargeValues(ctx context.Context, id Identity, body []byte) error {
	members, elements := strictjson.Count(body)
	if members > maxMembers {
		return manifest.E(manifest.BadRequest, "the body has more than 10,000 members; send fewer in one request")
	}
	n := min(members*memberBytes+elements*elementBytes, bodyBurst)
	if n == 0 {
		return nil // waiting for no token consumes rate, too
	}
	ctx, cancel := context.WithTimeout(ctx, bodyWait)
	defer cancel()
	if b.paceOf(id).WaitN(ctx, n) != nil {
		<-ctx.Done()
		return errTooManyBodies
	}
	return nil
}

// errTooManyBodies is for a client whose body got no memory in time.
var errTooManyBodies = Exhausted("too many large requests of this identity are in progress; send fewer at a time", time.Second)

// take takes n bytes of an identity's share, and of what its tenant may send now.
func (b *Bodies) take(ctx context.Context, id Identity, n int64) bool {
	return b.paceOf(id).WaitN(ctx, int(n)) == nil && b.pool.Acquire(ctx, id, n)
}

// paceOf returns the bucket of an identity's tenant.
func (b *Bodies) paceOf(id Identity) *rate.Limiter {
	sender := id.Tenant
	if sender == "" { // a board that joins: its address
		sender = "address " + id.Subject
	}
	return b.pace.Bucket(sender, bodyRate, bodyBurst, time.Now())
}

// readGrowing is io.ReadAll that asks before it allocates. in ends with an error after limit bytes.
func readGrowing(in io.Reader, limit int64, grow func(size int64) error) ([]byte, error) {
	b := make([]byte, 0, 512)
	for {
		n, err := in.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case err == io.EOF:
			return b, nil
		case err != nil:
			return nil, err
		}
		if len(b) == cap(b) {
			size := int(min(2*int64(cap(b)), limit+1))
			if err := grow(int64(size)); err != nil {
				return nil, err
			}
			b = append(make([]byte, 0, size), b...)
		}
	}
}

// Release ends what Read holds for an identity.
func (b *Bodies) Release(id Identity, held int64) {
	if held > 0 {
		b.pool.Release(id, held)
	}
}

// IsJSON reports whether a Content-Type is JSON in UTF-8. A web page cannot send this type to
// another origin without a CORS preflight.
func IsJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	t, params, err := mime.ParseMediaType(contentType)
	charset, given := params["charset"]
	return err == nil && t == "application/json" && (!given || strings.EqualFold(charset, "utf-8"))
}

package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
)

// maxRevocations bounds the deny list. Below half of it nothing is pruned: if the clock
// jumps ahead and back, no revocation may have been lost in between.
const maxRevocations = 100_000

// denyList is an immutable snapshot of the revocations; installDenyList replaces it. Each map
// gives the second up to which a token counts as revoked, by the time it was issued.
//
// A revocation by subject, node or tenant is a point in time: it stops every token that was
// issued up to that second, seen by this relay or not, and none that is minted later
// (earliestIssue). A revocation by jti stops that token whenever it was issued. Both stay
// in the list until every token they can stop has expired, at most MaxTTL. Among those by jti
// are thumbprints of keys, which stop every token that is bound to the key.
type denyList struct {
	revision               int64 // value of changes.revocations when it was read
	jti, sub, node, tenant map[string]int64
}

// revokes reports whether the identity's token is revoked. Most relays have no
// revocation, so empty maps are skipped before anything is hashed.
func (d *denyList) revokes(id *Identity) bool {
	return issuedBefore(d.jti, id.JTI, id.issuedAt) || issuedBefore(d.jti, id.KeyThumbprint, id.issuedAt) || issuedBefore(d.tenant, id.Tenant, id.issuedAt) ||
		issuedBefore(d.sub, id.Subject, id.issuedAt) || issuedBefore(d.node, id.NodeID, id.issuedAt)
}

// issuedBefore reports whether m has the key with a second at or after issuedAt.
func issuedBefore(m map[string]int64, key string, issuedAt int64) bool {
	if len(m) == 0 || key == "" {
		return false
	}
	at, ok := m[key]
	return ok && issuedAt <= at
}

// earliestIssue returns the earliest second from now on at which a token of this holder
// can be issued without falling under a revocation made so far.
func (d *denyList) earliestIssue(tenant, sub, node string, now int64) int64 {
	return max(now, d.tenant[tenant]+1, d.sub[sub]+1, d.node[node]+1)
}

// querier is a *sql.DB or a *sql.Tx.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// loadDenyList reads all revocations. The list is bounded (maxRevocations) and changes
// rarely, so it is not read in parts.
func loadDenyList(ctx context.Context, q querier) (*denyList, error) {
	d := &denyList{jti: map[string]int64{}, sub: map[string]int64{}, node: map[string]int64{}, tenant: map[string]int64{}}
	// The counter comes first: a row that is added after it makes the next Refresh
	// load the list again.
	if err := q.QueryRowContext(ctx, "SELECT revocations FROM changes").Scan(&d.revision); err != nil {
		return nil, err
	}
	kinds := map[string]map[string]int64{"jti": d.jti, "sub": d.sub, "node": d.node, "tenant": d.tenant}
	return d, forEachRow(ctx, q, func(scan func(...any) error) error {
		var kind, value string
		var at int64
		if err := scan(&kind, &value, &at); err != nil {
			return err
		}
		if kind == "jti" { // names one token, whenever it was issued
			at = math.MaxInt64
		}
		kinds[kind][value] = at
		return nil
	}, "SELECT kind, value, at FROM revocations")
}

// installDenyList puts a snapshot in force, unless a later one is.
func (s *Store) installDenyList(d *denyList) {
	for {
		old := s.deny.Load()
		if old != nil && old.revision > d.revision || s.deny.CompareAndSwap(old, d) {
			return
		}
	}
}

// Active reports whether a verified identity still holds: its token has not expired
// and was not revoked. It costs about 0.1 us, so call it each second on everything that
// lives long (streams, device links). The error is an *Error as of Verify.
func (s *Store) Active(id *Identity) error {
	now := s.now().Unix()
	if err := id.expiryError(now); err != nil {
		return err
	}
	if id.key.expired(now) {
		return errKey
	}
	return s.CheckRevoked(id)
}

// ActiveFromNow returns Active for what begins now and lasts: a stream, an MCP session. It measures
// the rest of the token's time by the monotonic clock, so that a step of the wall clock ends
// nothing early and extends nothing.
func (s *Store) ActiveFromNow(id *Identity) func() error {
	end := id.ValidUntil()
	if end.IsZero() {
		return func() error { return s.CheckRevoked(id) }
	}
	began, remaining := time.Now(), end.Sub(s.now())
	return func() error {
		if time.Since(began) >= remaining {
			return id.expiryError(id.validUntil)
		}
		return s.CheckRevoked(id)
	}
}

// CheckRevoked is Active without the expiry, for a link whose grant may outlive the token with
// which it began.
func (s *Store) CheckRevoked(id *Identity) error {
	switch {
	case id.key.dropped():
		return errKey
	case s.deny.Load().revokes(id):
		return errRevoked
	}
	return nil
}

// Revision changes with each revocation, and when a signing key is taken out of use. A holder
// of thousands of identities calls Active on them only when it has changed, or when
// ValidUntil has passed.
func (s *Store) Revision() int64 { return s.deny.Load().revision + s.keyDrops.Load() }

// RevokeRequest selects what to revoke: exactly one of the first four fields is set.
type RevokeRequest struct {
	JTI     string // one token
	Subject string // every token issued to this subject so far, in any tenant
	Node    string // every token issued to this node so far: its id, or its name if only one node has it
	Tenant  string // every token issued in this tenant so far
	DryRun  bool   // only count
	// InTenant is the tenant of who asks over HTTP: with JTI, a token that was not minted for
	// it is ErrNoToken. Empty is the operator, who may revoke everything.
	InTenant string
}

// errDryRun rolls back a transaction that was only to count.
var errDryRun = errors.New("dry run")

// Revoke stops tokens issued up to now: here at once, in other processes within PollInterval. It
// returns how many live tokens it stopped. 0 can mean a mistyped word; the revocation
// is recorded all the same, because a token may be older than this database. Tokens
// minted afterwards for the same subject, node or tenant work.
func (s *Store) Revoke(ctx context.Context, req RevokeRequest) (n int, err error) {
	kind, value, err := s.parseRevocation(ctx, req)
	if err != nil {
		return 0, fmt.Errorf("revoke: %w", err)
	}
	var deny *denyList
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
		if req.InTenant != "" {
			var own bool
			if err := tx.QueryRow("SELECT EXISTS (SELECT 1 FROM tokens WHERE jti = ? AND tenant = ?)", req.JTI, req.InTenant).Scan(&own); err != nil {
				return err
			}
			if !own {
				return ErrNoToken
			}
		}
		if n, err = addRevocation(tx, kind, value, s.now().Unix(), maxRevocations); err != nil {
			return err
		}
		if kind == "jti" {
			if err := revokeKeyOfTokenTx(tx, value, s.now().Unix()); err != nil {
				return err
			}
		}
		if req.DryRun {
			return errDryRun
		}
		deny, err = loadDenyList(context.Background(), tx)
		return err
	}, func() { s.installDenyList(deny) })
	switch {
	case errors.Is(err, errDryRun):
		return n, nil
	case err != nil:
		return 0, fmt.Errorf("revoke: %w", err)
	}
	s.log.Info("tokens revoked", zap.String("by", kind), zap.String("value", value), zap.Int("live", n))
	return n, nil
}

// parseRevocation turns a request into kind and value of a row in the deny list.
func (s *Store) parseRevocation(ctx context.Context, req RevokeRequest) (kind, value string, err error) {
	set := 0
	for k, v := range map[string]string{"jti": req.JTI, "sub": req.Subject, "node": req.Node, "tenant": req.Tenant} {
		if v != "" {
			set, kind, value = set+1, k, v
		}
	}
	if set != 1 {
		return "", "", errors.New("give exactly one of jti, sub, node and tenant")
	}
	ok := true
	switch kind {
	case "jti":
		value, ok = manifest.ParseULID(value)
	case "sub":
		ok = subjectRE.MatchString(value)
	case "tenant":
		ok = manifest.ValidTenant(value)
	case "node":
		value, err = s.nodeByIDOrName(ctx, value)
	}
	if err == nil && !ok {
		err = fmt.Errorf("the %s is malformed; see: agentctl token ls", kind)
	}
	return kind, value, err
}

// isRevokedSQL is true for a row t of tokens that the deny list stops: denyList.revokes
// in SQL. It needs no thumbprints: a key is revoked together with the jti of its newest token
// (revokeKeyOfTokenTx), and only that token of a key has a row (issueTx).
const isRevokedSQL = `EXISTS (SELECT 1 FROM revocations r WHERE
	(r.kind = 'jti' AND r.value = t.jti) OR
	(r.kind = 'sub' AND r.value = t.sub AND t.iat <= r.at) OR
	(r.kind = 'node' AND r.value = t.node AND t.iat <= r.at) OR
	(r.kind = 'tenant' AND r.value = t.tenant AND t.iat <= r.at))`

// addRevocation inserts or extends a row of the deny list and counts the live tokens
// that it stops. A kind is also the name of its column in tokens. The row is needed
// until the last token that it can stop has expired (column until).
func addRevocation(tx *sql.Tx, kind, value string, now int64, limit int) (live int, err error) {
	if err := pruneDenyList(tx, now, limit); err != nil {
		return 0, err
	}
	var lastIssued, lastExp int64
	err = tx.QueryRow("SELECT coalesce(max(iat), 0), coalesce(max(exp), 0), count(*) FILTER (WHERE t.exp > ? AND NOT "+isRevokedSQL+
		") FROM tokens t WHERE t."+kind+" = ?", now-leewaySeconds, value).Scan(&lastIssued, &lastExp, &live)
	if err != nil {
		return 0, err
	}
	// A token minted right after an earlier revocation is issued a second ahead of the
	// clock (recordToken); `at` must reach it.
	stop := max(now, lastIssued)
	end := max(stop+int64(MaxTTL/time.Second), lastExp) + leewaySeconds
	if _, err := tx.Exec(`INSERT INTO revocations (kind, value, at, until) VALUES (?, ?, ?, ?)
		ON CONFLICT DO UPDATE SET at = max(at, excluded.at), until = max(until, excluded.until)`, kind, value, stop, end); err != nil {
		return 0, err
	}
	_, err = tx.Exec("UPDATE changes SET revocations = revocations + 1")
	return live, err
}

// pruneDenyList drops rows of a long deny list that stop only expired tokens.
func pruneDenyList(tx *sql.Tx, now int64, limit int) error {
	if _, err := tx.Exec("DELETE FROM revocations WHERE until < ? AND (SELECT count(*) FROM revocations) >= ?", now, limit/2); err != nil {
		return err
	}
	var n int
	if err := tx.QueryRow("SELECT count(*) FROM revocations").Scan(&n); err != nil || n < limit {
		return err
	}
	return fmt.Errorf("%w: %d revocations; revoke by tenant, or stop the relay and remove its keys to void every token", ErrFull, n)
}

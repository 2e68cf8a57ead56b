package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
)

// maxRevocations bounds the deny list. Below half of it nothing is pruned: a clock that
// jumps ahead must not revive a token.
const maxRevocations = 100_000

// denyList is a snapshot of the revocations. It is never changed, only replaced.
type denyList struct {
	revision          int64               // value of changes.revocations that it was read at
	jti               map[string]struct{} // upper case ULIDs
	sub, node, tenant map[string]int64    // tokens issued at or before this second are over
}

// revokes reports whether the identity's token is revoked. Mostly all maps are empty.
func (d *denyList) revokes(id *Identity) bool {
	if len(d.jti) > 0 {
		if _, ok := d.jti[id.JTI]; ok {
			return true
		}
	}
	return issuedBefore(d.tenant, id.Tenant, id.issuedAt) || issuedBefore(d.sub, id.Subject, id.issuedAt) || issuedBefore(d.node, id.NodeID, id.issuedAt)
}

func issuedBefore(m map[string]int64, key string, issued int64) bool {
	if len(m) == 0 || key == "" {
		return false
	}
	at, ok := m[key]
	return ok && issued <= at
}

// earliestIssue is the earliest second at which a token of this holder may be issued so that
// no revocation made so far stops it.
func (d *denyList) earliestIssue(tenant, sub, node string, now int64) int64 {
	for _, at := range []int64{d.tenant[tenant], d.sub[sub], d.node[node]} {
		now = max(now, at+1)
	}
	return now
}

// querier is a *sql.DB or a *sql.Tx.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func loadDenyList(ctx context.Context, q querier) (*denyList, error) {
	d := &denyList{jti: map[string]struct{}{}, sub: map[string]int64{}, node: map[string]int64{}, tenant: map[string]int64{}}
	// The counter first: a row that is added in between is then read once more later.
	if err := q.QueryRowContext(ctx, "SELECT revocations FROM changes").Scan(&d.revision); err != nil {
		return nil, err
	}
	rows, err := q.QueryContext(ctx, "SELECT kind, value, at FROM revocations")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var kind, value string
		var at int64
		if err := rows.Scan(&kind, &value, &at); err != nil {
			return nil, err
		}
		switch kind {
		case "jti":
			d.jti[value] = struct{}{}
		case "sub":
			d.sub[value] = at
		case "node":
			d.node[value] = at
		case "tenant":
			d.tenant[value] = at
		}
	}
	return d, rows.Err()
}

// installDenyList puts a snapshot in force, unless a later one is.
func (s *Store) installDenyList(d *denyList) {
	for {
		old := s.deny.Load()
		if old != nil && old.revision > d.revision {
			return
		}
		if s.deny.CompareAndSwap(old, d) {
			return
		}
	}
}

// Active reports whether a verified identity still holds: its token has not expired
// and was not revoked. It costs about 0.1 us, so ask each second on anything that lives
// long (streams, device links). The error is an *Error as of Verify.
func (s *Store) Active(id *Identity) error {
	if err := id.expiryError(s.now().Unix()); err != nil {
		return err
	}
	if s.deny.Load().revokes(id) {
		return errRevoked
	}
	return nil
}

// Revision changes with each revocation, so that those who keep thousands of identities
// ask Active about them only then, and when Until has come.
func (s *Store) Revision() int64 { return s.deny.Load().revision }

// RevokeRequest says what to revoke: exactly one field is set.
type RevokeRequest struct {
	JTI     string // one token
	Subject string // every token issued to this subject so far, in any tenant
	Node    string // every token issued to this node so far: its id, or its name if only one node has it
	Tenant  string // every token issued in this tenant so far
	DryRun  bool   // only count
}

// errDryRun takes a transaction back that was only to count.
var errDryRun = errors.New("dry run")

// Revoke stops tokens: here at once, in other processes within PollInterval. It
// returns how many live tokens it stopped; 0 can mean that the word was mistyped, but
// the revocation is kept even so, because a token may be older than this database.
// Tokens minted afterwards for the same subject, node or tenant work.
func (s *Store) Revoke(ctx context.Context, req RevokeRequest) (n int, err error) {
	kind, value, err := s.parseRevocation(ctx, req)
	if err != nil {
		return 0, err
	}
	var fresh *denyList
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		live, err := addRevocation(tx, kind, value, s.now().Unix(), maxRevocations)
		if err != nil {
			return err
		}
		if n = live; req.DryRun {
			return errDryRun
		}
		fresh, err = loadDenyList(context.Background(), tx)
		return err
	}, func() { s.installDenyList(fresh) })
	if errors.Is(err, errDryRun) {
		return n, nil
	}
	if err != nil {
		return 0, fmt.Errorf("revoke: %w", err)
	}
	s.log.Info("tokens revoked", zap.String("by", kind), zap.String("value", value), zap.Int("live", n))
	return n, nil
}

// parseRevocation turns a request into a row of the deny list.
func (s *Store) parseRevocation(ctx context.Context, req RevokeRequest) (kind, value string, err error) {
	set := 0
	for k, v := range map[string]string{"jti": req.JTI, "sub": req.Subject, "node": req.Node, "tenant": req.Tenant} {
		if v != "" {
			set, kind, value = set+1, k, v
		}
	}
	if set != 1 {
		return "", "", errors.New("revoke: give exactly one of --jti, --sub, --node and --tenant")
	}
	ok := true
	switch kind {
	case "jti":
		value, ok = manifest.ParseULID(value)
	case "sub":
		ok = validSubject(value)
	case "tenant":
		ok = manifest.ValidTenant(value)
	case "node":
		value, err = s.nodeByIDOrName(ctx, value)
	}
	if err == nil && !ok {
		err = fmt.Errorf("revoke: the --%s is malformed; see: agentctl token ls", kind)
	}
	return kind, value, err
}

// column is where a kind of revocation is found in tokens.
var column = map[string]string{"jti": "jti", "sub": "sub", "node": "node", "tenant": "tenant"}

// isRevokedSQL is true for a row t of tokens that the deny list stops.
const isRevokedSQL = `EXISTS (SELECT 1 FROM revocations r WHERE
	(r.kind = 'jti' AND r.value = t.jti) OR
	(r.kind = 'sub' AND r.value = t.sub AND t.iat <= r.at) OR
	(r.kind = 'node' AND r.value = t.node AND t.iat <= r.at) OR
	(r.kind = 'tenant' AND r.value = t.tenant AND t.iat <= r.at))`

func addRevocation(tx *sql.Tx, kind, value string, now int64, limit int) (live int, err error) {
	if err := pruneDenyList(tx, now, limit); err != nil {
		return 0, err
	}
	where := " FROM tokens t WHERE t." + column[kind] + " = ?"
	// A token minted right after an earlier revocation is issued a second ahead of the
	// clock; `at` must reach it.
	var at, until sql.NullInt64
	if err := tx.QueryRow("SELECT max(iat), max(exp)"+where, value).Scan(&at, &until); err != nil {
		return 0, err
	}
	if err := tx.QueryRow("SELECT count(*)"+where+" AND t.exp > ? AND NOT "+isRevokedSQL, value, now-leewaySeconds).Scan(&live); err != nil {
		return 0, err
	}
	stop := max(now, at.Int64)
	end := max(stop+int64(MaxTTL/time.Second), until.Int64) + leewaySeconds
	if _, err := tx.Exec(`INSERT INTO revocations (kind, value, at, until) VALUES (?, ?, ?, ?)
		ON CONFLICT DO UPDATE SET at = max(at, excluded.at), until = max(until, excluded.until)`, kind, value, stop, end); err != nil {
		return 0, err
	}
	_, err = tx.Exec("UPDATE changes SET revocations = revocations + 1")
	return live, err
}

// pruneDenyList makes room in a long deny list by dropping what stops only tokens that
// have expired anyway.
func pruneDenyList(tx *sql.Tx, now int64, limit int) error {
	var n int
	if err := tx.QueryRow("SELECT count(*) FROM revocations").Scan(&n); err != nil || n < limit/2 {
		return err
	}
	if _, err := tx.Exec("DELETE FROM revocations WHERE until < ?", now); err != nil {
		return err
	}
	if err := tx.QueryRow("SELECT count(*) FROM revocations").Scan(&n); err != nil || n < limit {
		return err
	}
	return fmt.Errorf("%w: %d revocations; revoke whole tenants (--tenant), or stop the relay and remove its keys to void every token", ErrFull, n)
}

package auth

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/zap"

	"agentctl/manifest"
)

// DefaultTenant is the tenant of a relay that has only one.
const DefaultTenant = "default"

// Bounds of minting.
const (
	MaxMintCount          = 10_000  // tokens of one Mint
	maxTokens             = 500_000 // rows in the table of minted tokens
	minTTL                = time.Second
	expiredTokenRetention = 30 * day // an expired token stays in `token ls` this long
)

// MintRequest describes the tokens to make.
type MintRequest struct {
	Class    string        // agent, device, enroll, a preset, or a claim value such as agent_runtime
	Tenant   string        // default DefaultTenant
	Subject  string        // agent id, ^[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}$; default: a new one each; not for devices
	NodeID   string        // devices: a node id, or a name or id prefix of a registered node; default: a new node each
	Scopes   []string      // default: those of the class
	TTL      time.Duration // default 90 days for agents, 1 year for devices, 1 hour for enrollment
	Count    int           // default 1, at most MaxMintCount; more than one excludes NodeID
	Instance string        // devices: hex SHA-256 of the instance_id that the token is bound to; default none
	Gen      int           // devices: generation; default 1
	DryRun   bool          // check only: nothing is recorded, and the results have no Token
}

// Minted is one new token. Token is a secret: print it once, do not log it.
type Minted struct {
	Token   string    `json:"token,omitempty"`
	JTI     string    `json:"jti"`
	Class   string    `json:"class"`
	Tenant  string    `json:"tenant"`
	Subject string    `json:"subject"`
	NodeID  string    `json:"node_id,omitempty"`
	Scopes  Scopes    `json:"scopes"`
	Expires time.Time `json:"expires"`

	issuedAt, notBefore int64  // Unix seconds
	keyThumbprint       string // claim cnf.jkt; "": none
	keysRevision        int64  // value of changes.keys when the token was recorded
}

// Mint makes tokens. It registers the node of a device token, so that a call to a board
// that never connected fails with "offline" and not with "denied".
func (s *Store) Mint(ctx context.Context, req MintRequest) (_ []Minted, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("mint a token: %w", err)
		}
	}()
	plan, err := s.planTokens(ctx, req)
	if err != nil || req.DryRun {
		return plan, err
	}
	var added []*node
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		added = added[:0]
		deny, err := loadDenyList(context.Background(), tx)
		if err != nil {
			return err
		}
		if err := pruneTokens(tx, s.now(), len(plan)); err != nil {
			return err
		}
		for i := range plan {
			n, err := s.recordToken(tx, &plan[i], deny)
			if err != nil {
				return err
			}
			if n != nil {
				added = append(added, n)
			}
		}
		return nil
	}, func() { s.registry.put(added) })
	if err != nil {
		return nil, err
	}
	for i := range plan {
		if err := s.sign(&plan[i], req); err != nil {
			return nil, err
		}
	}
	s.log.Info("tokens minted", zap.String("class", plan[0].Class), zap.String("tenant", plan[0].Tenant), zap.Int("count", len(plan)))
	return plan, nil
}

// planTokens checks a request and fills in everything that needs no transaction. The
// result is the result of a dry run.
func (s *Store) planTokens(ctx context.Context, req MintRequest) ([]Minted, error) {
	class, scopes, err := resolveScopes(req.Class, req.Scopes)
	if err != nil {
		return nil, err
	}
	ttl, longest := cmp.Or(req.TTL, classes[class].ttl), classes[class].maxTTL
	if ttl < minTTL || ttl > longest {
		return nil, fmt.Errorf("a lifetime of %s is out of range %s..%s for class %s", ttl, minTTL, longest, class)
	}
	tenant := cmp.Or(req.Tenant, DefaultTenant)
	if !manifest.ValidTenant(tenant) {
		return nil, fmt.Errorf("not a tenant: %q (use 1 to 32 of a-z, 0-9 and -, not starting with -)", tenant)
	}
	count := max(req.Count, 1)
	if req.Count < 0 || count > MaxMintCount {
		return nil, fmt.Errorf("count %d is out of range 1..%d", req.Count, MaxMintCount)
	}
	nodeID, err := s.resolveNode(ctx, req, class, tenant, count)
	if err != nil {
		return nil, err
	}
	now := s.now().Truncate(time.Second)
	plan := make([]Minted, count)
	for i := range plan {
		m := Minted{JTI: manifest.NewULID(), Class: class, Tenant: tenant, Subject: req.Subject, Scopes: scopes,
			Expires: now.Add(ttl.Truncate(time.Second)), notBefore: now.Unix()}
		switch {
		case class == ClassDevice:
			m.NodeID = nodeID
			if nodeID == "" {
				m.NodeID = manifest.NewNodeID()
			}
			m.Subject = m.NodeID
		case m.Subject == "":
			m.Subject = strings.TrimSuffix(class, "_runtime") + "-" + manifest.NewNodeID()
		}
		plan[i] = m
	}
	return plan, nil
}

// resolveNode returns the node id that a request names, or "" for new ones. It refuses
// fields that do not fit the class.
func (s *Store) resolveNode(ctx context.Context, req MintRequest, class, tenant string, count int) (string, error) {
	switch {
	case class != ClassDevice && (req.NodeID != "" || req.Instance != "" || req.Gen != 0):
		return "", errors.New("only a token of class device names a node")
	case class != ClassDevice && req.Subject != "" && !subjectRE.MatchString(req.Subject):
		return "", fmt.Errorf("not a subject: %q (use 1 to 64 letters, digits and ._:@-, starting with a letter or digit)", req.Subject)
	case class != ClassDevice:
		return "", nil
	case req.Subject != "" && req.Subject != req.NodeID:
		return "", errors.New("the subject of a device token is its node; set the node instead")
	case req.Instance != "" && !instanceRE.MatchString(req.Instance), req.Gen < 0 || req.Gen > maxTokenGen:
		return "", errors.New("the instance hash or the generation is malformed")
	case req.NodeID == "" || manifest.ValidNodeID(req.NodeID) && count == 1:
		return req.NodeID, nil
	case count > 1:
		return "", errors.New("several device tokens are for one new node each; leave out the node")
	}
	n, err := s.Node(ctx, tenant, req.NodeID)
	if err != nil {
		return "", fmt.Errorf("node %q: %w; give a node id of 26 characters, or see: agentctl ls", req.NodeID, err)
	}
	return n.NodeID, nil
}

// pruneTokens deletes tokens that expired long ago, and fails if the table would still
// become too large.
func pruneTokens(tx *sql.Tx, now time.Time, added int) error {
	if _, err := tx.Exec("DELETE FROM tokens WHERE exp < ?", now.Add(-expiredTokenRetention).Unix()); err != nil {
		return err
	}
	var n int
	if err := tx.QueryRow("SELECT count(*) FROM tokens").Scan(&n); err != nil {
		return err
	}
	if n+added > maxTokens {
		return fmt.Errorf("%w: %d tokens; give new ones shorter lifetimes", ErrFull, n)
	}
	return nil
}

// recordToken inserts the row of a token and registers its node, if it has one. It moves
// the time of issue behind revocations of the same holder: these stop every token issued
// up to their second, and the new token must work.
func (s *Store) recordToken(tx *sql.Tx, m *Minted, deny *denyList) (n *node, err error) {
	m.issuedAt = deny.earliestIssue(m.Tenant, m.Subject, m.NodeID, m.notBefore)
	m.Expires = m.Expires.Add(time.Duration(m.issuedAt-m.notBefore) * time.Second)
	if m.NodeID != "" {
		if n, err = s.upsertNodeTx(tx, m.Tenant, m.NodeID, "", nil); err != nil {
			return nil, err
		}
	}
	return n, insertToken(tx, m)
}

// insertToken inserts the row of a token, and notes which key may sign it (signingKey).
func insertToken(tx *sql.Tx, m *Minted) error {
	return tx.QueryRow(`INSERT INTO tokens (jti, class, tenant, sub, node, scopes, iat, exp) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
		RETURNING (SELECT keys FROM changes)`,
		m.JTI, m.Class, m.Tenant, m.Subject, m.NodeID, m.Scopes.String(), m.issuedAt, m.Expires.Unix()).Scan(&m.keysRevision)
}

// sign makes the token itself, after its row was committed: a token that exists can be
// listed and revoked.
func (s *Store) sign(m *Minted, req MintRequest) (err error) {
	c := jwt.MapClaims{
		"iss": s.relay.Issuer, "aud": s.relay.Audience, "sub": m.Subject, "tid": m.Tenant, "cls": m.Class,
		"scope": m.Scopes.String(), "jti": m.JTI, "iat": m.issuedAt, "nbf": m.notBefore, "exp": m.Expires.Unix(),
	}
	if m.Class == ClassDevice {
		c["gen"] = max(req.Gen, 1)
		if req.Instance != "" {
			c["iid"] = req.Instance
		}
	}
	if m.keyThumbprint != "" {
		c["cnf"] = map[string]string{"jkt": m.keyThumbprint}
	}
	kid, key, err := s.signingKey(m.keysRevision)
	if err != nil {
		return err
	}
	t := jwt.NewWithClaims(jwt.SigningMethodEdDSA, c)
	t.Header["typ"], t.Header["kid"] = tokenType, kid
	m.Token, err = t.SignedString(key)
	return err
}

// TokenInfo is one row of `agentctl token ls`. The token itself is not stored.
type TokenInfo struct {
	JTI     string    `json:"jti"`
	Class   string    `json:"class"`
	Tenant  string    `json:"tenant"`
	Subject string    `json:"subject"`
	NodeID  string    `json:"node_id,omitempty"`
	Scopes  string    `json:"scopes"`
	Issued  time.Time `json:"issued"`
	Expires time.Time `json:"expires"`
	Expired bool      `json:"expired"`
	Revoked bool      `json:"revoked"`
}

// Tokens lists the minted tokens, newest first. Tokens that expired more than 30 days
// ago may be missing.
func (s *Store) Tokens(ctx context.Context) ([]TokenInfo, error) {
	now := s.now()
	list := []TokenInfo{} // in JSON an empty list is [] and not null
	err := s.query(ctx, func(scan func(...any) error) error {
		var t TokenInfo
		var iat, exp int64
		if err := scan(&t.JTI, &t.Class, &t.Tenant, &t.Subject, &t.NodeID, &t.Scopes, &iat, &exp, &t.Revoked); err != nil {
			return err
		}
		t.Issued, t.Expires = time.Unix(iat, 0).UTC(), time.Unix(exp, 0).UTC()
		t.Expired = !now.Before(t.Expires.Add(Leeway))
		list = append(list, t)
		return nil
	}, "SELECT jti, class, tenant, sub, node, scopes, iat, exp, "+isRevokedSQL+" FROM tokens t ORDER BY iat DESC, jti DESC")
	return list, err
}

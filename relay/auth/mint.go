package auth

import (
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
	maxEnrollTTL          = time.Hour           // an enrollment token is not single use yet, so its life is short
	expiredTokenRetention = 30 * 24 * time.Hour // an expired token stays in `token ls` this long
)

// defaultTTL is the lifetime of a token when none is asked for. They are long because
// tokens cannot be refreshed yet; all can be revoked.
var defaultTTL = map[string]time.Duration{
	ClassAgent:  90 * 24 * time.Hour,
	ClassDevice: 365 * 24 * time.Hour,
	ClassEnroll: time.Hour,
}

// MintRequest says which tokens to make.
type MintRequest struct {
	Class    string        // agent, device, enroll, admin, or a claim value such as agent_runtime
	Tenant   string        // default DefaultTenant
	Subject  string        // agent id, ^[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}$; default: a new one each; not for devices
	NodeID   string        // devices: a node id, or a name or id prefix of a registered node; default: a new node each
	Scopes   []string      // default: those of the class
	TTL      time.Duration // default 90 days for agents, 1 year for devices, 1 hour for enrollment
	Count    int           // default 1, at most MaxMintCount; more than one excludes NodeID
	Instance string        // devices: hex SHA-256 of the instance_id that the token is bound to; default none
	Gen      int           // devices: generation; default 1
	DryRun   bool          // make and keep nothing; what comes back has no Token
}

// Minted is one new token. Token is a secret: print it once, log it never.
type Minted struct {
	Token   string    `json:"token,omitempty"`
	JTI     string    `json:"jti"`
	Class   string    `json:"class"`
	Tenant  string    `json:"tenant"`
	Subject string    `json:"subject"`
	NodeID  string    `json:"node_id,omitempty"`
	Scopes  Scopes    `json:"scopes"`
	Expires time.Time `json:"expires"`

	issuedAt, notBefore int64
}

// Mint makes tokens. The node of a device token is registered with it, so that a call
// to a board that never connected is answered with "offline" and not with "denied".
func (s *Store) Mint(ctx context.Context, req MintRequest) ([]Minted, error) {
	plan, err := s.planTokens(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("mint a token: %w", err)
	}
	if req.DryRun {
		return plan, nil
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
			m := &plan[i]
			m.issuedAt = deny.earliestIssue(m.Tenant, m.Subject, m.NodeID, m.notBefore)
			m.Expires = m.Expires.Add(time.Duration(m.issuedAt-m.notBefore) * time.Second)
			if m.NodeID != "" {
				n, err := s.upsertNodeTx(tx, m.Tenant, m.NodeID, "", nil)
				if err != nil {
					return err
				}
				added = append(added, n)
			}
			if err := insertToken(tx, m); err != nil {
				return err
			}
		}
		return nil
	}, func() { s.registry.put(added) })
	if err != nil {
		return nil, fmt.Errorf("mint a token: %w", err)
	}
	for i := range plan {
		if err := s.sign(&plan[i], req); err != nil {
			return nil, fmt.Errorf("mint a token: %w", err)
		}
	}
	s.log.Info("tokens minted", zap.String("class", plan[0].Class), zap.String("tenant", plan[0].Tenant), zap.Int("count", len(plan)))
	return plan, nil
}

// planTokens checks a request and fills in everything that needs no transaction.
func (s *Store) planTokens(ctx context.Context, req MintRequest) ([]Minted, error) {
	class, defaults, err := resolveClass(req.Class)
	if err != nil {
		return nil, err
	}
	scopes, err := resolveScopes(class, req.Scopes, defaults)
	if err != nil {
		return nil, err
	}
	ttl, err := resolveTTL(class, req.TTL)
	if err != nil {
		return nil, err
	}
	tenant := req.Tenant
	if tenant == "" {
		tenant = DefaultTenant
	}
	if !manifest.ValidTenant(tenant) {
		return nil, fmt.Errorf("%q is not a tenant; use 1 to 32 of a-z, 0-9 and -, not starting with -", tenant)
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
			Expires: now.Add(ttl), notBefore: now.Unix()}
		switch {
		case class == ClassDevice && nodeID != "":
			m.NodeID, m.Subject = nodeID, nodeID
		case class == ClassDevice:
			m.NodeID = manifest.NewNodeID()
			m.Subject = m.NodeID
		case m.Subject == "":
			m.Subject = strings.TrimSuffix(class, "_runtime") + "-" + manifest.NewNodeID()
		}
		plan[i] = m
	}
	return plan, nil
}

// resolveNode is the node id that a request names, or "" for new ones; it also refuses
// what does not fit the class.
func (s *Store) resolveNode(ctx context.Context, req MintRequest, class, tenant string, count int) (string, error) {
	if class != ClassDevice {
		switch {
		case req.NodeID != "" || req.Instance != "" || req.Gen != 0:
			return "", errors.New("only a device token names a node; use --class device")
		case req.Subject != "" && !validSubject(req.Subject):
			return "", fmt.Errorf("%q is not a subject; use 1 to 64 letters, digits and ._:@- starting with a letter or digit", req.Subject)
		}
		return "", nil
	}
	switch {
	case req.Subject != "" && req.Subject != req.NodeID:
		return "", errors.New("the subject of a device token is its node; use --node")
	case req.Instance != "" && !instanceRE.MatchString(req.Instance), req.Gen < 0 || req.Gen > 1<<30:
		return "", errors.New("the instance hash or the generation is malformed")
	case req.NodeID == "" || manifest.ValidNodeID(req.NodeID) && count == 1:
		return req.NodeID, nil
	case count > 1:
		return "", errors.New("--count makes one node for each token; leave out --node")
	}
	n, err := s.Node(ctx, tenant, req.NodeID)
	if err != nil {
		return "", fmt.Errorf("--node %q: %w; give a node id of 26 characters, or see: agentctl ls", req.NodeID, err)
	}
	return n.NodeID, nil
}

func resolveTTL(class string, ttl time.Duration) (time.Duration, error) {
	if ttl == 0 {
		return defaultTTL[class], nil
	}
	longest := MaxTTL
	if class == ClassEnroll {
		longest = maxEnrollTTL
	}
	if ttl < minTTL || ttl > longest {
		return 0, fmt.Errorf("a lifetime of %s is out of range %s..%s for class %s", ttl, minTTL, longest, class)
	}
	return ttl.Truncate(time.Second), nil
}

// pruneTokens forgets tokens that expired long ago and refuses what would not fit.
func pruneTokens(tx *sql.Tx, now time.Time, more int) error {
	if _, err := tx.Exec("DELETE FROM tokens WHERE exp < ?", now.Add(-expiredTokenRetention).Unix()); err != nil {
		return err
	}
	var n int
	if err := tx.QueryRow("SELECT count(*) FROM tokens").Scan(&n); err != nil {
		return err
	}
	if n+more > maxTokens {
		return fmt.Errorf("%w: %d tokens; use shorter lifetimes (--ttl)", ErrFull, n)
	}
	return nil
}

func insertToken(tx *sql.Tx, m *Minted) error {
	_, err := tx.Exec("INSERT INTO tokens (jti, class, tenant, sub, node, scopes, iat, exp) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
		m.JTI, m.Class, m.Tenant, m.Subject, m.NodeID, m.Scopes.String(), m.issuedAt, m.Expires.Unix())
	return err
}

// signKey makes the token itself.
func (s *Store) sign(m *Minted, req MintRequest) error {
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
	t := jwt.NewWithClaims(jwt.SigningMethodEdDSA, c)
	t.Header["typ"], t.Header["kid"] = tokenType, s.keyring.signKID
	signed, err := t.SignedString(s.keyring.signKey)
	m.Token = signed
	return err
}

// TokenInfo is one row of `agentctl token ls`. The token itself is kept nowhere.
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

// Tokens lists what was minted, newest first. Tokens that expired more than 30 days
// ago may be gone from it.
func (s *Store) Tokens(ctx context.Context) ([]TokenInfo, error) {
	rows, err := s.db.readDB.QueryContext(ctx, "SELECT jti, class, tenant, sub, node, scopes, iat, exp, "+isRevokedSQL+
		" FROM tokens t ORDER BY iat DESC, jti DESC")
	if err != nil {
		return nil, explain(s.dir.path, err)
	}
	defer rows.Close()
	now := s.now()
	list := []TokenInfo{} // as JSON it is a list, also an empty one
	for rows.Next() {
		var t TokenInfo
		var iat, exp int64
		if err := rows.Scan(&t.JTI, &t.Class, &t.Tenant, &t.Subject, &t.NodeID, &t.Scopes, &iat, &exp, &t.Revoked); err != nil {
			return nil, explain(s.dir.path, err)
		}
		t.Issued, t.Expires = time.Unix(iat, 0).UTC(), time.Unix(exp, 0).UTC()
		t.Expired = !now.Before(t.Expires.Add(Leeway))
		list = append(list, t)
	}
	return list, explain(s.dir.path, rows.Err())
}

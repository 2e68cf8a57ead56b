package auth

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/topic"
)

// DefaultTenant is the tenant of a relay that has only one.
const DefaultTenant = "default"

// Bounds of minting.
const (
	MaxMintCount          = 10_000  // tokens of one Mint
	mintBatch             = 250     // tokens of one transaction
	maxTokens             = 500_000 // rows in the table of minted tokens
	minTTL                = time.Second
	expiredTokenRetention = 30 * day // an expired token stays in `token ls` this long
)

// MintRequest describes the tokens to make.
type MintRequest struct {
	Class   string   // agent, device, enroll, a preset, or a claim value such as agent_runtime
	Tenant  string   // default DefaultTenant
	Subject string   // agent id, ^[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}$; default: a new one each; not for devices
	NodeID  string   // devices: a node id, or a name or id prefix of a registered node; default: a new node each
	Scopes  []string // default: those of the class
	// AddScopes are scopes besides Scopes or those of the class.
	AddScopes []string
	// PluginScopes are the scopes that plugins declare: only these can be granted.
	PluginScopes []string
	// Topics limit events:subscribe and events:ingest to topics and prefixes such as log/*;
	// default: all topics, or those of the creator.
	Topics   []string
	TTL      time.Duration // default 90 days for agents, 1 year for devices, 1 hour for enrollment
	Count    int           // default 1, at most MaxMintCount; more than one excludes NodeID
	Instance string        // devices: hex SHA-256 of the instance_id that the token is bound to; default none
	Gen      int           // devices: generation; default 1
	DryRun   bool          // check only: nothing is recorded, and the results have no Token
	// Creator is who asks; nil is the operator, who has access to the state directory. A token
	// holds no scope and no topic that its creator lacks, except device:connect, and is for the creator's
	// tenant and a node that is registered there, or a new one.
	Creator *Identity
}

// Minted is one new token. Token is a secret: print it once, do not log it.
type Minted struct {
	Token   string         `json:"token,omitempty"`
	JTI     string         `json:"jti"`
	Class   string         `json:"class"`
	Tenant  string         `json:"tenant"`
	Subject string         `json:"subject"`
	NodeID  string         `json:"node_id,omitempty"`
	Scopes  Scopes         `json:"scopes"`
	Topics  topic.Patterns `json:"topics,omitempty"` // that the scopes for events are limited to
	Expires time.Time      `json:"expires"`

	issuedAt, notBefore int64  // Unix seconds
	keyThumbprint       string // claim cnf.jkt; "": none
	keysRevision        int64  // value of changes.keys when the token was recorded
}

// Mint makes tokens. It registers the node of a device token, so that a call to a board
// that never connected fails with "offline" and not with "denied".
//
// Many tokens are recorded in several transactions, between which a relay that runs can write.
// When one of them fails, no token was made; nodes that were recorded before it remain.
func (s *Store) Mint(ctx context.Context, req MintRequest) (_ []Minted, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("create a token: %w", err)
		}
	}()
	plan, err := s.planTokens(ctx, req)
	if err != nil || req.DryRun {
		return plan, err
	}
	for first := 0; first < len(plan); first += mintBatch {
		if err := s.recordTokens(ctx, plan[first:min(first+mintBatch, len(plan))], len(plan)-first); err != nil {
			return nil, err
		}
	}
	for i := range plan {
		if err := s.sign(&plan[i], req); err != nil {
			return nil, err
		}
	}
	s.log.Info("tokens created", zap.String("class", plan[0].Class), zap.String("tenant", plan[0].Tenant), zap.Int("count", len(plan)))
	return plan, nil
}

// recordTokens records tokens in one transaction, and registers their nodes. It fails if there
// is no space for as many as are left.
func (s *Store) recordTokens(ctx context.Context, plan []Minted, left int) error {
	var added []*node
	return s.db.write(ctx, func(tx *sql.Tx) error {
		added = added[:0]
		deny, err := loadDenyList(context.Background(), tx)
		if err != nil {
			return err
		}
		if err := pruneTokens(tx, s.now(), left); err != nil {
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
}

// planTokens checks a request and fills in everything that needs no transaction. The
// result is the result of a dry run.
func (s *Store) planTokens(ctx context.Context, req MintRequest) ([]Minted, error) {
	ask := grantRequest{req.Class, req.Scopes, req.AddScopes, req.Topics, req.PluginScopes, req.Creator, "a token cannot hold"}
	g, err := ask.resolve()
	if err != nil {
		return nil, err
	}
	class := g.class
	ttl, longest := cmp.Or(req.TTL, classes[class].ttl), classes[class].maxTTL
	if ttl < minTTL || ttl > longest {
		return nil, badMint("a lifetime of %s is out of range %s..%s for class %s", ttl, minTTL, longest, class)
	}
	own := DefaultTenant
	if req.Creator != nil {
		own = req.Creator.Tenant
	}
	tenant := cmp.Or(req.Tenant, own)
	if !manifest.ValidTenant(tenant) {
		return nil, badMint("not a tenant: %q (use 1 to 32 of a-z, 0-9 and -, not starting with -)", tenant)
	}
	count := max(req.Count, 1)
	if req.Count < 0 || count > MaxMintCount {
		return nil, badMint("count %d is out of range 1..%d", req.Count, MaxMintCount)
	}
	if req.Creator != nil && tenant != req.Creator.Tenant {
		return nil, &Error{ErrGrant, "tenant", "a token is for the tenant of the token that makes it"}
	}
	nodeID, err := s.resolveNode(ctx, req, class, tenant, count)
	if err != nil {
		return nil, err
	}
	now := s.now().Truncate(time.Second)
	plan := make([]Minted, count)
	for i := range plan {
		m := Minted{JTI: manifest.NewULID(), Class: class, Tenant: tenant, Subject: req.Subject, Scopes: g.scopes, Topics: g.topics,
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

// requestError marks an error of the request itself, for a caller who asks over HTTP.
type requestError struct{ error }

// Is makes the error ErrRequest.
func (e requestError) Is(target error) bool { return target == ErrRequest }

// Unwrap returns the cause.
func (e requestError) Unwrap() error { return e.error }

func badMint(format string, args ...any) error { return requestError{fmt.Errorf(format, args...)} }

// resolveNode returns the node id that a request names, or "" for new ones. It refuses
// fields that do not fit the class.
func (s *Store) resolveNode(ctx context.Context, req MintRequest, class, tenant string, count int) (string, error) {
	switch {
	case class != ClassDevice && (req.NodeID != "" || req.Instance != "" || req.Gen != 0):
		return "", badMint("only a token of class device names a node")
	case class != ClassDevice && req.Subject != "" && !subjectRE.MatchString(req.Subject):
		return "", badMint("not a subject: %q (use 1 to 64 letters, digits and ._:@-, starting with a letter or digit)", req.Subject)
	case class != ClassDevice && strings.HasPrefix(req.Subject, pluginSubject):
		return "", badMint("not a subject: %q (plugin: begins the identities of plugins, which need no token)", req.Subject)
	case class != ClassDevice:
		return "", nil
	case req.Subject != "" && req.Subject != req.NodeID:
		return "", badMint("the subject of a device token is its node; set the node instead")
	case req.Instance != "" && !instanceRE.MatchString(req.Instance), req.Gen < 0 || req.Gen > maxTokenGen:
		return "", badMint("the instance hash or the generation is malformed")
	case req.NodeID == "" || req.Creator == nil && manifest.ValidNodeID(req.NodeID) && count == 1:
		return req.NodeID, nil
	case count > 1:
		return "", badMint("several device tokens are for one new node each; leave out the node")
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
	return tx.QueryRow(`INSERT INTO tokens (jti, class, tenant, sub, node, scopes, topics, iat, exp) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
		RETURNING (SELECT keys FROM changes)`,
		m.JTI, m.Class, m.Tenant, m.Subject, m.NodeID, m.Scopes.String(), topicsText(m.Topics), m.issuedAt, m.Expires.Unix()).Scan(&m.keysRevision)
}

// sign makes the token itself, after its row was committed: a token that exists can be
// listed and revoked. iat may be ahead of the clock (recordToken), but nbf is not, and only nbf is
// compared with the clock, so the token works at once.
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
	if m.Topics != nil { // a relay that does not know the claim refuses the token
		c["topics"] = topicsText(m.Topics)
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

package auth

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/relay/topic"
)

// Lifetimes of the tokens of those who have joined, and bounds of joining.
const (
	BoardTokenTTL = 24 * time.Hour
	AgentTokenTTL = time.Hour

	maxEnrollments = 200_000 // rows
)

// enrolled is the row of a key that has joined: who holds it, and how far its tokens were
// refreshed.
//
// The key counts as issued at its creation, as a token does at iat: a revocation of the
// node, the subject or the tenant that is not older stops it (identity). Revoking the token
// that was issued to it last stops it as well.
type enrolled struct {
	rowID       int64
	publicKey   ed25519.PublicKey
	code        string // SHA-256 of the code, hex
	class       string // ClassDevice or ClassAgent
	tenant      string
	subject     string // node id or agent id
	scopes      Scopes
	topics      topic.Patterns
	instance    string // boards: hex SHA-256 of the instance id
	created     int64  // Unix seconds
	jti         string // of the token issued last
	refresh     refreshState
	nonce       string // of the refresh served last
	migrating   bool   // the node's earlier tokens are revoked when it links with proof
	revoked     bool   // replaced by another key of the node
	codeRevoked bool   // the invite was revoked: no repeat
}

const enrolledColumns = "id, public_key, code, class, tenant, sub, scopes, topics, instance, created, jti, gen, base_gen, request_id, nonce, used_gen, prev_spent, migrating, revoked, code_revoked"

func scanEnrolled(scan func(...any) error) (*enrolled, error) {
	e := new(enrolled)
	var scopes, topics string
	r := &e.refresh
	err := scan(&e.rowID, (*[]byte)(&e.publicKey), &e.code, &e.class, &e.tenant, &e.subject, &scopes, &topics, &e.instance, &e.created, &e.jti,
		&r.gen, &r.baseGen, &r.requestID, &e.nonce, &r.usedGen, &r.prevSpent, &e.migrating, &e.revoked, &e.codeRevoked)
	e.scopes = knownScopes(scopes)
	e.topics, err = readTopics(topics, err)
	return e, err
}

// identity is what revocations are compared with.
func (e *enrolled) identity() *Identity {
	id := &Identity{Tenant: e.tenant, Subject: e.subject, JTI: e.jti, KeyThumbprint: enrollment.Thumbprint(e.publicKey), issuedAt: e.created}
	if e.class == ClassDevice {
		id.NodeID = e.subject
	}
	return id
}

// revokedUntilTx returns stop: the tokens of a holder that were issued up to that second are
// revoked. It is 0 if none are. revoked reports whether id is. It reads the database and not the deny
// list in memory, which may be PollInterval behind another process: a refresh right after a revocation
// must not outlive it.
func revokedUntilTx(tx *sql.Tx, id *Identity) (stop int64, revoked bool, err error) {
	var byJTI bool
	err = tx.QueryRow(`SELECT coalesce(max(at) FILTER (WHERE kind <> 'jti'), 0), coalesce(max(kind = 'jti'), 0) FROM revocations WHERE
		(kind = 'jti' AND value IN (?1, ?5) AND value <> '') OR (kind = 'sub' AND value = ?2 AND ?2 <> '') OR
		(kind = 'node' AND value = ?3 AND ?3 <> '') OR (kind = 'tenant' AND value = ?4)`,
		id.JTI, id.Subject, id.NodeID, id.Tenant, id.KeyThumbprint).Scan(&stop, &byJTI)
	return stop, byJTI || id.issuedAt <= stop && stop > 0, err
}

// Enrolled is the result of an enrollment or a refresh. Token is a secret.
type Enrolled struct {
	Class          string // ClassDevice or ClassAgent
	Tenant         string
	Subject        string // node id or agent id
	Name           string // of the node; "" after a refresh
	Token          string
	Gen            int
	Expires        time.Time
	Repeat         bool // a repeat of an enrollment or refresh that was served before
	CloneSuspected bool // a refresh by an older generation: two may hold this identity
}

// ValidUntil is until when the relay accepts the token, leeway included.
func (e *Enrolled) ValidUntil() time.Time { return e.Expires.Add(Leeway) }

// Enroll registers a key under an invite code and issues its first token. The same code and
// key again give the same identity and count no use. The error is an *Error of kind ErrJoin
// for a refusal and ErrRequest for a malformed request.
//
// Strangers call it, so what is cheap to refuse comes first:
//
//	checkEnroll      form, nonce, proof of the key     memory and one signature
//	knowsCode        is there such a code              one read
//	tokenToMigrate   the board's earlier token         one signature
//	enrollTx         the invite's state, a use of it, the node or agent, the key
//	issueTx          the row of the first token
//	sign             the token, after the commit
func (s *Store) Enroll(ctx context.Context, req *enrollment.EnrollRequest) (*Enrolled, error) {
	e, err := s.checkEnroll(req)
	if err != nil {
		return nil, err
	}
	if known, err := s.knowsCode(ctx, e.code); err != nil || !known {
		return nil, cmp.Or(err, error(errCodeUnknown))
	}
	// Of a board that keeps its node. It is verified before the transaction, which must be short, and
	// used only if the key is new.
	var earlier *Identity
	var earlierErr error
	if req.Token != "" {
		earlier, earlierErr = s.tokenToMigrate(req)
	}
	var m *Minted
	var nodes []*node
	out := new(Enrolled)
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		known, err := scanEnrolled(tx.QueryRow("SELECT "+enrolledColumns+" FROM enrollments WHERE jkt = ?", enrollment.Thumbprint(e.publicKey)).Scan)
		switch {
		case err == nil && known.code == e.code:
			out.Repeat = true
			err = s.checkRepeatTx(tx, known)
			known.instance, e = e.instance, known // a key that was moved to another install is bound to that one
		case err == nil || errors.Is(err, sql.ErrNoRows):
			nodes, err = s.enrollTx(tx, e, req, err == nil, earlier, earlierErr)
		}
		if err != nil {
			return err
		}
		m, err = s.issueTx(tx, e)
		return err
	}, func() {
		s.registry.put(nodes)
		if e.migrating {
			s.joining.mu.Lock()
			defer s.joining.mu.Unlock()
			s.joining.migrating[e.subject] = struct{}{}
		}
	})
	if err == nil {
		err = s.sign(m, MintRequest{Gen: e.refresh.gen, Instance: e.instance})
	}
	if err != nil {
		return nil, fmt.Errorf("enroll: %w", err)
	}
	if n := s.registry.get(e.subject); n != nil {
		out.Name = n.name
	}
	s.fillResult(out, e, m)
	return out, nil
}

// knowsCode reports whether a code is that of an invite, or was when something joined with
// it. It reads only: somebody who guesses codes must not queue for the write lock.
func (s *Store) knowsCode(ctx context.Context, hash string) (known bool, err error) {
	err = s.query(ctx, func(scan func(...any) error) error { return scan(&known) },
		"SELECT EXISTS (SELECT 1 FROM invites WHERE code = ?1) OR EXISTS (SELECT 1 FROM enrollments WHERE code = ?1)", hash)
	return known, err
}

// fillResult copies what the caller of Enroll and RenewToken gets.
func (s *Store) fillResult(out *Enrolled, e *enrolled, m *Minted) {
	out.Class, out.Tenant, out.Subject, out.Token, out.Gen, out.Expires = e.class, e.tenant, e.subject, m.Token, e.refresh.gen, m.Expires
}

// checkEnroll checks everything of a request that needs no database: its form, the nonce and
// the proof. The result has code, key and instance.
func (s *Store) checkEnroll(req *enrollment.EnrollRequest) (*enrolled, error) {
	key, err := enrollment.ParseKey(req.PublicKey)
	switch {
	case err != nil:
		return nil, badRequest("public_key is not an Ed25519 public key of 32 bytes in base64url")
	case len(req.InstanceID) != 32 || strings.Trim(req.InstanceID, "0123456789abcdef") != "":
		return nil, badRequest("instance_id is not 32 lower case hex digits")
	case req.Name != "" && !manifest.ValidNodeName(req.Name):
		return nil, badRequest("a name is 1 to 32 of a-z, 0-9 and -, not starting with -")
	case len(req.AgentVersion) > 64 || strings.ContainsFunc(req.AgentVersion, func(r rune) bool { return r < ' ' || r > '~' }):
		return nil, badRequest("agent_version is not at most 64 printable ASCII characters")
	case !s.nonces.valid(req.Nonce):
		return nil, errNonce
	}
	code, err := enrollment.ParseCode(req.Code)
	if err != nil {
		return nil, errCodeUnknown
	}
	if !enrollment.Verify(key, enrollment.EnrollMessage(req.Nonce, code, req.InstanceID), req.Proof) {
		return nil, errProof
	}
	sum := sha256.Sum256([]byte(req.InstanceID))
	return &enrolled{publicKey: key, code: enrollment.HashCode(code), instance: hex.EncodeToString(sum[:])}, nil
}

// checkRepeatTx refuses the repeat of an enrollment whose identity or invite was revoked.
func (s *Store) checkRepeatTx(tx *sql.Tx, known *enrolled) error {
	_, revoked, err := revokedUntilTx(tx, known.identity())
	switch {
	case err != nil:
		return err
	case revoked || known.revoked:
		return errJoinRevoked
	case known.codeRevoked:
		return errCodeRevoked
	}
	inv, err := scanInvite(tx.QueryRow("SELECT "+inviteColumns+" FROM invites WHERE code = ?", known.code).Scan)
	if errors.Is(err, sql.ErrNoRows) { // ended long ago
		return nil
	}
	if err == nil {
		_, revoked, err = revokedUntilTx(tx, inv.issuer())
	}
	if err == nil && revoked {
		err = errCodeRevoked
	}
	return err
}

// enrollTx uses up one use of an invite for a new key, and inserts its row. keyKnown reports that the
// key has joined with another code. earlier and earlierErr are the result of tokenToMigrate. No other
// transaction writes meanwhile, so of two boards that claim the last use one gets it.
func (s *Store) enrollTx(tx *sql.Tx, e *enrolled, req *enrollment.EnrollRequest, keyKnown bool, earlier *Identity, earlierErr error) (nodes []*node, err error) {
	inv, err := scanInvite(tx.QueryRow("SELECT "+inviteColumns+" FROM invites WHERE code = ?", e.code).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, errCodeUnknown
	}
	if err != nil {
		return nil, err
	}
	_, stopped, err := revokedUntilTx(tx, inv.issuer())
	if err != nil {
		return nil, err
	}
	inv.setState(s.now(), stopped)
	switch inv.State {
	case "revoked":
		return nil, errCodeRevoked
	case "used":
		return nil, errCodeUsed
	case "expired":
		return nil, errCodeExpired
	}
	if keyKnown {
		return nil, errKeyInUse
	}
	if _, err := tx.Exec("UPDATE invites SET used = used + 1 WHERE id = ?", inv.rowID); err != nil {
		return nil, err
	}
	if err := pruneEnrollments(tx); err != nil {
		return nil, err
	}
	if err := pruneTokens(tx, s.now(), 1); err != nil {
		return nil, err
	}
	e.tenant, e.scopes, e.topics, e.refresh = inv.Tenant, inv.Scopes, inv.Topics, refreshState{gen: 1}
	if inv.Class == InviteAgent {
		err = s.newAgentTx(tx, e, inv, req)
	} else {
		nodes, err = s.newBoardTx(tx, e, inv, req, earlier, earlierErr)
	}
	if err != nil {
		return nil, err
	}
	stop, _, err := revokedUntilTx(tx, e.identity())
	if err != nil {
		return nil, err
	}
	e.created = max(s.now().Unix(), stop+1) // it must work after a revocation of its tenant
	err = tx.QueryRow(`INSERT INTO enrollments (jkt, public_key, code, class, tenant, sub, scopes, topics, instance, created, jti, gen, base_gen, request_id, nonce, used_gen, prev_spent, migrating, revoked, code_revoked)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', ?, 0, '', '', 0, 0, ?, 0, 0) RETURNING id`,
		enrollment.Thumbprint(e.publicKey), []byte(e.publicKey), e.code, e.class, e.tenant, e.subject, e.scopes.String(), topicsText(e.topics), e.instance, e.created,
		e.refresh.gen, e.migrating).Scan(&e.rowID)
	return nodes, err
}

// newBoardTx gives a board its node: a new one, or that of its earlier token. A name and
// tags of the invite are set as an operator would; a name that the board proposes is only
// what it would propose on its link. The nodes that changed are for the registry.
func (s *Store) newBoardTx(tx *sql.Tx, e *enrolled, inv *Invite, req *enrollment.EnrollRequest, earlier *Identity, earlierErr error) ([]*node, error) {
	e.class, e.subject = ClassDevice, manifest.NewNodeID()
	proposed := req.Name
	if req.Token != "" {
		if earlierErr != nil || earlier.Tenant != inv.Tenant {
			return nil, errTokenToMigrate
		}
		if _, revoked, err := revokedUntilTx(tx, earlier); err != nil || revoked {
			return nil, cmp.Or(err, error(errTokenToMigrate))
		}
		e.subject, e.migrating, proposed = earlier.NodeID, true, "" // it keeps its name
		// A node has one key: an earlier enrollment of it, which was not finished or whose
		// key was lost, ends here.
		if _, err := tx.Exec("UPDATE enrollments SET revoked = 1, migrating = 0 WHERE sub = ?", e.subject); err != nil {
			return nil, err
		}
	}
	n, err := s.upsertNodeTx(tx, inv.Tenant, e.subject, proposed, nil)
	if errors.Is(err, ErrForeignNode) {
		return nil, errTokenToMigrate
	}
	if err != nil || inv.Name == "" && len(inv.Tags) == 0 {
		return []*node{n}, err
	}
	a := inv.attributes()
	_, changed, err := s.setAttributesTx(tx, inv.Tenant, e.subject, *a)
	if _, ok := errors.AsType[*AttributeError](err); ok { // a node that the board keeps has many tags already
		a.AddTags = nil
		_, changed, err = s.setAttributesTx(tx, inv.Tenant, e.subject, *a)
	}
	return append([]*node{n}, changed...), err
}

// newAgentTx gives an agent its id: the name of the invite while no other agent that joined
// has it, else the name with a suffix.
func (s *Store) newAgentTx(tx *sql.Tx, e *enrolled, inv *Invite, req *enrollment.EnrollRequest) error {
	if req.Token != "" {
		return errTokenToMigrate
	}
	e.class, e.instance = ClassAgent, ""
	random := manifest.NewNodeID()
	e.subject = cmp.Or(inv.Name, "agent-"+random)
	var taken bool
	err := tx.QueryRow("SELECT EXISTS (SELECT 1 FROM enrollments WHERE sub = ?)", e.subject).Scan(&taken)
	if taken {
		e.subject += "-" + random[manifest.ULIDLen-6:]
	}
	return err
}

// pruneEnrollments deletes the keys that were replaced if the table is full.
func pruneEnrollments(tx *sql.Tx) error {
	var n int
	if err := tx.QueryRow("SELECT count(*) FROM enrollments").Scan(&n); err != nil || n < maxEnrollments {
		return err
	}
	res, err := tx.Exec("DELETE FROM enrollments WHERE revoked > 0")
	if err != nil {
		return err
	}
	if deleted, err := res.RowsAffected(); err != nil || deleted > 0 {
		return err
	}
	return fmt.Errorf("%w: %d keys have joined", ErrFull, n)
}

// issueTx records a new token for a key, in place of the one before: however often a key is
// refreshed, it has one row in `token ls`. The caller signs it after the commit.
func (s *Store) issueTx(tx *sql.Tx, e *enrolled) (*Minted, error) {
	ttl := AgentTokenTTL
	if e.class == ClassDevice {
		ttl = BoardTokenTTL
	}
	now := s.now().Truncate(time.Second)
	m := &Minted{JTI: manifest.NewULID(), Class: e.class, Tenant: e.tenant, Subject: e.subject, Scopes: e.scopes, Topics: e.topics,
		notBefore: now.Unix(), keyThumbprint: enrollment.Thumbprint(e.publicKey)}
	if e.class == ClassDevice {
		m.NodeID = e.subject
	}
	stop, _, err := revokedUntilTx(tx, e.identity())
	if err != nil {
		return nil, err
	}
	m.issuedAt = max(now.Unix(), stop+1)
	m.Expires = time.Unix(m.issuedAt, 0).Add(ttl).UTC()
	if _, err := tx.Exec("DELETE FROM tokens WHERE jti = ?", e.jti); err != nil {
		return nil, err
	}
	if err := insertToken(tx, m); err != nil {
		return nil, err
	}
	e.jti = m.JTI
	r := &e.refresh
	_, err = tx.Exec("UPDATE enrollments SET jti = ?, instance = ?, gen = ?, base_gen = ?, request_id = ?, nonce = ?, prev_spent = ? WHERE id = ?",
		e.jti, e.instance, r.gen, r.baseGen, r.requestID, e.nonce, r.prevSpent, e.rowID)
	return m, err
}

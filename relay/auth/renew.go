package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"agentctl/enrollment"
	"agentctl/manifest"
)

// refreshState says how far the tokens of a key were refreshed, and which request made the
// newest generation. A holder that has copied the key soon names a generation that another
// holder has used, which is how a copy is found.
type refreshState struct {
	gen       int    // the newest generation issued
	baseGen   int    // the generation that was exchanged for it; 0: it was enrolled
	requestID string // of that exchange
	usedGen   int    // the newest generation that was used on a link
	prevSpent bool   // the newest generation was exchanged for the one before the newest
}

// apply serves a refresh that names a generation, and reports whether it may be served.
//
//	same gen and request, newest gen not used   the same generation again (a lost answer)
//	the newest                                  the next one
//	newer than the newest                       adopted: this relay was restored from a backup
//	the one before, once, boards only           the next one, suspect (a lost write, or a copy)
//	anything else                               refused
func (r *refreshState) apply(gen int, requestID string, isBoard bool) (repeat, suspect, ok bool) {
	switch {
	case r.isRepeat(gen, requestID):
		return true, false, true
	case gen >= r.gen:
		r.prevSpent = false
	case isBoard && gen == r.gen-1 && !r.prevSpent:
		r.prevSpent, suspect = true, true
	default:
		return false, false, false
	}
	r.gen, r.baseGen, r.requestID = max(gen, r.gen)+1, gen, requestID
	return false, suspect, true
}

// isRepeat reports whether a request is that which made the newest generation, which nobody
// has used since.
func (r *refreshState) isRepeat(gen int, requestID string) bool {
	return gen == r.baseGen && requestID == r.requestID && r.usedGen < r.gen
}

// RenewToken exchanges the proof of a key for its next token. The error is an *Error of kind
// ErrJoin for a refusal and ErrRequest for a malformed request.
//
// For boards admit is called after the proof was verified and before anything changes, with
// the node's id. It returns false while the node is linked with another session than the one
// that the request names.
//
// The transaction reads the key's row again and decides: two requests for one key come one after the
// other there, and the second one sees the generation that the first one made.
func (s *Store) RenewToken(ctx context.Context, req *enrollment.TokenRequest, admit func(ctx context.Context, nodeID string) bool) (*Enrolled, error) {
	if err := checkRenew(req); err != nil {
		return nil, err
	}
	if !s.nonces.valid(req.Nonce) {
		return nil, errNonce
	}
	e, err := s.enrolledByProof(ctx, req)
	if err != nil {
		return nil, err
	}
	if s.deny.Load().revokes(e.identity()) {
		return nil, errJoinRevoked
	}
	if e.class == ClassDevice {
		if !admit(ctx, e.subject) {
			return nil, errLinkedElsewhere
		}
		// A caller that left while the link was pinged has cut the ping short: that the link did
		// not answer means nothing, and a copy must not spend a generation that way.
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("refresh: %w", err)
		}
	}
	var m *Minted
	out := new(Enrolled)
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
		// Read again: the row may have changed since the proof was verified.
		if e, err = scanEnrolled(tx.QueryRow("SELECT "+enrolledColumns+" FROM enrollments WHERE id = ?", e.rowID).Scan); err != nil {
			return err
		}
		_, revoked, err := revokedUntilTx(tx, e.identity())
		switch {
		case err != nil:
			return err
		case revoked || e.revoked:
			return errJoinRevoked
		case s.isReplay(e, req):
			return errNonce
		}
		var ok bool
		if out.Repeat, out.CloneSuspected, ok = e.refresh.apply(req.Gen, req.RequestID, e.class == ClassDevice); !ok {
			return errGenerationUsed
		}
		e.nonce = req.Nonce
		m, err = s.issueTx(tx, e)
		return err
	}, nil)
	if err == nil {
		err = s.sign(m, MintRequest{Gen: e.refresh.gen, Instance: e.instance})
	}
	if err != nil {
		return nil, fmt.Errorf("refresh: %w", err)
	}
	s.fillResult(out, e, m)
	return out, nil
}

// checkRenew checks the form of a request.
func checkRenew(req *enrollment.TokenRequest) error {
	_, requestOK := manifest.ParseULID(req.RequestID)
	_, sessionOK := manifest.ParseULID(req.SessionID)
	switch {
	case (req.NodeID == "") == (req.AgentID == ""):
		return badRequest("give either node_id or agent_id")
	case req.NodeID != "" && !manifest.ValidNodeID(req.NodeID), req.AgentID != "" && !subjectRE.MatchString(req.AgentID):
		return badRequest("node_id or agent_id is malformed")
	case req.Gen < 1 || req.Gen >= maxTokenGen:
		return badRequest("gen is out of range")
	case !requestOK:
		return badRequest("request_id is not a ULID")
	case req.SessionID != "" && !sessionOK:
		return badRequest("session_id is not a ULID")
	}
	return nil
}

// maxKeysOfSubject bounds the keys of one id that a proof is tried with: the present one and
// some that it replaced.
const maxKeysOfSubject = 8

// enrolledByProof finds the row whose key made the proof of a request. An unknown id and a
// wrong proof get the same answer, so that ids cannot be probed.
func (s *Store) enrolledByProof(ctx context.Context, req *enrollment.TokenRequest) (*enrolled, error) {
	class, subject := ClassAgent, req.AgentID
	if req.NodeID != "" {
		class, subject = ClassDevice, req.NodeID
	}
	message := enrollment.TokenMessage(req.Nonce, subject, req.Gen, req.RequestID)
	var found *enrolled
	err := s.query(ctx, func(scan func(...any) error) error {
		e, err := scanEnrolled(scan)
		if err != nil {
			return err
		}
		if enrollment.Verify(e.publicKey, message, req.Proof) {
			found = e
			return errStopRows
		}
		return nil
	}, "SELECT "+enrolledColumns+" FROM enrollments WHERE sub = ? AND class = ? ORDER BY id DESC LIMIT ?", subject, class, maxKeysOfSubject)
	switch {
	case err != nil:
		return nil, fmt.Errorf("refresh: %w", err)
	case found == nil:
		return nil, errProof
	case found.revoked:
		return nil, errJoinRevoked
	}
	return found, nil
}

// isReplay reports whether a request was recorded and sent again. A client gets a new nonce
// for each attempt, so its nonces only become newer. Without this check, a recorded request
// could spend the one refresh that an older generation has, and raise a false alarm. A
// request that still repeats the newest generation changes nothing and is served.
func (s *Store) isReplay(e *enrolled, req *enrollment.TokenRequest) bool {
	last, ok := s.nonces.issuedAt(e.nonce)
	if !ok || e.refresh.isRepeat(req.Gen, req.RequestID) { // not ok: of before the last start, as is no valid nonce
		return false
	}
	at, _ := s.nonces.issuedAt(req.Nonce)
	return at < last || req.Nonce == e.nonce
}

// VerifyLinkProof checks that whoever presents a token that is bound to a key holds that key:
// proof signs the nonce of the link's hello (enrollment.LinkMessage). It remembers that the
// token's generation has been used.
func (s *Store) VerifyLinkProof(ctx context.Context, id *Identity, token, nonce, proof string) error {
	var e *enrolled
	err := s.query(ctx, func(scan func(...any) error) (err error) {
		e, err = scanEnrolled(scan)
		return err
	}, "SELECT "+enrolledColumns+" FROM enrollments WHERE jkt = ? AND tenant = ? AND sub = ? AND class = ?",
		id.KeyThumbprint, id.Tenant, id.Subject, id.Class)
	switch {
	case err != nil:
		return err
	case e == nil || !enrollment.Verify(e.publicKey, enrollment.LinkMessage(nonce, id.NodeID, token), proof):
		return errProof
	case e.revoked || s.deny.Load().revokes(e.identity()):
		return errJoinRevoked
	}
	if id.Gen > e.refresh.usedGen { // once for each refresh that is followed by a new link
		err = s.db.write(ctx, func(tx *sql.Tx) error {
			_, err := tx.Exec("UPDATE enrollments SET used_gen = max(used_gen, ?) WHERE id = ?", id.Gen, e.rowID)
			return err
		}, nil)
	}
	return err
}

// revokeKeyOfTokenTx revokes the key whose newest token is jti, if a board or agent that joined holds
// it: its holder would otherwise get another token at once. Every token that is bound to the key stops,
// and so do invites that its holder made. It does not revoke by subject, which other tenants may use, too.
func revokeKeyOfTokenTx(tx *sql.Tx, jti string, now int64) error {
	var jkt, tenant, subject string
	err := tx.QueryRow("SELECT jkt, tenant, sub FROM enrollments WHERE jti = ?", jti).Scan(&jkt, &tenant, &subject)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := addRevocation(tx, "jti", jkt, now, maxRevocations); err != nil {
		return err
	}
	for _, stmt := range []string{
		"UPDATE enrollments SET code_revoked = 1 WHERE code IN (SELECT code FROM invites WHERE tenant = ?2 AND creator = ?3)",
		"UPDATE invites SET revoked = max(?1, 1) WHERE tenant = ?2 AND creator = ?3 AND revoked = 0",
	} {
		if _, err := tx.Exec(stmt, now, tenant, subject); err != nil {
			return err
		}
	}
	return nil
}

package link

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// Grant is the rights that the relay's authenticator gives a device.
type Grant struct {
	NodeID string
	Tenant string
	// ProposedName is Auth.Name. It counts only once the device is admitted.
	ProposedName string
	// CheckActive returns an error when the grant has been revoked. It must be quick; nil:
	// the grant cannot be revoked.
	CheckActive func() error
	// ExpiresAt is the end of the grant at the time of auth; zero: never. Session.CheckGrant
	// and Session.GrantRemaining say when it really ends: by monotonic time, and later when
	// it was extended.
	ExpiresAt time.Time
	Proved    bool // auth proved the key that the token is bound to
	// Address is where the device connected from, for the audit log; invalid: unknown.
	Address netip.Addr
}

// Refusal is an error that ends a handshake with a close code of the authenticator's
// choice. Reason is sent to the device, so it must not say more than the code does.
type Refusal struct {
	Code   int
	Reason string
}

// Error is for the relay's log.
func (r *Refusal) Error() string { return "link refused: " + r.Reason }

// AcceptOptions configure the relay's end.
type AcceptOptions struct {
	// Authenticate checks the token, within AuthTimeout. A *Refusal carries the close code;
	// any other error closes with 4401. Auth.Nonce and Auth.V21 are set.
	Authenticate func(ctx context.Context, a *Auth) (*Grant, error)
	// Admit decides, after Authenticate and before auth_ok, whether the device may have the
	// link of its node and which session it gets. The fields of s are set, its ID included,
	// which is that of a fresh session. It may block for AdmitTimeout. A *Refusal carries the
	// close code. nil: each link is a fresh session.
	Admit func(ctx context.Context, s *Session, a *Auth) (Admission, error)
	// Now is the wall clock, for server_time_ms; nil: time.Now.
	Now func() time.Time
	// ReconnectSpreadMS is the reconnect_spread_ms of auth_ok, see Backoff.
	ReconnectSpreadMS func() int64
	// ValidateCapability checks one announced capability against its schema; nil: no check.
	ValidateCapability func(raw []byte) error
}

// Admission is the session that a link gets.
type Admission struct {
	SessionID string // of the resumed session; "" for a fresh one
	Resumed   bool   // answers Auth.Resume
}

// Manifest is an announce after its checks: what was rejected is left out.
type Manifest struct {
	Capabilities []*manifest.Capability
	Tools        []manifest.Tool
	Raw          []byte // Capabilities as a JSON array
}

// Accept runs the relay's handshake: hello, auth, auth_ok, announce. The announce_ack is
// sent by Run, so that the owner can make the device's tools available first.
//
// Each wait is bounded. When Accept fails it has closed the link: CloseCode of the error is
// the code that was sent, the peer's, or 0 for a link that broke. The end of ctx closes the
// link with 4503.
func Accept(ctx context.Context, conn Conn, opt AcceptOptions) (*Session, *Manifest, error) {
	s := &Session{conn: conn, opt: opt, ID: manifest.NewULID(), V21: conn.Subprotocol() == Subprotocol21}
	s.runWriter = s.drainQueue
	s.lastReadAt.Store(monotonicNow())
	conn.OnPing(s.onPing)
	stop := context.AfterFunc(ctx, func() { s.Close(CloseDraining, "draining") })
	defer stop()
	// Read deadlines do not bound a pong, which blocks while the peer reads nothing.
	timeout := time.AfterFunc(maxHandshakeTime, func() { s.Close(CloseTimeout, "timeout") })
	defer timeout.Stop()
	m, err := s.handshake(ctx, timeout)
	if err != nil {
		return nil, nil, s.shutdown(err)
	}
	_ = conn.SetReadDeadline(time.Time{})                                    // from here on the owner calls CheckLiveness
	s.opt.Authenticate, s.opt.Admit, s.opt.ReconnectSpreadMS = nil, nil, nil // frees what these closures hold
	return s, m, nil
}

// wallClock is the time that the device gets as server_time_ms.
func (s *Session) wallClock() time.Time {
	if s.opt.Now == nil {
		return time.Now()
	}
	return s.opt.Now()
}

// handshake reads and writes the messages in the order of the protocol. Before auth the
// read limit is MaxFrame, so that a stranger cannot make the relay buffer more.
func (s *Session) handshake(ctx context.Context, timeout *time.Timer) (*Manifest, error) {
	_ = s.conn.SetReadDeadline(time.Now().Add(AuthTimeout))
	nonce := make([]byte, 32)
	_, _ = rand.Read(nonce)
	hello := Hello{Protocol: Protocol, Nonce: base64.RawURLEncoding.EncodeToString(nonce), ServerTimeMS: s.wallClock().UnixMilli()}
	if err := s.conn.Write(Encode(TypeHello, NewID(), "", hello)); err != nil {
		return nil, err
	}
	var auth Auth
	if err := expect(s.conn, TypeAuth, func(e *Envelope) error { return decodeValid(e, &auth) }); err != nil {
		return nil, err
	}
	if auth.Nonce, auth.V21 = hello.Nonce, s.V21; !s.V21 {
		auth.Resume = nil
	}
	g, err := s.authenticate(ctx, &auth)
	if err != nil {
		return nil, err
	}
	s.Grant, s.BootID, s.InstanceID, s.Version = *g, auth.BootID, auth.InstanceID, auth.AgentVersion
	s.setGrantEnd(g.ExpiresAt)
	timeout.Reset(AdmitTimeout + maxHandshakeTime)
	resumed, err := s.admit(ctx, &auth)
	if err != nil {
		return nil, err
	}
	timeout.Reset(maxHandshakeTime)
	ok := AuthOK{NodeID: g.NodeID, TenantID: g.Tenant, SessionID: s.ID, Resumed: resumed, ServerTimeMS: s.wallClock().UnixMilli(),
		ReconnectSpreadMS: s.opt.ReconnectSpreadMS(), Limits: Limits{MaxInflight: MaxInflight, MaxStreams: MaxStreams}}
	s.startTime(ok.ServerTimeMS)
	if err := s.conn.Write(Encode(TypeAuthOK, NewID(), "", ok)); err != nil {
		return nil, err
	}
	if s.V21 {
		s.mu.Lock()
		payload := s.appendPingLocked(nil, false)
		s.mu.Unlock()
		if err := s.conn.Ping(payload); err != nil {
			return nil, err
		}
	}
	s.conn.SetReadLimit(MaxAnnounce) // the larger limit is for authenticated peers only
	_ = s.conn.SetReadDeadline(time.Now().Add(AnnounceTimeout))
	var m *Manifest
	var ack []byte
	err = expect(s.conn, TypeAnnounce, func(e *Envelope) (err error) {
		m, ack, err = s.checkAnnounce(e)
		return err
	})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.pings.onAnnounce(s.NowMS() - ok.ServerTimeMS)
	s.mu.Unlock()
	// Run sends the announce_ack, ahead of any cmd: a device that reads it can rely on its
	// tools being available.
	s.queue, s.writing = [][]byte{ack}, true
	return m, nil
}

// expect reads one message, which must be of type typ, and calls fn with it.
func expect(conn Conn, typ string, fn func(e *Envelope) error) error {
	return conn.Read(func(msg []byte) error {
		e, err := Decode(msg)
		switch {
		case err != nil:
			return err
		case e.Type != typ:
			return badFrame(e.Type + " in the wrong state")
		}
		return fn(&e)
	})
}

// authenticate calls the authenticator. An error that is not a Refusal becomes 4401, except
// the end of ctx, which closeCodeFor maps.
func (s *Session) authenticate(ctx context.Context, a *Auth) (*Grant, error) {
	ctx, cancel := context.WithTimeout(ctx, AuthTimeout)
	defer cancel()
	g, err := s.opt.Authenticate(ctx, a)
	var r *Refusal
	if err == nil || errors.As(err, &r) || ctx.Err() != nil {
		return g, err
	}
	return nil, &Refusal{Code: CloseAuthFailed, Reason: "auth_failed"}
}

// admit asks the owner for the session of the link. An error that is not a Refusal becomes
// 4503, except the end of ctx, which closeCodeFor maps.
func (s *Session) admit(ctx context.Context, a *Auth) (resumed bool, err error) {
	if s.opt.Admit == nil {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, AdmitTimeout)
	defer cancel()
	adm, err := s.opt.Admit(ctx, s, a)
	var r *Refusal
	switch {
	case errors.As(err, &r), errors.Is(err, context.Canceled):
		return false, err
	case err != nil:
		return false, &Refusal{Code: CloseDraining, Reason: "overloaded"}
	case adm.SessionID != "":
		s.ID = adm.SessionID
	}
	return adm.Resumed && a.Resume != nil, nil
}

// validate checks the forms that RFC-0002 §2 prescribes. All of them end up in logs or in
// tool names, so nothing else may pass.
func (a *Auth) validate() bool {
	_, bootOK := manifest.ParseULID(a.BootID)
	return bootOK && len(a.InstanceID) == 32 && strings.Trim(a.InstanceID, "0123456789abcdef") == "" &&
		len(a.AgentVersion) <= 64 && printableASCII(a.AgentVersion) == a.AgentVersion &&
		(a.Name == "" || manifest.ValidNodeName(a.Name)) && (a.Resume == nil || a.Resume.validate())
}

// validate checks the bounds of a resume and brings its ids to upper case.
func (r *Resume) validate() bool {
	var ok, idOK bool
	r.SessionID, ok = manifest.ParseULID(r.SessionID)
	for i := range r.Seen {
		c := &r.Seen[i]
		c.MsgID, idOK = manifest.ParseULID(c.MsgID)
		ok = ok && idOK && (c.State == SeenRunning || c.State == SeenDone)
	}
	return ok && len(r.Seen) <= MaxInflight
}

// closeCodeFor maps the error that ended a link to the close frame for the peer.
func closeCodeFor(err error) (code int, reason string) {
	var refusal *Refusal
	var own *codedError
	var me *manifest.Error
	var ne net.Error
	switch {
	case errors.As(err, &refusal):
		return refusal.Code, refusal.Reason
	case errors.As(err, &own):
		return own.code, own.reason
	case errors.As(err, &me) && me.Code == manifest.ManifestInvalid:
		return CloseManifestInvalid, "manifest_invalid"
	case errors.As(err, &ne) && ne.Timeout():
		return CloseTimeout, "timeout"
	case errors.Is(err, context.Canceled):
		return CloseDraining, "draining"
	case CloseCode(err) != 0:
		return CloseNormal, "normal"
	}
	return CloseGoingAway, "gone" // the link broke; the peer will hardly read this
}

// checkAnnounce checks an announce and makes its announce_ack. Capabilities are rejected
// one by one; a malformed announce, or one of which nothing is left, is E_MANIFEST_INVALID.
func (s *Session) checkAnnounce(e *Envelope) (*Manifest, []byte, error) {
	var a Announce
	var raws []strictjson.Raw
	if e.Decode(&a) != nil || strictjson.Unmarshal(a.Capabilities, &raws) != nil || len(raws) > manifest.MaxCapabilities {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "the announce is malformed: manifest_version, manifest_sha256 and an array of at most 32 capabilities")
	}
	if a.ManifestVersion != manifest.Version || manifest.Hash(a.Capabilities) != a.ManifestSHA256 {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "manifest_version or manifest_sha256 does not fit")
	}
	m := &Manifest{Capabilities: make([]*manifest.Capability, 0, len(raws))}
	ack := AnnounceAck{Tools: []string{}, Rejected: []Rejected{}}
	seen := make(map[string]bool, len(raws))
	for _, raw := range raws {
		c, tools, err := s.checkCapability(raw)
		if err != nil || seen[c.CapID] {
			ack.Rejected = append(ack.Rejected, Rejected{CapID: rejectedCapID(raw), Code: manifest.ManifestInvalid})
			continue
		}
		seen[c.CapID] = true
		m.Capabilities = append(m.Capabilities, c)
		m.Tools = append(m.Tools, tools...)
		for _, t := range tools {
			ack.Tools = append(ack.Tools, t.Canonical)
		}
	}
	if len(m.Tools) == 0 {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "no capability is left")
	}
	m.Tools = slices.Clone(m.Tools)    // without spare capacity: a relay has one for each board
	m.Raw = encodeJSON(m.Capabilities) // not the announced bytes: they include what was rejected
	return m, Encode(TypeAnnounceAck, NewID(), e.MsgID, ack), nil
}

// checkCapability parses one announced capability and projects it to tools of this node.
func (s *Session) checkCapability(raw []byte) (*manifest.Capability, []manifest.Tool, error) {
	if s.opt.ValidateCapability != nil {
		if err := s.opt.ValidateCapability(raw); err != nil {
			return nil, nil, err
		}
	}
	c := new(manifest.Capability)
	if err := strictjson.Unmarshal(raw, c); err != nil {
		return nil, nil, err
	}
	if !servedOn(s.V21, c.Kind) {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "the kind needs "+Subprotocol21)
	}
	tools, err := manifest.Project(s.NodeID, c)
	return c, tools, err
}

// servedOn reports whether a link of a version may carry a kind of capability. What came with
// v2.1 is neither announced nor accepted on v2.
func servedOn(v21 bool, kind string) bool {
	k, known := manifest.LookupKind(kind)
	return v21 || !known || !k.SinceV21
}

// rejectedCapID is the cap_id of a rejected capability, so that a developer knows which
// one it is; "" when it has no well-formed one.
func rejectedCapID(raw []byte) string {
	var c map[string]strictjson.Raw
	var id string
	if strictjson.Unmarshal(raw, &c) != nil || strictjson.Unmarshal(c["cap_id"], &id) != nil || !manifest.ValidCapID(id) {
		return ""
	}
	return id
}

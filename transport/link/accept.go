package link

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"net"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// Grant is what the relay's authenticator gives to a device.
type Grant struct {
	NodeID      string
	Tenant      string
	Name        string
	CheckActive func() error // still good? It must be quick; nil: cannot end
	ExpiresAt   time.Time    // when it ends by itself; zero: never
}

// Refusal ends a handshake with a close code.
type Refusal struct {
	Code   int
	Reason string
}

func (r *Refusal) Error() string { return "link refused: " + r.Reason }

// AcceptOptions configure the relay's end.
type AcceptOptions struct {
	// Authenticate checks the token, within AuthTimeout; a *Refusal tells the close code,
	// any other error closes with 4401.
	Authenticate func(ctx context.Context, a *Auth) (*Grant, error)
	// ReconnectSpreadMS is the reconnect_spread_ms that a device gets.
	ReconnectSpreadMS func() int64
	// ValidateCapability checks one announced capability against its schema; nil skips.
	ValidateCapability func(raw []byte) error
}

// Manifest is a checked announce.
type Manifest struct {
	Capabilities []*manifest.Capability
	Tools        []manifest.Tool
	Raw          []byte // Capabilities as a JSON array
}

// Accept runs the relay's handshake: hello, auth, auth_ok, announce; the announce_ack goes
// out when Run begins. Every wait is bounded. When it fails it has closed the link: CloseCode of the error is the
// code that was sent, the peer's, or 0 for a link that just broke. The end of ctx closes
// it with 4503.
func Accept(ctx context.Context, conn Conn, opt AcceptOptions) (*Session, *Manifest, error) {
	s := &Session{conn: conn, opt: opt, ID: manifest.NewULID()}
	s.runWriter = s.drainQueue
	s.lastReadAt.Store(monotonicNow())
	conn.OnPing(s.onPing)
	stop := context.AfterFunc(ctx, func() { s.Close(CloseDraining, "draining") })
	defer stop()
	// A pong to a peer that reads nothing may wait for longer than any read deadline.
	late := time.AfterFunc(maxHandshakeTime, func() { s.Close(CloseTimeout, "timeout") })
	defer late.Stop()
	m, err := s.handshake(ctx)
	if err != nil {
		return nil, nil, s.shutdown(err)
	}
	_ = conn.SetReadDeadline(time.Time{})                  // the owner's sweep calls Tick from here on
	s.opt.Authenticate, s.opt.ReconnectSpreadMS = nil, nil // they hold what the handshake needed
	return s, m, nil
}

func (s *Session) handshake(ctx context.Context) (*Manifest, error) {
	_ = s.conn.SetReadDeadline(time.Now().Add(AuthTimeout))
	nonce := make([]byte, 32)
	_, _ = rand.Read(nonce)
	hello := Hello{Protocol: Protocol, Nonce: base64.RawURLEncoding.EncodeToString(nonce), ServerTimeMS: time.Now().UnixMilli()}
	if err := s.conn.Write(Encode(TypeHello, NewID(), "", hello)); err != nil {
		return nil, err
	}
	var auth Auth
	err := s.readMessage(TypeAuth, func(e *Envelope) error { return e.Decode(&auth) })
	if err != nil {
		return nil, err
	}
	if err := auth.check(); err != nil {
		return nil, err
	}
	g, err := s.authenticate(ctx, &auth)
	if err != nil {
		return nil, err
	}
	s.Grant, s.BootID, s.InstanceID, s.Version = *g, auth.BootID, auth.InstanceID, auth.AgentVersion
	ok := AuthOK{NodeID: g.NodeID, TenantID: g.Tenant, SessionID: s.ID, ServerTimeMS: time.Now().UnixMilli(),
		ReconnectSpreadMS: s.opt.ReconnectSpreadMS(), Limits: Limits{MaxInflight: MaxInflight, MaxStreams: MaxStreams}}
	if err := s.conn.Write(Encode(TypeAuthOK, NewID(), "", ok)); err != nil {
		return nil, err
	}
	s.conn.SetReadLimit(MaxAnnounce) // only for those who proved who they are
	_ = s.conn.SetReadDeadline(time.Now().Add(AnnounceTimeout))
	var m *Manifest
	var reply []byte
	err = s.readMessage(TypeAnnounce, func(e *Envelope) (err error) {
		m, reply, err = s.checkAnnounce(e)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Run sends it, ahead of every cmd: whoever reads it finds the device's tools served.
	s.queue, s.writing = [][]byte{reply}, true
	return m, nil
}

// readMessage reads one message, which has to be of that type: anything before its state is
// a bad frame.
func (s *Session) readMessage(typ string, fn func(e *Envelope) error) error {
	return s.conn.Read(func(msg []byte) error {
		e, err := Decode(msg)
		if err != nil {
			return err
		}
		if e.Type != typ {
			return badFrame(e.Type + " before its state")
		}
		return fn(&e)
	})
}

func (s *Session) authenticate(ctx context.Context, a *Auth) (*Grant, error) {
	ctx, cancel := context.WithTimeout(ctx, AuthTimeout)
	defer cancel()
	g, err := s.opt.Authenticate(ctx, a)
	var r *Refusal
	switch {
	case err == nil:
		return g, nil
	case errors.As(err, &r), ctx.Err() != nil:
		return nil, err
	}
	return nil, &Refusal{Code: CloseAuthFailed, Reason: "auth_failed"}
}

func (a *Auth) check() error {
	_, bootOK := manifest.ParseULID(a.BootID)
	switch {
	case !bootOK, !validInstance(a.InstanceID), len(a.AgentVersion) > 64, printableASCII(a.AgentVersion) != a.AgentVersion,
		a.Name != "" && !manifest.ValidNodeName(a.Name), a.Resume != nil && !a.Resume.valid():
		return badFrame("payload of auth")
	}
	return nil
}

func (r *Resume) valid() bool {
	_, ok := manifest.ParseULID(r.SessionID)
	for _, c := range r.Seen {
		_, idOK := manifest.ParseULID(c.MsgID)
		ok = ok && idOK && (c.State == SeenRunning || c.State == SeenDone)
	}
	return ok && len(r.Seen) <= MaxInflight
}

func validInstance(s string) bool {
	if len(s) != 32 {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// closeCodeFor maps the end of a link to the close code that the peer is told.
func closeCodeFor(err error) (code int, reason string) {
	var r *Refusal
	var me *manifest.Error
	var ne net.Error
	switch {
	case errors.As(err, &r):
		return r.Code, r.Reason
	case errors.Is(err, ErrTooLarge):
		return CloseTooLarge, "too_large"
	case errors.Is(err, errBackpressure):
		return CloseTooLarge, "backpressure"
	case errors.Is(err, errFlood):
		return CloseRateLimited, "rate_limited"
	case errors.Is(err, ErrBadFrame):
		return CloseBadFrame, "bad_frame"
	case errors.As(err, &me) && me.Code == manifest.ManifestInvalid:
		return CloseManifestInvalid, "manifest_invalid"
	case errors.As(err, &ne) && ne.Timeout():
		return CloseTimeout, "timeout"
	case errors.Is(err, context.Canceled):
		return CloseDraining, "draining"
	case CloseCode(err) != 0:
		return CloseNormal, "normal"
	}
	return CloseGoingAway, "gone" // it broke; hardly anybody will read this
}

// checkAnnounce checks an announce and makes its announce_ack. Bad capabilities are rejected
// one by one; a malformed announce or one with nothing left is E_MANIFEST_INVALID.
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
		if err == nil && seen[c.CapID] {
			err = manifest.E(manifest.ManifestInvalid, "cap_id stands twice")
		}
		if err != nil {
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
	m.Raw = encodeJSON(m.Capabilities) // not as sent: what was rejected is kept nowhere
	return m, Encode(TypeAnnounceAck, NewID(), e.MsgID, ack), nil
}

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
	tools, err := manifest.Project(s.NodeID, c)
	return c, tools, err
}

// rejectedCapID is the cap_id of a rejected capability if it has a well-formed one, so that a
// developer can tell which; otherwise "".
func rejectedCapID(raw []byte) string {
	var c map[string]strictjson.Raw
	var id string
	if strictjson.Unmarshal(raw, &c) != nil || strictjson.Unmarshal(c["cap_id"], &id) != nil || !manifest.ValidCapID(id) {
		return ""
	}
	return id
}

package link

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/transport/strictjson"
)

// Grant is what the relay's authenticator gives to a device.
type Grant struct {
	NodeID string
	Tenant string
	Name   string
	Active func() error // still good? nil: cannot end
}

// Refusal ends a handshake with a close code.
type Refusal struct {
	Code   int
	Reason string
}

func (r *Refusal) Error() string { return "link refused: " + r.Reason }

// AcceptOptions configure the relay's end.
type AcceptOptions struct {
	// Authenticate checks the token; a *Refusal tells the close code, any other error
	// closes with 4401.
	Authenticate func(ctx context.Context, a *Auth) (*Grant, error)
	// SpreadMS is the reconnect_spread_ms that a device gets.
	SpreadMS func() int64
	// Validate checks one announced capability against its schema; nil skips.
	Validate func(raw []byte) error
}

// Session is the relay's end of a link whose device is authenticated and announced.
type Session struct {
	Grant
	ID         string
	BootID     string
	InstanceID string
	Version    string // agent_version, for people only

	conn     Conn
	opt      AcceptOptions
	lastRead atomic.Int64 // monotonic ns since epoch
	pinged   atomic.Int64 // when the peer last pinged

	mu      sync.Mutex // protects the fields below
	queue   [][]byte
	writing bool
	closed  bool
	strange int     // acks that answer nothing
	tokens  float64 // flood bucket
	filled  int64

	wg sync.WaitGroup // the writer
}

// epoch is the zero of the package's monotonic readings.
var epoch = time.Now()

func monoNow() int64 { return int64(time.Since(epoch)) }

// Manifest is a checked announce.
type Manifest struct {
	Capabilities []*manifest.Capability
	Tools        []manifest.Tool
	Raw          []byte // the raw bytes of capabilities
}

// Accept runs the relay's handshake: hello, auth, auth_ok, announce, announce_ack. It
// closes the link itself when it returns an error. Every wait is bounded.
func Accept(ctx context.Context, conn Conn, opt AcceptOptions) (*Session, *Manifest, error) {
	s := &Session{conn: conn, opt: opt, ID: manifest.NewULID()}
	s.lastRead.Store(monoNow())
	conn.OnPing(func(ping bool) {
		now := monoNow()
		s.lastRead.Store(now)
		if ping {
			s.pinged.Store(now)
		}
	})
	m, err := s.handshake(ctx)
	if err != nil {
		code, reason := closeFor(err)
		_ = conn.Close(code, reason)
		return nil, nil, err
	}
	_ = conn.SetReadDeadline(time.Time{}) // the owner's sweep calls Tick from here on
	return s, m, nil
}

func (s *Session) handshake(ctx context.Context) (*Manifest, error) {
	_ = s.conn.SetReadDeadline(time.Now().Add(AuthTimeout))
	nonce := make([]byte, 32)
	_, _ = rand.Read(nonce)
	hello := Hello{Protocol: Protocol, Nonce: base64.RawURLEncoding.EncodeToString(nonce), ServerTimeMS: time.Now().UnixMilli()}
	if err := s.conn.Write(Encode(TypeHello, manifest.NewULID(), "", hello)); err != nil {
		return nil, err
	}
	var auth Auth
	if err := s.expect(TypeAuth, &auth); err != nil {
		return nil, err
	}
	if err := auth.check(); err != nil {
		return nil, err
	}
	g, err := s.opt.Authenticate(ctx, &auth)
	if err != nil {
		return nil, err
	}
	s.Grant, s.BootID, s.InstanceID, s.Version = *g, auth.BootID, auth.InstanceID, auth.AgentVersion
	ok := AuthOK{NodeID: g.NodeID, TenantID: g.Tenant, SessionID: s.ID, ServerTimeMS: time.Now().UnixMilli(),
		ReconnectSpreadMS: s.opt.SpreadMS(), Limits: Limits{MaxInflight: MaxInflight, MaxStreams: MaxStreams}}
	if err := s.conn.Write(Encode(TypeAuthOK, manifest.NewULID(), "", ok)); err != nil {
		return nil, err
	}
	_ = s.conn.SetReadDeadline(time.Now().Add(AnnounceTimeout))
	var a Announce
	var replyTo string
	err = s.conn.Read(func(msg []byte) error {
		e, err := Decode(msg)
		if err != nil {
			return err
		}
		if e.Type != TypeAnnounce {
			return ErrBadFrame
		}
		replyTo = e.MsgID
		if err := e.Decode(&a); err != nil {
			return err
		}
		a.Capabilities = append(strictjson.Raw(nil), a.Capabilities...) // the bytes are the reader's
		return nil
	})
	if err != nil {
		return nil, err
	}
	m, ack, err := s.project(&a)
	if err != nil {
		return nil, err
	}
	return m, s.conn.Write(Encode(TypeAnnounceAck, manifest.NewULID(), replyTo, ack))
}

func (s *Session) expect(typ string, v any) error {
	return s.conn.Read(func(msg []byte) error {
		e, err := Decode(msg)
		if err != nil {
			return err
		}
		if e.Type != typ {
			return ErrBadFrame // anything before its state
		}
		return e.Decode(v)
	})
}

func (a *Auth) check() error {
	_, bootOK := manifest.ParseULID(a.BootID)
	switch {
	case !bootOK, !validInstance(a.InstanceID), len(a.AgentVersion) > 64, a.Token == "",
		a.Name != "" && !manifest.ValidNodeName(a.Name),
		a.Resume != nil && len(a.Resume.Seen) > MaxInflight:
		return ErrBadFrame
	}
	return nil
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

// closeFor maps the end of a link to the close code that the device is told.
func closeFor(err error) (code int, reason string) {
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
	}
	return CloseAuthFailed, "auth_failed"
}

var (
	errBackpressure = errors.New("link: the device does not read")
	errFlood        = errors.New("link: the device sends too much")
)

// SessionHandler is told what a device sends. Calls come from the session's goroutine,
// one at a time; byte slices are the handler's only until it returns.
type SessionHandler interface {
	Announced(m *Manifest)
	Acked(inReplyTo string, a *CmdAck) (known bool)
	Metered(m *Metric) error
	Ended(e *StreamEnd)
}

// Run reads the link until it ends and returns why; it waits for the writer. The link
// is closed when it returns.
func (s *Session) Run(ctx context.Context, h SessionHandler) error {
	stop := context.AfterFunc(ctx, func() { s.Close(CloseDraining, "draining") })
	defer stop()
	var err error
	for err == nil {
		err = s.conn.Read(func(msg []byte) error { return s.handle(msg, h) })
	}
	if CloseCode(err) == 0 && ctx.Err() == nil && !s.isClosed() {
		code, reason := closeFor(err)
		if code == CloseAuthFailed { // a broken connection, not a refusal
			code, reason = CloseGoingAway, "gone"
		}
		s.Close(code, reason)
	} else {
		s.Close(CloseNormal, "normal")
	}
	s.wg.Wait()
	return err
}

func (s *Session) handle(msg []byte, h SessionHandler) error {
	now := monoNow()
	s.lastRead.Store(now)
	if !s.admit(now) {
		return errFlood
	}
	e, err := Decode(msg)
	if err != nil {
		return err
	}
	switch e.Type {
	case TypeCmdAck:
		var a CmdAck
		if err := e.Decode(&a); err != nil {
			return err
		}
		if !a.valid() {
			return ErrBadFrame
		}
		if !h.Acked(e.InReplyTo, &a) {
			if s.strange++; s.strange > maxStrange {
				return ErrBadFrame
			}
		}
	case TypeMetric:
		var m Metric
		if err := e.Decode(&m); err != nil {
			return err
		}
		return h.Metered(&m)
	case TypeStreamEnd:
		var end StreamEnd
		if err := e.Decode(&end); err != nil {
			return err
		}
		if end.Reason != EndCancelled && end.Reason != EndHandlerError && end.Reason != EndShutdown {
			return ErrBadFrame
		}
		h.Ended(&end)
	case TypeAnnounce:
		var a Announce
		if err := e.Decode(&a); err != nil {
			return err
		}
		a.Capabilities = append(strictjson.Raw(nil), a.Capabilities...)
		m, ack, err := s.project(&a)
		if err != nil {
			return err
		}
		h.Announced(m)
		return s.Send(Encode(TypeAnnounceAck, manifest.NewULID(), e.MsgID, ack))
	case TypeError:
		var p ErrorPayload
		if err := e.Decode(&p); err != nil {
			return err
		}
		if !p.Code.Valid() {
			return ErrBadFrame
		}
	default: // auth again, or a relay's word
		return ErrBadFrame
	}
	return nil
}

// maxStrange is how many acks that answer nothing a device may send in one session.
const maxStrange = 64

func (a *CmdAck) valid() bool {
	if a.OK {
		return len(a.Result) > 0 && a.Code == "" && a.Detail == ""
	}
	return len(a.Result) == 0 && a.Code.Valid() && len(a.Detail) <= 200
}

// A device may send 1,000 frames at once and 500 a second: five times what its
// streams and commands can need.
const (
	floodBurst = 1000
	floodRate  = 500
)

func (s *Session) admit(now int64) bool {
	if s.filled == 0 {
		s.tokens = floodBurst
	} else {
		s.tokens = min(floodBurst, s.tokens+float64(now-s.filled)/1e9*floodRate)
	}
	s.filled = now
	if s.tokens < 1 {
		return false
	}
	s.tokens--
	return true
}

// Send queues a frame for the device; a full queue ends the link with 4413. It never
// blocks.
func (s *Session) Send(frame []byte) error { return s.enqueue(frame) }

// enqueue hands a frame to the writer, which lives only while there is work: an idle
// link has one goroutine. A nil frame is a ping.
func (s *Session) enqueue(frame []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	if len(s.queue) >= maxQueue {
		s.closeLocked(CloseTooLarge, "backpressure")
		return errBackpressure
	}
	s.queue = append(s.queue, frame)
	if !s.writing {
		s.writing = true
		s.wg.Go(s.write)
	}
	return nil
}

func (s *Session) write() {
	for {
		s.mu.Lock()
		if len(s.queue) == 0 || s.closed {
			s.queue, s.writing = nil, false
			s.mu.Unlock()
			return
		}
		frame := s.queue[0]
		s.queue = s.queue[1:]
		s.mu.Unlock()
		var err error
		if frame == nil {
			err = s.conn.Ping()
		} else {
			err = s.conn.Write(frame)
		}
		if err != nil {
			s.Close(CloseGoingAway, "gone")
		}
	}
}

// Close ends the link with a close code; Run returns soon after. It does not block: a
// dead peer can hold a close frame up for a second, and sweeps call this.
func (s *Session) Close(code int, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked(code, reason)
}

func (s *Session) closeLocked(code int, reason string) {
	if !s.closed {
		s.closed = true
		s.wg.Go(func() { _ = s.conn.Close(code, reason) })
	}
}

func (s *Session) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Tick is called by the owner's sweep, about once in PingEvery: it closes a link that
// has been silent for DeadAfter and pings one whose device has not pinged lately.
func (s *Session) Tick() {
	now := monoNow()
	if time.Duration(now-s.lastRead.Load()) > DeadAfter {
		s.Close(CloseTimeout, "idle_timeout")
		return
	}
	if p := s.pinged.Load(); p != 0 && time.Duration(now-p) < PingEvery {
		return
	}
	_ = s.enqueue(nil)
}

// Idle is how long the link has been silent.
func (s *Session) Idle() time.Duration { return time.Duration(monoNow() - s.lastRead.Load()) }

// project checks an announce and turns it into tools. Bad capabilities are rejected one
// by one; a malformed announce or one with nothing left is E_MANIFEST_INVALID.
func (s *Session) project(a *Announce) (*Manifest, *AnnounceAck, error) {
	if a.ManifestVersion != manifest.Version || manifest.Hash(a.Capabilities) != a.ManifestSHA256 {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "manifest_version or manifest_sha256 does not fit")
	}
	var raws []strictjson.Raw
	if err := strictjson.Unmarshal(a.Capabilities, &raws); err != nil || len(raws) > manifest.MaxCapabilities {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "capabilities is no array of at most 32 objects")
	}
	m := &Manifest{Raw: a.Capabilities}
	ack := &AnnounceAck{Tools: []string{}, Rejected: []Rejected{}}
	seen := make(map[string]bool, len(raws))
	m.Capabilities = make([]*manifest.Capability, 0, len(raws))
	for _, raw := range raws {
		c, tools, err := s.capability(raw)
		if err == nil && seen[c.CapID] {
			err = manifest.E(manifest.ManifestInvalid, "cap_id stands twice")
		}
		if err != nil {
			ack.Rejected = append(ack.Rejected, Rejected{CapID: capID(raw), Code: manifest.ManifestInvalid})
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
	return m, ack, nil
}

func (s *Session) capability(raw []byte) (*manifest.Capability, []manifest.Tool, error) {
	if s.opt.Validate != nil {
		if err := s.opt.Validate(raw); err != nil {
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

// capID is the cap_id of a rejected capability if it has a well-formed one, so that a
// developer can tell which; otherwise "".
func capID(raw []byte) string {
	var c map[string]strictjson.Raw
	var id string
	if strictjson.Unmarshal(raw, &c) != nil || strictjson.Unmarshal(c["cap_id"], &id) != nil || !manifest.ValidCapID(id) {
		return ""
	}
	return id
}

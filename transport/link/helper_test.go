package link

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// bubble runs a test in a synctest bubble whose clock starts in 2026: earlier samples are
// refused.
func bubble(t *testing.T, fn func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))
		// With tickers running, synctest does not detect a deadlock.
		defer time.AfterFunc(7*24*time.Hour, func() { panic("the test is deadlocked") }).Stop()
		fn(t)
	})
}

// raceDetector: tests take ten times as long, so some are smaller.
var raceDetector bool

// slow reports whether AGENTCTL_SLOW requests the full tests.
func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// peer is one end of a link, driven by the test frame by frame.
type peer struct {
	t    *testing.T
	conn Conn
}

func (p *peer) send(frame string) {
	p.t.Helper()
	if err := p.conn.Write([]byte(frame)); err != nil {
		p.t.Fatalf("write %.80s: %v", frame, err)
	}
}

func (p *peer) sendAs(typ, inReplyTo string, payload any) (id string) {
	p.t.Helper()
	id = NewID()
	if s, ok := payload.(string); ok {
		payload = strictjson.Raw(s)
	}
	p.send(string(Encode(typ, id, inReplyTo, payload)))
	return id
}

// read decodes the next frame into v; a frame of another type fails the test.
func (p *peer) read(typ string, v any) Envelope {
	p.t.Helper()
	var e Envelope
	err := p.conn.Read(func(msg []byte) (err error) {
		if e, err = Decode(append([]byte(nil), msg...)); err != nil {
			return err
		}
		return nil
	})
	if err != nil || e.Type != typ {
		p.t.Fatalf("got %s %s, %v, want %s", e.Type, e.Payload, err, typ)
	}
	if v != nil {
		if err := e.Decode(v); err != nil {
			p.t.Fatalf("payload of %s: %v", typ, err)
		}
	}
	return e
}

// readUntilClose reads until the link ends. It returns the close code of the other side and
// the frames that came before.
func (p *peer) readUntilClose() (code int, before []Envelope) {
	p.t.Helper()
	for {
		err := p.conn.Read(func(msg []byte) error {
			e, err := Decode(append([]byte(nil), msg...))
			before = append(before, e)
			return err
		})
		if err != nil {
			return CloseCode(err), before
		}
	}
}

// expectSilence fails the test when a frame comes within d.
func (p *peer) expectSilence(d time.Duration) {
	p.t.Helper()
	_ = p.conn.SetReadDeadline(time.Now().Add(d))
	err := p.conn.Read(func(msg []byte) error {
		p.t.Errorf("got %s, want nothing", msg)
		return nil
	})
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Errorf("the link ended: %v", err)
	}
	_ = p.conn.SetReadDeadline(time.Time{})
}

func (p *peer) close() { _ = p.conn.Close(CloseNormal, "normal") }

const testInstance = "0123456789abcdef0123456789abcdef"

func goodAuth() Auth {
	return Auth{Token: "good", AgentVersion: "1.0.0", BootID: NewID(), InstanceID: testInstance}
}

func announceOf(caps string) Announce {
	return Announce{ManifestVersion: 1, ManifestSHA256: manifest.Hash([]byte(caps)), Capabilities: strictjson.Raw(caps)}
}

func capsJSON(caps ...manifest.Capability) string {
	b, err := json.Marshal(caps)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func echoAndMetrics() string { return capsJSON(manifest.Echo(), manifest.Metrics()) }

// authenticate accepts the token "good" and refuses others in two ways.
func authenticate(_ context.Context, a *Auth) (*Grant, error) {
	switch a.Token {
	case "good":
		return &Grant{NodeID: testNode, Tenant: "acme"}, nil
	case "forbidden":
		return nil, &Refusal{Code: CloseForbidden, Reason: "forbidden"}
	}
	return nil, errors.New("no such token")
}

// recorder is a SessionHandler that records its calls.
type recorder struct {
	known bool // what OnAck returns

	mu    sync.Mutex
	lines []string
	raw   string // of the last announce
}

func (l *recorder) add(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *recorder) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

func (l *recorder) OnAnnounce(m *Manifest) {
	names := make([]string, len(m.Tools))
	for i := range m.Tools {
		names[i] = m.Tools[i].Name().CapID + "." + m.Tools[i].Name().Verb
	}
	l.add("announced %s", strings.Join(names, " "))
	l.raw = string(m.Raw)
}
func (l *recorder) OnAck(id string, a CmdAck) bool {
	l.add("acked %s %v %s%s", id, a.OK, a.Code, a.Result)
	return l.known
}
func (l *recorder) OnMetric(m Metric) error  { l.add("metered %d %s", m.Seq, m.Sample); return nil }
func (l *recorder) OnStreamEnd(e *StreamEnd) { l.add("ended %s", e.Reason) }
func (l *recorder) OnEvent(e *Event)         { l.add("event %s %s", e.Topic, e.Data) }

// relaySide runs Accept and Run in a goroutine.
type relaySide struct {
	*recorder
	cancel  context.CancelFunc
	session *Session  // after ready
	ready   chan bool // closed when Accept has returned
	done    chan error
	took    time.Duration // from Accept to the end of Run
}

func startRelay(conn Conn) *relaySide {
	ctx, cancel := context.WithCancel(context.Background())
	r := &relaySide{recorder: &recorder{known: true}, cancel: cancel, ready: make(chan bool), done: make(chan error, 1)}
	start := time.Now()
	go func() {
		s, m, err := Accept(ctx, conn, AcceptOptions{
			Authenticate:       authenticate,
			ReconnectSpreadMS:  func() int64 { return 1234 },
			ValidateCapability: func(raw []byte) error { return manifest.Validate(manifest.CapabilityRef, raw) },
		})
		if err == nil {
			r.session = s
			close(r.ready)
			r.OnAnnounce(m)
			err = s.Run(ctx, r.recorder)
		} else {
			close(r.ready)
		}
		r.took = time.Since(start)
		r.done <- err
	}()
	return r
}

// readyPair is a session in READY and the device that it serves, driven by the test.
func readyPair(t *testing.T) (*relaySide, *peer) {
	t.Helper()
	dev, rel := Pipe()
	r, p := startRelay(rel), &peer{t, dev}
	p.read(TypeHello, nil)
	p.sendAs(TypeAuth, "", goodAuth())
	p.read(TypeAuthOK, nil)
	p.sendAs(TypeAnnounce, "", announceOf(echoAndMetrics()))
	p.read(TypeAnnounceAck, nil)
	<-r.ready
	return r, p
}

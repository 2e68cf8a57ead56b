package link

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// pingRecorder is a device's end that keeps the payloads of the relay's pings.
type pingRecorder struct {
	*peer
	payloads []string
}

// accept21 starts a relay's end on v2.1 and returns the device's.
func accept21(t *testing.T, pipe func() (Conn, Conn), opt AcceptOptions) (*pingRecorder, chan error, chan *Session) {
	dev, rel := pipe()
	p := &pingRecorder{peer: &peer{t, dev}}
	dev.OnPing(func(ping bool, payload []byte) {
		if ping {
			p.payloads = append(p.payloads, string(payload))
		}
	})
	if opt.Authenticate == nil {
		opt.Authenticate = authenticate
	}
	opt.ReconnectSpreadMS = func() int64 { return 1000 }
	done, ready := make(chan error, 1), make(chan *Session, 1)
	go func() {
		s, _, err := Accept(t.Context(), rel, opt)
		if err == nil {
			ready <- s
			err = s.Run(t.Context(), &recorder{known: true})
		}
		done <- err
	}()
	return p, done, ready
}

func (p *pingRecorder) handshake(a Auth) (ok AuthOK) {
	p.read(TypeHello, nil)
	p.sendAs(TypeAuth, "", a)
	p.read(TypeAuthOK, &ok)
	p.sendAs(TypeAnnounce, "", announceOf(echoAndMetrics()))
	p.read(TypeAnnounceAck, nil)
	return ok
}

// TestAdmit: what the owner decides about a link, and what the device gets.
func TestAdmit(t *testing.T) {
	session := NewID()
	resume := &Resume{SessionID: session, Seen: []ResumedCommand{{NewID(), SeenDone}}}
	tests := []struct {
		name    string
		pipe    func() (Conn, Conn)
		admit   func(ctx context.Context, s *Session, a *Auth) (Admission, error)
		code    int // of the close; 0: admitted
		resumed bool
	}{
		{"nil", Pipe21, nil, 0, false},
		{"fresh", Pipe21, func(context.Context, *Session, *Auth) (Admission, error) { return Admission{}, nil }, 0, false},
		{"resumed", Pipe21, func(_ context.Context, _ *Session, a *Auth) (Admission, error) {
			return Admission{SessionID: a.Resume.SessionID, Resumed: a.Resume.SessionID == session && len(a.Resume.Seen) == 1}, nil
		}, 0, true},
		{"v2 asks in vain", Pipe, func(_ context.Context, _ *Session, a *Auth) (Admission, error) {
			return Admission{Resumed: true}, nil
		}, 0, false},
		{"refused", Pipe21, func(context.Context, *Session, *Auth) (Admission, error) {
			return Admission{}, &Refusal{Code: CloseSuperseded, Reason: "superseded"}
		}, CloseSuperseded, false},
		{"error", Pipe21, func(context.Context, *Session, *Auth) (Admission, error) {
			return Admission{}, errors.New("disk full")
		}, CloseDraining, false},
		{"waits for the older link", Pipe21, func(ctx context.Context, _ *Session, _ *Auth) (Admission, error) {
			time.Sleep(AdmitTimeout - time.Millisecond)
			return Admission{}, ctx.Err()
		}, 0, false},
		{"waits too long", Pipe21, func(ctx context.Context, _ *Session, _ *Auth) (Admission, error) {
			<-ctx.Done()
			return Admission{}, ctx.Err()
		}, CloseDraining, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				opt := AcceptOptions{}
				if tt.admit != nil {
					opt.Admit = func(ctx context.Context, s *Session, a *Auth) (Admission, error) {
						if s.NodeID != testNode || s.BootID != a.BootID || s.InstanceID != testInstance || s.ID == "" || s.V21 != a.V21 || a.Nonce == "" {
							t.Errorf("session %+v, auth %+v", s, a)
						}
						return tt.admit(ctx, s, a)
					}
				}
				p, done, ready := accept21(t, tt.pipe, opt)
				a := goodAuth()
				a.Resume = resume
				if tt.code != 0 {
					p.read(TypeHello, nil)
					p.sendAs(TypeAuth, "", a)
					code, before := p.readUntilClose()
					if code != tt.code || len(before) != 0 {
						t.Errorf("closed with %d after %v", code, before)
					}
					if err := <-done; CloseCode(err) != tt.code {
						t.Errorf("Accept: %v", err)
					}
					return
				}
				ok := p.handshake(a)
				if s := <-ready; ok.Resumed != tt.resumed || ok.SessionID != s.ID || tt.resumed != (s.ID == session) {
					t.Errorf("auth_ok %+v", ok)
				}
				p.close()
				<-done
			})
		})
	}
}

// TestRelayPings: on v2.1 the relay pings right after auth_ok, and always; each ping carries
// the session time. On v2 pings are empty and left out when the device pings.
func TestRelayPings(t *testing.T) {
	for name, pipe := range map[string]func() (Conn, Conn){"v2": Pipe, "v2.1": Pipe21} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				p, done, ready := accept21(t, pipe, AcceptOptions{})
				ok := p.handshake(goodAuth())
				s := <-ready
				go p.readUntilClose()
				synctest.Wait()
				first := slices.Clone(p.payloads)
				for range 3 {
					time.Sleep(24 * time.Second)
					_ = p.conn.Ping(nil)
					synctest.Wait()
					s.CheckLiveness()
					synctest.Wait()
				}
				if name == "v2" {
					if len(p.payloads) != 0 {
						t.Errorf("pings %q although the device pings", p.payloads)
					}
				} else {
					want := []string{strconv.FormatInt(ok.ServerTimeMS, 10)}
					if !slices.Equal(first, want) {
						t.Errorf("the first ping is %q, want %q", first, want)
					}
					for i := int64(1); i <= 3; i++ {
						want = append(want, strconv.FormatInt(ok.ServerTimeMS+24_000*i, 10))
					}
					if !slices.Equal(p.payloads, want) {
						t.Errorf("pings %q, want %q", p.payloads, want)
					}
				}
				p.close()
				<-done
			})
		})
	}
}

// TestProbe: only the pong of that very ping counts, and callers share a ping.
func TestProbe(t *testing.T) {
	for name, pipe := range map[string]func() (Conn, Conn){"v2": Pipe, "v2.1": Pipe21} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				p, done, ready := accept21(t, pipe, AcceptOptions{})
				p.handshake(goodAuth())
				s := <-ready
				in := p.conn.(*pipeConn).in
				nextPing := func() string {
					for {
						select {
						case m := <-in:
							if m.op == opPing {
								return string(m.data)
							}
						case <-time.After(time.Minute):
							t.Fatal("no ping")
						}
					}
				}
				pong := func(payload string) { p.conn.(*pipeConn).out <- pipeMsg{op: opPong, data: []byte(payload)} }
				probe := func(d time.Duration) chan error {
					answer := make(chan error, 1)
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), d)
						defer cancel()
						answer <- s.Probe(ctx)
					}()
					synctest.Wait()
					return answer
				}
				a, b := probe(5*time.Second), probe(10*time.Second)
				first := nextPing()
				if ms, ok := parsePing([]byte(first)); !ok || ms < s.NowMS() {
					t.Errorf("ping %q at session time %d", first, s.NowMS())
				}
				for _, other := range []string{"", "1", first + "0", "x"} {
					pong(other)
				}
				if err := <-a; !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("without its pong: %v", err)
				}
				pong(first)
				if err := <-b; err != nil { // it still waited
					t.Errorf("the other caller: %v", err)
				}
				c := probe(5 * time.Second)
				second := nextPing()
				if second == first {
					t.Error("two pings have one payload")
				}
				if err := <-c; err == nil {
					t.Error("no pong came")
				}
				d := probe(5 * time.Second)
				pong(second) // of a ping whose callers have left
				third := nextPing()
				synctest.Wait()
				select {
				case err := <-d:
					t.Errorf("answered by an earlier pong: %v", err)
				default:
				}
				s.Close(CloseNormal, "normal")
				if err := <-d; !errors.Is(err, net.ErrClosed) || third == second {
					t.Errorf("at the end of the link: %v", err)
				}
				if err := s.Probe(t.Context()); !errors.Is(err, net.ErrClosed) {
					t.Errorf("after the link: %v", err)
				}
				<-done
			})
		})
	}
}

// TestStamp: the expiry is the deadline less the smallest round trip and the margin.
func TestStamp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p, done, ready := accept21(t, Pipe21, AcceptOptions{})
		p.read(TypeHello, nil)
		p.sendAs(TypeAuth, "", goodAuth())
		var ok AuthOK
		p.read(TypeAuthOK, &ok)
		time.Sleep(700 * time.Millisecond) // auth_ok to announce
		p.sendAs(TypeAnnounce, "", announceOf(echoAndMetrics()))
		s := <-ready
		want := func(rtt int64) {
			t.Helper()
			got, err := s.Stamp(time.Now().Add(5 * time.Second))
			if x := (Expiry{s.NowMS(), 4900 - rtt}); err != nil || got != x {
				t.Errorf("stamp %+v, %v, want %+v", got, err, x)
			}
		}
		want(700)
		if got, err := s.Stamp(time.Now().Add(800 * time.Millisecond)); !errors.Is(err, ErrExpired) {
			t.Errorf("a deadline within the round trip: %+v, %v", got, err)
		}
		time.Sleep(6 * time.Second)
		p.read(TypeAnnounceAck, nil) // and the ping before it
		synctest.Wait()
		want(700) // the first pong was late, for instance because the relay was busy
		go p.readUntilClose()
		for range rttWindow {
			s.CheckLiveness()
			synctest.Wait()
		}
		want(0)
		if s.NowMS() != ok.ServerTimeMS+6700 {
			t.Errorf("session time %d after 6.7 s from %d", s.NowMS(), ok.ServerTimeMS)
		}
		p.close()
		<-done
	})
	if got, err := (&Session{}).Stamp(time.Now()); got != (Expiry{}) || err != nil {
		t.Errorf("on v2: %+v, %v", got, err)
	}
}

func TestGrantEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var s Session
		s.setGrantEnd(time.Time{})
		if _, ok := s.GrantRemaining(); ok || s.CheckGrant() != nil {
			t.Error("a grant without end ends")
		}
		s.ExtendGrant(time.Now().Add(time.Hour)) // no shorter
		if _, ok := s.GrantRemaining(); ok {
			t.Error("extending a grant without end gave it one")
		}
		s.setGrantEnd(time.Now().Add(time.Minute).Round(0)) // a wall time, as tokens have
		s.ExtendGrant(time.Now())
		time.Sleep(59 * time.Second)
		if d, ok := s.GrantRemaining(); !ok || d != time.Second || s.CheckGrant() != nil {
			t.Errorf("remaining %v", d)
		}
		s.ExtendGrant(time.Now().Add(time.Minute))
		time.Sleep(59 * time.Second)
		if err := s.CheckGrant(); err != nil {
			t.Errorf("an extended grant: %v", err)
		}
		time.Sleep(time.Second)
		if err := s.CheckGrant(); !errors.Is(err, ErrGrantExpired) {
			t.Errorf("after its end: %v", err)
		}
		s.ExtendGrant(time.Time{})
		revoked := errors.New("revoked")
		s.CheckActive = func() error { return revoked }
		if err := s.CheckGrant(); !errors.Is(err, revoked) {
			t.Errorf("a revoked grant: %v", err)
		}
	})
}

// TestEstimateBound: with any delays, the device's estimate is never ahead of session time, and
// behind it by the round trip that the relay deducts at most; rounding, and a second ping in
// one millisecond, add 2 ms. Pings may stay unanswered, and a pong may answer several.
func TestEstimateBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var log pingLog
		var estimate timeEstimate
		start := time.Unix(1_800_000_000, 0)
		const base = 1_795_000_000_000 // session time at start
		session := func(at time.Duration) int64 { return base + at.Milliseconds() }
		delay := rapid.Map(rapid.IntRange(0, 3000), func(ms int) time.Duration { return time.Duration(ms) * time.Millisecond })
		micros := rapid.Map(rapid.IntRange(0, 999), func(us int) time.Duration { return time.Duration(us) * time.Microsecond })
		now := delay.Draw(t, "auth_ok") + micros.Draw(t, "us")
		estimate.observe(base, start.Add(now))
		now += delay.Draw(t, "announce")
		log.onAnnounce(session(now) - base)
		for range rapid.IntRange(0, 40).Draw(t, "pings") {
			now += 2*time.Millisecond + delay.Draw(t, "pause") + micros.Draw(t, "us")
			payload := log.next(session(now))
			if rapid.Bool().Draw(t, "two at once") {
				now += delay.Draw(t, "down of the first")
				estimate.observe(payload, start.Add(now))
				payload = log.next(session(now))
			}
			now += delay.Draw(t, "down")
			estimate.observe(payload, start.Add(now))
			now += delay.Draw(t, "up")
			if rapid.Bool().Draw(t, "answered") && (!log.onPong(payload, session(now)) || log.onPong(payload, session(now))) {
				t.Fatal("a pong is to count once")
			}
			got, _ := estimate.nowMS(start.Add(now))
			if ahead := got - session(now); ahead > 2 || ahead < -log.minRTT()-2 {
				t.Fatalf("the estimate is %d ms ahead, round trip %d ms", ahead, log.minRTT())
			}
		}
	})
}

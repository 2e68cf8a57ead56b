package link

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// admit21 completes the handshake with an auth_ok, and returns the auth.
func (d *device) admit21(ok AuthOK) (*peer, Auth) {
	p := d.greet()
	var a Auth
	p.read(TypeAuth, &a)
	p.sendAs(TypeAuthOK, "", ok)
	e := p.read(TypeAnnounce, nil)
	p.sendAs(TypeAnnounceAck, e.MsgID, AnnounceAck{Tools: []string{echoTool}, Rejected: []Rejected{}})
	synctest.Wait()
	return p, a
}

// resumedOK is the auth_ok that resumes a session.
func resumedOK(of AuthOK) AuthOK {
	ok := testAuthOK()
	ok.SessionID, ok.Resumed = of.SessionID, true
	return ok
}

// cmdUntil sends a command with an expiry.
func (p *peer) cmdUntil(tool string, e Expiry) (id string) {
	p.t.Helper()
	id = NewID()
	p.send(string(AppendCmd(nil, id, tool, []byte("{}"), 0, "", e)))
	return id
}

// blocking is a tool that answers when release is closed, or its ctx ends.
func blocking(release chan bool) tool {
	return func(ctx context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
		select {
		case <-release:
			return args, nil, nil
		case <-ctx.Done():
			return nil, nil, manifest.E(manifest.DeadlineExceeded, "late")
		}
	}
}

func TestProof(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDeviceOn(t, echoArgs, Pipe21)
		ok := testAuthOK()
		if _, a := d.admit21(ok); a.Proof != "proof of n good" || a.Resume != nil {
			t.Errorf("auth %+v", a)
		}
		if id := d.client.SessionID(); id != ok.SessionID {
			t.Errorf("session %q, want %q", id, ok.SessionID)
		}
		d.end()
	})
}

func TestSignFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDeviceOn(t, echoArgs, Pipe21)
		d.client.opt.Sign = func(string, string) (string, error) { return "", errors.New("open key: permission denied") }
		p := d.greet()
		if code, frames := p.readUntilClose(); code != CloseNormal || len(frames) != 0 {
			t.Errorf("closed with %d after %v", code, frames)
		}
		synctest.Wait()
		if s := d.client.Status(); !strings.Contains(s.LastErr, "permission denied") {
			t.Errorf("status %+v", s)
		}
		d.end()
	})
}

// TestHandshakeWaitsForTakeover: on v2.1 the device waits for auth_ok while the relay pings an
// older link of the node.
func TestHandshakeWaitsForTakeover(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDeviceOn(t, echoArgs, Pipe21)
		time.Sleep(4 * time.Second)
		p := d.greet()
		p.read(TypeAuth, nil)
		time.Sleep(AuthTimeout + AdmitTimeout)
		p.sendAs(TypeAuthOK, "", testAuthOK())
		p.read(TypeAnnounce, nil)
		d.end()
	})
}

// TestExpiry: what a device does with a command whose caller may have been answered.
func TestExpiry(t *testing.T) {
	const second = 1000
	tests := []struct {
		name   string
		expiry func(session int64) Expiry // made at session time
		after  time.Duration              // until it arrives
		starts bool
	}{
		{"none", func(int64) Expiry { return Expiry{} }, time.Hour, true},
		{"in time", func(ms int64) Expiry { return Expiry{ms, 2 * second} }, 1999 * time.Millisecond, true},
		{"at its end", func(ms int64) Expiry { return Expiry{ms, 2 * second} }, 2 * time.Second, false},
		{"held for long", func(ms int64) Expiry { return Expiry{ms, 5 * second} }, 17 * time.Second, false},
		{"no time at all", func(ms int64) Expiry { return Expiry{ms + 60*second, 0} }, 0, false},
		{"negative", func(ms int64) Expiry { return Expiry{ms + 60*second, -1} }, 0, false},
		{"negative, not issued", func(int64) Expiry { return Expiry{0, -1} }, 0, false},
		{"not issued", func(int64) Expiry { return Expiry{0, 5 * second} }, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDeviceOn(t, echoArgs, Pipe21)
				ok := testAuthOK()
				ok.ServerTimeMS += 3_600_000_000 // another wall clock than the device's
				p, _ := d.admit21(ok)
				e := tt.expiry(ok.ServerTimeMS)
				for start := time.Now(); time.Since(start) < tt.after; {
					time.Sleep(min(tt.after-time.Since(start), 20*time.Second))
					_ = p.conn.Ping([]byte("no time")) // keeps the link, and is no estimate
				}
				id := p.cmdUntil(echoTool, e)
				if tt.starts {
					if a := p.ack(id); !a.OK || d.handler.runs() != 1 {
						t.Errorf("got %+v, %d runs", a, d.handler.runs())
					}
				} else {
					p.wantCode(id, manifest.DeadlineExceeded)
					p.send(string(AppendCmd(nil, id, echoTool, []byte("{}"), 0, "", Expiry{})))
					p.wantCode(id, manifest.DeadlineExceeded) // a repeat does not start it either
					if s := d.client.Status(); d.handler.runs() != 0 || s.Expired != 1 {
						t.Errorf("%d runs, status %+v", d.handler.runs(), s)
					}
				}
				d.end()
			})
		})
	}
}

// TestEstimateFollowsFastestPing: pings that a slow link delays do not set the estimate back.
func TestEstimateFollowsFastestPing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDeviceOn(t, echoArgs, Pipe21)
		ok := testAuthOK()
		ok.ServerTimeMS -= 3000 // auth_ok was under way for 3 s
		p, _ := d.admit21(ok)
		session := func() int64 { return time.Now().UnixMilli() }
		_ = p.conn.Ping(appendPing(nil, session())) // no delay
		for range estimateWindow - 1 {
			_ = p.conn.Ping(appendPing(nil, session()-20_000))
		}
		synctest.Wait()
		p.wantCode(p.cmdUntil(echoTool, Expiry{session() - 5000, 5000}), manifest.DeadlineExceeded)
		_ = p.conn.Ping(appendPing(nil, session()-20_000)) // the fast one is forgotten
		synctest.Wait()
		id := p.cmdUntil(echoTool, Expiry{session() - 5000, 5000})
		if a := p.ack(id); !a.OK {
			t.Errorf("got %+v", a)
		}
		d.end()
	})
}

// TestV2HasNoExpiry: on v2 the keys of v2.1 are unknown ones, and a bad frame.
func TestV2HasNoExpiry(t *testing.T) {
	for _, keys := range []Expiry{{1, 0}, {0, 1}, {1, 1}} {
		bubble(t, func(t *testing.T) {
			d := startDevice(t, echoArgs)
			p := d.admit()
			p.cmdUntil(echoTool, keys)
			if code, _ := p.readUntilClose(); code != CloseBadFrame {
				t.Errorf("%+v: closed with %d", keys, code)
			}
			d.end()
		})
	}
}

// TestResume: a command goes on when its link is lost, and the next link that resumes the
// session sends the answer, whenever the handler returns.
func TestResume(t *testing.T) {
	tests := []struct {
		name  string
		at    func(stage string, release chan bool) // stages: lost, auth, ready
		state string                                // in seen
	}{
		{"answered before auth", func(stage string, release chan bool) {
			if stage == "lost" {
				close(release)
			}
		}, SeenDone},
		{"answered in the handshake", func(stage string, release chan bool) {
			if stage == "auth" {
				close(release)
			}
		}, SeenRunning},
		{"answered later", func(stage string, release chan bool) {
			if stage == "ready" {
				close(release)
			}
		}, SeenRunning},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				release := make(chan bool)
				d := startDeviceOn(t, blocking(release), Pipe21)
				first := testAuthOK()
				first.ReconnectSpreadMS = 500
				p, _ := d.admit21(first)
				id := p.cmd(echoTool, `{"n":1}`)
				synctest.Wait()
				_ = p.conn.Close(CloseGoingAway, "gone")
				synctest.Wait()
				tt.at("lost", release)
				p = d.greet()
				var a Auth
				p.read(TypeAuth, &a)
				if a.Resume == nil || a.Resume.SessionID != first.SessionID || len(a.Resume.Seen) != 1 || a.Resume.Seen[0] != (ResumedCommand{id, tt.state}) {
					t.Fatalf("resume %+v", a.Resume)
				}
				tt.at("auth", release)
				synctest.Wait()
				p.sendAs(TypeAuthOK, "", resumedOK(first))
				e := p.read(TypeAnnounce, nil)
				p.sendAs(TypeAnnounceAck, e.MsgID, AnnounceAck{Tools: []string{}, Rejected: []Rejected{}})
				synctest.Wait()
				tt.at("ready", release)
				if got := p.ack(id); !got.OK || string(got.Result) != `{"n":1}` {
					t.Errorf("answer %+v", got)
				}
				p.expectSilence(10 * time.Second)
				if n := d.handler.runs(); n != 1 {
					t.Errorf("%d runs", n)
				}
				if s := d.client.Status(); s.Resumed != 1 || s.Reconnects != 1 || d.client.SessionID() != first.SessionID {
					t.Errorf("status %+v, session %s", s, d.client.SessionID())
				}
				d.end()
			})
		})
	}
}

// TestNotResumed: when the relay starts a fresh session, the commands of the one before are
// canceled and not answered. A relay that claims to resume another session is not believed.
func TestNotResumed(t *testing.T) {
	for name, ok := range map[string]func(first AuthOK) AuthOK{
		"fresh":   func(AuthOK) AuthOK { return testAuthOK() },
		"another": func(AuthOK) AuthOK { ok := testAuthOK(); ok.Resumed = true; return ok },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				release := make(chan bool)
				d := startDeviceOn(t, blocking(release), Pipe21)
				first := testAuthOK()
				first.ReconnectSpreadMS = 500
				p, _ := d.admit21(first)
				running := p.cmd(echoTool, `{"n":1}`)
				synctest.Wait()
				p.close()
				second := ok(first)
				p, a := d.admit21(second)
				if a.Resume == nil || len(a.Resume.Seen) == 0 {
					t.Errorf("resume %+v", a.Resume)
				}
				synctest.Wait()
				close(release)
				p.expectSilence(10 * time.Second)
				p.send(string(AppendCmd(nil, running, echoTool, []byte("{}"), 0, "", Expiry{})))
				p.wantCode(running, manifest.DeadlineExceeded) // it was canceled, and is not run again
				p.close()
				if _, a := d.admit21(testAuthOK()); a.Resume == nil || a.Resume.SessionID != second.SessionID || len(a.Resume.Seen) != 0 {
					t.Errorf("resume %+v, want the session before and none of its elders' commands", a.Resume)
				}
				d.end()
			})
		})
	}
}

// TestCancelAfterResume: a cmd_cancel on the resumed link reaches a command of the one before.
func TestCancelAfterResume(t *testing.T) {
	bubble(t, func(t *testing.T) {
		canceled := make(chan time.Time, 1)
		d := startDeviceOn(t, func(ctx context.Context, _ manifest.ToolName, _ []byte) ([]byte, StreamFunc, error) {
			<-ctx.Done()
			canceled <- time.Now()
			return nil, nil, manifest.E(manifest.Internal, "canceled")
		}, Pipe21)
		first := testAuthOK()
		first.ReconnectSpreadMS = 1
		p, _ := d.admit21(first)
		id := p.cmd(echoTool, "{}")
		synctest.Wait()
		_ = p.conn.Close(CloseGoingAway, "gone")
		p, _ = d.admit21(resumedOK(first))
		start := time.Now()
		p.sendAs(TypeCmdCancel, id, nil)
		if at := <-canceled; at.Sub(start) > 0 {
			t.Errorf("canceled after %v", at.Sub(start))
		}
		p.expectSilence(5 * time.Second)
		d.end()
	})
}

// TestStreamIsNotResumed: a stream ends with its link, and the stored answer that opened it
// becomes an error.
func TestStreamIsNotResumed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ended := make(chan error, 1)
		d := startDeviceOn(t, func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
			return []byte(`{"interval_ms":1000}`), func(ctx context.Context, _ func([]byte) error) error {
				<-ctx.Done()
				ended <- context.Cause(ctx)
				return ctx.Err()
			}, nil
		}, Pipe21)
		first := testAuthOK()
		p, _ := d.admit21(first)
		id := p.cmd(testSub, `{"interval_ms":1000}`)
		if a := p.ack(id); !a.OK {
			t.Fatalf("answer %+v", a)
		}
		_ = p.conn.Close(CloseGoingAway, "gone")
		if err := <-ended; errors.Is(err, errSessionEnded) {
			t.Errorf("the stream ended with %v, want the link's error", err)
		}
		p, _ = d.admit21(resumedOK(first))
		p.wantCode(id, manifest.Internal)
		d.end()
	})
}

// TestSeenIsBounded: of many commands, those that run and the newest that are done are
// reported; old ones are not.
func TestSeenIsBounded(t *testing.T) {
	var s dedupTable
	now := time.Unix(1_800_000_000, 0)
	running := NewID()
	s.begin(running, 1, now)
	old, other := NewID(), NewID()
	for id, session := range map[string]int{old: 1, other: 2} {
		s.begin(id, session, now)
		s.finish(id, []byte("ack"), false, now)
	}
	if got := s.seen(1, now.Add(seenWindow)); len(got) != 1 || got[0] != (ResumedCommand{running, SeenRunning}) {
		t.Errorf("seen %+v, want the running one", got)
	}
	now = now.Add(time.Second)
	var last string
	for range 2 * MaxInflight {
		last = NewID()
		s.begin(last, 1, now)
		s.finish(last, []byte("ack"), false, now)
	}
	got := s.seen(1, now)
	if len(got) != MaxInflight || got[0].MsgID != running || got[1] != (ResumedCommand{last, SeenDone}) {
		t.Errorf("%d seen, %+v", len(got), got[:2])
	}
}

// TestReplacedLinkIsSuperseded: a 4409 for a link that the client has replaced by dialing again
// means nothing: no clone is suspected, and the newer link stays.
func TestReplacedLinkIsSuperseded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDeviceOn(t, echoArgs, Pipe21)
		ok := testAuthOK()
		old, _ := d.admit21(ok)
		time.Sleep(IdleTimeout) // the relay is silent: the client gives the link up
		p, _ := d.admit21(resumedOK(ok))
		_ = old.conn.Close(CloseSuperseded, "superseded")
		synctest.Wait()
		if s := d.client.Status(); s.State != StateReady || s.CloneSuspected || s.LastCode != 0 {
			t.Errorf("status %+v", s)
		}
		if a := p.ack(p.cmd(echoTool, "{}")); !a.OK {
			t.Errorf("answer %+v", a)
		}
		d.end()
	})
}

// TestGivenUpLinkCanBeResumed: a silent link is closed with 4408, which leaves the session; on
// v2 with 1000, as ever.
func TestGivenUpLinkCanBeResumed(t *testing.T) {
	for name, tt := range map[string]struct {
		pipe func() (Conn, Conn)
		code int
	}{"v2": {Pipe, CloseNormal}, "v2.1": {Pipe21, CloseTimeout}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDeviceOn(t, echoArgs, tt.pipe)
				p, _ := d.admit21(testAuthOK())
				time.Sleep(IdleTimeout)
				if code, _ := p.readUntilClose(); code != tt.code {
					t.Errorf("closed with %d, want %d", code, tt.code)
				}
				d.end()
			})
		})
	}
}

package link

import (
	"context"
	"encoding/base64"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

func TestHandshake(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dev, rel := Pipe()
		r, p := startRelay(rel), &peer{t, dev}
		var hello Hello
		p.read(TypeHello, &hello)
		if nonce, err := base64.RawURLEncoding.DecodeString(hello.Nonce); err != nil || len(nonce) != 32 || hello.Protocol != "v2" || hello.ServerTimeMS != time.Now().UnixMilli() {
			t.Errorf("hello %+v", hello)
		}
		p.sendAs(TypeAuth, "", goodAuth())
		var ok AuthOK
		p.read(TypeAuthOK, &ok)
		if _, isULID := manifest.ParseULID(ok.SessionID); !isULID || ok.NodeID != testNode || ok.TenantID != "acme" || ok.Resumed ||
			ok.ReconnectSpreadMS != 1234 || ok.Limits != (Limits{64, 32}) {
			t.Errorf("auth_ok %+v", ok)
		}
		var ack AnnounceAck
		id := p.sendAs(TypeAnnounce, "", announceOf(echoAndMetrics()))
		if e := p.read(TypeAnnounceAck, &ack); e.InReplyTo != id {
			t.Errorf("announce_ack answers %s, want %s", e.InReplyTo, id)
		}
		want := "[" + echoTool + " sys." + testNode + ".metrics.snapshot " + testSub + "]"
		if got := "[" + strings.Join(ack.Tools, " ") + "]"; got != want || len(ack.Rejected) != 0 {
			t.Errorf("announce_ack %+v, want %s", ack, want)
		}
		p.close()
		if err := <-r.done; CloseCode(err) != CloseNormal {
			t.Errorf("the session ended with %v", err)
		}
	})
}

// TestHandshakeRefused: errors of a device in the handshake, and the close code that it
// gets.
func TestHandshakeRefused(t *testing.T) {
	auth := func(change func(*Auth)) func(p *peer) {
		return func(p *peer) {
			a := goodAuth()
			change(&a)
			p.sendAs(TypeAuth, "", a)
		}
	}
	announce := func(a any) func(p *peer) {
		return func(p *peer) {
			p.sendAs(TypeAuth, "", goodAuth())
			p.sendAs(TypeAnnounce, "", a)
		}
	}
	raw := func(frame string) func(p *peer) { return func(p *peer) { p.send(frame) } }
	echo := capsJSON(manifest.Echo())
	tests := []struct {
		name string
		do   func(p *peer)
		code int
	}{
		{"bad token", auth(func(a *Auth) { a.Token = "stolen" }), CloseAuthFailed},
		{"no token", auth(func(a *Auth) { a.Token = "" }), CloseAuthFailed},
		{"forbidden", auth(func(a *Auth) { a.Token = "forbidden" }), CloseForbidden},
		{"no boot id", auth(func(a *Auth) { a.BootID = "" }), CloseBadFrame},
		{"boot id is no ULID", auth(func(a *Auth) { a.BootID = strings.Repeat("u", 26) }), CloseBadFrame},
		{"instance id in upper case", auth(func(a *Auth) { a.InstanceID = strings.ToUpper(testInstance) }), CloseBadFrame},
		{"instance id too short", auth(func(a *Auth) { a.InstanceID = testInstance[1:] }), CloseBadFrame},
		{"long version", auth(func(a *Auth) { a.AgentVersion = strings.Repeat("1", 65) }), CloseBadFrame},
		{"version with a control character", auth(func(a *Auth) { a.AgentVersion = "\x1b[31m" }), CloseBadFrame},
		{"bad name", auth(func(a *Auth) { a.Name = "Porch Pi" }), CloseBadFrame},
		{"resume of 65", auth(func(a *Auth) {
			a.Resume = &Resume{SessionID: NewID()}
			for range 65 {
				a.Resume.Seen = append(a.Resume.Seen, ResumedCommand{NewID(), SeenDone})
			}
		}), CloseBadFrame},
		{"resume with another state", auth(func(a *Auth) { a.Resume = &Resume{NewID(), []ResumedCommand{{NewID(), "lost"}}} }), CloseBadFrame},
		{"resume of no session", auth(func(a *Auth) { a.Resume = &Resume{} }), CloseBadFrame},
		{"unknown key in auth", raw(frame("auth", `,"payload":{"token":"good","extra":1}`)), CloseBadFrame},
		{"wrong case in auth", raw(frame("auth", `,"payload":{"Token":"good"}`)), CloseBadFrame},
		{"announce before auth", func(p *peer) { p.sendAs(TypeAnnounce, "", announceOf(echo)) }, CloseBadFrame},
		{"cmd_ack before auth", raw(goldenAck), CloseBadFrame},
		{"metric before auth", raw(goldenMetric), CloseBadFrame},
		{"metric before announce", func(p *peer) { p.sendAs(TypeAuth, "", goodAuth()); p.send(goldenMetric) }, CloseBadFrame},
		{"cmd_ack before announce", func(p *peer) { p.sendAs(TypeAuth, "", goodAuth()); p.send(goldenAck) }, CloseBadFrame},
		{"second auth", func(p *peer) { p.sendAs(TypeAuth, "", goodAuth()); p.sendAs(TypeAuth, "", goodAuth()) }, CloseBadFrame},
		{"no JSON", raw("GET / HTTP/1.1"), CloseBadFrame},
		{"64 KiB and one before auth", raw(strings.Repeat(" ", MaxFrame+1)), CloseTooLarge},
		{"announce of 256 KiB and one", func(p *peer) { p.sendAs(TypeAuth, "", goodAuth()); p.send(strings.Repeat(" ", MaxAnnounce+1)) }, CloseTooLarge},

		{"hash mismatch", announce(Announce{1, manifest.Hash([]byte("[]")), []byte(echo)}), CloseManifestInvalid},
		{"hash in upper case", announce(Announce{1, strings.ToUpper(manifest.Hash([]byte(echo))), []byte(echo)}), CloseManifestInvalid},
		{"another version", announce(Announce{2, manifest.Hash([]byte(echo)), []byte(echo)}), CloseManifestInvalid},
		{"announce without keys", announce("{}"), CloseManifestInvalid},
		{"announce with an unknown key", announce(`{"manifest_version":1,"x":1}`), CloseManifestInvalid},
		{"version as text", announce(`{"manifest_version":"1"}`), CloseManifestInvalid},
		{"capabilities are no array", announce(announceOf(`{}`)), CloseManifestInvalid},
		{"capabilities are null", announce(announceOf(`null`)), CloseManifestInvalid},
		{"no capability", announce(announceOf(`[]`)), CloseManifestInvalid},
		{"33 capabilities", announce(announceOf(capsJSON(append(make([]manifest.Capability, 32), manifest.Echo())...))), CloseManifestInvalid},
		{"none left", announce(announceOf(`[{"cap_id":"gpio"},5]`)), CloseManifestInvalid},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				dev, rel := Pipe()
				r, p := startRelay(rel), &peer{t, dev}
				tt.do(p)
				if code, _ := p.readUntilClose(); code != tt.code {
					t.Errorf("the device got %d, want %d", code, tt.code)
				}
				if err := <-r.done; CloseCode(err) != tt.code || r.session != nil {
					t.Errorf("the relay ended with %v, want %d", err, tt.code)
				}
				if r.took != 0 {
					t.Errorf("took %v", r.took)
				}
			})
		})
	}
}

func TestHandshakeDeadlines(t *testing.T) {
	tests := []struct {
		name string
		do   func(p *peer)
		took time.Duration
	}{
		{"nothing", func(*peer) {}, 5 * time.Second},
		{"pings are no auth", func(p *peer) {
			for range 9 {
				time.Sleep(500 * time.Millisecond)
				_ = p.conn.Ping(nil)
			}
		}, 5 * time.Second},
		{"late auth, no announce", func(p *peer) {
			time.Sleep(4 * time.Second)
			p.sendAs(TypeAuth, "", goodAuth())
		}, 9 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				dev, rel := Pipe()
				r, p := startRelay(rel), &peer{t, dev}
				go tt.do(p)
				code, _ := p.readUntilClose()
				if err := <-r.done; code != CloseTimeout || CloseCode(err) != CloseTimeout || r.took != tt.took {
					t.Errorf("closed with %d after %v (%v), want 4408 after %v", code, r.took, err, tt.took)
				}
			})
		})
	}
}

// TestSlowAuthenticator: the handshake is bounded although the authenticator hangs.
func TestSlowAuthenticator(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dev, rel := Pipe()
		p := &peer{t, dev}
		done := make(chan error, 1)
		start := time.Now()
		go func() {
			_, _, err := Accept(t.Context(), rel, AcceptOptions{Authenticate: func(ctx context.Context, _ *Auth) (*Grant, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}})
			done <- err
		}()
		p.sendAs(TypeAuth, "", goodAuth())
		if code, _ := p.readUntilClose(); code != CloseTimeout {
			t.Errorf("got %d, want 4408", code)
		}
		if err := <-done; CloseCode(err) != CloseTimeout || time.Since(start) != AuthTimeout {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

// deaf is a connection whose Read blocks on a pong that the peer does not read, until
// Close.
type deaf struct {
	Conn
	closed chan struct{}
	once   sync.Once
}

func (d *deaf) Read(func([]byte) error) error { <-d.closed; return net.ErrClosed }
func (d *deaf) Close(code int, reason string) error {
	d.once.Do(func() { close(d.closed) })
	return d.Conn.Close(code, reason)
}

// TestHandshakeWithoutReading: a device that pings without reading, so that a pong blocks,
// is closed at the end of maxHandshakeTime.
func TestHandshakeWithoutReading(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dev, rel := Pipe()
		start := time.Now()
		go func() {
			p := &peer{t, dev}
			p.readUntilClose()
		}()
		_, _, err := Accept(t.Context(), &deaf{Conn: rel, closed: make(chan struct{})}, AcceptOptions{})
		if CloseCode(err) != CloseTimeout || time.Since(start) > 15*time.Second {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

// TestRejectedCapabilities: a bad capability is rejected by its id, the others are served.
func TestRejectedCapabilities(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dev, rel := Pipe()
		r, p := startRelay(rel), &peer{t, dev}
		gpio := manifest.Echo()
		gpio.CapID, gpio.Kind = "gpio", "system.gpio"
		writes := manifest.Metrics()
		writes.CapID, writes.SafetyClass = "writes", "mutating"
		long := manifest.Metrics()
		long.CapID = strings.Repeat("x", 24) // sys + 26 + 24 + subscribe and three dots: 65
		fast := manifest.Echo()
		fast.CapID, fast.Constraints.RateLimitRPS = "fast", 1000
		caps := capsJSON(gpio, manifest.Echo(), writes, manifest.Echo(), long, fast)
		caps = caps[:len(caps)-1] + `,7,{"cap_id":"<script>"},{"cap_id":"extra","x":1}]`
		p.sendAs(TypeAuth, "", goodAuth())
		p.sendAs(TypeAnnounce, "", announceOf(caps))
		p.read(TypeHello, nil)
		p.read(TypeAuthOK, nil)
		var ack AnnounceAck
		p.read(TypeAnnounceAck, &ack)
		var rejected []string
		for _, x := range ack.Rejected {
			rejected = append(rejected, x.CapID+":"+string(x.Code))
		}
		const e = ":E_MANIFEST_INVALID"
		want := "gpio" + e + " writes" + e + " echo" + e + " " + long.CapID + e + " fast" + e + " " + e + " " + e + " extra" + e
		if got := strings.Join(rejected, " "); got != want {
			t.Errorf("rejected\n%s, want\n%s", got, want)
		}
		if len(ack.Tools) != 1 || ack.Tools[0] != echoTool {
			t.Errorf("tools %v", ack.Tools)
		}
		p.close()
		<-r.done
		if got := r.all(); got != "announced echo.invoke" {
			t.Errorf("the relay serves %q", got)
		}
		if r.raw != capsJSON(manifest.Echo()) {
			t.Errorf("of what was rejected the relay keeps %s", r.raw)
		}
	})
}

// TestWholeNumberConstraints: whole numbers may be written in all forms of JSON Schema.
func TestWholeNumberConstraints(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		caps := strings.ReplaceAll(strings.ReplaceAll(echoAndMetrics(), ":2000", ":2e3"), ":10", ":10.0")
		p.sendAs(TypeAnnounce, "", announceOf(caps))
		var ack AnnounceAck
		if p.read(TypeAnnounceAck, &ack); len(ack.Rejected) > 0 || len(ack.Tools) != 3 {
			t.Errorf("ack %+v", ack)
		}
		p.close()
		<-r.done
		if r.raw != echoAndMetrics() {
			t.Errorf("the relay keeps %s", r.raw)
		}
	})
}

// TestLargeAnnounce: an announce may have up to 256 KiB, the first and later ones; other
// messages may not.
func TestLargeAnnounce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		caps := strings.Replace(echoAndMetrics(), ",", ","+strings.Repeat(" ", 200<<10), 1)
		announce := `{"manifest_version":1,"manifest_sha256":"` + manifest.Hash([]byte(caps)) + `","capabilities":` + caps + `}`
		p.sendAs(TypeAnnounce, "", announce)
		p.read(TypeAnnounceAck, nil)
		p.close()
		<-r.done

		dev, rel := Pipe()
		r, p = startRelay(rel), &peer{t, dev}
		p.sendAs(TypeAuth, "", goodAuth())
		p.sendAs(TypeAnnounce, "", announce)
		p.read(TypeHello, nil)
		p.read(TypeAuthOK, nil)
		p.read(TypeAnnounceAck, nil)
		p.close()
		<-r.done
	})
}

// TestReadyRefused: errors of a ready device, and the close code that it gets.
func TestReadyRefused(t *testing.T) {
	tests := []struct {
		name, frame string
		code        int
	}{
		{"second auth", string(Encode(TypeAuth, deviceID, "", goodAuth())), CloseBadFrame},
		{"a relay's word", goldenCmd, CloseBadFrame},
		{"hello", frame("hello", `,"payload":{}`), CloseBadFrame},
		{"no JSON", "}{", CloseBadFrame},
		{"duplicate key", frame("error", `,"payload":{},"payload":{}`), CloseBadFrame},
		{"wrong case", strings.Replace(goldenAck, "ok", "OK", 1), CloseBadFrame},
		{"17 levels", frame("error", `,"payload":`+strings.Repeat(`{"a":`, 16)+"1"+strings.Repeat("}", 16)), CloseBadFrame},
		{"oversized", frame("error", `,"payload":{"message":"`+strings.Repeat("x", MaxFrame)+`"}`), CloseTooLarge},
		{"over any size", strings.Repeat("x", MaxAnnounce+1), CloseTooLarge},
		{"ack without ok", strings.Replace(goldenAck, `"ok":true,`, "", 1), CloseBadFrame},
		{"ack of nothing", strings.Replace(goldenAck, `"in_reply_to":"01HZXC0000000000000000SRV0",`, "", 1), CloseBadFrame},
		{"metric with CR", strings.Replace(goldenMetric, `{"ts_ms"`, "{\r\"ts_ms\"", 1), CloseBadFrame},
		{"metric with LF", strings.Replace(goldenMetric, `{"ts_ms"`, "{\n\"ts_ms\"", 1), CloseBadFrame},
		{"stream_end with another reason", frame("stream_end", `,"payload":{"stream_id":"x","reason":"bored"}`), CloseBadFrame},
		{"event of another topic", frame("event", `,"payload":{"topic":"gossip","data":{}}`), CloseBadFrame},
		{"event without an object", frame("event", `,"payload":{"topic":"alert","data":[]}`), CloseBadFrame},
		{"event over two lines", frame("event", `,"payload":{"topic":"alert","data":{`+"\n"+`}}`), CloseBadFrame},
		{"event above 4 KiB", frame("event", `,"payload":{"topic":"alert","data":{"message":"`+strings.Repeat("x", MaxEvent)+`"}}`), CloseBadFrame},
		{"error with another code", frame("error", `,"payload":{"code":"E_TIMEOUT","message":""}`), CloseBadFrame},
		{"announce that does not hold", frame("announce", `,"payload":{}`), CloseManifestInvalid},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, p := readyPair(t)
				p.send(tt.frame)
				if code, _ := p.readUntilClose(); code != tt.code {
					t.Errorf("the device got %d, want %d", code, tt.code)
				}
				if err := <-r.done; CloseCode(err) != tt.code {
					t.Errorf("the relay ended with %v, want %d", err, tt.code)
				}
				if got := r.all(); got != "announced echo.invoke metrics.snapshot metrics.subscribe" {
					t.Errorf("the handler was called: %s", got)
				}
			})
		})
	}
}

func TestReadyFrames(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		p.send(goldenAck)
		p.send(strings.ToLower(goldenMetric))
		p.sendAs(TypeError, "", ErrorPayload{manifest.Internal, "\x1b[31mlook at me"})
		p.sendAs(TypeStreamEnd, "", StreamEnd{NewID(), EndHandlerError})
		p.sendAs(TypeEvent, "", Event{TopicAlert, strictjson.Raw(`{"level":"warn"}`)})
		id := p.sendAs(TypeAnnounce, "", announceOf(capsJSON(manifest.Echo())))
		var ack AnnounceAck
		if e := p.read(TypeAnnounceAck, &ack); e.InReplyTo != id || len(ack.Tools) != 1 {
			t.Errorf("announce_ack %+v", ack)
		}
		p.close()
		<-r.done
		want := `announced echo.invoke metrics.snapshot metrics.subscribe
acked 01HZXC0000000000000000SRV0 true {"message":"ping","received_at_ms":1745236800012,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"}
metered 7 {"ts_ms":1745300000000}
ended handler_error
event alert {"level":"warn"}
announced echo.invoke`
		if got := r.all(); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	})
}

func TestFlood(t *testing.T) {
	big := frame("error", `,"payload":{"code":"E_INTERNAL","message":"`+strings.Repeat("x", MaxFrame-200)+`"}`)
	tests := []struct {
		name     string
		send     func(p *peer) error
		fit, max int // how many are accepted at once
	}{
		{"small frames", func(p *peer) error { return p.conn.Write([]byte(goldenMetric)) }, 900, 1000},
		{"frames of 64 KiB", func(p *peer) error { return p.conn.Write([]byte(big)) }, 50, 63},
		{"announces", func(p *peer) error {
			return p.conn.Write(Encode(TypeAnnounce, NewID(), "", announceOf(echoAndMetrics())))
		}, 8, 10},
		{"pings", func(p *peer) error { return p.conn.Ping(nil) }, 900, 1000},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, p := readyPair(t)
				ended := make(chan int, 1)
				go func() { code, _ := p.readUntilClose(); ended <- code }()
				n := 0
				for tt.send(p) == nil && n < 5000 {
					synctest.Wait()
					n++
				}
				if code := <-ended; code != CloseRateLimited || n < tt.fit || n > tt.max+1 {
					t.Errorf("closed with %d after %d, want 4429 after %d to %d", code, n, tt.fit, tt.max)
				}
				if err := <-r.done; CloseCode(err) != CloseRateLimited {
					t.Errorf("the relay ended with %v", err)
				}
			})
		})
	}
}

// TestFloodLimitAllowsAnswers: ten times what streams need, for 20 s, is not a flood, and
// neither is any number of answers.
func TestFloodLimitAllowsAnswers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		for range 20 {
			for range 320 {
				p.send(goldenMetric)
			}
			time.Sleep(time.Second)
		}
		for range 3000 {
			p.send(goldenAck)
		}
		p.close()
		if err := <-r.done; CloseCode(err) != CloseNormal {
			t.Errorf("the session ended with %v", err)
		}
	})
}

// TestUnsolicitedAcks: a device may send 64 acks to no command; one more ends the link.
func TestUnsolicitedAcks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		r.known = false
		for i := range maxUnsolicitedAcks + 1 {
			p.send(string(AppendAck(nil, NewID(), NewID(), []byte(`{"n":`+strconv.Itoa(i)+`}`))))
		}
		if code, _ := p.readUntilClose(); code != CloseBadFrame {
			t.Errorf("closed with %d, want 4400", code)
		}
		<-r.done
		if n := strings.Count(r.all(), "acked"); n != maxUnsolicitedAcks+1 {
			t.Errorf("%d acks reached the handler", n)
		}
	})
}

package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// tool is the answer of a testHandler to a command.
type tool = func(ctx context.Context, name manifest.ToolName, args []byte) ([]byte, StreamFunc, error)

type testHandler struct {
	caps []manifest.Capability
	call tool

	mu  sync.Mutex
	ran int
}

func (h *testHandler) Capabilities() []manifest.Capability {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.caps
}

func (h *testHandler) Call(ctx context.Context, name manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
	h.mu.Lock()
	h.ran++
	h.mu.Unlock()
	return h.call(ctx, name, args)
}

func (h *testHandler) runs() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ran
}

func echoArgs(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
	return args, nil, nil
}

// device is a Client whose relay is the test.
type device struct {
	t       *testing.T
	client  *Client
	handler *testHandler
	dialled chan Conn // the relay's ends
	pipe    func() (device, relay Conn)
	dialErr error // what Dial returns instead of a connection
	stop    context.CancelFunc
	done    chan error

	mu     sync.Mutex
	token  string
	states []Status
	dials  []time.Time
}

func startDevice(t *testing.T, call tool) *device { return startDeviceOn(t, call, Pipe) }

func startDeviceOn(t *testing.T, call tool, pipe func() (device, relay Conn)) *device {
	d := &device{t: t, pipe: pipe, handler: &testHandler{caps: []manifest.Capability{manifest.Echo(), manifest.Metrics()}, call: call},
		dialled: make(chan Conn, 1), done: make(chan error, 1), token: "good"}
	d.client = NewClient(ClientOptions{
		Dial:  d.dial,
		Token: func() (string, error) { d.mu.Lock(); defer d.mu.Unlock(); return d.token, nil },
		OnState: func(s Status) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.states = append(d.states, s)
		},
		Sign:    func(nonce, token string) (string, error) { return "proof of " + nonce + " " + token, nil },
		Version: "1.2.3", InstanceID: testInstance, Name: "porch", Handler: d.handler,
	})
	ctx, cancel := context.WithCancel(context.Background())
	d.stop = cancel
	go func() { d.done <- d.client.Run(ctx) }()
	return d
}

func (d *device) dial(context.Context) (Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dials = append(d.dials, time.Now())
	if d.dialErr != nil {
		return nil, d.dialErr
	}
	dev, rel := d.pipe()
	select {
	case d.dialled <- rel:
		return dev, nil
	default:
		return nil, errors.New("the test does not expect this dial")
	}
}

func (d *device) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dialErr = err
}

func (d *device) dialCount() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.dials)
}

// greet accepts the next dial and sends hello.
func (d *device) greet() *peer {
	p := &peer{d.t, <-d.dialled}
	p.sendAs(TypeHello, "", Hello{Protocol: Protocol, Nonce: "n", ServerTimeMS: time.Now().UnixMilli()})
	return p
}

func testAuthOK() AuthOK {
	return AuthOK{NodeID: testNode, TenantID: "acme", SessionID: NewID(), ServerTimeMS: time.Now().UnixMilli(), ReconnectSpreadMS: 2000, Limits: Limits{64, 32}}
}

// admit completes the handshake.
func (d *device) admit() *peer {
	p := d.greet()
	p.read(TypeAuth, nil)
	p.sendAs(TypeAuthOK, "", testAuthOK())
	e := p.read(TypeAnnounce, nil)
	p.sendAs(TypeAnnounceAck, e.MsgID, AnnounceAck{Tools: []string{echoTool}, Rejected: []Rejected{}})
	synctest.Wait()
	return p
}

// end stops the client and checks that no goroutine is left.
func (d *device) end() {
	d.stop()
	if err := <-d.done; !errors.Is(err, context.Canceled) {
		d.t.Errorf("Run ended with %v", err)
	}
}

func (p *peer) cmd(tool, args string) (id string) {
	p.t.Helper()
	id = NewID()
	p.send(string(AppendCmd(nil, id, tool, []byte(args), 0, "", Expiry{})))
	return id
}

// decodeAck reads the answer to a command.
func (p *peer) ack(id string) CmdAck {
	p.t.Helper()
	e := p.read(TypeCmdAck, nil)
	a, err := e.decodeAck()
	if err != nil || e.InReplyTo != id {
		p.t.Fatalf("ack %+v of %s, %v, want one of %s", a, e.InReplyTo, err, id)
	}
	return a
}

func (p *peer) wantCode(id string, want manifest.Code) {
	p.t.Helper()
	if a := p.ack(id); a.OK || a.Code != want || len(a.Detail) > 200 {
		p.t.Errorf("got %+v, want %s", a, want)
	}
}

func TestClientHandshake(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.greet()
		var a Auth
		p.read(TypeAuth, &a)
		if _, ok := manifest.ParseULID(a.BootID); !ok || a.Token != "good" || a.AgentVersion != "1.2.3" || a.InstanceID != testInstance || a.Name != "porch" || a.Proof != "" || a.Resume != nil {
			t.Errorf("auth %+v", a)
		}
		p.sendAs(TypeAuthOK, "", testAuthOK())
		e := p.read(TypeAnnounce, nil)
		if err := manifest.Validate(manifest.AnnounceRef, e.Payload); err != nil {
			t.Errorf("announce %s: %v", e.Payload, err)
		}
		var ann Announce
		if err := e.Decode(&ann); err != nil || manifest.Hash(ann.Capabilities) != ann.ManifestSHA256 || !strings.HasPrefix(string(ann.Capabilities),
			`[{"cap_id":"echo","kind":"system.echo","schema_ref":"mcp://schemas/system.echo.invoke.input@1.0.0","verbs":["invoke"],"safety_class":"read_only","constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}},`) {
			t.Errorf("announce %s, %v", e.Payload, err)
		}
		if s := d.client.Status(); s.State != StateConnecting {
			t.Errorf("state %s before announce_ack", s.State)
		}
		p.sendAs(TypeAnnounceAck, e.MsgID, AnnounceAck{Tools: []string{}, Rejected: []Rejected{}})
		synctest.Wait()
		if s := d.client.Status(); s.State != StateReady || s.NodeID != testNode || s.Tenant != "acme" || s.Reconnects != 0 {
			t.Errorf("status %+v", s)
		}
		// The boot id stays the same for the life of the process, on any link.
		p.close()
		var b Auth
		if d.greet().read(TypeAuth, &b); b.BootID != a.BootID {
			t.Errorf("boot id %s, then %s", a.BootID, b.BootID)
		}
		d.end()
		if other := NewClient(ClientOptions{}); other.bootID == a.BootID {
			t.Error("two processes have one boot id")
		}
	})
}

// TestClientAnnouncesAgain checks that a change of the capabilities reaches the relay on the same
// link, or with the next one, and that commands are checked against it.
func TestClientAnnouncesAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.admit()
		offer := func(caps ...manifest.Capability) {
			d.handler.mu.Lock()
			d.handler.caps = caps
			d.handler.mu.Unlock()
			d.client.Announce()
		}
		announced := func(p *peer, want string) {
			t.Helper()
			var a Announce
			e := p.read(TypeAnnounce, &a)
			if err := manifest.Validate(manifest.AnnounceRef, e.Payload); err != nil || strings.Count(string(a.Capabilities), "cap_id") != 1 || !strings.Contains(string(a.Capabilities), want) {
				t.Errorf("announce %s, %v", e.Payload, err)
			}
			p.sendAs(TypeAnnounceAck, e.MsgID, AnnounceAck{Tools: []string{}, Rejected: []Rejected{}})
			synctest.Wait()
		}
		offer(manifest.Metrics())
		announced(p, `"metrics"`)
		p.wantCode(p.cmd(echoTool, `{}`), manifest.ManifestInvalid)
		offer(manifest.Echo())
		announced(p, `"echo"`)
		if a := p.ack(p.cmd(echoTool, `{}`)); !a.OK {
			t.Errorf("echo answered %+v", a)
		}
		p.close()
		synctest.Wait()
		offer(manifest.Metrics())
		p = d.greet()
		p.read(TypeAuth, nil)
		p.sendAs(TypeAuthOK, "", testAuthOK())
		announced(p, `"metrics"`)
		p.wantCode(p.cmd(echoTool, `{}`), manifest.ManifestInvalid) // and no second announce
		d.end()
	})
}

func TestClientAnswers(t *testing.T) {
	boom := strings.Repeat("\x1b[31m boom ", 50)
	call := func(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
		switch {
		case strings.Contains(string(args), "refuse"):
			return nil, nil, manifest.E(manifest.RateLimited, boom)
		case strings.Contains(string(args), "fail"):
			return nil, nil, errors.New("disk on fire")
		case strings.Contains(string(args), "panic"):
			panic("no")
		case strings.Contains(string(args), "empty"):
			return nil, nil, nil
		case strings.Contains(string(args), "huge"):
			return []byte(`"` + strings.Repeat("x", MaxFrame) + `"`), nil, nil
		}
		return args, nil, nil
	}
	tests := []struct {
		name, tool, args string
		code             manifest.Code // "" is success
		ran              bool
	}{
		{"echo", echoTool, `{"message":"ping"}`, "", true},
		{"unannounced capability", "sysecho." + testNode + ".gpio.invoke", `{}`, manifest.ManifestInvalid, false},
		{"another node", strings.Replace(echoTool, "01hzx9", "01hzx8", 1), `{}`, manifest.ManifestInvalid, false},
		{"no tool name", "echo", `{}`, manifest.ManifestInvalid, false},
		{"arguments are no object", echoTool, `[]`, manifest.ManifestInvalid, false},
		{"arguments are null", echoTool, `null`, manifest.ManifestInvalid, false},
		{"the handler refuses", echoTool, `{"message":"refuse"}`, manifest.RateLimited, true},
		{"the handler fails", echoTool, `{"message":"fail"}`, manifest.Internal, true},
		{"the handler panics", echoTool, `{"message":"panic"}`, manifest.Internal, true},
		{"no result", echoTool, `{"message":"empty"}`, manifest.Internal, true},
		{"result over 64 KiB", echoTool, `{"message":"huge"}`, manifest.Internal, true},
	}
	bubble(t, func(t *testing.T) {
		d := startDevice(t, call)
		p := d.admit()
		for _, tt := range tests {
			before := d.handler.runs()
			id := p.cmd(tt.tool, tt.args)
			e := p.read(TypeCmdAck, nil)
			a, err := e.decodeAck()
			if err != nil || e.InReplyTo != id || a.OK != (tt.code == "") || a.Code != tt.code || (a.OK && string(a.Result) != tt.args) {
				t.Errorf("%s: got %+v of %s, %v", tt.name, a, e.InReplyTo, err)
			}
			if ran := d.handler.runs() > before; ran != tt.ran {
				t.Errorf("%s: the handler ran: %v", tt.name, ran)
			}
		}
		p.sendAs(TypeCmd, "", `{"tool":"`+echoTool+`"}`) // without arguments
		if a, _ := func() (CmdAck, error) { e := p.read(TypeCmdAck, nil); return e.decodeAck() }(); a.Code != manifest.ManifestInvalid {
			t.Errorf("without arguments: %+v", a)
		}
		p.sendAs(TypeError, "", ErrorPayload{manifest.Internal, "x"}) // accepted without an answer
		p.sendAs(TypeAnnounceAck, NewID(), AnnounceAck{})
		p.expectSilence(time.Second)
		d.end()
	})
}

// TestClientSendsEvents: an event is sent at once while there is a link; without one, the
// newest maxPendingEvents wait for it and then go out in order, 20 a second.
func TestClientSendsEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		for _, bad := range []string{``, `[]`, `"x"`, `{`, `{"a":"` + strings.Repeat("x", MaxEvent) + `"}`} {
			if d.client.SendEvent(TopicAlert, []byte(bad)) {
				t.Errorf("%.20s was taken", bad)
			}
		}
		for i := range maxPendingEvents + 3 {
			if !d.client.SendEvent(TopicAlert, fmt.Appendf(nil, "{\n \"n\": %d}", i)) {
				t.Errorf("event %d was refused", i)
			}
		}
		if drops := d.client.Status().Drops; drops != 3 {
			t.Errorf("%d drops are counted, want 3", drops)
		}
		p := d.admit()
		start := time.Now()
		for i := range maxPendingEvents {
			var e Event
			if p.read(TypeEvent, &e); e.Topic != TopicAlert || string(e.Data) != fmt.Sprintf(`{"n":%d}`, i+3) {
				t.Errorf("event %d: %+v", i, e)
			}
			if took := time.Since(start); took != time.Duration(i)*eventInterval {
				t.Fatalf("event %d after %v", i, took)
			}
		}
		time.Sleep(time.Second)
		start = time.Now()
		d.client.SendEvent(TopicAlert, []byte(`{"live":true}`))
		var e Event
		if p.read(TypeEvent, &e); string(e.Data) != `{"live":true}` || time.Since(start) > 0 {
			t.Errorf("%+v after %v", e, time.Since(start))
		}
		p.expectSilence(time.Second)
		d.end()
	})
}

// TestSuccessorSendsEvents: the client that takes the place of another one has its boot_id, and
// sends its events first; the newest maxPendingEvents stay.
func TestSuccessorSendsEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		before, after := NewClient(ClientOptions{}), NewClient(ClientOptions{})
		for i := range maxPendingEvents {
			before.SendEvent(TopicAlert, fmt.Appendf(nil, `{"n":%d}`, i))
		}
		after.SendEvent(TopicAlert, []byte(`{"n":"new"}`))
		after.Continue(before)
		if after.bootID != before.bootID || before.Pending() != 0 || after.Pending() != maxPendingEvents || after.Status().Drops != 1 {
			t.Errorf("%d events wait, %d in the one before, %d dropped", after.Pending(), before.Pending(), after.Status().Drops)
		}
		if first, last := after.events[0], after.events[maxPendingEvents-1]; !bytes.Contains(first, []byte(`{"n":1}`)) || !bytes.Contains(last, []byte("new")) {
			t.Errorf("the first is %s, the last %s", first, last)
		}
	})
}

// TestEventsPassTheFloodLimit: a relay takes the events of an outage at the pace of a client,
// beside frames of as many streams as a device may have.
func TestEventsPassTheFloodLimit(t *testing.T) {
	s := &Session{}
	now := int64(1)
	for i := range maxPendingEvents {
		now += int64(eventInterval)
		if cost := frameCost(MaxEvent + 200); !s.takeTokens(now, cost) || !s.takeTokens(now, eventCost) {
			t.Fatalf("event %d is too much", i)
		}
		if i%20 == 0 { // each second
			for range MaxStreams {
				if !s.takeTokens(now, 1) {
					t.Fatalf("a frame beside event %d is too much", i)
				}
			}
		}
	}
}

// TestClientRefusesBadFrames: errors of a relay, and the close code that it gets.
func TestClientRefusesBadFrames(t *testing.T) {
	tests := []struct {
		name, frame string
		code        int
	}{
		{"no JSON", "hello", CloseBadFrame},
		{"duplicate key", frame("error", `,"payload":{},"payload":{}`), CloseBadFrame},
		{"unknown key in cmd", strings.Replace(goldenCmd, `"tool"`, `"commit_token":"x","tool"`, 1), CloseBadFrame},
		{"wrong case in cmd", strings.Replace(goldenCmd, `"tool"`, `"Tool"`, 1), CloseBadFrame},
		{"cancel with a payload", frame("cmd_cancel", `,"in_reply_to":"`+relayID+`","payload":{"x":1}`), CloseBadFrame},
		{"a device's word", goldenAck, CloseBadFrame},
		{"auth_ok again", frame("auth_ok", `,"payload":{}`), CloseBadFrame},
		{"oversized", strings.Repeat("x", MaxFrame+1), CloseTooLarge},
		{"announce of the relay", frame("announce", `,"payload":{}`), CloseBadFrame},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, echoArgs)
				p := d.admit()
				p.send(tt.frame)
				if code, _ := p.readUntilClose(); code != tt.code {
					t.Errorf("closed with %d, want %d", code, tt.code)
				}
				d.admit() // the device has linked again
				if s := d.client.Status(); s.State != StateReady || s.Reconnects != 1 || s.LastErr == "" {
					t.Errorf("status %+v", s)
				}
				if d.handler.runs() != 0 {
					t.Error("the handler ran")
				}
				d.end()
			})
		})
	}
}

func TestHandlerDeadline(t *testing.T) {
	tests := []struct {
		deadlineMS int64
		want       time.Duration
	}{{0, 2 * time.Second}, {500, 500 * time.Millisecond}, {9000, 2 * time.Second}, {math.MaxInt64, 2 * time.Second}}
	for _, tt := range tests {
		bubble(t, func(t *testing.T) {
			d := startDevice(t, func(ctx context.Context, _ manifest.ToolName, _ []byte) ([]byte, StreamFunc, error) {
				time.Sleep(3 * time.Second) // ignores ctx
				return []byte("{}"), nil, nil
			})
			p := d.admit()
			start := time.Now()
			id := NewID()
			p.send(string(AppendCmd(nil, id, echoTool, []byte("{}"), tt.deadlineMS, "", Expiry{})))
			p.wantCode(id, manifest.DeadlineExceeded)
			if took := time.Since(start); took != tt.want {
				t.Errorf("deadline_ms %d: answered after %v, want %v", tt.deadlineMS, took, tt.want)
			}
			p.expectSilence(5 * time.Second) // the late answer is dropped
			d.end()
		})
	}
}

// TestRepeatedCommand: a command runs once, also when the relay repeats it on another link.
func TestRepeatedCommand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, func(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
			time.Sleep(time.Second)
			return args, nil, nil
		})
		p := d.admit()
		start := time.Now()
		id := p.cmd(echoTool, `{"n":1}`)
		cmd := string(AppendCmd(nil, id, echoTool, []byte(`{"n":2}`), 0, "", Expiry{}))
		p.send(cmd) // while it runs
		p.send(strings.Replace(cmd, id, strings.ToLower(id), 1))
		first := p.ack(id)
		if time.Since(start) != time.Second || string(first.Result) != `{"n":1}` {
			t.Errorf("got %+v after %v", first, time.Since(start))
		}
		p.expectSilence(3 * time.Second)
		p.send(cmd) // after it has ended
		if a := p.ack(id); string(a.Result) != `{"n":1}` {
			t.Errorf("the repeat gave %+v", a)
		}
		p.close()
		p = d.admit()
		p.send(cmd) // again on a new link
		if a := p.ack(id); string(a.Result) != `{"n":1}` {
			t.Errorf("the repeat on another link gave %+v", a)
		}
		if n := d.handler.runs(); n != 1 {
			t.Errorf("the handler ran %d times", n)
		}
		d.end()
	})
}

// TestCancelCommand: cmd_cancel ends a running command without an answer; the command is
// still remembered.
func TestCancelCommand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var ended time.Duration
		start := time.Now()
		d := startDevice(t, func(ctx context.Context, _ manifest.ToolName, _ []byte) ([]byte, StreamFunc, error) {
			<-ctx.Done()
			ended = time.Since(start)
			return nil, nil, manifest.E(manifest.DeadlineExceeded, "cancelled")
		})
		p := d.admit()
		start = time.Now()
		id := p.cmd(echoTool, "{}")
		time.Sleep(300 * time.Millisecond)
		p.sendAs(TypeCmdCancel, NewID(), nil) // of no command
		p.sendAs(TypeCmdCancel, id, nil)
		p.expectSilence(4 * time.Second)
		synctest.Wait()
		if ended != 300*time.Millisecond {
			t.Errorf("the handler was canceled after %v", ended)
		}
		p.send(string(AppendCmd(nil, id, echoTool, []byte("{}"), 0, "", Expiry{})))
		p.wantCode(id, manifest.DeadlineExceeded)
		if n := d.handler.runs(); n != 1 {
			t.Errorf("the handler ran %d times", n)
		}
		d.end()
	})
}

// TestCommandsBounded: 64 commands may run at a time, those with an abandoned handler
// included.
func TestCommandsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan bool)
		d := startDevice(t, func(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
			<-release // ignores ctx
			return args, nil, nil
		})
		p := d.admit()
		for range MaxInflight {
			p.cmd(echoTool, "{}")
		}
		synctest.Wait()
		p.wantCode(p.cmd(echoTool, "{}"), manifest.RateLimited)
		for range MaxInflight { // after 2 s all are abandoned
			if e := p.read(TypeCmdAck, nil); !strings.Contains(string(e.Payload), "E_DEADLINE_EXCEEDED") {
				t.Errorf("got %s", e.Payload)
			}
		}
		p.wantCode(p.cmd(echoTool, "{}"), manifest.RateLimited) // but they still hang
		if n := d.handler.runs(); n != MaxInflight {
			t.Errorf("%d handlers ran", n)
		}
		close(release)
		synctest.Wait()
		if a := p.ack(p.cmd(echoTool, "{}")); !a.OK {
			t.Errorf("after the jam: %+v", a)
		}
		d.end()
	})
}

// TestHungHandler: a handler that hangs does not keep the client from linking again, and
// Run waits for it at the end.
func TestHungHandler(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan bool)
		d := startDevice(t, func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
			<-release
			return []byte("{}"), nil, nil
		})
		p := d.admit()
		p.cmd(echoTool, "{}")
		synctest.Wait()
		_ = p.conn.Close(CloseGoingAway, "going_away")
		start := time.Now()
		d.admit()
		if time.Since(start) > 2*time.Second {
			t.Errorf("back after %v", time.Since(start))
		}
		d.stop()
		time.Sleep(time.Minute)
		select {
		case <-d.done:
			t.Error("Run ended before its handler")
		default:
		}
		close(release)
		<-d.done
	})
}

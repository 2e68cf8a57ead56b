package link

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// tool is what a testHandler does with a command.
type tool = func(ctx context.Context, name manifest.ToolName, args []byte) ([]byte, StreamFunc, error)

type testHandler struct {
	caps []manifest.Capability
	call tool

	mu  sync.Mutex
	ran int
}

func (h *testHandler) Capabilities() []manifest.Capability { return h.caps }

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
	dialErr error     // what Dial gives instead
	stop    context.CancelFunc
	done    chan error

	mu     sync.Mutex
	token  string
	states []Status
	dials  []time.Time
}

func startDevice(t *testing.T, call tool) *device {
	d := &device{t: t, handler: &testHandler{caps: []manifest.Capability{manifest.Echo(), manifest.Metrics()}, call: call},
		dialled: make(chan Conn, 1), done: make(chan error, 1), token: "good"}
	d.client = NewClient(ClientOptions{
		Dial:  d.dial,
		Token: func() (string, error) { d.mu.Lock(); defer d.mu.Unlock(); return d.token, nil },
		OnState: func(s Status) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.states = append(d.states, s)
		},
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
	dev, rel := Pipe()
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

// greet accepts the next dial and says hello.
func (d *device) greet() *peer {
	p := &peer{d.t, <-d.dialled}
	p.sendAs(TypeHello, "", Hello{Protocol: Protocol, Nonce: "n", ServerTimeMS: time.Now().UnixMilli()})
	return p
}

func testAuthOK() AuthOK {
	return AuthOK{NodeID: testNode, TenantID: "acme", SessionID: NewID(), ServerTimeMS: time.Now().UnixMilli(), ReconnectSpreadMS: 2000, Limits: Limits{64, 32}}
}

// admit is the rest of the handshake.
func (d *device) admit() *peer {
	p := d.greet()
	p.read(TypeAuth, nil)
	p.sendAs(TypeAuthOK, "", testAuthOK())
	e := p.read(TypeAnnounce, nil)
	p.sendAs(TypeAnnounceAck, e.MsgID, AnnounceAck{Tools: []string{echoTool}, Rejected: []Rejected{}})
	synctest.Wait()
	return p
}

// end stops the client and checks that it leaves nothing behind.
func (d *device) end() {
	d.stop()
	if err := <-d.done; !errors.Is(err, context.Canceled) {
		d.t.Errorf("Run ended with %v", err)
	}
}

func (p *peer) cmd(tool, args string) (id string) {
	p.t.Helper()
	id = NewID()
	p.send(string(AppendCmd(nil, id, tool, []byte(args), 0, "")))
	return id
}

// ack reads the answer to a command.
func (p *peer) ack(id string) CmdAck {
	p.t.Helper()
	e := p.read(TypeCmdAck, nil)
	a, err := e.ack()
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
		if _, ok := manifest.ParseULID(a.BootID); !ok || a.Token != "good" || a.AgentVersion != "1.2.3" || a.InstanceID != testInstance || a.Name != "porch" || a.Resume != nil {
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
		// The boot id is one a process, whatever happens to the link.
		p.close()
		p = d.greet()
		var b Auth
		if p.read(TypeAuth, &b); b.BootID != a.BootID {
			t.Errorf("boot id %s, then %s", a.BootID, b.BootID)
		}
		d.end()
		if other := NewClient(ClientOptions{}); other.bootID == a.BootID {
			t.Error("two processes have one boot id")
		}
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
			a, err := e.ack()
			if err != nil || e.InReplyTo != id || a.OK != (tt.code == "") || a.Code != tt.code || (a.OK && string(a.Result) != tt.args) {
				t.Errorf("%s: got %+v of %s, %v", tt.name, a, e.InReplyTo, err)
			}
			if ran := d.handler.runs() > before; ran != tt.ran {
				t.Errorf("%s: the handler ran: %v", tt.name, ran)
			}
		}
		p.sendAs(TypeCmd, "", `{"tool":"`+echoTool+`"}`) // no arguments at all
		if a, _ := func() (CmdAck, error) { e := p.read(TypeCmdAck, nil); return e.ack() }(); a.Code != manifest.ManifestInvalid {
			t.Errorf("without arguments: %+v", a)
		}
		p.sendAs(TypeError, "", ErrorPayload{manifest.Internal, "x"}) // noted, no answer
		p.sendAs(TypeAnnounceAck, NewID(), AnnounceAck{})
		p.silent(time.Second)
		d.end()
	})
}

// What a relay may do wrong, and the code that it gets.
func TestClientRefuses(t *testing.T) {
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
				if code, _ := p.ended(); code != tt.code {
					t.Errorf("closed with %d, want %d", code, tt.code)
				}
				d.admit() // and the device is back
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

func TestClientHandshakeFails(t *testing.T) {
	ok := testAuthOK()
	ok.NodeID = strings.ToUpper(testNode)
	tests := []struct {
		name  string
		do    func(d *device)
		code  int // that the relay gets; 0: it closed itself
		state State
		back  time.Duration // the next dial comes after at most this
	}{
		{"silent relay", func(d *device) { <-d.dialled }, -1, StateWaiting, 10*time.Second + 5*time.Second},
		{"a relay that only pings", func(d *device) {
			c := <-d.dialled
			for range 15 {
				_ = c.Ping()
				time.Sleep(time.Second)
			}
		}, -1, StateWaiting, 15 * time.Second},
		{"another protocol", func(d *device) {
			(&peer{d.t, <-d.dialled}).sendAs(TypeHello, "", Hello{Protocol: "v3\x1b"})
		}, -1, StateRefused, time.Hour + 5*time.Minute},
		{"a word too early", func(d *device) {
			p := &peer{d.t, <-d.dialled}
			p.send(goldenCmd)
			if code, _ := p.ended(); code != CloseBadFrame {
				d.t.Errorf("closed with %d", code)
			}
		}, CloseBadFrame, StateWaiting, 5 * time.Second},
		{"a node id in upper case", func(d *device) {
			p := d.greet()
			p.sendAs(TypeAuthOK, "", ok)
			if code, _ := p.ended(); code != CloseBadFrame {
				d.t.Errorf("closed with %d", code)
			}
		}, CloseBadFrame, StateWaiting, 5 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, echoArgs)
				start := time.Now()
				tt.do(d)
				<-d.dialled // the next try
				if after := time.Since(start); after > tt.back {
					t.Errorf("back after %v, want %v at most", after, tt.back)
				}
				d.mu.Lock()
				if s := d.states[1]; s.State != tt.state || strings.Contains(s.LastErr, "\x1b") {
					t.Errorf("status %+v, want %s", s, tt.state)
				}
				d.mu.Unlock()
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
				time.Sleep(3 * time.Second) // deaf to ctx
				return []byte("{}"), nil, nil
			})
			p := d.admit()
			start := time.Now()
			id := NewID()
			p.send(string(AppendCmd(nil, id, echoTool, []byte("{}"), tt.deadlineMS, "")))
			p.wantCode(id, manifest.DeadlineExceeded)
			if took := time.Since(start); took != tt.want {
				t.Errorf("deadline_ms %d: answered after %v, want %v", tt.deadlineMS, took, tt.want)
			}
			p.silent(5 * time.Second) // the late answer is dropped
			d.end()
		})
	}
}

// A command runs once, whatever the relay sends again and on whichever link.
func TestRepeatedCommand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, func(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
			time.Sleep(time.Second)
			return args, nil, nil
		})
		p := d.admit()
		start := time.Now()
		id := p.cmd(echoTool, `{"n":1}`)
		cmd := string(AppendCmd(nil, id, echoTool, []byte(`{"n":2}`), 0, ""))
		p.send(cmd) // it runs
		p.send(strings.Replace(cmd, id, strings.ToLower(id), 1))
		first := p.ack(id)
		if time.Since(start) != time.Second || string(first.Result) != `{"n":1}` {
			t.Errorf("got %+v after %v", first, time.Since(start))
		}
		p.silent(3 * time.Second)
		p.send(cmd) // it is done
		if a := p.ack(id); string(a.Result) != `{"n":1}` {
			t.Errorf("the repeat gave %+v", a)
		}
		p.close()
		p = d.admit()
		p.send(cmd) // from before the link broke
		if a := p.ack(id); string(a.Result) != `{"n":1}` {
			t.Errorf("the repeat on another link gave %+v", a)
		}
		if n := d.handler.runs(); n != 1 {
			t.Errorf("the handler ran %d times", n)
		}
		d.end()
	})
}

// cmd_cancel ends a running command without an answer; the command is still known.
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
		p.sendAs(TypeCmdCancel, NewID(), nil) // of nothing
		p.sendAs(TypeCmdCancel, id, nil)
		p.silent(4 * time.Second)
		synctest.Wait()
		if ended != 300*time.Millisecond {
			t.Errorf("the handler was told after %v", ended)
		}
		p.send(string(AppendCmd(nil, id, echoTool, []byte("{}"), 0, "")))
		p.wantCode(id, manifest.DeadlineExceeded)
		if n := d.handler.runs(); n != 1 {
			t.Errorf("the handler ran %d times", n)
		}
		d.end()
	})
}

// 64 commands may run at a time, those whose handler was given up included.
func TestCommandsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan bool)
		d := startDevice(t, func(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, StreamFunc, error) {
			<-release // deaf to ctx
			return args, nil, nil
		})
		p := d.admit()
		for range MaxInflight {
			p.cmd(echoTool, "{}")
		}
		synctest.Wait()
		p.wantCode(p.cmd(echoTool, "{}"), manifest.RateLimited)
		for range MaxInflight { // 2 s later all are given up
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

// A handler that hangs keeps neither the link from coming back nor Run from waiting for
// it at the end.
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
		p = d.admit()
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

// The same for a stream that hangs. One that looks at nothing but send's error ends.
func TestHungStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release, ended := make(chan bool), make(chan error, 1)
		n := 0
		d := startDevice(t, func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
			if n++; n == 1 {
				return []byte("{}"), func(context.Context, func([]byte) error) error { <-release; return nil }, nil
			}
			return []byte("{}"), func(_ context.Context, send func([]byte) error) error {
				for {
					if err := send([]byte("{}")); err != nil {
						ended <- err
						return err
					}
					time.Sleep(time.Second)
				}
			}, nil
		})
		p := d.admit()
		p.ack(p.cmd(testSub, "{}"))
		p.ack(p.cmd(testSub, "{}"))
		_ = p.conn.Close(CloseGoingAway, "going_away")
		start := time.Now()
		d.admit()
		if time.Since(start) > 2*time.Second {
			t.Errorf("back after %v", time.Since(start))
		}
		<-ended
		close(release)
		d.end()
	})
}

// slowConn takes a second to close, as a dead peer's WebSocket does.
type slowConn struct {
	Conn
	closing *atomic.Int64
}

func (c slowConn) Close(code int, reason string) error {
	c.closing.Add(1)
	defer c.closing.Add(-1)
	time.Sleep(time.Second)
	return c.Conn.Close(code, reason)
}

// Run waits for everything that it started, the closing of a link included.
func TestRunWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var closing atomic.Int64
		// In the handshake, when ready, while a link that the relay closed is closing.
		for _, after := range []time.Duration{0, 3 * time.Second, 1500 * time.Millisecond} {
			dialled := make(chan Conn, 1)
			c := NewClient(ClientOptions{Handler: &testHandler{}, Token: func() (string, error) { return "good", nil },
				Dial: func(context.Context) (Conn, error) {
					dev, rel := Pipe()
					dialled <- rel
					return slowConn{dev, &closing}, nil
				}})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			p := &peer{t, <-dialled}
			if after > 0 {
				p.sendAs(TypeHello, "", Hello{Protocol: Protocol})
				ok := testAuthOK()
				ok.ReconnectSpreadMS = 600_000 // no dial in between
				p.sendAs(TypeAuthOK, "", ok)
				p.sendAs(TypeAnnounceAck, "", AnnounceAck{})
				go p.ended()
			}
			synctest.Wait()
			if after == 1500*time.Millisecond {
				p.close()
			}
			time.Sleep(after)
			cancel()
			<-done
			if n := closing.Load(); n != 0 {
				t.Errorf("after Run %d links are still closing", n)
			}
		}
	})
}

// ticks is a stream of frames {"n":1}, {"n":2} ... at a cadence.
func ticks(every time.Duration) tool {
	return func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
		return []byte(fmt.Sprintf(`{"interval_ms":%d}`, every.Milliseconds())), func(ctx context.Context, send func([]byte) error) error {
			for n := 1; ; n++ {
				if err := send([]byte(fmt.Sprintf(`{"n":%d}`, n))); err != nil {
					return err
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(every):
				}
			}
		}, nil
	}
}

func TestStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, ticks(time.Second))
		p := d.admit()
		id := p.cmd(testSub, `{"interval_ms":1000}`)
		var sub Subscribed
		if a := p.ack(id); !a.OK || manifest.Validate("system.metrics.subscribe.output@1.0.0", a.Result) != nil {
			t.Fatalf("the opening gave %+v", a)
		} else if e := (&Envelope{Payload: a.Result}); e.Decode(&sub) != nil || sub.IntervalMS != 1000 {
			t.Fatalf("the opening gave %s", a.Result)
		}
		for n := int64(1); n <= 3; n++ {
			e := p.read(TypeMetric, nil)
			m, err := e.metric()
			if err != nil || m.StreamID != sub.StreamID || m.Seq != n || string(m.Sample) != fmt.Sprintf(`{"n":%d}`, n) {
				t.Errorf("frame %d: %+v, %v", n, m, err)
			}
		}
		p.sendAs(TypeCmdCancel, id, nil)
		var end StreamEnd
		if p.read(TypeStreamEnd, &end); end != (StreamEnd{sub.StreamID, EndCancelled}) {
			t.Errorf("got %+v", end)
		}
		p.silent(5 * time.Second)
		d.end()
	})
}

func TestStreamEnds(t *testing.T) {
	tests := []struct {
		name string
		fn   StreamFunc
		want string
	}{
		{"no more", func(context.Context, func([]byte) error) error { return nil }, EndShutdown},
		{"failed", func(context.Context, func([]byte) error) error { return errors.New("no sensor") }, EndHandlerError},
		{"panicked", func(context.Context, func([]byte) error) error { panic("no") }, EndHandlerError},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
					return []byte(`{"interval_ms":1000}`), tt.fn, nil
				})
				p := d.admit()
				p.ack(p.cmd(testSub, "{}"))
				var end StreamEnd
				if p.read(TypeStreamEnd, &end); end.Reason != tt.want {
					t.Errorf("got %+v, want %s", end, tt.want)
				}
				d.end()
			})
		})
	}
}

func TestStreamsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, ticks(time.Hour))
		p := d.admit()
		var ids []string
		for range MaxStreams {
			id := p.cmd(testSub, "{}")
			if a := p.ack(id); !a.OK {
				t.Fatalf("stream %d: %+v", len(ids), a)
			}
			p.read(TypeMetric, nil)
			ids = append(ids, id)
		}
		p.wantCode(p.cmd(testSub, "{}"), manifest.RateLimited)
		p.sendAs(TypeCmdCancel, ids[7], nil)
		p.read(TypeStreamEnd, nil)
		synctest.Wait()
		if a := p.ack(p.cmd(testSub, "{}")); !a.OK {
			t.Errorf("after one ended: %+v", a)
		}
		d.end()
	})
}

// A link slower than the cadence loses frames, counts them and leaves gaps in seq.
func TestDrops(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, ticks(10*time.Millisecond))
		p := d.admit()
		p.ack(p.cmd(testSub, "{}"))
		time.Sleep(5 * time.Second) // the pipe takes 16, the queue 64; writing waits for 10 s
		var seqs []int64
		for range 200 {
			e := p.read(TypeMetric, nil)
			m, err := e.metric()
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, m.Seq)
		}
		drops := uint64(seqs[199]) - 200
		if got := d.client.Status().Drops; got != drops || drops < 300 || drops > 500 {
			t.Errorf("%d frames are missing, Drops says %d", drops, got)
		}
		p.sendAs(TypeCmd, "", Cmd{Tool: echoTool, Arguments: []byte("{}")}) // the link lives on
		d.end()
	})
}

// A relay that stops reading is given up after 10 s, even when the device's reader waits
// for room in the send queue.
func TestRelayDoesNotRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.admit()
		start := time.Now()
		done := make(chan bool)
		go func() {
			defer close(done)
			for p.conn.Write(AppendCmd(nil, NewID(), echoTool, []byte("{}"), 0, "")) == nil {
				_ = p.conn.Ping()
			}
		}()
		<-d.dialled
		if took := time.Since(start); took < writeTimeout || took > writeTimeout+2*time.Second+2*time.Second {
			t.Errorf("the next dial came after %v", took)
		}
		<-done
		d.end()
	})
}

func TestClientLiveness(t *testing.T) {
	bubble(t, func(t *testing.T) { // a silent relay is dropped after 60 s
		d := startDevice(t, echoArgs)
		p := d.admit()
		start := time.Now()
		var pings []time.Duration
		for {
			select { // the pipe answers pings only while somebody reads it
			case m := <-p.conn.(*pipeConn).in:
				if m.kind == 'p' {
					pings = append(pings, time.Since(start))
				}
				continue
			case <-d.dialled:
			}
			break
		}
		if took := time.Since(start); took < DeadAfter || took > DeadAfter+2*time.Second {
			t.Errorf("the next dial came after %v, want 60 s and at most the spread of 2 s", took)
		}
		if len(pings) < 2 || pings[0] < 20*time.Second || pings[0] > 30*time.Second || pings[1]-pings[0] < 20*time.Second || pings[1]-pings[0] > 30*time.Second {
			t.Errorf("pings after %v", pings)
		}
		d.end()
	})
	bubble(t, func(t *testing.T) { // one that answers pings stays, and so does one that pings
		d := startDevice(t, echoArgs)
		p := d.admit()
		var pings atomic.Int64
		p.conn.OnPing(func(ping bool) {
			if ping {
				pings.Add(1)
			}
		})
		done := make(chan bool)
		go func() { p.ended(); close(done) }()
		time.Sleep(10 * time.Minute)
		before := pings.Load()
		if before < 20 || before > 30 {
			t.Errorf("%d pings in 10 min, want one in 20 to 30 s", before)
		}
		for range 30 {
			_ = p.conn.Ping()
			time.Sleep(20 * time.Second)
		}
		if n := pings.Load() - before; n > 1 {
			t.Errorf("%d pings in 10 min beside the relay's own", n)
		}
		if d.dialCount() != 1 {
			t.Errorf("%d dials", d.dialCount())
		}
		d.end()
		<-done
	})
}

// A relay that is gone for 10 minutes finds its devices back within one cap.
func TestReconnectForEver(t *testing.T) {
	for range 20 {
		bubble(t, func(t *testing.T) {
			d := startDevice(t, echoArgs)
			p := d.admit()
			go p.ended()
			time.Sleep(2 * time.Minute)
			d.fail(errors.New("connection refused"))
			p.close()
			time.Sleep(10 * time.Minute)
			if s := d.client.Status(); s.State != StateWaiting || s.LastErr != "connection refused" {
				t.Errorf("status %+v", s)
			}
			if n := d.dialCount(); n < 10 || n > 80 {
				t.Errorf("%d dials in 10 min", n)
			}
			d.fail(nil)
			start := time.Now()
			d.admit()
			if took := time.Since(start); took > maxBackoff {
				t.Errorf("back after %v, want %v at most", took, maxBackoff)
			}
			d.end()
		})
	}
}

func TestHungDial(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var starts []time.Time
		c := NewClient(ClientOptions{Token: func() (string, error) { return "", nil }, Handler: &testHandler{},
			Dial: func(ctx context.Context) (Conn, error) {
				starts = append(starts, time.Now())
				<-ctx.Done()
				return nil, ctx.Err()
			}})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		if err := c.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run ended with %v", err)
		}
		if len(starts) < 3 || starts[1].Sub(starts[0]) > 35*time.Second {
			t.Errorf("dials at %v", starts)
		}
	})
}

// What each close code of the relay does to the device.
func TestClientCloseCodes(t *testing.T) {
	tests := []struct {
		code     int
		state    State
		min, max time.Duration
		cloned   bool
	}{
		{CloseNormal, StateWaiting, 0, 2 * time.Second, false},
		{CloseGoingAway, StateWaiting, 0, 2 * time.Second, false},
		{CloseBadFrame, StateWaiting, 0, 2 * time.Second, false},
		{CloseAuthFailed, StateRefused, 5 * time.Minute, 330 * time.Second, false},
		{CloseForbidden, StateRefused, 5 * time.Minute, 330 * time.Second, false},
		{CloseTimeout, StateWaiting, 0, 2 * time.Second, false},
		{CloseSuperseded, StateWaiting, time.Minute, time.Minute, true},
		{CloseTooLarge, StateWaiting, 0, 2 * time.Second, false},
		{CloseManifestInvalid, StateRefused, time.Hour, 65 * time.Minute, false},
		{CloseUpgradeRequired, StateRefused, time.Hour, 65 * time.Minute, false},
		{CloseRateLimited, StateWaiting, 30 * time.Second, time.Minute, false},
		{CloseDraining, StateWaiting, 0, 2 * time.Second, false},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.code), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, echoArgs)
				p := d.admit()
				start := time.Now()
				_ = p.conn.Close(tt.code, "because\x07")
				synctest.Wait()
				s := d.client.Status()
				if tt.min > 0 && (s.State != tt.state || s.LastCode != tt.code || s.CloneSuspected != tt.cloned || s.LastErrAt != start || s.Since != start) {
					t.Errorf("status %+v", s)
				}
				<-d.dialled
				if took := time.Since(start); took < tt.min || took > tt.max {
					t.Errorf("the next dial came after %v, want %v to %v", took, tt.min, tt.max)
				}
				d.end()
			})
		})
	}
}

// A refused token is tried again after 5 min, another token at once.
func TestNewToken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.greet()
		p.read(TypeAuth, nil)
		_ = p.conn.Close(CloseAuthFailed, "auth_failed")
		time.Sleep(time.Minute)
		if n := d.dialCount(); n != 1 {
			t.Errorf("%d dials with the refused token", n)
		}
		d.mu.Lock()
		d.token = "another"
		d.mu.Unlock()
		start := time.Now()
		p = d.greet()
		var a Auth
		if p.read(TypeAuth, &a); a.Token != "another" || time.Since(start) > tokenPoll {
			t.Errorf("dialled with %q after %v", a.Token, time.Since(start))
		}
		d.end()
	})
}

// An install that was superseded waits 60 s, then twice that, and says why for 2 hours.
func TestSuperseded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		for wait := time.Minute; wait <= 8*time.Minute; wait *= 2 {
			p := d.admit()
			go p.ended()
			time.Sleep(wait) // as long as the other install waits
			start := time.Now()
			_ = p.conn.Close(CloseSuperseded, "superseded")
			time.Sleep(wait - 1)
			dials := d.dialCount()
			time.Sleep(1)
			synctest.Wait()
			if n := d.dialCount(); n != dials+1 {
				t.Errorf("%d dials %v after the takeover, want 1", n-dials, time.Since(start))
			}
			if !d.client.Status().CloneSuspected {
				t.Error("no clone is suspected")
			}
		}
		p := d.admit()
		go p.ended()
		time.Sleep(111 * time.Minute) // and 8 before
		if !d.client.Status().CloneSuspected {
			t.Error("the clone is forgotten too soon")
		}
		d.end()
		time.Sleep(time.Minute)
		if d.client.Status().CloneSuspected {
			t.Error("a clone is suspected for ever")
		}
	})
}

func TestTokenUnreadable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dials := make(chan Conn, 10)
		c := NewClient(ClientOptions{Handler: &testHandler{}, Token: func() (string, error) { return "", errors.New("open token: permission denied") },
			Dial: func(context.Context) (Conn, error) { dev, rel := Pipe(); dials <- rel; return dev, nil }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		p := &peer{t, <-dials}
		p.sendAs(TypeHello, "", Hello{Protocol: Protocol})
		if code, _ := p.ended(); code != CloseNormal {
			t.Errorf("closed with %d", code)
		}
		<-dials
		if s := c.Status(); !strings.Contains(s.LastErr, "permission denied") {
			t.Errorf("status %+v", s)
		}
		cancel()
		<-done
	})
}

package test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/strictjson"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// board is a device as agentctl run builds it (client, handlers, sampler), on a link in
// memory whose other end is this test: a relay written by hand.
type board struct {
	t       *testing.T
	conn    link.Conn // of the link in force
	links   chan link.Conn
	frames  chan link.Envelope
	closed  chan error // why the link in force ended, as the relay saw it
	auth    link.Auth
	caps    string // raw, as announced
	client  *link.Client
	handler link.Handler
}

const boardNode = "01hzx9k3m4p7q8r9s0t1v2w3xy"

// fixedSource is a prober.Source whose figures do not change.
type fixedSource struct{}

func (fixedSource) Read(s *prober.Sample) error {
	s.CPUPct, s.MemBytes, s.MemTotalBytes, s.DiskPct = 12.4, 1234567890, 8589934592, 31.2
	s.Load1, s.Load5, s.Load15 = 0.42, 0.39, 0.35
	return nil
}

func (fixedSource) Close() error { return nil }

// withBoard runs f with a board that is linked, in a synctest bubble. more are handlers beside
// echo and metrics, or in their place.
func withBoard(t *testing.T, f func(t *testing.T, b *board), more ...handlers.Handler) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)))
		c := clock.New(time.Time{}, nil)
		p := prober.New(prober.Options{Source: fixedSource{}, Interval: time.Second, Now: func() int64 { ms, _ := c.NowMS(); return ms }})
		if more == nil {
			more = []handlers.Handler{handlers.NewEcho(c.NowMS), handlers.NewMetrics(p, c.NowMS)}
		}
		mux, err := handlers.New(handlers.Options{}, more...)
		if err != nil {
			t.Fatal(err)
		}
		b := &board{t: t, links: make(chan link.Conn, 8), handler: mux}
		b.client = link.NewClient(link.ClientOptions{
			Dial: func(context.Context) (link.Conn, error) {
				device, relay := link.Pipe()
				b.links <- relay
				return device, nil
			},
			Token: func() (string, error) { return "a.b.c", nil }, Version: "test", InstanceID: strings.Repeat("0a", 16),
			Name: "attic", Handler: mux, Clock: c,
		})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = p.Run(ctx) })
		wg.Go(func() { _ = b.client.Run(ctx) })
		t.Cleanup(func() {
			cancel()
			_ = b.conn.Close(link.CloseNormal, "normal")
			wg.Wait()
			synctest.Wait()
		})
		b.accept()
		f(t, b)
	})
}

// accept takes the next link through its handshake.
func (b *board) accept() {
	b.t.Helper()
	select {
	case b.conn = <-b.links:
	case <-time.After(time.Minute):
		b.t.Fatal("the board did not dial within a minute")
	}
	b.send(link.TypeHello, "", link.Hello{Protocol: link.Protocol, Nonce: "bm9uY2U", ServerTimeMS: time.Now().UnixMilli()})
	b.read(link.TypeAuth, &b.auth)
	b.send(link.TypeAuthOK, "", link.AuthOK{NodeID: boardNode, TenantID: "default", SessionID: manifest.NewULID(),
		ServerTimeMS: time.Now().UnixMilli(), ReconnectSpreadMS: 1000, Limits: link.Limits{MaxInflight: link.MaxInflight, MaxStreams: link.MaxStreams}})
	var a link.Announce
	id := b.read(link.TypeAnnounce, &a)
	b.caps = string(a.Capabilities)
	if a.ManifestVersion != 1 || a.ManifestSHA256 != manifest.Hash(a.Capabilities) {
		b.t.Errorf("announce %+v", a)
	}
	b.send(link.TypeAnnounceAck, id, link.AnnounceAck{Tools: []string{}, Rejected: []link.Rejected{}})
	conn := b.conn
	b.frames, b.closed = make(chan link.Envelope, 1024), make(chan error, 1)
	frames, closed := b.frames, b.closed
	go func() {
		for {
			err := conn.Read(func(msg []byte) error {
				e, err := link.Decode(append([]byte(nil), msg...))
				if err == nil {
					e.Payload = append(strictjson.Raw(nil), e.Payload...)
					frames <- e
				}
				return err
			})
			if err != nil {
				closed <- err
				return
			}
		}
	}()
}

func (b *board) read(typ string, v any) (id string) {
	b.t.Helper()
	err := b.conn.Read(func(msg []byte) error {
		e, err := link.Decode(append([]byte(nil), msg...))
		if err == nil && e.Type != typ {
			err = fmt.Errorf("got %s", e.Type)
		}
		if err != nil {
			return err
		}
		id = e.MsgID
		return e.Decode(v)
	})
	if err != nil {
		b.t.Fatalf("waiting for %s: %v", typ, err)
	}
	return id
}

func (b *board) send(typ, inReplyTo string, payload any) (id string) {
	b.t.Helper()
	id = manifest.NewULID()
	if err := b.conn.Write(link.Encode(typ, id, inReplyTo, payload)); err != nil {
		b.t.Fatal(err)
	}
	return id
}

func (b *board) cmd(tool, args string) (id string) {
	b.t.Helper()
	return b.send(link.TypeCmd, "", link.Cmd{Tool: tool, Arguments: strictjson.Raw(args)})
}

// next is the board's next frame, within a time.
func (b *board) next(typ string, within time.Duration) link.Envelope {
	b.t.Helper()
	select {
	case e := <-b.frames:
		if e.Type != typ {
			b.t.Fatalf("got %s %s instead of %s", e.Type, e.Payload, typ)
		}
		return e
	case <-time.After(within):
		b.t.Fatalf("no %s within %s", typ, within)
	}
	panic("not reached")
}

// ack is the board's answer to a command.
func (b *board) ack(id string, within time.Duration) link.CmdAck {
	b.t.Helper()
	e := b.next(link.TypeCmdAck, within)
	if e.InReplyTo != id || e.MsgID == id {
		b.t.Errorf("ack %s of %s answers %s", e.MsgID, id, e.InReplyTo)
	}
	var a link.CmdAck
	if err := e.Decode(&a); err != nil {
		b.t.Fatal(err)
	}
	return a
}

func (b *board) expectNothing() {
	b.t.Helper()
	synctest.Wait()
	select {
	case e := <-b.frames:
		b.t.Errorf("an unasked %s %s", e.Type, e.Payload)
	default:
	}
}

const (
	boardEcho      = "sysecho." + boardNode + ".echo.invoke"
	boardSnapshot  = "sys." + boardNode + ".metrics.snapshot"
	boardSubscribe = "sys." + boardNode + ".metrics.subscribe"
)

// RFC-0005 §9, §13: the board announces the capability object of the document at connect.
func TestRFC0005BoardAnnounces(t *testing.T) {
	t.Parallel()
	withBoard(t, func(t *testing.T, b *board) {
		const echo = `{"cap_id":"echo","kind":"system.echo","schema_ref":"mcp://schemas/system.echo.invoke.input@1.0.0",` +
			`"verbs":["invoke"],"safety_class":"read_only","constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}}`
		const metrics = `{"cap_id":"metrics","kind":"system.metrics","schema_ref":"mcp://schemas/system.metrics.snapshot.input@1.0.0",` +
			`"verbs":["snapshot","subscribe"],"safety_class":"read_only","constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}}`
		if b.caps != "["+echo+","+metrics+"]" {
			t.Errorf("announced %s", b.caps)
		}
		if b.auth.Token != "a.b.c" || b.auth.Name != "attic" || b.auth.InstanceID != strings.Repeat("0a", 16) || len(b.auth.BootID) != manifest.ULIDLen {
			t.Errorf("auth %+v", b.auth)
		}
		first := b.auth
		_ = b.conn.Close(link.CloseDraining, "draining")
		start := time.Now()
		b.accept()
		if took := time.Since(start); took > time.Second {
			t.Errorf("back after %s, want within 1 s", took)
		}
		if b.auth.BootID != first.BootID || b.auth.InstanceID != first.InstanceID {
			t.Errorf("the second auth is of another board: %+v", b.auth)
		}
	})
}

// RFC-0005 §6.6, §6.7: what a board answers, and what it refuses without running anything.
func TestRFC0005BoardAnswers(t *testing.T) {
	t.Parallel()
	withBoard(t, func(t *testing.T, b *board) {
		for _, message := range []string{"ping", "", `\"<>&`, strings.Repeat("~", 1024)} {
			args, _ := json.Marshal(map[string]string{"message": message})
			a := b.ack(b.cmd(boardEcho, string(args)), time.Second)
			quoted, _ := json.Marshal(message)
			var got struct {
				Message string
				MS      int64  `json:"received_at_ms"`
				Node    string `json:"node_id"`
			}
			if err := json.Unmarshal(a.Result, &got); err != nil || !a.OK || got.Message != message || got.Node != boardNode || got.MS != time.Now().UnixMilli() {
				t.Errorf("%s became %s, %v", quoted, a.Result, err)
			}
		}
		a := b.ack(b.cmd(boardSnapshot, `{}`), time.Second)
		want := fmt.Sprintf(`{"ts_ms":%d,"node_id":"%s","cpu_pct":12.4,"mem_bytes":1234567890,"mem_total_bytes":8589934592,"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}`, time.Now().UnixMilli(), boardNode)
		if !a.OK || string(a.Result) != want {
			t.Errorf("got %s, want %s", a.Result, want)
		}
		for _, c := range [][2]string{
			{"sysecho.01hzx9k3m4p7q8r9s0t1v2w3xz.echo.invoke", `{"message":"x"}`}, {"sysecho." + boardNode + ".echo2.invoke", `{"message":"x"}`},
			{"sys." + boardNode + ".echo.invoke", `{"message":"x"}`}, {"sysecho." + boardNode + ".echo.snapshot", `{}`}, {"system.echo", `{"message":"x"}`},
			{boardEcho, `{}`}, {boardEcho, `{"message":1}`}, {boardEcho, `{"message":"x","y":1}`}, {boardEcho, `{"message":"\u00e9"}`},
			{boardEcho, `{"message":"` + strings.Repeat("x", 1025) + `"}`}, {boardSubscribe, `{"interval_ms":999}`}, {boardSnapshot, `{"x":1}`},
		} {
			time.Sleep(time.Second)
			a := b.ack(b.cmd(c[0], c[1]), time.Second)
			if a.OK || a.Code != manifest.ManifestInvalid || len(a.Result) != 0 || len(a.Detail) > 200 {
				t.Errorf("%v: got %+v", c, a)
			}
		}
		b.expectNothing()
		id := manifest.NewULID()
		_ = b.conn.Write([]byte(`{"type":"cmd","msg_id":"` + id + `","payload":{"tool":"` + boardEcho + `"}}`))
		if a := b.ack(id, time.Second); a.OK || a.Code != manifest.ManifestInvalid {
			t.Errorf("no arguments: got %+v", a)
		}
	})
}

// RFC-0005 §9 on the board: it does not have to trust its relay about the limits.
func TestRFC0005BoardLimits(t *testing.T) {
	t.Parallel()
	withBoard(t, func(t *testing.T, b *board) {
		refused := 0
		for range 12 {
			if a := b.ack(b.cmd(boardEcho, `{"message":"x"}`), time.Second); !a.OK {
				if a.Code != manifest.RateLimited {
					t.Errorf("got %+v", a)
				}
				refused++
			}
		}
		if refused != 2 {
			t.Errorf("%d of 12 at once were refused, want 2", refused)
		}
	})
}

// hangingHandler answers echo when the test releases it, or never.
type hangingHandler struct {
	open  atomic.Bool
	mu    sync.Mutex
	runs  int
	ended int
}

func (h *hangingHandler) Capability() manifest.Capability { return manifest.Echo() }

func (h *hangingHandler) Call(ctx context.Context, tool manifest.ToolName, _ []byte) ([]byte, handlers.Stream, error) {
	h.mu.Lock()
	h.runs++
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.ended++
		h.mu.Unlock()
	}()
	for !h.open.Load() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
	return fmt.Appendf(nil, `{"message":"late","received_at_ms":%d,"node_id":"%s"}`, time.Now().UnixMilli(), tool.NodeID), nil, nil
}

func (h *hangingHandler) counts() (runs, ended int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.runs, h.ended
}

// RFC-0005 §7: a handler has 2 s, less if the relay sends a shorter deadline, and a cancel ends it.
func TestRFC0005BoardDeadline(t *testing.T) {
	t.Parallel()
	h := new(hangingHandler)
	withBoard(t, func(t *testing.T, b *board) {
		for _, tt := range []struct {
			ms   int64
			want time.Duration
		}{{0, 2 * time.Second}, {500, 500 * time.Millisecond}, {4000, 2 * time.Second}} {
			start := time.Now()
			a := b.ack(b.send(link.TypeCmd, "", link.Cmd{Tool: boardEcho, Arguments: strictjson.Raw(`{"message":"x"}`), DeadlineMS: tt.ms}), 3*time.Second)
			if took := time.Since(start); a.OK || a.Code != manifest.DeadlineExceeded || took < tt.want || took > tt.want+100*time.Millisecond {
				t.Errorf("deadline_ms %d: %+v after %s", tt.ms, a, took)
			}
		}
		id := b.cmd(boardEcho, `{"message":"x"}`)
		time.Sleep(100 * time.Millisecond)
		b.send(link.TypeCmdCancel, id, nil)
		synctest.Wait()
		if runs, ended := h.counts(); runs != 4 || ended != 4 {
			t.Errorf("%d runs, %d ended", runs, ended)
		}
	}, h)
}

// RFC-0002 §7.3: a command that comes twice runs once; its answer is given again, byte for
// byte, once there is one.
func TestRFC0005BoardDedupes(t *testing.T) {
	t.Parallel()
	h := new(hangingHandler)
	withBoard(t, func(t *testing.T, b *board) {
		id := manifest.NewULID()
		frame := link.AppendCmd(nil, id, boardEcho, []byte(`{"message":"x"}`), 0, "", link.Expiry{})
		for range 3 {
			_ = b.conn.Write(frame)
		}
		b.expectNothing()
		h.open.Store(true)
		first := b.next(link.TypeCmdAck, time.Second)
		b.expectNothing()
		_ = b.conn.Write([]byte(strings.Replace(string(frame), id, strings.ToLower(id), 1))) // either case is one id
		again := b.next(link.TypeCmdAck, time.Second)
		if again.InReplyTo != id || string(again.Payload) != string(first.Payload) || again.MsgID != first.MsgID {
			t.Errorf("first %s %s, again %s %s", first.MsgID, first.Payload, again.MsgID, again.Payload)
		}
		if runs, _ := h.counts(); runs != 1 {
			t.Errorf("it ran %d times", runs)
		}
	}, h)
}

// RFC-0009 §4, §5.1 on the board: the first frame at once, then the cadence, numbered from
// 1, until the relay cancels.
func TestRFC0009BoardStream(t *testing.T) {
	t.Parallel()
	withBoard(t, func(t *testing.T, b *board) {
		start := time.Now()
		id := b.cmd(boardSubscribe, `{"interval_ms":2000}`)
		a := b.ack(id, time.Second)
		var sub link.Subscribed
		if err := strictjson.Unmarshal(a.Result, &sub); err != nil || sub.IntervalMS != 2000 || len(sub.StreamID) != manifest.ULIDLen {
			t.Fatalf("got %s, %v", a.Result, err)
		}
		for seq := int64(1); seq <= 5; seq++ {
			var m link.Metric
			e := b.next(link.TypeMetric, 3*time.Second)
			if err := e.Decode(&m); err != nil || m.Seq != seq || m.StreamID != sub.StreamID {
				t.Errorf("got %+v, %v", m, err)
			}
			if err := manifest.CheckFrame(m.Sample, boardNode); err != nil {
				t.Errorf("%s: %v", m.Sample, err)
			}
			if late := time.Since(start) - time.Duration(seq-1)*2*time.Second; late < 0 || late > time.Second {
				t.Errorf("frame %d came after %s", seq, time.Since(start))
			}
		}
		b.send(link.TypeCmdCancel, id, nil)
		var end link.StreamEnd
		if e := b.next(link.TypeStreamEnd, time.Second); e.Decode(&end) != nil || end.StreamID != sub.StreamID || end.Reason != link.EndCanceled {
			t.Errorf("got %+v", end)
		}
		time.Sleep(10 * time.Second)
		b.expectNothing()
	})
}

// A relay that talks nonsense is left (4400) and dialled again.
func TestRFC0005BadFramesFromRelay(t *testing.T) {
	t.Parallel()
	id := manifest.NewULID()
	for name, frame := range map[string]string{
		"no JSON": `hello`, "unknown type": `{"type":"reboot","msg_id":"` + id + `","payload":{}}`,
		"a device's word": `{"type":"announce","msg_id":"` + id + `","payload":{}}`, "hello again": `{"type":"hello","msg_id":"` + id + `","payload":{"protocol":"v2","nonce":"x","server_time_ms":1}}`,
		"extra key":  `{"type":"cmd","msg_id":"` + id + `","payload":{"tool":"` + boardEcho + `","arguments":{},"commit_token":"x"}}`,
		"twice":      `{"type":"cmd","msg_id":"` + id + `","payload":{"tool":"` + boardEcho + `","tool":"` + boardEcho + `","arguments":{}}}`,
		"bad msg_id": `{"type":"cmd","msg_id":"1","payload":{"tool":"` + boardEcho + `","arguments":{}}}`,
		"cancel":     `{"type":"cmd_cancel","msg_id":"` + id + `","payload":{}}`,
	} {
		t.Run(name, func(t *testing.T) {
			withBoard(t, func(t *testing.T, b *board) {
				_ = b.conn.Write([]byte(frame))
				var ce *link.CloseError
				select {
				case err := <-b.closed:
					if !errors.As(err, &ce) || ce.Code != link.CloseBadFrame {
						t.Errorf("the board's end: %v", err)
					}
				case <-time.After(10 * time.Second):
					t.Fatal("the board stayed")
				}
				b.accept()
				if a := b.ack(b.cmd(boardEcho, `{"message":"x"}`), time.Second); !a.OK {
					t.Errorf("got %+v", a)
				}
			})
		})
	}
}

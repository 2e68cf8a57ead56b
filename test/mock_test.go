package test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/strictjson"
	"agentctl/transport/link"
)

// mockDevice is a scripted device: it sends what a test wants it to send, valid or not. By
// default it announces echo and metrics and answers them correctly.
type mockDevice struct {
	t     testing.TB
	r     *testRelay
	ws    *websocket.Conn
	node  string
	token string
	ok    link.AuthOK
	ack   link.AnnounceAck

	script  func(id string, c link.Cmd) // answers one command; nil: answer
	cadence bool                        // streams go on at their interval after the first frame
	now     func() int64                // the board's clock
	deaf    atomic.Bool                 // pings are not answered

	wmu sync.Mutex // one writer at a time

	mu       sync.Mutex // protects the fields below
	got      []receivedCmd
	streams  map[string]chan struct{} // stop channels by the id of the cmd
	streamID string                   // of the stream opened last
	closing  bool
	ended    chan struct{} // waitClosed when the link has ended
	close    int           // the code that ended it
	wg       sync.WaitGroup
}

// receivedCmd is one frame from the relay.
type receivedCmd struct {
	raw string
	link.Envelope
	cmd link.Cmd
}

// mockOptions configure a mock's handshake; the zero value is a valid device of tenant
// default.
type mockOptions struct {
	tenant, token, instance, name string
	agentVersion                  string // default mock
	caps                          string // raw JSON of capabilities
	announce                      func(raw string) string
	script                        func(m *mockDevice) func(id string, c link.Cmd)
	cadence                       bool
}

func defaultCaps() string {
	b, _ := json.Marshal([]manifest.Capability{manifest.Echo(), manifest.Metrics()})
	return string(b)
}

// device links a mock and waits until its tools are there.
func (r *testRelay) device(o mockOptions) *mockDevice {
	r.t.Helper()
	m, err := r.link(o)
	if err != nil {
		r.t.Fatal(err)
	}
	eventually(r.t, "the node is online", func() bool { return m.online() })
	return m
}

// online reports whether the relay has loaded the device: a call with bad arguments is then
// refused for these.
func (m *mockDevice) online() bool {
	m.t.Helper()
	return m.r.call(m.ack.Tools[0], `{"no_such":1}`, "Accept", "application/json, text/event-stream", "Authorization", m.bearer()).status ==
		http.StatusUnprocessableEntity
}

// bearer is the header of an agent of the device's tenant.
func (m *mockDevice) bearer() string { return "Bearer " + m.r.agentFor(m.ok.TenantID) }

// link makes the handshake; the error is a *websocket.CloseError when the relay refused.
func (r *testRelay) link(o mockOptions) (*mockDevice, error) {
	r.t.Helper()
	m := &mockDevice{t: r.t, r: r, token: o.token, cadence: o.cadence, streams: make(map[string]chan struct{}), ended: make(chan struct{})}
	m.now = func() int64 { return time.Now().UnixMilli() }
	if m.token == "" {
		m.token = r.mint(auth.MintRequest{Class: "device", Tenant: o.tenant}).Token
	}
	if o.script != nil {
		m.script = o.script(m)
	}
	ws, err := r.websocket()
	if err != nil {
		return nil, err
	}
	m.ws = ws
	if err := m.handshake(o); err != nil {
		_ = ws.NetConn().Close()
		return nil, err
	}
	ws.SetPingHandler(func(data string) error {
		if !m.deaf.Load() {
			_ = ws.WriteControl(websocket.PongMessage, []byte(data), time.Now().Add(r.within(time.Second)))
		}
		return nil
	})
	m.wg.Go(m.read)
	r.t.Cleanup(m.kill)
	return m, nil
}

// websocket opens the device link's WebSocket and nothing more.
func (r *testRelay) websocket() (*websocket.Conn, error) {
	d := websocket.Dialer{NetDialContext: r.dial, TLSClientConfig: r.tls, Subprotocols: []string{link.Subprotocol}, HandshakeTimeout: r.within(10 * time.Second)}
	ctx, cancel := context.WithTimeout(context.Background(), r.within(10*time.Second))
	defer cancel()
	ws, resp, err := d.DialContext(ctx, "ws"+strings.TrimPrefix(r.url, "http")+link.Path, nil)
	if err != nil && resp != nil {
		return nil, fmt.Errorf("HTTP %d: %w", resp.StatusCode, err)
	}
	return ws, err
}

func (m *mockDevice) handshake(o mockOptions) error {
	_ = m.ws.SetReadDeadline(time.Now().Add(m.r.within(15 * time.Second)))
	defer func() { _ = m.ws.SetReadDeadline(time.Time{}) }()
	var hello link.Hello
	if err := m.expect(link.TypeHello, &hello); err != nil {
		return err
	}
	if o.instance == "" {
		o.instance = "00112233445566778899aabbccddeeff"
	}
	a := link.Auth{Token: m.token, AgentVersion: cmp.Or(o.agentVersion, "mock"), BootID: manifest.NewULID(), InstanceID: o.instance, Name: o.name}
	if err := m.send(link.TypeAuth, "", a); err != nil {
		return err
	}
	if err := m.expect(link.TypeAuthOK, &m.ok); err != nil {
		return err
	}
	m.node = m.ok.NodeID
	if o.caps == "" {
		o.caps = defaultCaps()
	}
	body := announceBody(o.caps)
	if o.announce != nil {
		body = o.announce(body)
	}
	if err := m.write(string(link.Encode(link.TypeAnnounce, manifest.NewULID(), "", strictjson.Raw(body)))); err != nil {
		return err
	}
	return m.expect(link.TypeAnnounceAck, &m.ack)
}

func announceBody(caps string) string {
	return `{"manifest_version":1,"manifest_sha256":"` + manifest.Hash([]byte(caps)) + `","capabilities":` + caps + `}`
}

func (m *mockDevice) expect(typ string, v any) error {
	_, b, err := m.ws.ReadMessage()
	if err != nil {
		return err
	}
	e, err := link.Decode(b)
	if err != nil {
		return err
	}
	if e.Type != typ {
		return fmt.Errorf("got %s instead of %s", e.Type, typ)
	}
	m.mu.Lock()
	m.got = append(m.got, receivedCmd{raw: string(b), Envelope: e})
	m.mu.Unlock()
	return e.Decode(v)
}

func (m *mockDevice) read() {
	defer close(m.ended)
	for {
		_, b, err := m.ws.ReadMessage()
		if err != nil {
			var ce *websocket.CloseError
			m.mu.Lock()
			if errors.As(err, &ce) {
				m.close = ce.Code
			}
			for _, stop := range m.streams {
				close(stop)
			}
			m.streams, m.closing = nil, true
			m.mu.Unlock()
			_ = m.ws.NetConn().Close()
			return
		}
		e, err := link.Decode(b)
		if err != nil {
			m.t.Errorf("the relay sent %q: %v", b, err)
			continue
		}
		g := receivedCmd{raw: string(b), Envelope: e}
		if e.Type == link.TypeCmd {
			if err := e.Decode(&g.cmd); err != nil {
				m.t.Errorf("the relay sent %q: %v", b, err)
			}
		}
		m.mu.Lock()
		m.got = append(m.got, g)
		if stop := m.streams[e.InReplyTo]; e.Type == link.TypeCmdCancel && stop != nil {
			close(stop)
			delete(m.streams, e.InReplyTo)
		}
		m.mu.Unlock()
		if e.Type != link.TypeCmd {
			continue
		}
		if m.script != nil {
			m.script(e.MsgID, g.cmd)
		} else {
			m.answer(e.MsgID, g.cmd)
		}
	}
}

// answer sends what a correct device answers.
func (m *mockDevice) answer(id string, c link.Cmd) {
	switch {
	case strings.HasSuffix(c.Tool, ".invoke"):
		var a struct {
			Message string `json:"message"`
		}
		_ = json.Unmarshal(c.Arguments, &a)
		m.result(id, m.echo(a.Message))
	case strings.HasSuffix(c.Tool, ".snapshot"):
		m.result(id, m.sample(1))
	default:
		m.subscribed(id, c)
	}
}

func (m *mockDevice) echo(message string) string {
	b, _ := json.Marshal(message)
	return fmt.Sprintf(`{"message":%s,"received_at_ms":%d,"node_id":"%s"}`, b, m.now(), m.node)
}

// sample is a valid frame; n identifies it in cpu_pct.
func (m *mockDevice) sample(n int64) string {
	return fmt.Sprintf(`{"ts_ms":%d,"node_id":"%s","cpu_pct":%d.5,"mem_bytes":1234567890,"mem_total_bytes":8589934592,`+
		`"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}`, m.now(), m.node, n%100)
}

// subscribed opens a stream and sends its first frame, and the others if cadence is on.
func (m *mockDevice) subscribed(id string, c link.Cmd) (streamID string) {
	var a struct {
		IntervalMS int64 `json:"interval_ms"`
	}
	_ = json.Unmarshal(c.Arguments, &a)
	streamID = manifest.NewULID()
	m.mu.Lock()
	m.streamID = streamID
	m.mu.Unlock()
	m.result(id, fmt.Sprintf(`{"stream_id":"%s","interval_ms":%d}`, streamID, a.IntervalMS))
	m.metric(streamID, 1, m.sample(1))
	if !m.cadence {
		return streamID
	}
	stop := make(chan struct{})
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return streamID
	}
	m.streams[id] = stop
	m.wg.Go(func() {
		tick := time.NewTicker(time.Duration(a.IntervalMS) * time.Millisecond)
		defer tick.Stop()
		for seq := int64(2); ; seq++ {
			select {
			case <-stop:
				return
			case <-tick.C:
				m.metric(streamID, seq, m.sample(seq))
			}
		}
	})
	return streamID
}

func (m *mockDevice) write(raw string) error {
	m.wmu.Lock()
	defer m.wmu.Unlock()
	_ = m.ws.SetWriteDeadline(time.Now().Add(m.r.within(5 * time.Second)))
	return m.ws.WriteMessage(websocket.TextMessage, []byte(raw))
}

func (m *mockDevice) send(typ, inReplyTo string, payload any) error {
	return m.write(string(link.Encode(typ, manifest.NewULID(), inReplyTo, payload)))
}

func (m *mockDevice) result(id, result string) {
	_ = m.write(string(link.AppendAck(nil, manifest.NewULID(), id, []byte(result))))
}

func (m *mockDevice) refuse(id string, code manifest.Code, detail string) {
	_ = m.send(link.TypeCmdAck, id, link.CmdAck{Code: code, Detail: detail})
}

func (m *mockDevice) metric(streamID string, seq int64, sample string) {
	_ = m.write(string(link.AppendMetric(nil, manifest.NewULID(), streamID, seq, []byte(sample))))
}

// kill drops the connection without a word, and waits for the mock's goroutines.
func (m *mockDevice) kill() {
	if t, ok := m.ws.NetConn().(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = m.ws.NetConn().Close()
	m.wg.Wait()
}

// waitClosed waits for the relay's close and gives its code.
func (m *mockDevice) waitClosed() int {
	m.t.Helper()
	select {
	case <-m.ended:
	case <-time.After(m.r.within(10 * time.Second)):
		m.t.Fatal("the relay did not close the link")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.close
}

// cmds are the commands that the mock received so far.
func (m *mockDevice) cmds() []receivedCmd {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []receivedCmd
	for _, g := range m.got {
		if g.Type == link.TypeCmd {
			list = append(list, g)
		}
	}
	return list
}

// count is how many frames of a type came.
func (m *mockDevice) count(typ string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range m.got {
		if g.Type == typ {
			n++
		}
	}
	return n
}

// expectNoCommand proves that f made the relay send nothing to the device: the next command that
// arrives is the test's own.
func (m *mockDevice) expectNoCommand(f func()) {
	m.t.Helper()
	before := len(m.cmds())
	f()
	time.Sleep(time.Second) // the rate limit's window; costs nothing in a bubble
	probe := "probe " + manifest.NewULID()
	if a := m.r.call(m.tool("sysecho.echo.invoke"), `{"message":"`+probe+`"}`,
		"Authorization", m.bearer()); a.status != http.StatusOK {
		m.t.Fatalf("the probe got %d %s", a.status, a.body)
	}
	c := m.cmds()
	if len(c) != before+1 || !strings.Contains(string(c[before].cmd.Arguments), probe) {
		m.t.Errorf("the device received %d commands besides the probe", len(c)-before-1)
	}
}

// tool puts the node into "short.cap.verb".
func (m *mockDevice) tool(s string) string {
	short, rest, _ := strings.Cut(s, ".")
	return short + "." + m.node + "." + rest
}

func (m *mockDevice) echoTool() string      { return m.tool("sysecho.echo.invoke") }
func (m *mockDevice) snapshotTool() string  { return m.tool("sys.metrics.snapshot") }
func (m *mockDevice) subscribeTool() string { return m.tool("sys.metrics.subscribe") }

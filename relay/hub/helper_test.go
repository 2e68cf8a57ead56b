package hub

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
	"agentctl/transport/link"
)

const (
	nodeA     = "01hzx9k3m4p7q8r9s0t1v2w3xy"
	nodeB     = "01hzx9k3m4p7q8r9s0t1v2w3xz"
	instance1 = "11111111111111111111111111111111"
	instance2 = "22222222222222222222222222222222"
)

// bubble runs a test in a synctest bubble whose clock starts in 2026.
func bubble(t *testing.T, fn func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))
		// With tickers running, synctest does not detect a deadlock.
		defer time.AfterFunc(7*24*time.Hour, func() { panic("the test is deadlocked") }).Stop()
		fn(t)
	})
}

// testHub is a hub whose callbacks are recorded.
type testHub struct {
	t    *testing.T
	hub  *Hub
	stop context.CancelFunc
	done chan error

	mu         sync.Mutex
	events     []string // AuditEvents as text
	lifecycle  []string // OnAnnounce, OnReady and OnGone as text
	nodes      map[string]*Node
	revoked    map[string]bool
	until      time.Time // of all tokens
	lastSeen   []string
	result     func(ref string, raw []byte) error // before CheckResult
	onAnnounce func(n *Node)                      // in OnAnnounce
	onEvent    func(n *Node, data []byte)         // in OnDeviceEvent
	listed     map[string]*Node                   // between OnReady and OnGone
	readies    map[string]int                     // calls of OnReady
	clockError time.Duration                      // of the wall clock that devices get
	boots      map[string]string                  // SaveBoot
	cloneMS    int64                              // the last SaveCloneTime
}

// newTestHub starts a hub that accepts a node id as token.
func newTestHub(t *testing.T) *testHub {
	r := &testHub{t: t, done: make(chan error, 1), nodes: make(map[string]*Node), revoked: make(map[string]bool), boots: make(map[string]string), listed: make(map[string]*Node), readies: make(map[string]int)}
	r.hub = New(Options{
		Now: func() time.Time { r.mu.Lock(); defer r.mu.Unlock(); return time.Now().Add(r.clockError) },
		OnDeviceEvent: func(n *Node, _ string, data []byte) {
			if r.onEvent != nil {
				r.onEvent(n, data)
			}
		},
		Authenticate: func(_ context.Context, a *link.Auth) (*link.Grant, error) {
			if !manifest.ValidNodeID(a.Token) {
				return nil, errors.New("no such token")
			}
			return &link.Grant{NodeID: a.Token, Tenant: "acme", ExpiresAt: r.until, CheckActive: func() error { return r.active(a.Token) }}, nil
		},
		ValidateCapability: func(raw []byte) error { return manifest.Validate(manifest.CapabilityRef, raw) },
		CheckResult: func(t *manifest.Tool, args, raw []byte) error {
			if r.result != nil {
				if err := r.result(t.Verb.Ack, raw); err != nil {
					return err
				}
			}
			return manifest.CheckAnswer(t, args, raw)
		},
		CheckSample: manifest.CheckFrame,
		EncodeSSE:   func(sample []byte) []byte { return append([]byte("data: "), sample...) },
		OnAnnounce: func(n *Node) {
			r.note(&r.lifecycle, "known %d", len(n.Tools()))
			if r.onAnnounce != nil {
				r.onAnnounce(n)
			}
		},
		OnReady: func(n *Node) {
			r.mu.Lock()
			r.nodes[n.ID()], r.listed[n.ID()] = n, n
			r.readies[n.ID()]++
			r.mu.Unlock()
			r.note(&r.lifecycle, "ready %s", n.session.Load().InstanceID[:1])
		},
		SaveBoot:         func(id, boot string) { r.mu.Lock(); r.boots[id] = boot; r.mu.Unlock() },
		LastBoot:         func(id string) string { r.mu.Lock(); defer r.mu.Unlock(); return r.boots[id] },
		SaveCloneTime:    func(_ string, ms int64) { r.mu.Lock(); r.cloneMS = ms; r.mu.Unlock() },
		OnCloneSuspected: func(_ string, suspected bool) { r.note(&r.lifecycle, "clone %v", suspected) },
		OnSuspect:        func(_ *Node, suspect bool) { r.note(&r.lifecycle, "suspect %v", suspect) },
		OnLost:           func(n *Node) { r.note(&r.lifecycle, "lost %s", n.session.Load().InstanceID[:1]) },
		OnGone: func(n *Node) {
			r.mu.Lock()
			if r.listed[n.ID()] == n {
				delete(r.listed, n.ID())
			}
			r.mu.Unlock()
			r.note(&r.lifecycle, "gone %s", n.session.Load().InstanceID[:1])
		},
		SaveLastSeen: func(ids []string) { r.mu.Lock(); r.lastSeen = append(r.lastSeen, ids...); r.mu.Unlock() },
		Audit: func(e AuditEvent) {
			s := e.Kind
			if i := strings.Index(e.Tool, nodeA[:25]); i >= 0 {
				e.Tool = e.Tool[i+len(nodeA)+1:]
			}
			for _, f := range []string{e.Tenant, strings.TrimPrefix(e.NodeID, nodeA[:25]), string(e.Code), e.Tool, strings.TrimLeft(e.TraceID, "0")} {
				if f != "" {
					s += " " + f
				}
			}
			if e.Close != 0 {
				s += fmt.Sprint(" ", e.Close)
			}
			r.note(&r.events, "%s", s)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() { r.done <- r.hub.Run(ctx) }()
	return r
}

func (r *testHub) active(node string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.revoked[node] || !r.until.IsZero() && !time.Now().Before(r.until) {
		return errors.New("revoked")
	}
	return nil
}

// useGrantRevision sets GrantRevision to the number of revocations.
func (r *testHub) useGrantRevision() {
	r.hub.mu.Lock()
	defer r.hub.mu.Unlock()
	r.hub.opt.GrantRevision = func() int64 {
		r.mu.Lock()
		defer r.mu.Unlock()
		return int64(len(r.revoked))
	}
}

func (r *testHub) revoke(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.revoked[node] = true
}

func (r *testHub) note(to *[]string, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*to = append(*to, fmt.Sprintf(format, args...))
}

// takeLines returns what was recorded since its last call.
func (r *testHub) takeLines(of *[]string) string {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	s := strings.Join(*of, ", ")
	*of = nil
	return s
}

func (r *testHub) wantEvents(want string) {
	r.t.Helper()
	if got := r.takeLines(&r.events); got != want {
		r.t.Errorf("events: got %q, want %q", got, want)
	}
}

// end stops the hub; Run waits for its sessions.
func (r *testHub) end() {
	r.t.Helper()
	r.stop()
	if err := <-r.done; !errors.Is(err, context.Canceled) {
		r.t.Errorf("Run ended with %v", err)
	}
	if s := r.hub.Stats(); s.Nodes != 0 || s.Handshaking != 0 || s.Streams != 0 {
		r.t.Errorf("left behind: %+v", s)
	}
}

func (r *testHub) node(id string) *Node {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.nodes[id]
}

// tool finds a node's tool by its last two segments.
func (r *testHub) tool(n *Node, name string) *manifest.Tool {
	tools := n.Tools()
	for i := range tools {
		if strings.HasSuffix(tools[i].Canonical, "."+name) {
			return &tools[i]
		}
	}
	r.t.Fatalf("no tool %s", name)
	return nil
}

type callReturn struct {
	result string
	err    error
	took   time.Duration
}

// call sends an echo in a goroutine, with the gateway's budget. The command has been sent
// when call returns.
func (r *testHub) call(n *Node, message string) chan callReturn {
	done := make(chan callReturn, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		start := time.Now()
		result, err := n.Call(ctx, r.tool(n, "echo.invoke"), []byte(`{"message":"`+message+`"}`), CallOptions{TraceID: testTrace})
		done <- callReturn{string(result), err, time.Since(start)}
	}()
	synctest.Wait()
	return done
}

// testTrace is the trace id of the calls of testHub.call.
const testTrace = "00000000000000000000000000000001"

func (r *testHub) wantOutcome(err error, code manifest.Code, outcome manifest.Outcome) {
	r.t.Helper()
	var e *manifest.Error
	if !errors.As(err, &e) || e.Code != code || e.Outcome != outcome {
		r.t.Errorf("got %#v, want %s, %s", err, code, outcome)
	}
}

func (r *testHub) wantError(err error, code manifest.Code) {
	r.t.Helper()
	var e *manifest.Error
	if !errors.As(err, &e) || e.Code != code {
		r.t.Errorf("got %v, want %s", err, code)
	}
}

// board is a device that the test drives frame by frame.
type board struct {
	t    *testing.T
	conn link.Conn
	wire *wire
	in   chan link.Envelope // what the relay sent; closed at the end
	code int                // the close code; valid when in is closed
}

// attach links a board and completes its handshake.
func (r *testHub) attach(node, instance string) *board {
	r.t.Helper()
	b := r.join(node, instance)
	b.next(link.TypeAnnounceAck)
	return b
}

// join is attach without waiting for announce_ack.
func (r *testHub) join(node, instance string) *board {
	r.t.Helper()
	b := r.dial()
	b.authenticate(node, instance)
	b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
	synctest.Wait()
	return b
}

// attachOn is attach with a subprotocol; auth gives the rest of the message.
func (r *testHub) attachOn(subprotocol, node, instance string, auth link.Auth) *board {
	r.t.Helper()
	b := r.dialOn(subprotocol)
	auth.Token, auth.InstanceID = node, instance
	if auth.BootID == "" {
		auth.BootID = link.NewID()
	}
	b.authenticateWith(auth)
	b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
	b.next(link.TypeAnnounceAck)
	synctest.Wait()
	return b
}

// authenticateWith sends an auth and returns the answer.
func (b *board) authenticateWith(a link.Auth) (ok link.AuthOK) {
	b.t.Helper()
	b.next(link.TypeHello)
	b.sendAs(link.TypeAuth, "", a)
	e := b.next(link.TypeAuthOK)
	if err := e.Decode(&ok); err != nil {
		b.t.Fatal(err)
	}
	return ok
}

// dropAll ends all links as a network would.
func (r *testHub) dropAll() {
	var nodes []*Node
	r.hub.mu.Lock()
	for _, n := range r.hub.nodes {
		nodes = append(nodes, n)
	}
	r.hub.mu.Unlock()
	for _, n := range nodes {
		n.session.Load().Close(link.CloseTimeout, "timeout")
	}
	synctest.Wait()
}

// dial links a board that has not sent anything yet.
func (r *testHub) dial() *board { return r.dialOn(link.Subprotocol) }

func (r *testHub) dialOn(subprotocol string) *board {
	dev, rel := link.Pipe()
	if subprotocol == link.Subprotocol21 {
		dev, rel = link.Pipe21()
	}
	b := &board{t: r.t, conn: dev, wire: &wire{Conn: rel}, in: make(chan link.Envelope, 1024)}
	r.hub.Attach(b.wire, netip.MustParseAddr("192.0.2.1"))
	go func() {
		defer close(b.in)
		for {
			err := dev.Read(func(msg []byte) error {
				e, err := link.Decode(append([]byte(nil), msg...))
				if err == nil {
					b.in <- e
				}
				return err
			})
			if err != nil {
				b.code = link.CloseCode(err)
				return
			}
		}
	}()
	return b
}

// wire is the relay's end of a board's link; it counts pings and can lose them.
type wire struct {
	link.Conn
	pings atomic.Int64
	cut   atomic.Bool // the network is down
}

// Close of a half-open link waits for the peer, in vain.
func (w *wire) Close(code int, reason string) error {
	if w.cut.Load() {
		time.Sleep(time.Second)
	}
	return w.Conn.Close(code, reason)
}

func (w *wire) Ping(payload []byte) error {
	w.pings.Add(1)
	if w.cut.Load() {
		return nil
	}
	return w.Conn.Ping(payload)
}

func (b *board) authenticate(node, instance string) {
	b.t.Helper()
	b.next(link.TypeHello)
	b.sendAs(link.TypeAuth, "", link.Auth{Token: node, BootID: link.NewID(), InstanceID: instance})
	b.next(link.TypeAuthOK)
}

func announce(caps ...manifest.Capability) link.Announce {
	raw, err := json.Marshal(caps)
	if err != nil {
		panic(err)
	}
	return link.Announce{ManifestVersion: 1, ManifestSHA256: manifest.Hash(raw), Capabilities: raw}
}

func (b *board) sendAs(typ, inReplyTo string, payload any) {
	b.t.Helper()
	if err := b.conn.Write(link.Encode(typ, link.NewID(), inReplyTo, payload)); err != nil {
		b.t.Fatalf("the board writes %s: %v", typ, err)
	}
}

// next returns the relay's next frame, which must be of type typ.
func (b *board) next(typ string) link.Envelope {
	b.t.Helper()
	e, ok := <-b.in
	if !ok || e.Type != typ {
		b.t.Fatalf("the board got %s %s (%v), want %s", e.Type, e.Payload, ok, typ)
	}
	return e
}

// expectNothing fails the test when the relay has sent a frame.
func (b *board) expectNothing() {
	b.t.Helper()
	synctest.Wait()
	select {
	case e, ok := <-b.in:
		b.t.Errorf("the board got %s %s (%v), want nothing", e.Type, e.Payload, ok)
	default:
	}
}

// waitClosed waits for the relay to close the link and returns the code.
func (b *board) waitClosed() int {
	for range b.in {
	}
	return b.code
}

func (b *board) close() { _ = b.conn.Close(link.CloseNormal, "normal") }

// cmd returns the next command.
func (b *board) cmd() (id string, c link.Cmd) {
	b.t.Helper()
	e := b.next(link.TypeCmd)
	if err := e.Decode(&c); err != nil {
		b.t.Fatal(err)
	}
	return e.MsgID, c
}

func (b *board) ack(id, result string) {
	b.t.Helper()
	b.sendAs(link.TypeCmdAck, id, link.CmdAck{OK: true, Result: strictjson.Raw(result)})
}

func echoed(node, message string) string {
	return fmt.Sprintf(`{"message":%q,"received_at_ms":%d,"node_id":%q}`, message, time.Now().UnixMilli(), node)
}

// echo answers an echo command.
func (b *board) echo(node, id string, c link.Cmd) {
	b.t.Helper()
	var args struct{ Message string }
	if err := json.Unmarshal(c.Arguments, &args); err != nil {
		b.t.Fatal(err)
	}
	b.ack(id, echoed(node, args.Message))
}

// acquireCounter counts what subscriptions cost.
type acquireCounter struct{ acquired, released atomic.Int64 }

func (c *acquireCounter) acquire() (func(), error) {
	c.acquired.Add(1)
	return func() { c.released.Add(1) }, nil
}

func (r *testHub) subscribe(ctx context.Context, n *Node, intervalMS int64) (*Subscriber, error) {
	return r.subscribeFor(ctx, n, intervalMS, new(acquireCounter))
}

func (r *testHub) subscribeFor(ctx context.Context, n *Node, intervalMS int64, c *acquireCounter) (*Subscriber, error) {
	return n.Subscribe(ctx, r.tool(n, "metrics.subscribe"), IntervalArgs(intervalMS), intervalMS, c.acquire, CallOptions{})
}

type subscribeReturn struct {
	reader *Subscriber
	err    error
}

// startSubscribe calls Subscribe in a goroutine.
func (r *testHub) startSubscribe(ctx context.Context, n *Node, intervalMS int64, c *acquireCounter) chan subscribeReturn {
	done := make(chan subscribeReturn, 1)
	go func() {
		reader, err := r.subscribeFor(ctx, n, intervalMS, c)
		done <- subscribeReturn{reader, err}
	}()
	synctest.Wait()
	return done
}

// open answers the opening of a stream and returns the ids of command and stream.
func (b *board) open() (cmdID, streamID string) {
	b.t.Helper()
	cmdID, c := b.cmd()
	streamID = link.NewID()
	b.ack(cmdID, `{"stream_id":"`+streamID+`",`+strings.TrimPrefix(string(c.Arguments), "{"))
	synctest.Wait()
	return cmdID, streamID
}

func sample(node string, cpu int) string {
	return fmt.Sprintf(`{"ts_ms":%d,"node_id":%q,"cpu_pct":%d,"mem_bytes":1,"mem_total_bytes":2,"disk_pct":3,"load_1m":0,"load_5m":0,"load_15m":0}`,
		time.Now().UnixMilli(), node, cpu)
}

func (b *board) metric(streamID string, seq int64, sample string) {
	b.t.Helper()
	b.sendAs(link.TypeMetric, "", link.Metric{StreamID: streamID, Seq: seq, Sample: strictjson.Raw(sample)})
	synctest.Wait()
}

func frames(r *Subscriber) (n int) {
	for _, ok := r.Next(); ok; _, ok = r.Next() {
		n++
	}
	return n
}

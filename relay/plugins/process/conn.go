package process

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/creachadair/jrpc2"

	"agentctl/relay/kernel"
)

// protocolVersion is the MCP version that a plugin is greeted with; it may answer with
// an older one.
const protocolVersion = "2025-11-25"

const (
	maxLine    = 4 << 20 // a message of a plugin, bytes; a longer one ends the connection
	maxPages   = 64      // of a list
	maxPending = 1024    // calls that wait for their progress

	sendTime  = 5 * time.Second // that a plugin may leave a message untaken
	maxAhead  = 32 << 20        // bytes read while a message is untaken, and
	aheadCost = 16 << 10        // for each message besides its size
)

// lines is a jrpc2 channel of one JSON value a line, bounded.
type lines struct {
	in    *bufio.Scanner
	out   writer
	abort func() // ends both directions at once, whatever the plugin does
	stop  func() error

	broken  error         // of a Send: part of a message may be out. Sends exclude each other
	closing atomic.Bool   // a Send waits no more
	sending chan struct{} // of one: held by a Send
	ahead   atomic.Int64  // what was read since the last Send ended, bytes
}

// writer is an end whose writes can be bounded in time.
type writer interface {
	io.Writer
	SetWriteDeadline(t time.Time) error
}

func newLines(r io.Reader, w writer, abort func(), stop func() error) *lines {
	l := &lines{in: bufio.NewScanner(r), out: w, abort: abort, stop: sync.OnceValue(stop), sending: make(chan struct{}, 1)}
	l.in.Buffer(make([]byte, 0, 16<<10), maxLine)
	return l
}

// Send writes one message; jrpc2 encodes without newlines. It holds up every other call
// and the end of the connection, so a plugin that takes nothing for sendTime is given up.
func (l *lines) Send(b []byte) error {
	if l.broken != nil {
		return l.broken
	}
	l.sending <- struct{}{}
	defer func() { l.ahead.Store(0); <-l.sending }()
	_ = l.out.SetWriteDeadline(time.Now().Add(sendTime))
	if l.closing.Load() { // after the deadline was set: hurry may have come before
		l.hurry()
	}
	if _, err := l.out.Write(append(b, '\n')); err != nil {
		l.broken = fmt.Errorf("it takes no messages: %w", err)
		l.abort()
		return l.broken
	}
	return nil
}

// hurry ends a Send that waits, and all further ones.
func (l *lines) hurry() {
	l.closing.Store(true)
	_ = l.out.SetWriteDeadline(time.Unix(1, 0)) // long ago
}

// Recv reads one message. While a Send waits, nobody takes what is read: after maxAhead
// the plugin waits too.
func (l *lines) Recv() ([]byte, error) {
	for l.in.Scan() {
		if b := l.in.Bytes(); len(b) > 0 {
			if l.ahead.Add(int64(len(b))+aheadCost) > maxAhead {
				l.sending <- struct{}{}
				l.ahead.Store(0)
				<-l.sending
			}
			return append([]byte(nil), b...), nil
		}
	}
	if err := l.in.Err(); err != nil {
		return nil, err
	}
	return nil, io.EOF
}

// Close ends both directions.
func (l *lines) Close() error { return l.stop() }

// conn is one life of a plugin's server.
type conn struct {
	rpc     *jrpc2.Client
	ch      *lines
	ended   chan struct{} // closed when nothing more will come
	updated func(uri string)
	version string

	mu       sync.Mutex // protects the fields below
	next     int64
	progress map[int64]follower
}

// follower is a call that wants to hear of its progress, as long as ctx lasts.
type follower struct {
	ctx     context.Context
	session kernel.Session
}

func newConn(ch *lines, updated func(uri string)) *conn {
	c := &conn{ch: ch, ended: make(chan struct{}), updated: updated, progress: make(map[int64]follower)}
	c.rpc = jrpc2.NewClient(ch, &jrpc2.ClientOptions{
		OnNotify:   c.notified,
		OnCallback: c.asked,
		OnCancel: func(cli *jrpc2.Client, rsp *jrpc2.Response) {
			_ = cli.Notify(context.Background(), "notifications/cancelled",
				map[string]any{"requestId": json.RawMessage(rsp.ID()), "reason": "the caller's time is over"})
		},
		OnStop: func(*jrpc2.Client, error) { close(c.ended) },
	})
	return c
}

// call asks the plugin; the answer is its raw result.
func (c *conn) call(ctx context.Context, method string, params any) (json.RawMessage, error) {
	rsp, err := c.rpc.Call(ctx, method, params)
	if err != nil {
		return nil, err
	}
	var raw json.RawMessage
	err = rsp.UnmarshalResult(&raw)
	return raw, err
}

// greet is the MCP handshake.
func (c *conn) greet(ctx context.Context, version string) error {
	raw, err := c.call(ctx, "initialize", map[string]any{
		"protocolVersion": protocolVersion,
		"capabilities":    map[string]any{},
		"clientInfo":      map[string]any{"name": "agentctl", "version": version},
	})
	if err != nil {
		return fmt.Errorf("it does not answer initialize: %w", err)
	}
	var r struct {
		ProtocolVersion string `json:"protocolVersion"`
	}
	if err := json.Unmarshal(raw, &r); err != nil || r.ProtocolVersion == "" {
		return errors.New("its answer to initialize names no protocolVersion")
	}
	c.version = r.ProtocolVersion
	return c.rpc.Notify(ctx, "notifications/initialized", nil)
}

// names lists what the plugin serves: the member key of each element of list.
func (c *conn) names(ctx context.Context, method, list, key string) (map[string]json.RawMessage, error) {
	out := make(map[string]json.RawMessage)
	cursor := ""
	for range maxPages {
		var params any
		if cursor != "" {
			params = map[string]any{"cursor": cursor}
		}
		raw, err := c.call(ctx, method, params)
		if err != nil {
			return nil, err
		}
		var page map[string]json.RawMessage
		var items []map[string]json.RawMessage
		if err := json.Unmarshal(raw, &page); err != nil {
			return nil, fmt.Errorf("its answer to %s: %w", method, err)
		}
		if err := json.Unmarshal(page[list], &items); err != nil {
			return nil, fmt.Errorf("its answer to %s: %w", method, err)
		}
		for _, item := range items {
			var name string
			if json.Unmarshal(item[key], &name) == nil && len(out) < kernel.MaxToolsPerPlugin {
				out[name] = item["annotations"]
			}
		}
		cursor = ""
		_ = json.Unmarshal(page["nextCursor"], &cursor) // absent: the last page
		if cursor == "" {
			return out, nil
		}
	}
	return nil, fmt.Errorf("its answer to %s has more than %d pages", method, maxPages)
}

// follow has progress with the returned token reach s until done is called; the token is
// 0 when s wants none.
func (c *conn) follow(ctx context.Context, s kernel.Session) (token int64, done func()) {
	if s == nil || s.ProgressToken() == nil {
		return 0, func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.progress) >= maxPending {
		return 0, func() {}
	}
	c.next++
	token = c.next
	c.progress[token] = follower{ctx, s}
	return token, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.progress, token)
	}
}

// notified takes a notification of the plugin.
func (c *conn) notified(req *jrpc2.Request) {
	switch req.Method() {
	case "notifications/progress":
		var p map[string]json.RawMessage
		var token int64
		if req.UnmarshalParams(&p) != nil || json.Unmarshal(p["progressToken"], &token) != nil {
			return
		}
		c.mu.Lock()
		f, ok := c.progress[token]
		c.mu.Unlock()
		if !ok {
			return // late, or of nobody
		}
		p["progressToken"], _ = json.Marshal(f.session.ProgressToken())
		params, _ := json.Marshal(p)
		_ = f.session.Notify(f.ctx, "notifications/progress", params)
	case "notifications/resources/updated":
		var p struct {
			URI string `json:"uri"`
		}
		if req.UnmarshalParams(&p) == nil && p.URI != "" {
			c.updated(p.URI)
		}
	}
}

// asked answers a request of the plugin: it may see whether we live, and nothing else.
func (c *conn) asked(_ context.Context, req *jrpc2.Request) (any, error) {
	if req.Method() == "ping" {
		return struct{}{}, nil
	}
	return nil, jrpc2.Errorf(jrpc2.MethodNotFound, "the relay offers plugins no %s", "such method")
}

// close hangs up.
func (c *conn) close() {
	c.ch.hurry() // a Send that waits holds jrpc2's lock
	_ = c.rpc.Close()
}

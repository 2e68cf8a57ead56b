package process

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/creachadair/jrpc2"

	"agentctl/relay/kernel"
)

// A connection to a plugin goes through these steps, with the relay as the MCP client:
//
//	initialize, notifications/initialized    the MCP handshake
//	tools/list, resources/list, prompts/list are compared with plugin.json, also after list_changed
//	tools/call, resources/read, ...          any number, concurrently
//	notifications/cancelled                  when a call's context ends first
//	end of the plugin's stdin                asks it to stop
//
// jrpc2 serializes the messages and matches the answers. It encodes and sends under a
// lock, so lineChannel bounds how long a Send takes.

// protocolVersion is the MCP version that the relay offers to a plugin, which may answer
// with an older one.
const protocolVersion = "2025-11-25"

// Bounds of a connection.
const (
	maxLine     = 4 << 20 // bytes of a plugin's message; a longer one ends the connection
	maxPages    = 64      // of a list
	maxFollowed = 1024    // calls whose progress is forwarded

	// sendTimeout is how long a plugin may leave a message unread: as long as one that works
	// may answer nothing (liveness).
	sendTimeout = maxUnansweredBusy * pingInterval
	// maxReadAhead bounds the bytes that are read while a message is unread. Each message
	// counts messageOverhead in addition to its size.
	maxReadAhead    = 32 << 20
	messageOverhead = 16 << 10
)

// lineChannel is a jrpc2 channel of one JSON value a line, with bounds in both directions.
// jrpc2 calls Send under a lock and Recv from one goroutine.
//
// Both bounds protect the relay from a plugin that stops reading: sendTimeout ends the
// connection, and until then maxReadAhead stops the reading of further messages.
type lineChannel struct {
	in    *bufio.Scanner
	out   deadlineWriter
	abort func() // ends both directions at once, whatever the plugin does
	stop  func() error

	// onNotification handles notifications in their order; nil: jrpc2 gets them. Only Recv uses it.
	onNotification func(method string, params json.RawMessage)
	// onNoise gets lines that cannot be messages; nil: such a line ends the connection. Only Recv
	// uses it.
	onNoise func(line []byte)

	sendErr   error         // of an earlier Send: part of a message may be out. Only Send uses it
	isBroken  atomic.Bool   // there is a sendErr
	isClosing atomic.Bool   // Send does not wait any more
	sendSlot  chan struct{} // capacity 1: held by a Send
	readAhead atomic.Int64  // bytes that were read since the last Send ended
	messages  atomic.Int64  // that were read
	isStopped func() bool   // the server's process is stopped by a signal
}

// deadlineWriter is a writer with a write deadline: a pipe or a socket.
type deadlineWriter interface {
	io.Writer
	SetWriteDeadline(t time.Time) error
}

// newLineChannel makes a channel. abort must end a Write and a Read that are blocked; stop
// ends both directions and waits for a process. stop is called once.
func newLineChannel(r io.Reader, w deadlineWriter, abort func(), stop func() error) *lineChannel {
	l := &lineChannel{in: bufio.NewScanner(r), out: w, abort: abort, stop: sync.OnceValue(stop), sendSlot: make(chan struct{}, 1), isStopped: func() bool { return false }}
	l.in.Buffer(make([]byte, 0, 16<<10), maxLine)
	return l
}

// Send writes one message, which jrpc2 encodes without newlines. Meanwhile all other calls
// and the end of the connection wait, so it aborts the connection to a plugin that reads
// nothing for sendTimeout.
//
// A Send that failed may have written a part of its message. Later ones return the same
// error, because the plugin would read their bytes as the rest of that message.
func (l *lineChannel) Send(b []byte) error {
	if l.sendErr != nil {
		return l.sendErr
	}
	l.sendSlot <- struct{}{}
	defer func() { l.readAhead.Store(0); <-l.sendSlot }()
	_ = l.out.SetWriteDeadline(time.Now().Add(sendTimeout))
	if l.isClosing.Load() { // checked after the deadline was set: abortSend may have been called before
		l.abortSend()
	}
	if n, err := l.out.Write(append(b, '\n')); err != nil {
		l.sendErr = fmt.Errorf("it reads no messages: %w", err)
		l.isBroken.Store(true)
		l.abort()
		if n > 0 {
			return partlySentError{l.sendErr}
		}
		return l.sendErr
	}
	return nil
}

// partlySentError is the error of the Send that has written a part of its message.
type partlySentError struct{ error }

// notSentError is the error of a request of which nothing was sent, since the connection had ended.
type notSentError struct{ error }

// abortSend ends a Send that is waiting, and makes further ones fail at once.
func (l *lineChannel) abortSend() {
	l.isClosing.Store(true)
	_ = l.out.SetWriteDeadline(time.Unix(1, 0))
}

// notify passes a notification on and reports whether b was one. jrpc2 handles each message in a
// separate goroutine, so it would report the progress of a call after its result, or in
// another order.
func (l *lineChannel) notify(b []byte) bool {
	if l.onNotification == nil || !bytes.Contains(b, []byte(`"method"`)) {
		return false
	}
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params json.RawMessage `json:"params"`
	}
	if json.Unmarshal(b, &m) != nil || m.Method == "" || len(m.ID) > 0 {
		return false // jrpc2 refuses what is malformed
	}
	l.onNotification(m.Method, m.Params)
	return true
}

// Recv reads one message. While a Send waits, jrpc2 queues incoming messages without bound, so
// after maxReadAhead Recv waits for the Send to end.
//
// Empty lines are skipped, and so is what an adopted server prints between its messages, as clients
// of MCP do. It is no sign of life. A line longer than maxLine is an error, which ends the
// connection. The result is a copy, since the scanner overwrites its buffer.
func (l *lineChannel) Recv() ([]byte, error) {
	for l.in.Scan() {
		if b := bytes.TrimSpace(l.in.Bytes()); len(b) > 0 {
			if l.onNoise != nil && b[0] != '{' && b[0] != '[' {
				l.onNoise(b)
				continue
			}
			l.messages.Add(1)
			if l.readAhead.Add(int64(len(b))+messageOverhead) > maxReadAhead {
				l.sendSlot <- struct{}{}
				l.readAhead.Store(0)
				<-l.sendSlot
			}
			if l.notify(b) {
				continue
			}
			return bytes.Clone(b), nil
		}
	}
	if errors.Is(l.in.Err(), bufio.ErrTooLong) {
		return nil, errTooLong
	}
	return nil, cmp.Or(l.in.Err(), io.EOF)
}

// What a server sent that ends its connection.
var (
	errTooLong    = fmt.Errorf("it sent a message of more than %d MiB", maxLine>>20)
	errNotMessage = errors.New("it wrote a line to stdout that is not a JSON-RPC message")
)

// Close ends both directions.
func (l *lineChannel) Close() error { return l.stop() }

// conn is one connection to a plugin's server, from its start to its end. A plugin that is
// restarted gets a new one. version is set by initialize, before other goroutines see conn.
//
// State that ends with the process, such as what the server subscribed to, belongs here; what a
// restart keeps belongs to Plugin, what a new version keeps to process.
type conn struct {
	plugin  *Plugin
	rpc     *jrpc2.Client
	ch      *lineChannel
	ended   chan struct{} // closed when nothing more will arrive
	fault   error         // errTooLong or errNotMessage, if that ended it; set before ended is closed
	version string        // of the protocol, as the plugin chose it
	server  serverInfo    // set by initialize, as version
	// listsChanged holds one signal: the server said that one of its lists has changed.
	listsChanged chan struct{}
	relisting    sync.WaitGroup // followLists
	// sentAt is how many messages the plugin had sent when it got the last call; -1: it got none.
	sentAt  atomic.Int64
	faulted atomic.Bool // the end of the connection was reported as a fault, or is none

	bus     *busConn      // nil: the plugin asks for nothing
	started chan struct{} // closed when rpc is set: a request of the plugin may come before

	mu        sync.Mutex // protects the fields below
	lastToken int64
	progress  map[int64]progressFollower
}

// progressFollower is a call whose progress is sent to the client until ctx ends.
type progressFollower struct {
	ctx     context.Context
	session kernel.Session
}

// serverInfo is the answer of a server to initialize, as far as the relay uses it.
type serverInfo struct {
	ProtocolVersion string `json:"protocolVersion"`
	ServerInfo      struct {
		Name    string `json:"name"`
		Version string `json:"version"`
	} `json:"serverInfo"`
	Capabilities struct {
		Tools     *struct{} `json:"tools"`
		Prompts   *struct{} `json:"prompts"`
		Resources *struct {
			Subscribe bool `json:"subscribe"`
		} `json:"resources"`
		Completions *struct{} `json:"completions"`
	} `json:"capabilities"`
}

// newConn starts a JSON-RPC client on the channel. It ends with close, or when the channel
// fails or reaches its end.
func newConn(p *Plugin, ch *lineChannel) *conn {
	c := &conn{plugin: p, ch: ch, ended: make(chan struct{}), started: make(chan struct{}), listsChanged: make(chan struct{}, 1), progress: make(map[int64]progressFollower)}
	c.bus = p.bus.attach(c)
	c.sentAt.Store(-1)
	ch.onNotification = c.onNotification
	if p.isAdopted() {
		ch.onNoise = newNoiseLogger(p.log)
	}
	c.rpc = jrpc2.NewClient(ch, &jrpc2.ClientOptions{
		OnCallback: c.onRequest,
		// jrpc2 calls OnCancel when the context of a call ends before its answer. The plugin may
		// stop its work then; jrpc2 discards an answer that still arrives.
		OnCancel: func(cli *jrpc2.Client, rsp *jrpc2.Response) {
			_ = cli.Notify(context.Background(), "notifications/cancelled",
				map[string]any{"requestId": json.RawMessage(rsp.ID()), "reason": "the caller's time is over"})
		},
		OnStop: func(_ *jrpc2.Client, err error) {
			if errors.Is(err, errTooLong) {
				c.fault = errTooLong
			} else if jrpc2.ErrorCode(err) == jrpc2.ParseError {
				c.fault = errNotMessage
			}
			close(c.ended)
		},
	})
	close(c.started)
	return c
}

// call sends a request and returns the raw result. An error that the plugin answered with is
// a *jrpc2.Error, which callError translates.
func (c *conn) call(ctx context.Context, method string, params any) (json.RawMessage, error) {
	c.sentAt.Store(c.ch.messages.Load())
	rsp, err := c.rpc.Call(ctx, method, params)
	if err != nil {
		if c.isLost() && !wasSent(err) {
			err = notSentError{err}
		}
		return nil, err
	}
	var raw json.RawMessage
	err = rsp.UnmarshalResult(&raw)
	return raw, err
}

// isLost reports whether nothing can be sent any more. That is so before ended is closed.
func (c *conn) isLost() bool { return c.ch.isBroken.Load() || c.rpc.IsStopped() }

// wasSent reports whether a part of the request was sent. Of a request that waited for its answer jrpc2
// returns an error of its own or of the context, of others that of the channel.
func wasSent(err error) bool {
	var partly partlySentError
	var rpc *jrpc2.Error
	return errors.As(err, &partly) || errors.As(err, &rpc) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// initialize is the MCP handshake. version is the relay's. The relay announces no client
// capabilities, so a plugin may not ask for sampling, roots or elicitation. It accepts any
// protocol version that the plugin chooses.
func (c *conn) initialize(ctx context.Context, version string) error {
	raw, err := c.call(ctx, "initialize", map[string]any{
		"protocolVersion": protocolVersion,
		"capabilities":    map[string]any{},
		"clientInfo":      map[string]any{"name": "agentctl", "version": version},
	})
	if err != nil {
		return fmt.Errorf("it does not answer initialize: %w", err)
	}
	if err := json.Unmarshal(raw, &c.server); err != nil || c.server.ProtocolVersion == "" {
		return errors.New("its answer to initialize names no protocolVersion")
	}
	c.version = c.server.ProtocolVersion
	return c.rpc.Notify(ctx, "notifications/initialized", nil)
}

// list reads all pages of a list: the elements of the member `list`.
//
// Elements beyond the first kernel.MaxToolsPerPlugin are ignored, and a list of more than
// maxPages pages is an error: a plugin could otherwise list without end.
func (c *conn) list(ctx context.Context, method, list string) ([]json.RawMessage, error) {
	all, _, err := c.listCounting(ctx, method, list)
	return all, err
}

// listCounting is list, and counts the elements that are ignored.
func (c *conn) listCounting(ctx context.Context, method, list string) (all []json.RawMessage, ignored int, err error) {
	cursor := ""
	for range maxPages {
		var params any
		if cursor != "" {
			params = map[string]any{"cursor": cursor}
		}
		raw, err := c.call(ctx, method, params)
		if err != nil {
			return nil, 0, err
		}
		var page map[string]json.RawMessage
		var items []json.RawMessage
		if err = json.Unmarshal(raw, &page); err == nil {
			err = json.Unmarshal(page[list], &items)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("its answer to %s: %w", method, err)
		}
		n := min(len(items), kernel.MaxToolsPerPlugin-len(all))
		all, ignored = append(all, items[:n]...), ignored+len(items)-n
		cursor = ""
		_ = json.Unmarshal(page["nextCursor"], &cursor) // there is none on the last page
		if cursor == "" {
			return all, ignored, nil
		}
	}
	return nil, 0, fmt.Errorf("its answer to %s has more than %d pages", method, maxPages)
}

// followProgress forwards progress with the returned token to s until done is called. The
// token is 0 when s wants no progress, or when maxFollowed calls are followed.
//
// Tokens are numbers of this connection. The client's own token is not sent to the plugin:
// two clients may have chosen the same one.
func (c *conn) followProgress(ctx context.Context, s kernel.Session) (token int64, done func()) {
	if s == nil || s.ProgressToken() == nil {
		return 0, func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.progress) >= maxFollowed {
		return 0, func() {}
	}
	c.lastToken++
	token = c.lastToken
	c.progress[token] = progressFollower{ctx, s}
	return token, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.progress, token)
	}
}

// onNotification handles a notification of the plugin. In progress, the
// client's token replaces the one of followProgress. After a change of a list, followLists compares
// the lists with the manifest. Other notifications are ignored.
//
// lineChannel calls it before it reads on, so it must not wait for an answer of the plugin.
func (c *conn) onNotification(method string, params json.RawMessage) {
	switch method {
	case "notifications/progress":
		var p map[string]json.RawMessage
		var token int64
		if json.Unmarshal(params, &p) != nil || json.Unmarshal(p["progressToken"], &token) != nil {
			return
		}
		c.mu.Lock()
		f, ok := c.progress[token]
		c.mu.Unlock()
		if !ok {
			return // the call has ended, or the token is unknown
		}
		p["progressToken"], _ = json.Marshal(f.session.ProgressToken())
		params, _ := json.Marshal(p)
		_ = f.session.Notify(f.ctx, "notifications/progress", params)
	case "notifications/resources/updated":
		var p struct {
			URI string `json:"uri"`
		}
		if json.Unmarshal(params, &p) == nil && p.URI != "" {
			c.plugin.watches.notify(c.plugin.publicURI(p.URI))
		}
	case "notifications/tools/list_changed", "notifications/resources/list_changed", "notifications/prompts/list_changed":
		select {
		case c.listsChanged <- struct{}{}:
		default: // the lists are read later anyway
		}
	}
}

// onRequest answers a request of the plugin: a ping, or one for the bus.
func (c *conn) onRequest(_ context.Context, req *jrpc2.Request) (any, error) {
	if req.Method() == "ping" {
		return struct{}{}, nil
	}
	if strings.HasPrefix(req.Method(), busPrefix) {
		<-c.started
		return c.bus.handle(req)
	}
	return nil, jrpc2.Errorf(jrpc2.MethodNotFound, "the relay offers plugins no %s", "such method")
}

// close ends the connection and waits for its end, that of the plugin's process included.
// It first aborts a Send, which holds jrpc2's lock.
func (c *conn) close() {
	c.ch.abortSend()
	_ = c.rpc.Close()
	<-c.ended
	c.relisting.Wait()
	c.bus.close()
}

package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

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
	maxPages    = 64   // of a list
	maxFollowed = 1024 // calls whose progress is forwarded
)

// conn is one connection to a plugin's server, from its start to its end. A plugin that is
// restarted gets a new one.
//
// State that ends with the process, such as what the server subscribed to, belongs here; what a
// restart keeps belongs to Plugin, what a new version keeps to loadedPlugin.
type conn struct {
	plugin *Plugin
	rpc    *jrpc2.Client
	ch     *lineChannel
	ended  chan struct{} // closed when nothing more will arrive
	fault  error         // errTooLong or errNotMessage, if that ended it; set before ended is closed
	server serverInfo    // set by initialize, before other goroutines see conn
	// listsChanged holds one signal: the server said that one of its lists has changed.
	listsChanged chan struct{}
	relisting    sync.WaitGroup // followLists
	// readAtLastCall is how many messages of the plugin had been read when the last call was sent to it;
	// -1: none was. While no further message has been read, the plugin may be working on that call (liveness).
	readAtLastCall atomic.Int64
	endReported    atomic.Bool // one call has reported the end of the connection as a fault, or it is none

	bus     *busConn      // nil: the plugin asks for nothing
	started chan struct{} // closed when rpc is set: a request of the plugin may come before

	mu sync.Mutex // protects the fields below
	// Tokens are not reused: late progress of one call must not be taken for that of another.
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
	c.readAtLastCall.Store(-1)
	ch.onNotification = c.onNotification
	if p.isAdopted() {
		ch.onNoise = newNoiseLogger(p.log)
	}
	// NewClient reads before it returns, so a request may come before rpc is set: onRequest waits for
	// started.
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
	// Before the call is sent, so that its answer counts as a message after the call.
	c.readAtLastCall.Store(c.ch.messages.Load())
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

// hasEnded reports whether nothing more will arrive.
func (c *conn) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// isLost reports whether nothing can be sent any more. That is so before ended is closed.
func (c *conn) isLost() bool { return c.ch.isBroken.Load() || c.rpc.IsStopped() }

// wasSent reports whether a part of the request was sent. For a request that waited for its answer, jrpc2
// returns one of its errors or that of the context; for one that could not be sent, that of the channel.
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
		// Only the token is replaced; the rest is passed on as the plugin sent it.
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
	// These use rpc. It has ended, so their requests fail and do not hold this up.
	c.relisting.Wait()
	c.bus.close()
}

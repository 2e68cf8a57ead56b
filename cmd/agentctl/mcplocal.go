//go:build !agentctl_omit_relay

package main

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/control"
	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/transport/edge"
)

// localURL is where the local kernel is served: nowhere but in this process.
const localURL = "http://board.local/mcp"

// local is the kernel for one board, without a relay: the board is its one plugin, and
// /mcp is served on pipes in memory.
type local struct {
	server *http.Server
	pipes  *pipeListener
	stop   context.CancelFunc
	wg     sync.WaitGroup
	board  *board
}

func openLocal(ctx context.Context, socket, agent string, log *zap.Logger) (*local, error) {
	if agent == "" {
		agent = "local"
	}
	if len(agent) > 128 || strings.ContainsFunc(agent, func(r rune) bool { return r < '!' || r > '~' }) {
		return nil, exit(exitUsage, "MCP_AGENT_ID must be 1 to 128 printable ASCII characters without spaces")
	}
	b := &board{socket: socket}
	if err := b.announce(ctx); err != nil {
		return nil, err
	}
	scopes, err := auth.ParseScopes(manifest.ScopeCallReadOnly, manifest.ScopeToolsList)
	if err != nil {
		return nil, err
	}
	k := kernel.New(kernel.Options{})
	if err := k.Load(b, false); err != nil {
		return nil, exit(exitFailure, "%w", err)
	}
	h := mcp.New(mcp.Options{Kernel: k, Version: version, Logger: log, Guard: edge.NewGuard(edge.GuardOptions{CheckHost: true, Hosts: []string{"board.local"}}),
		Authenticate: func(*http.Request) (*kernel.Caller, error) { // whoever may open the socket may ask
			return &kernel.Caller{Tenant: auth.DefaultTenant, Actor: agent, Transport: "stdio", Scopes: scopes}, nil
		}})
	l := &local{pipes: newPipeListener(), board: b, server: &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stop = stop
	l.wg.Go(func() { _ = k.Run(run) })
	l.wg.Go(func() { _ = h.Run(run) })
	l.wg.Go(func() { _ = l.server.Serve(l.pipes) })
	return l, nil
}

// client speaks to the kernel.
func (l *local) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: l.pipes.dial, MaxIdleConnsPerHost: 16}}
}

func (l *local) close() {
	l.stop()
	_ = l.server.Close()
	l.wg.Wait()
	l.board.close()
}

// pipeListener hands connections over in memory.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (p *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.conns <- there:
		return here, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipeListener) Accept() (net.Conn, error) {
	select {
	case nc := <-p.conns:
		return nc, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipeListener) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }

// board is this machine's daemon as a plugin of the kernel. It asks the control socket,
// and dials it anew after a restart of the daemon.
type board struct {
	socket   string
	manifest *kernel.Manifest
	streams  map[string]string // a stream's tool by the tool that gives one of its frames

	mu   sync.Mutex // protects conn
	conn *control.Client
}

// announce learns what the board can do.
func (b *board) announce(ctx context.Context) error {
	c, err := b.client(ctx)
	if err != nil {
		return err
	}
	var a struct {
		NodeID       string                `json:"node_id"`
		Capabilities []manifest.Capability `json:"capabilities"`
	}
	if err := c.Capabilities(ctx, &a); err != nil {
		return err
	}
	b.manifest = &kernel.Manifest{Name: "device:" + a.NodeID, Version: "1.0.0", Inline: true}
	b.streams = make(map[string]string)
	for i := range a.Capabilities {
		tools, err := manifest.Project(a.NodeID, &a.Capabilities[i])
		if err != nil {
			continue // a newer daemon's capability
		}
		snapshot := ""
		for j := range tools {
			t := &tools[j]
			if t.Verb.Name == manifest.VerbSnapshot {
				snapshot = t.Canonical
			}
		}
		for j := range tools {
			t := &tools[j]
			if t.Verb.Stream() {
				if snapshot == "" {
					continue
				}
				b.streams[t.Canonical] = snapshot
			}
			in, _ := manifest.Schema(t.Verb.Input)
			out, _ := manifest.Schema(t.Verb.Output)
			input := t.Verb.Input
			b.manifest.Tools = append(b.manifest.Tools, &kernel.Tool{
				Name: t.Canonical, Title: t.Verb.Title, Description: t.Verb.Description, InputSchema: in, OutputSchema: out,
				SafetyClass: t.Capability.SafetyClass, Scope: manifest.ScopeForClass(t.Capability.SafetyClass), NodeID: a.NodeID,
				Streams: t.Verb.Stream(), CheckArguments: func(args []byte) ([]byte, error) { return manifest.CheckArgs(input, args) },
			})
		}
	}
	return nil
}

// Manifest implements kernel.Plugin.
func (b *board) Manifest() *kernel.Manifest { return b.manifest }

// Call implements kernel.Plugin.
func (b *board) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	if one, ok := b.streams[r.Target().Name]; ok {
		return b.stream(ctx, one, r.Arguments)
	}
	out, err := b.call(ctx, r.Target().Name, r.Arguments)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Structured: out}, nil
}

func (b *board) call(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
	c, err := b.client(ctx)
	if err != nil {
		return nil, &manifest.Error{Code: manifest.NodeOffline, Message: "the daemon of this board does not answer; see: agentctl doctor", Reason: "socket"}
	}
	out, err := c.CallTool(ctx, tool, args)
	var refused *control.Error
	switch {
	case err == nil:
		return out, nil
	case errors.As(err, &refused) && refused.ToolCode != "":
		return nil, manifest.E(manifest.Code(refused.ToolCode), "the board refuses this call")
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	b.close()
	return nil, &manifest.Error{Code: manifest.Internal, Message: "the daemon of this board failed to answer", Reason: "socket"}
}

// client is the open connection, or a new one.
func (b *board) client(ctx context.Context) (*control.Client, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn != nil {
		select {
		case <-b.conn.Done():
			_ = b.conn.Close()
		default:
			return b.conn, nil
		}
	}
	var err error
	if b.conn, err = control.Dial(ctx, b.socket); err != nil {
		b.conn = nil
		return nil, err
	}
	return b.conn, nil
}

func (b *board) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn != nil {
		_ = b.conn.Close()
		b.conn = nil
	}
}

// localStream is a stream made of single readings, one each interval.
type localStream struct {
	ready  chan struct{}
	cancel context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex // protects the fields below
	last *manifest.Frame
	err  error
}

// stream opens a stream of what tool says.
func (b *board) stream(ctx context.Context, tool string, args json.RawMessage) (*kernel.Result, error) {
	var a struct {
		IntervalMS int64 `json:"interval_ms"`
	}
	if err := json.Unmarshal(args, &a); err != nil {
		return nil, manifest.E(manifest.ManifestInvalid, "the arguments do not fit the tool's schema")
	}
	if a.IntervalMS == 0 {
		a.IntervalMS = 5000
	}
	first, err := b.call(ctx, tool, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // Close ends it, not the budget of opening it
	s := &localStream{ready: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{})}
	s.put(first, nil)
	go func() { // Close waits for it
		defer close(s.done)
		t := time.NewTicker(time.Duration(a.IntervalMS) * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			frame, err := b.call(ctx, tool, nil)
			if s.put(frame, err); err != nil {
				return
			}
		}
	}()
	return &kernel.Result{Stream: s}, nil
}

func (s *localStream) put(frame json.RawMessage, err error) {
	s.mu.Lock()
	if err == nil {
		s.last = &manifest.Frame{Data: frame}
	}
	s.err = err
	s.mu.Unlock()
	select {
	case s.ready <- struct{}{}:
	default: // already signalled
	}
}

// Ready implements kernel.Stream.
func (s *localStream) Ready() <-chan struct{} { return s.ready }

// Next implements kernel.Stream.
func (s *localStream) Next() (*manifest.Frame, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.last
	s.last = nil
	return f, f != nil
}

// Err implements kernel.Stream.
func (s *localStream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close implements kernel.Stream.
func (s *localStream) Close() { s.cancel(); <-s.done }

// Package mcplocal serves one board over MCP without a relay: a kernel in this process whose
// only plugin is the board. The plugin calls the daemon over its control socket.
//
//	s, err := mcplocal.Open(ctx, mcplocal.Options{Socket: socket, Log: log})
//	...
//	defer s.Close()
//	resp, err := s.Client().Post(mcplocal.URL, "application/json", body)
//
// /mcp is served on in-memory connections, so no other process can reach it. A user who may
// open the control socket may call the read-only tools.
//
// The kernel and the endpoint are the relay's packages, so that an MCP client sees the same
// protocol with and without a relay. Open fails when the daemon does not run; when it restarts
// later, the calls in between fail and the next one dials again.
package mcplocal

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/transport/edge"
)

const host = "board.local"

// URL is the address of the MCP endpoint. Only the clients of a Server reach it.
const URL = "http://" + host + "/mcp"

// Bounds of the endpoint. Its only client is the stdio bridge of the same process, so that
// they guard against mistakes rather than attacks.
const (
	readHeaderTimeout = 10 * time.Second
	maxIdleConns      = 16 // of a client
	maxAgentID        = 128
)

// ErrAgentID reports an Options.AgentID that is not 1 to 128 printable ASCII characters
// without spaces.
var ErrAgentID = errors.New("an agent id has 1 to 128 printable ASCII characters without spaces")

// Options configure a Server.
type Options struct {
	Socket  string // control socket of the daemon
	AgentID string // the caller's name in the log; "": local
	Version string // of this binary
	Log     *zap.Logger
}

// Server is a kernel with the board's tools and an MCP endpoint in front.
type Server struct {
	http     *http.Server
	listener *pipeListener
	board    *board
	stop     context.CancelFunc // ends the kernel and the MCP endpoint
	wg       sync.WaitGroup
}

// Open asks the daemon for its tools and serves them until Close. Its errors are ErrAgentID
// and those of control.Dial.
func Open(ctx context.Context, o Options) (*Server, error) {
	o.AgentID = cmp.Or(o.AgentID, "local")
	if len(o.AgentID) > maxAgentID || strings.ContainsFunc(o.AgentID, func(r rune) bool { return r < '!' || r > '~' }) {
		return nil, ErrAgentID
	}
	b := &board{socket: o.Socket}
	if err := b.loadManifest(ctx); err != nil {
		return nil, err
	}
	// Reading and listing only: a client without a token must not change anything.
	scopes, err := auth.ParseScopes(manifest.ScopeCallReadOnly, manifest.ScopeToolsList, manifest.ScopeBoardsInspect)
	if err != nil {
		return nil, err
	}
	k := kernel.New(kernel.Options{})
	if err := k.Load(b, false); err != nil {
		return nil, err
	}
	caller := &kernel.Caller{Tenant: auth.DefaultTenant, Actor: o.AgentID, Transport: "stdio", Scopes: scopes}
	endpoint := mcp.New(mcp.Options{Kernel: k, Version: o.Version, Logger: o.Log,
		Guard:        edge.NewGuard(edge.GuardOptions{CheckHost: true, Hosts: []string{host}}),
		Authenticate: func(*http.Request) (*kernel.Caller, error) { return caller, nil }})
	s := &Server{listener: newPipeListener(), board: b, http: &http.Server{Handler: endpoint, ReadHeaderTimeout: readHeaderTimeout}}
	// The server outlives the context of Open, which may be that of a dial.
	runCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = stop
	s.wg.Go(func() { _ = k.Run(runCtx) })
	s.wg.Go(func() { _ = endpoint.Run(runCtx) })
	<-endpoint.Started() // on a busy machine the first request would come before, and be refused
	s.wg.Go(func() { _ = s.http.Serve(s.listener) })
	return s, nil
}

// Client returns an HTTP client whose connections lead to this server, whatever the URL.
func (s *Server) Client() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: s.listener.dial, MaxIdleConnsPerHost: maxIdleConns}}
}

// Close ends all requests and waits for the server's goroutines.
//
// The order matters: the contexts end first, because a stream that still runs would keep a
// request open; the board closes last, because requests use its connection.
func (s *Server) Close() {
	s.stop()
	_ = s.http.Close()
	s.wg.Wait()
	s.board.close()
}

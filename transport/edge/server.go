package edge

import (
	"context"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

// Bounds of every listener.
const (
	BodyTimeout    = 10 * time.Second // to read a request body
	headerTimeout  = 10 * time.Second // to read the request line and headers
	idleTimeout    = 2 * time.Minute  // of a kept-alive connection between requests
	maxHeaderBytes = 16 << 10
)

// Server is an http.Server whose listeners refuse requests of ambiguous length, and which serves
// plain requests itself if Direct takes them.
type Server struct {
	*http.Server
	// Direct reports whether a request may be served without net/http, see directConn. Its handler
	// finds neither Request.TLS nor http.LocalAddrContextKey. Direct is set before Serve; nil: none may.
	Direct func(path string) bool

	direct directConns
}

// NewServer returns a server with the bounds above. It has no write timeout, which would cut
// event streams, and speaks HTTP/1.1 only: each stream needs its own connection, whose
// unacknowledged bytes reveal a stalled reader.
func NewServer(h http.Handler, errorLog *log.Logger) *Server {
	s := &http.Server{
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          errorLog,
		Protocols:         new(http.Protocols),
		ConnContext:       connContext,
	}
	s.Protocols.SetHTTP1(true)
	srv := &Server{Server: s, direct: directConns{conns: make(map[uint64]*directConn), draining: make(chan struct{})}}
	s.Handler = srv.delayRefusals(h)
	return srv
}

// Serve is http.Server.Serve.
func (s *Server) Serve(ln net.Listener) error {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	if s.Direct != nil && s.direct.open() {
		wg.Go(func() { s.direct.run(ctx) })
	}
	err := s.Server.Serve(framingListener{ln, s})
	cancel()
	wg.Wait()
	return err
}

// Shutdown is http.Server.Shutdown. It drains connections with direct requests first: net/http still
// waits for the first request of such a connection, and Shutdown closes those that have waited for 5 s.
func (s *Server) Shutdown(ctx context.Context) error {
	s.direct.drain(ctx)
	return s.Server.Shutdown(ctx)
}

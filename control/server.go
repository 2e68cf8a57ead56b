package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/prober"
	"agentctl/transport/clock"
	"agentctl/transport/fanout"

	"github.com/creachadair/jrpc2"
	"go.uber.org/zap"
)

// Options configure a Server. Path (or Listener) and Prober must be given.
type Options struct {
	Path   string         // of the socket; its directory is made if missing
	Prober *prober.Prober // what is sampled
	Clock  *clock.Clock   // of events; default the system's
	Logger *zap.Logger    // default none

	Version string // of the server, told in hello; default "dev"
	Token   string // what hello must say; default anything that is not empty

	// Status gives what the method status answers: a value whose JSON has snake_case
	// keys. Default: the method is not supported.
	Status func(context.Context) any

	// Persist keeps what set_config changed over a restart. Default: it is not kept,
	// and the answer says so.
	Persist func(context.Context, Config) error

	// History answers query_history. Default: it is answered with a snapshot, and the
	// capability history_query is not served.
	History History

	// OnRecording is told when start or stop (or a hello with metrics_stream) turned
	// recording on or off; it is on at first. Default: nobody is.
	OnRecording func(on bool)

	// EnableModules has the prober read exactly these of its modules (prober.OptionalModuleNames) for
	// this socket, in place of those before; the first time is when some are started. An
	// error fails the request. Default: none can be read beyond what others enabled.
	EnableModules func(modules []string) error

	// GetConfig gives what get_config answers, an object with snake_case keys: values
	// and where they come from. Default: the method is not supported.
	GetConfig func(context.Context) any

	// Capabilities gives what the method capabilities answers, an object with the
	// node_id and the list of capabilities that the device announces. Default: the
	// method is not supported.
	Capabilities func() any

	// Call calls a tool of the device; args is an object. A *manifest.Error becomes an
	// error with its code in data. Default: the method call is not supported.
	Call func(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error)

	// Allow decides who may connect, by what the kernel says. Default AllowGroup.
	Allow func(uid, gid uint32) error

	// Listener, when given, is served in place of Path: a socket that systemd made.
	Listener net.Listener

	// peerOf stands for the kernel where tests have no sockets.
	peerOf func(net.Conn) (uid, gid uint32, err error)
}

// Server serves the control socket. Its methods may be called from any goroutine.
type Server struct {
	o             Options
	prober        *prober.Prober
	clock         *clock.Clock
	log           *zap.Logger
	events        *fanout.Topic[event]
	notices       *fanout.Topic[event]
	messageBuffer chan []byte // the memory for large messages: there is one at a time
	stats         counters
	countSlots    chan []byte // one for each query_history that may be counted at a time
	answerBuffer  chan []byte // the memory for answers of query_history that are not small: likewise

	samplingMu     sync.Mutex       // serializes applySampling, protects enabled; taken before mu
	enabledModules prober.ModuleSet // what Options.Enable was told

	mu          sync.Mutex // protects the fields below
	listener    net.Listener
	file        *socketFile // nil when the listener was given
	conns       map[*serverChannel]struct{}
	sampling    sampling
	update      event     // update_ready, for those who come later
	lastWarning time.Time // when a refused peer was logged last
}

// Stats counts what a Server did since NewServer.
type Stats struct {
	Clients  int    // connections now
	Accepted uint64 // connections that were served
	Denied   uint64 // peers that are not allowed
	Busy     uint64 // connections above MaxClients
	Requests uint64 // methods called
	Events   uint64 // events published
	Dropped  uint64 // events a slow client did not get
}

type counters struct{ accepted, denied, busy, requests atomic.Uint64 }

// NewServer makes a Server; nothing starts or is opened before Listen or Serve.
func NewServer(o Options) (*Server, error) {
	s := &Server{
		o: o, prober: o.Prober, clock: o.Clock, log: o.Logger,
		events:        fanout.New[event](fanout.Options{MaxSubscribers: MaxClients}),
		notices:       fanout.New[event](fanout.Options{MaxSubscribers: MaxClients}),
		messageBuffer: make(chan []byte, 1),
		answerBuffer:  make(chan []byte, 1),
		countSlots:    make(chan []byte, maxQueries),
		conns:         make(map[*serverChannel]struct{}),
		sampling:      sampling{isRunning: true, modules: defaultModules},
	}
	s.messageBuffer <- nil
	s.answerBuffer <- nil
	for range maxQueries {
		s.countSlots <- nil
	}
	if s.prober == nil {
		return nil, errors.New("control: no prober")
	}
	if s.clock == nil {
		s.clock = clock.New(time.Time{})
	}
	if s.log == nil {
		s.log = zap.NewNop()
	}
	if s.o.Version == "" {
		s.o.Version = "dev"
	}
	if s.o.Allow == nil {
		s.o.Allow = AllowGroup
	}
	if s.o.peerOf == nil {
		s.o.peerOf = unixPeer
	}
	return s, nil
}

// Listen makes the socket, so that a daemon can say what is wrong before it says that
// it is ready. The error tells what to do. Serve must follow.
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener != nil {
		return nil
	}
	if s.o.Listener != nil {
		s.listener = s.o.Listener
		return nil
	}
	ln, file, err := listenUnix(s.o.Path)
	if err != nil {
		return err
	}
	s.listener, s.file = ln, file
	return nil
}

// Serve answers clients until ctx ends, and returns why it ended. It calls Listen if
// nobody did. Requests in work are answered for a second more; then all is closed,
// and the socket is removed if Listen made it. It may be called once.
func (s *Server) Serve(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	s.log.Info("control socket open", zap.String("path", s.Addr()))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	hard, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()

	var wg sync.WaitGroup
	wg.Go(func() { s.runSampler(ctx) })
	wg.Go(func() { cancel(s.accept(ctx, hard, &wg)) })
	<-ctx.Done()

	s.listener.Close()
	if s.file != nil {
		s.file.remove()
	}
	s.forEachConn((*serverChannel).drain)
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	timer := time.NewTimer(drainTimeout)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		cut()
		s.forEachConn(func(c *serverChannel) { c.nc.Close() })
		<-ended
	}
	return context.Cause(ctx)
}

func (s *Server) forEachConn(f func(*serverChannel)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		f(c)
	}
}

// accept takes connections until ctx ends; each is served in a goroutine of wg.
func (s *Server) accept(ctx, hard context.Context, wg *sync.WaitGroup) error {
	for {
		nc, err := s.listener.Accept()
		switch {
		case err != nil && ctx.Err() != nil: // one that came at the last moment is served
			return ctx.Err()
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("control socket: %w", err)
		case err != nil: // out of descriptors, most likely
			s.log.Warn("control socket does not accept", zap.Error(err))
			s.sleep(ctx, 100*time.Millisecond)
			continue
		}
		c := newServerChannel(newWire(nc, MaxMessage), s.messageBuffer)
		if !s.register(ctx, c) {
			s.stats.busy.Add(1)
			c.write(frame(newError(CodeRateLimited, "16 clients are connected already: close one, or try again").answer(nil)))
			c.Close()
			continue
		}
		wg.Go(func() { s.serve(hard, c) })
	}
}

func (s *Server) register(ctx context.Context, c *serverChannel) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= MaxClients {
		return false
	}
	s.conns[c] = struct{}{}
	if ctx.Err() != nil { // Serve drained the others already
		c.drain()
	}
	return true
}

// serve is a connection's life, from the check of the peer to the end of the last
// goroutine. This one writes the events; jrpc2's two read requests and write answers.
func (s *Server) serve(ctx context.Context, c *serverChannel) {
	defer func() {
		c.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.conns, c)
	}()
	if err := s.checkPeer(c.nc); err != nil {
		s.stats.denied.Add(1)
		c.write(frame(newError(CodeUnauthorized, err.Error()).answer(nil)))
		return
	}
	s.stats.accepted.Add(1)
	s.serveRPC(ctx, c)
}

// serveRPC serves a client that may be served.
func (s *Server) serveRPC(ctx context.Context, c *serverChannel) {
	sess := &session{srv: s, c: c, subscribed: make(chan *subscription, 1)}
	rpc := jrpc2.NewServer(sess, &jrpc2.ServerOptions{
		Concurrency:    1,
		DisableBuiltin: true,
		NewContext:     func() context.Context { return ctx },
	}).Start(c)
	sess.writeEvents()
	rpc.Wait()
	if sess.sub != nil {
		s.unsubscribe(sess.sub)
	}
}

// checkPeer asks the kernel, then Options.Allow.
func (s *Server) checkPeer(nc net.Conn) error {
	uid, gid, err := s.o.peerOf(nc)
	if err != nil {
		s.log.Warn("control socket: peer unknown", zap.Error(err))
		return errors.New("the kernel does not say who you are")
	}
	if err := s.o.Allow(uid, gid); err != nil {
		if s.allowWarning() {
			s.log.Warn("control socket: peer refused", zap.Uint32("uid", uid), zap.Uint32("gid", gid), zap.Error(err))
		}
		return err
	}
	return nil
}

// allowWarning keeps a refused peer that tries again and again from filling the log.
func (s *Server) allowWarning() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.lastWarning) < 10*time.Second {
		return false
	}
	s.lastWarning = time.Now()
	return true
}

// Addr is the path that is listened on, "" before Listen.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Stats tells what was done so far.
func (s *Server) Stats() Stats {
	ev, notices := s.events.Stats(), s.notices.Stats()
	s.mu.Lock()
	clients := len(s.conns)
	s.mu.Unlock()
	return Stats{
		Clients:  clients,
		Accepted: s.stats.accepted.Load(),
		Denied:   s.stats.denied.Load(),
		Busy:     s.stats.busy.Load(),
		Requests: s.stats.requests.Load(),
		Events:   ev.Published + notices.Published,
		Dropped:  ev.Dropped + ev.Coalesced + notices.Dropped,
	}
}

// InheritedListener returns the listener that systemd passed to this process by
// LISTEN_PID and LISTEN_FDS (sd_listen_fds(3)), nil when there is none. It is for
// Options.Listener.
func InheritedListener(getenv func(string) string) (net.Listener, error) {
	if getenv("LISTEN_PID") != fmt.Sprint(os.Getpid()) || getenv("LISTEN_FDS") == "" {
		return nil, nil
	}
	if n := getenv("LISTEN_FDS"); n != "1" {
		return nil, fmt.Errorf("systemd passed %s sockets, expected one; keep one ListenStream= in agentctl.socket", n)
	}
	f := os.NewFile(3, "agentctl.socket") // SD_LISTEN_FDS_START
	defer f.Close()
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("socket passed by systemd: %w", err)
	}
	if _, ok := ln.(*net.UnixListener); !ok {
		ln.Close()
		return nil, fmt.Errorf("systemd passed a socket that is not a unix socket: set ListenStream= to a path in agentctl.socket")
	}
	return ln, nil
}

package control

import (
	"cmp"
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
	// Path is that of the socket; its directory is created if it is missing.
	Path   string
	Prober *prober.Prober // what is sampled
	Clock  *clock.Clock   // the time of events; default the system's
	Logger *zap.Logger    // default none

	// Version is the server's, which the answer to hello contains; default "dev".
	Version string
	// Token is what hello must contain; default any that is not empty.
	Token string

	// Alerts returns the alerts that are raised and not cleared, for clients that connect later.
	// It must not call the server. Default: none.
	Alerts func() []Alert

	// Status returns the answer of the method status: a value whose JSON has snake_case
	// keys. Default: the method is not supported.
	Status func(context.Context) any

	// Persist saves what set_config changed, so that it survives a restart. Default: it is
	// not saved, and the answer says so.
	Persist func(context.Context, Config) error

	// History answers query_history. Default: the answer is a snapshot, and the capability
	// history_query is not served.
	History History

	// OnRecording is called when start or stop (or a hello with metrics_stream) enables
	// or disables recording; it is enabled at first. Calls come one at a time, in the order
	// of the changes.
	OnRecording func(on bool)

	// EnableModules makes the prober read exactly these optional modules
	// (prober.OptionalModuleNames) for this socket, in place of those of the last call. It
	// is first called when some are started. An error fails the request. Default: modules
	// are read only as far as others have enabled them.
	EnableModules func(modules []string) error

	// GetConfig returns the answer of get_config, an object with snake_case keys: values
	// and where they come from. Default: the method is not supported.
	GetConfig func(context.Context) any

	// Capabilities returns the answer of the method capabilities: an object with the
	// node_id and the capabilities that the device announces. Default: the method is not
	// supported.
	Capabilities func() any

	// Call calls a tool of the device; args is an object. A *manifest.Error becomes an
	// error with its code in data. Default: the method call is not supported.
	Call func(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error)

	// Allow decides by the kernel's credentials who may connect; default AllowGroup.
	Allow func(uid, gid uint32) error

	// Listener, when given, is served in place of Path: a socket created by systemd.
	Listener net.Listener

	// peerOf replaces the kernel in tests without sockets.
	peerOf func(net.Conn) (uid, gid uint32, err error)

	// answerLimit and keptLimit replace maxAnswer and maxKeptAnswer in tests.
	answerLimit, keptLimit int
}

// Server serves the control socket. Its methods may be called from any goroutine.
//
// Goroutines: Serve runs the sampler and the accept loop, and for each connection one that
// writes events and two of jrpc2, which read requests and write answers. Serve waits for
// all of them. Lock order: samplingMu, then mu.
type Server struct {
	o       Options
	prober  *prober.Prober
	clock   *clock.Clock
	log     *zap.Logger
	events  *fanout.Topic[event]
	notices *fanout.Topic[event]
	stats   counters

	// Buffers and slots that connections share. A channel holds what is free; a buffer is
	// nil until its first use, and after ReleaseBuffer.
	messageBuffer chan []byte // one, for a large message
	answerSlot    chan []byte // one, for an answer of query_history that is not small; a nil value
	countSlots    chan []byte // maxQueries, for count passes of query_history; nil values

	samplingMu     sync.Mutex       // serializes applySampling; protects enabledModules
	enabledModules prober.ModuleSet // of the last call of Options.EnableModules

	mu          sync.Mutex // protects the fields below
	listener    net.Listener
	file        *socketFile                 // nil when the listener was given
	conns       map[*serverChannel]struct{} // clients, and connections before their hello
	sampling    sampling
	update      event     // update_ready, for clients that connect later
	lastWarning time.Time // when allowWarning last returned true
}

// Stats counts since NewServer.
type Stats struct {
	Clients  int    // connections now
	Accepted uint64 // connections that became clients
	// Denied are connections that Options.Allow refused.
	Denied uint64
	// Busy are refused hellos, because there were as many clients as there may be, and
	// connections that a newer one replaced before their hello.
	Busy     uint64
	Requests uint64 // methods called
	Events   uint64 // events published, each counted once for all clients
	// Dropped are events that a slow client did not get.
	Dropped uint64
}

// counters are those of Stats that change outside mu.
type counters struct{ accepted, denied, busy, requests atomic.Uint64 }

// NewServer returns a Server. It starts and opens nothing; Listen and Serve do.
func NewServer(o Options) (*Server, error) {
	s := &Server{
		o: o, prober: o.Prober, clock: o.Clock, log: cmp.Or(o.Logger, zap.NewNop()),
		events:        fanout.New[event](fanout.Options{MaxSubscribers: MaxClients}),
		notices:       fanout.New[event](fanout.Options{MaxSubscribers: MaxClients}),
		messageBuffer: make(chan []byte, 1),
		answerSlot:    make(chan []byte, 1),
		countSlots:    make(chan []byte, maxQueries),
		conns:         make(map[*serverChannel]struct{}),
		sampling:      sampling{isRunning: true, modules: defaultModules},
	}
	s.messageBuffer <- nil
	s.answerSlot <- nil
	for range maxQueries {
		s.countSlots <- nil
	}
	if s.prober == nil {
		return nil, errors.New("control: no prober")
	}
	if s.clock == nil {
		s.clock = clock.New(time.Time{}, nil)
	}
	s.o.Version = cmp.Or(s.o.Version, "dev")
	s.o.answerLimit = cmp.Or(s.o.answerLimit, maxAnswer)
	s.o.keptLimit = cmp.Or(s.o.keptLimit, maxKeptAnswer)
	if s.o.Allow == nil {
		s.o.Allow = AllowGroup
	}
	if s.o.peerOf == nil {
		s.o.peerOf = unixPeer
	}
	return s, nil
}

// Listen creates the socket, so that a daemon can report an error before it reports that it
// is ready. The error is a *PathError. Serve must follow.
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

// Serve answers clients until ctx ends, and returns why. It calls Listen if that was not
// called. After the end requests in progress have drainTimeout; then all connections are
// closed. The socket is removed if Listen created it. Serve may be called once.
func (s *Server) Serve(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	s.log.Info("control socket open", zap.String("path", s.Addr()))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// Requests in progress outlive ctx until the drain ends.
	requestCtx, cancelRequests := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelRequests()

	var wg sync.WaitGroup
	wg.Go(func() { s.runSampler(ctx) })
	wg.Go(func() { cancel(s.accept(ctx, requestCtx, &wg)) })
	<-ctx.Done()

	s.listener.Close()
	if s.file != nil {
		s.file.remove()
	}
	s.forEachConn((*serverChannel).drain)
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(drainTimeout):
		cancelRequests()
		s.forEachConn(func(c *serverChannel) { c.nc.Close() })
		<-ended
	}
	return context.Cause(ctx)
}

// forEachConn calls f with each connection, with mu held: f must not block.
func (s *Server) forEachConn(f func(*serverChannel)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		f(c)
	}
}

// accept accepts connections until ctx ends, and serves each in a goroutine of wg.
func (s *Server) accept(ctx, requestCtx context.Context, wg *sync.WaitGroup) error {
	for {
		nc, err := s.listener.Accept()
		switch {
		case err != nil && ctx.Err() != nil: // not before an error: the last connection is served
			return ctx.Err()
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("control socket: %w", err)
		case err != nil: // out of descriptors, most likely
			s.log.Warn("control socket does not accept", zap.Error(err))
			sleep(ctx, 100*time.Millisecond)
			continue
		}
		c := newServerChannel(newWire(nc, MaxMessage), s.messageBuffer)
		c.uid, c.gid, c.peerErr = s.o.peerOf(nc)
		s.register(ctx, c)
		wg.Go(func() { s.serve(requestCtx, c) })
	}
}

// register adds a connection, which is no client before its hello. If there are maxNewConns, it
// closes the oldest of the user that has the most, so that silent connections keep nobody out.
func (s *Server) register(ctx context.Context, c *serverChannel) {
	s.mu.Lock()
	defer s.mu.Unlock()
	byUser, total := make(map[uint32]int), 0
	for other := range s.conns {
		if !other.isClient {
			byUser[other.uid]++
			total++
		}
	}
	if total >= maxNewConns {
		var oldest *serverChannel
		for other := range s.conns {
			if !other.isClient && (oldest == nil || byUser[other.uid] > byUser[oldest.uid] ||
				byUser[other.uid] == byUser[oldest.uid] && other.connectedAt.Before(oldest.connectedAt)) {
				oldest = other
			}
		}
		delete(s.conns, oldest)
		oldest.nc.Close() // its goroutine notices
		s.stats.busy.Add(1)
	}
	s.conns[c] = struct{}{}
	if ctx.Err() != nil { // Serve drained the others already
		c.drain()
	}
}

// admitClient gives a connection one of the places of clients, for its first valid hello. The
// error says why there is none.
func (s *Server) admitClient(c *serverChannel) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.conns[c]; !ok || c.isClient { // !ok: it was replaced, and is closed
		return nil
	}
	clients, others, ofUser := 0, 0, 0
	for other := range s.conns {
		if !other.isClient {
			continue
		}
		clients++
		if !isOperator(other.uid) {
			others++
		}
		if other.uid == c.uid {
			ofUser++
		}
	}
	switch {
	case clients >= MaxClients, !isOperator(c.uid) && others >= maxOtherClients:
		s.stats.busy.Add(1)
		return newError(CodeRateLimited, fmt.Sprintf("%d clients are connected already: close one, or try again", clients))
	case !isOperator(c.uid) && ofUser >= maxUserClients:
		s.stats.busy.Add(1)
		return newError(CodeRateLimited, fmt.Sprintf("%d clients of this user are connected already: close one, or try again", ofUser))
	}
	c.isClient = true
	s.stats.accepted.Add(1)
	return nil
}

// isOperator reports whether a user is root or the daemon's own.
func isOperator(uid uint32) bool { return uid == 0 || int64(uid) == int64(os.Geteuid()) }

// serve handles a connection from the check of the peer to the end of its goroutines. This
// one writes the events.
func (s *Server) serve(ctx context.Context, c *serverChannel) {
	defer func() {
		c.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.conns, c)
	}()
	if err := s.checkPeer(c); err != nil {
		s.stats.denied.Add(1)
		c.write(frame(newError(CodeUnauthorized, err.Error()).answer(nil)))
		return
	}
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

// checkPeer passes the peer's credentials to Options.Allow. They are those of connect(2), which
// the peer cannot forge; a process that inherits the connection later keeps its rights.
func (s *Server) checkPeer(c *serverChannel) error {
	if c.peerErr != nil {
		s.log.Warn("control socket: peer unknown", zap.Error(c.peerErr))
		return errors.New("the kernel does not say who you are")
	}
	if err := s.o.Allow(c.uid, c.gid); err != nil {
		if s.allowWarning() {
			s.log.Warn("control socket: peer refused", zap.Uint32("uid", c.uid), zap.Uint32("gid", c.gid), zap.Error(err))
		}
		return err
	}
	return nil
}

// allowWarning limits warnings to one in ten seconds, so that a client that repeats a failing
// request does not fill the log.
func (s *Server) allowWarning() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.lastWarning) < 10*time.Second {
		return false
	}
	s.lastWarning = time.Now()
	return true
}

// ReleaseBuffer drops the buffer for large messages, unless it is in use. The next large message
// makes a new one.
func (s *Server) ReleaseBuffer() {
	select {
	case <-s.messageBuffer:
		s.messageBuffer <- nil
	default:
	}
}

// Addr returns the path of the socket, "" before Listen.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Stats returns the counts so far.
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

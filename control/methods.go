package control

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"agentctl/prober"

	"github.com/creachadair/jrpc2"
	"go.uber.org/zap"
)

// session is a connection's requests. They come one at a time, so its fields need no
// lock; joined crosses over to the goroutine that writes events.
type session struct {
	srv        *Server
	c          *serverChannel
	id         string             // UUID v4, once hello was good
	requestID  string             // the id of the request in work as it came; "" of a notification
	sub        *subscription      // once it takes events
	subscribed chan *subscription // sub, when the answer to hello is out
}

// methods are all there are, but for hello.
var methods = map[string]func(*session, context.Context, *paramFields) (any, error){
	MethodSnapshot:  (*session).snapshot,
	MethodStart:     (*session).start,
	MethodStop:      (*session).stop,
	MethodSetConfig: (*session).setConfig,
	MethodBurst:     (*session).burst,
	MethodSubscribe: (*session).subscribe,
	MethodHistory:   (*session).history,

	MethodStatus:       (*session).status,
	MethodGetConfig:    (*session).getConfig,
	MethodCapabilities: (*session).capabilities,
	MethodCall:         (*session).callTool,
}

// capabilities are what hello may ask for.
var capabilities = []string{CapMetricsStream, CapBurstMode, CapHistoryQuery}

// servedCapabilities is what a client may count on.
func (s *Server) servedCapabilities() []string {
	if s.o.History == nil {
		return []string{CapMetricsStream, CapBurstMode}
	}
	return capabilities
}

// writeEvents writes the events of a connection until it is closed.
func (ss *session) writeEvents() {
	var r *subscription
	var events, notices <-chan struct{}
	var ping <-chan time.Time
	for {
		var e event
		select {
		case <-ss.c.closed:
			return
		case r = <-ss.subscribed:
			events, notices = r.events.Ready(), r.notices.Ready()
			ticker := time.NewTicker(pingInterval)
			defer ticker.Stop()
			ping = ticker.C
			e = r.lastUpdate
		case <-events:
			e, _ = r.events.Next()
		case <-notices:
			e, _ = r.notices.Next()
		case <-ping:
			e = pingEvent
		}
		if e.frame != nil && ss.c.write(e.frame) != nil {
			events, notices, ping = nil, nil, nil // the connection is torn; jrpc2 will see it
		}
	}
}

// Assign gives every method to one handler.
func (ss *session) Assign(context.Context, string) jrpc2.Handler { return ss.handle }

// handle calls a method.
func (ss *session) handle(ctx context.Context, req *jrpc2.Request) (result any, err error) {
	if req.IsNotification() {
		defer ss.c.finishRequest() // no answer will do it
	}
	defer func() {
		if p := recover(); p != nil {
			ss.srv.log.Error("control method panicked", zap.String("panic", fmt.Sprint(p)), zap.ByteString("stack", debug.Stack()))
			result, err = nil, wireError(errInternal("a bug in the daemon; see its log"))
		}
	}()
	ss.srv.stats.requests.Add(1)
	timeout := callTimeout
	if req.Method() == MethodHistory {
		timeout = queryTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	result, err = ss.call(ctx, req)
	if err != nil {
		return nil, wireError(err)
	}
	return result, nil
}

func (ss *session) call(ctx context.Context, req *jrpc2.Request) (any, error) {
	var params json.RawMessage
	if err := req.UnmarshalParams(&params); err != nil {
		return nil, errParams("params", "must be an object")
	}
	if req.Method() == MethodHello {
		return ss.hello(parseParams(params))
	}
	if ss.id == "" {
		return nil, errUnauthorized("say hello first")
	}
	method, ok := methods[req.Method()]
	if !ok {
		return nil, &Error{Code: CodeMethodNotFound, Message: "method_not_found", Detail: "see docs/control.md for the methods"}
	}
	ss.requestID = req.ID()
	return method(ss, ctx, parseParams(params))
}

// wireError is an error as jrpc2 sends it. What is not an Error is internal.
func wireError(err error) *jrpc2.Error {
	var e *Error
	if !errors.As(err, &e) {
		e = errInternal(err.Error())
	}
	o := e.object()
	w := &jrpc2.Error{Code: jrpc2.Code(o.Code), Message: o.Message}
	if o.Data == nil {
		return w
	}
	return w.WithData(o.Data)
}

func (ss *session) hello(f *paramFields) (any, error) {
	// The version first: what else a later version sends is not known here.
	var version integer
	versionGiven := f.take("protocol_version", &version)
	if versionGiven && f.err == nil && version != ProtocolVersion {
		return nil, errNotSupported("protocol_version", fmt.Sprintf("this server speaks %d", ProtocolVersion))
	}
	f.text("app_version", 256)
	if !versionGiven {
		f.fail(errParams("protocol_version", "is missing"))
	}
	var token string
	f.take("token", &token)
	if len(token) > 4<<10 {
		f.fail(errParams("token", "is longer than 4096 bytes"))
	}
	if f.err == nil && !ss.srv.isTokenValid(token) {
		f.fail(errUnauthorized("hello needs the token; any non-empty one will do where none is configured"))
	}
	asked := f.choices("capabilities", capabilities)
	if err := f.finish(); err != nil {
		return nil, err
	}

	if slices.Contains(asked, CapMetricsStream) {
		if err := ss.joinEvents(); err != nil {
			return nil, err
		}
	}
	ss.c.helloDone = true
	if ss.id == "" {
		ss.id = newSessionID()
	}
	return Hello{ss.srv.o.Version, ProtocolVersion, ss.srv.servedCapabilities(), ss.id}, nil
}

func (s *Server) isTokenValid(token string) bool {
	if s.o.Token == "" {
		return token != ""
	}
	return subtle.ConstantTimeCompare([]byte(token), []byte(s.o.Token)) == 1
}

// subscribe has this connection take events. They begin behind the answer to hello.
func (ss *session) joinEvents() error {
	if ss.sub != nil {
		return nil
	}
	r, set, err := ss.srv.subscribe()
	if err != nil {
		return err
	}
	ss.sub = r
	ss.c.afterAnswer(func() {
		ss.subscribed <- r
		ss.srv.publishState("start", MethodHello, startExtra{set.Names()})
	})
	return nil
}

type startExtra struct {
	Modules []string `json:"modules"`
}

type burstExtra struct {
	IntervalMS int64 `json:"interval_ms"`
	ExpiresAt  int64 `json:"expires_at"`
}

func (ss *session) snapshot(ctx context.Context, f *paramFields) (any, error) {
	set := f.modules("modules", defaultModules)
	if err := f.finish(); err != nil {
		return nil, err
	}
	sample, err := ss.srv.prober.Now(ctx)
	if err != nil {
		return nil, errInternal(err.Error())
	}
	return snapshotOf(&sample, set), nil
}

func (ss *session) start(_ context.Context, f *paramFields) (any, error) {
	set := f.modules("modules", defaultModules)
	if err := f.finish(); err != nil {
		return nil, err
	}
	s := ss.srv
	if _, err := s.applySampling(true, func(prober.ModuleSet) prober.ModuleSet { return set }); err != nil {
		return nil, err
	}
	names := set.Names()
	ss.c.afterAnswer(func() { s.publishState("start", MethodStart, startExtra{names}) })
	return startResult{true, names}, nil
}

func (ss *session) stop(_ context.Context, f *paramFields) (any, error) {
	if err := f.finish(); err != nil {
		return nil, err
	}
	s := ss.srv
	if _, err := s.applySampling(false, func(now prober.ModuleSet) prober.ModuleSet { return now }); err != nil {
		return nil, err
	}
	ss.c.afterAnswer(func() { s.publishState("stop", MethodStop, nil) })
	return okResult{true}, nil
}

func (ss *session) setConfig(ctx context.Context, f *paramFields) (any, error) {
	base, _ := f.millis("base_interval_ms", prober.MinInterval, prober.MaxInterval)
	var byName map[string]integer
	f.take("module_intervals", &byName)
	var persist bool
	f.take("persist", &persist)
	every, err := parseIntervals(byName)
	if err != nil {
		f.fail(err)
	}
	if err := f.finish(); err != nil {
		return nil, err
	}

	now, serr := ss.srv.setIntervals(base, every, false)
	if serr != nil {
		return nil, serr
	}
	result := ConfigResult{OK: true, BaseIntervalMS: now.Milliseconds(), EffectiveIntervals: every.byName()}
	if persist {
		kept := ss.persist(ctx, Config{base.Milliseconds(), result.EffectiveIntervals, true})
		result.Persisted = &kept
	}
	return result, nil
}

func (ss *session) persist(ctx context.Context, c Config) bool {
	if ss.srv.o.Persist == nil {
		return false
	}
	if err := ss.srv.o.Persist(ctx, c); err != nil {
		ss.srv.log.Warn("set_config was not kept", zap.Error(err))
		return false
	}
	return true
}

func parseIntervals(byName map[string]integer) (every intervals, err *Error) {
	const name = "module_intervals"
	for n, ms := range byName {
		m, ok := prober.ModuleByName(n)
		if !ok {
			return every, errParams(name, "knows only %s", moduleChoice)
		}
		if every[m] != 0 {
			return every, errParams(name, "names module mem twice")
		}
		d, err := ms.millis(name, prober.MinInterval, prober.MaxInterval)
		if err != nil {
			return every, err
		}
		every[m] = d
	}
	return every, nil
}

func (iv *intervals) byName() map[string]int64 {
	byName := map[string]int64{}
	for m, d := range iv {
		if d > 0 {
			byName[prober.Module(m).String()] = d.Milliseconds()
		}
	}
	return byName
}

func (ss *session) burst(_ context.Context, f *paramFields) (any, error) {
	var unused []string // all modules are sped up, as the document has it
	f.take("modules", &unused)
	every := f.needMillis("interval_ms", prober.MinInterval, prober.MaxInterval)
	ttl := f.needMillis("ttl_ms", prober.MinInterval, maxBurstTTL)
	if err := f.finish(); err != nil {
		return nil, err
	}

	s := ss.srv
	if err := s.setBurst(every, ttl); err != nil {
		return nil, err
	}
	ms, _ := s.clock.NowMS()
	expires := ms + ttl.Milliseconds()
	ss.c.afterAnswer(func() { s.publishState("burst", MethodBurst, burstExtra{every.Milliseconds(), expires}) })
	return burstResult{true, expires}, nil
}

func (ss *session) subscribe(_ context.Context, f *paramFields) (any, error) {
	var enable bool
	f.require("enable", &enable)
	if err := f.finish(); err != nil {
		return nil, err
	}
	s := ss.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sampling.pushEnabled = enable
	s.replanLocked()
	return okResult{true}, nil
}

// newSessionID is a UUID v4 (RFC 9562 §5.4).
func newSessionID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

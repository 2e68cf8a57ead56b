//go:build linux

package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/prober"
)

var _ prober.ModuleSource = (*fixed)(nil)

// fixed is a machine that says the same each time; fail makes it say nothing.
type fixed struct {
	mu   sync.Mutex
	fail error
}

func (f *fixed) Read(s *prober.Sample) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.CPUPct, s.DiskPct = 12.5, 40.25
	s.MemTotalBytes, s.MemBytes = 16000<<20+1<<19, 2048<<20+999
	s.Load1, s.Load5, s.Load15 = 0.5, 0.25, 0.1
	if errors.Is(f.fail, prober.ErrDisk) {
		s.DiskPct, s.DiskErr = 0, f.fail
		return nil
	}
	return f.fail
}

func (f *fixed) Close() error { return nil }

// reading is a module of the fixed machine: a temperature that rises with each reading,
// a supply and an eMMC that are well. It has no network.
type reading func(*prober.ModuleReadings) error

func (f reading) Read(m *prober.ModuleReadings) error { return f(m) }
func (reading) Close() error                          { return nil }

func (f *fixed) OpenModule(name string) prober.ModuleReader {
	switch name {
	case "temperature":
		c := 40.0
		return reading(func(m *prober.ModuleReadings) error {
			c++
			m.Temperature = &prober.Temperature{HottestC: c, Zones: []prober.Zone{{Name: "cpu-thermal", C: c}}}
			return nil
		})
	case "power":
		no := false
		return reading(func(m *prober.ModuleReadings) error {
			m.Power = &prober.Power{UnderVoltage: &no}
			return nil
		})
	case "wear":
		used := 10.0
		return reading(func(m *prober.ModuleReadings) error {
			m.Wear = &prober.Wear{UsedPct: &used, PreEOL: prober.EOLNormal, Devices: []prober.WearDevice{{Name: "mmcblk0", UsedPct: &used}}}
			return nil
		})
	}
	return nil
}

func (f *fixed) setFail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = err
}

// pipes is a listener of net.Pipe, for tests in a synctest bubble.
type pipes struct {
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func newPipes() *pipes { return &pipes{ch: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case nc := <-p.ch:
		return nc, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes", Net: "unix"} }

// rig is a server with a prober on the fixed machine. In a bubble its clock is false,
// and so are its sockets.
type rig struct {
	t      testing.TB
	srv    *Server
	prober *prober.Prober
	source *fixed
	stop   context.CancelFunc
	served chan error
	dial   func() net.Conn
}

// inBubble runs f with a rig whose time costs nothing.
func inBubble(t *testing.T, o Options, f func(*testing.T, *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ln := newPipes()
		o.Listener = ln
		o.peerOf = func(net.Conn) (uint32, uint32, error) { return 0, 0, nil }
		r := newRig(t, o)
		defer r.end() // after a failure too: what still runs keeps the bubble open
		r.dial = func() net.Conn {
			a, b := net.Pipe()
			ln.ch <- b
			return a
		}
		f(t, r)
	})
}

// onSocket starts a rig on a real socket, to be ended by the test's cleanup.
func onSocket(t testing.TB, o Options) *rig {
	t.Helper()
	if o.Path == "" {
		o.Path = filepath.Join(shortDir(t), "s")
	}
	r := newRig(t, o)
	r.dial = func() net.Conn {
		nc, err := net.Dial("unix", o.Path)
		if err != nil {
			t.Fatal(err)
		}
		return nc
	}
	t.Cleanup(r.end)
	return r
}

func newRig(t testing.TB, o Options) *rig {
	t.Helper()
	r := &rig{t: t, source: &fixed{}, served: make(chan error, 1)}
	r.prober = prober.New(prober.Options{Interval: time.Second, Source: r.source})
	o.Prober = r.prober
	srv, err := NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Listen(); err != nil {
		t.Fatal(err)
	}
	r.srv = srv
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.Background())
	pctx, pstop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { r.prober.Run(pctx) })
	go func() {
		err := srv.Serve(ctx)
		pstop()
		wg.Wait()
		r.served <- err
	}()
	return r
}

func (r *rig) end() {
	r.t.Helper()
	r.stop()
	if err := <-r.served; !errors.Is(err, context.Canceled) {
		r.t.Errorf("Serve ended with %v", err)
	}
	r.served <- context.Canceled // it may be called again
}

// slow reports whether AGENTCTL_SLOW=1 asks for the tests in full.
func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// shortDir is a new directory with a path short enough for a socket.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// peer is a client made of nothing but the wire.
type peer struct {
	t  testing.TB
	nc net.Conn

	mu      sync.Mutex
	next    int
	waiting map[string]chan msg
	strays  []msg // events, and answers without an id
	ended   chan struct{}
}

type msg map[string]any

func (m msg) result() map[string]any { r, _ := m["result"].(map[string]any); return r }
func (m msg) params() map[string]any { r, _ := m["params"].(map[string]any); return r }

func (m msg) code() int {
	e, _ := m["error"].(map[string]any)
	c, _ := e["code"].(float64)
	return int(c)
}

func (m msg) field() any {
	e, _ := m["error"].(map[string]any)
	d, _ := e["data"].(map[string]any)
	return d["field"]
}

func (r *rig) peer() *peer {
	p := &peer{t: r.t, nc: r.dial(), waiting: map[string]chan msg{}, ended: make(chan struct{})}
	go p.read()
	r.t.Cleanup(func() { p.nc.Close() })
	return p
}

func (p *peer) read() {
	defer close(p.ended)
	in := newFrameReader(p.nc, maxAnswer)
	for {
		n, err := in.header()
		if err != nil {
			return
		}
		body := make([]byte, n)
		if err := in.body(body); err != nil {
			return
		}
		var m msg
		if err := json.Unmarshal(body, &m); err != nil {
			p.t.Errorf("the server wrote %q: %v", body, err)
			return
		}
		checkSnakeCase(p.t, map[string]any(m))
		p.mu.Lock()
		id := fmt.Sprint(m["id"])
		if ch := p.waiting[id]; ch != nil {
			ch <- m
			delete(p.waiting, id)
		} else {
			p.strays = append(p.strays, m)
		}
		p.mu.Unlock()
	}
}

// raw writes bytes as they are.
func (p *peer) raw(s string) error {
	_, err := io.WriteString(p.nc, s)
	return err
}

func (p *peer) send(body string) error { return p.raw(string(frame([]byte(body)))) }

// call asks and waits for the answer; params is JSON, "" for none.
func (p *peer) call(method, params string) msg {
	p.t.Helper()
	p.mu.Lock()
	p.next++
	id := fmt.Sprintf("call-%d-of-this-peer", p.next)
	ch := make(chan msg, 1)
	p.waiting[id] = ch
	p.mu.Unlock()
	if params != "" {
		params = `,"params":` + params
	}
	if err := p.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"method":%q%s}`, id, method, params)); err != nil {
		p.t.Fatalf("%s: %v", method, err)
	}
	select {
	case m := <-ch:
		return m
	case <-time.After(2 * time.Minute): // a prober that ticks keeps a bubble alive for ever
		p.t.Fatalf("%s: no answer", method)
		return nil
	case <-p.ended:
		select {
		case m := <-ch:
			return m
		default:
		}
		p.t.Fatalf("%s: the server hung up; before that it said %v", method, p.take(""))
		return nil
	}
}

// ok is call for what must not fail.
func (p *peer) ok(method, params string) map[string]any {
	p.t.Helper()
	m := p.call(method, params)
	if m["error"] != nil {
		p.t.Fatalf("%s %s: %v", method, params, m["error"])
	}
	return m.result()
}

func (p *peer) hello(capabilities string) *peer {
	p.t.Helper()
	p.ok("hello", `{"app_version":"t","protocol_version":1,"token":"t","capabilities":[`+capabilities+`]}`)
	return p
}

// take returns the events of a method that came so far, and forgets them; "" is for
// everything that answers no call.
func (p *peer) take(method string) (out []msg) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var rest []msg
	for _, m := range p.strays {
		if method == "" || m["method"] == method {
			out = append(out, m)
		} else {
			rest = append(rest, m)
		}
	}
	p.strays = rest
	return out
}

// checkSnakeCase checks that keys of the server are snake_case, as docs/control.md says. The elements of a
// long list have the same keys, so it looks at the first hundred.
func checkSnakeCase(t testing.TB, v any) {
	t.Helper()
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if !snakeCase.MatchString(k) {
				t.Errorf("key %q is not snake_case", k)
			}
			checkSnakeCase(t, e)
		}
	case []any:
		for _, e := range v[:min(len(v), 100)] {
			checkSnakeCase(t, e)
		}
	}
}

func readingOf(key string, v float64) prober.Reading { return prober.Reading{Key: key, Value: v} }

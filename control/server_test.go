//go:build linux

package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentctl/prober"
)

// listenErr returns why a daemon cannot listen at path. It removes the socket again.
func listenErr(t *testing.T, path string) error {
	t.Helper()
	srv, err := NewServer(Options{Path: path, Prober: prober.New(prober.Options{})})
	if err != nil {
		t.Fatal(err)
	}
	err = srv.Listen()
	if err == nil {
		srv.listener.Close()
		srv.file.remove()
	}
	return err
}

func TestSocketFile(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	path := filepath.Join(shortDir(t), "run", "agentctl.sock")
	r := onSocket(t, Options{Path: path})
	for p, want := range map[string]fs.FileMode{path: 0o660 | fs.ModeSocket, filepath.Dir(path): 0o750 | fs.ModeDir} {
		info, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", p, info.Mode(), want)
		}
	}
	alias := filepath.Join(filepath.Dir(path), WellKnownName)
	for _, p := range []string{path, alias} {
		c, err := Dial(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Snapshot(t.Context()); err != nil {
			t.Errorf("snapshot by %s: %v", p, err)
		}
		c.Close()
	}
	if r.srv.Addr() != path {
		t.Errorf("Addr is %q", r.srv.Addr())
	}
	r.end()
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

func TestLiveSocketIsNotStolen(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	onSocket(t, Options{Path: path})
	if err := listenErr(t, path); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "agentctl status") {
		t.Errorf("got %v", err)
	}
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatalf("the first daemon does not answer any more: %v", err)
	}
	c.Close()
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close() // as kill -9 leaves it
	onSocket(t, Options{Path: path})
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestReplacedSocketIsLeftAlone checks that a daemon which ends does not remove the socket of
// another one at the same path.
func TestReplacedSocketIsLeftAlone(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	r := onSocket(t, Options{Path: path})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	onSocket(t, Options{Path: path})
	r.end()
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatalf("the second daemon's socket is gone: %v", err)
	}
	c.Close()
}

func TestPathInTheWay(t *testing.T) {
	dir := shortDir(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	target := in("target")
	onSocket(t, Options{Path: target})
	for _, err := range []error{
		os.Symlink("target", in("link")),
		os.Symlink("nowhere", in("dangling")),
		os.WriteFile(in("file"), []byte("precious"), 0o600),
		os.Mkdir(in("dir"), 0o700),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		in("link"):                       "symbolic link",
		in("dangling"):                   "symbolic link",
		in("file"):                       "not a socket",
		in("dir"):                        "not a socket",
		in("file/s"):                     "not a directory",
		"":                               "bytes long",
		in(strings.Repeat("x", maxPath)): "bytes long",
	} {
		err := listenErr(t, path)
		var pathErr *PathError
		if !errors.As(err, &pathErr) || pathErr.Path != path || !strings.Contains(err.Error(), want) {
			t.Errorf("listen on %s: %v, want a PathError with %q", path, err, want)
		}
	}
	if b, err := os.ReadFile(in("file")); string(b) != "precious" {
		t.Errorf("the file in the way is now %q, %v", b, err)
	}
	if _, err := os.Readlink(in("link")); err != nil {
		t.Errorf("the link in the way: %v", err)
	}
}

// TestStartTogether checks that one of several daemons that start on a stale socket gets it.
func TestStartTogether(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	for range 20 {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		ln.SetUnlinkOnClose(false)
		ln.Close()
		var mu sync.Mutex
		var winners []*Server
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				srv, _ := NewServer(Options{Path: path, Prober: prober.New(prober.Options{})})
				err := srv.Listen()
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					winners = append(winners, srv)
				} else if !errors.Is(err, ErrInUse) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for _, srv := range winners {
			srv.listener.Close()
			srv.file.remove()
		}
		if len(winners) != 1 {
			t.Fatalf("%d daemons have the socket", len(winners))
		}
	}
}

func TestDialErrors(t *testing.T) {
	dir := shortDir(t)
	stale := filepath.Join(dir, "stale")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	for _, path := range []string{filepath.Join(dir, "none"), stale} {
		if _, err := Dial(t.Context(), path); !errors.Is(err, ErrNotRunning) || !strings.Contains(err.Error(), "agentctl run") {
			t.Errorf("dial %s: %v", path, err)
		}
	}
	r := onSocket(t, Options{Token: "s3cret"})
	if _, err := Dial(t.Context(), r.srv.Addr()); err == nil || !strings.Contains(err.Error(), "unauthorized") {
		t.Errorf("dial with a wrong token: %v", err)
	}
	c, err := DialOptions{Token: "s3cret"}.Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()

	// Who accepts and says nothing is given up on.
	mute := filepath.Join(dir, "mute")
	if ln, err = net.ListenUnix("unix", &net.UnixAddr{Name: mute, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, mute); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dial of a mute daemon: %v", err)
	}
}

func TestClient(t *testing.T) {
	r := onSocket(t, Options{Version: "1.2.3", Status: func(context.Context) any { return map[string]int{"uptime_s": 7} }})
	c, err := Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if h := c.Hello(); h.ServerVersion != "1.2.3" || h.ProtocolVersion != 1 || !uuid4.MatchString(h.SessionID) {
		t.Errorf("hello says %+v", h)
	}
	s, err := c.Snapshot(t.Context(), "cpu", "memory", "disk", "load")
	if err != nil {
		t.Fatal(err)
	}
	want := &Snapshot{TS: s.TS, CPU: &CPU{12.5}, Memory: &Memory{16000, 2048}, Disk: &Disk{40.25}, Load: &Load{0.5, 0.25, 0.1}}
	if !reflect.DeepEqual(s, want) || time.Since(time.UnixMilli(s.TS)) > time.Minute {
		t.Errorf("got %+v, want %+v", s, want)
	}
	var st struct {
		UptimeS int `json:"uptime_s"`
	}
	if err := c.Status(t.Context(), &st); err != nil || st.UptimeS != 7 {
		t.Errorf("status: %+v, %v", st, err)
	}
	if names, err := c.Start(t.Context(), "memory", "cpu"); fmt.Sprint(names, err) != "[cpu mem] <nil>" {
		t.Errorf("start: %v, %v", names, err)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	res, err := c.SetConfig(t.Context(), Config{BaseIntervalMS: 2000, ModuleIntervals: map[string]int64{"memory": 4000}})
	if err != nil || res.BaseIntervalMS != 2000 || res.EffectiveIntervals["mem"] != 4000 || res.Persisted != nil {
		t.Errorf("set_config: %+v, %v", res, err)
	}
	if at, err := c.Burst(t.Context(), 100*time.Millisecond, 5*time.Second); err != nil || time.Until(at) > 5*time.Second || time.Until(at) < 0 {
		t.Errorf("burst until %v, %v", at, err)
	}
	if err := c.SubscribeMetrics(t.Context(), true); err != nil {
		t.Error(err)
	}
	var e *Error
	if err := c.GetConfig(t.Context(), nil); !errors.As(err, &e) || e.Code != CodeNotSupported {
		t.Errorf("get_config: %v", err)
	}
	if _, err := c.Snapshot(t.Context(), "gpu"); !errors.As(err, &e) || e.Code != CodeInvalidParams || e.Field != "modules" {
		t.Errorf("snapshot gpu: %v", err)
	}
	r.end()
	<-c.Done()
	if err := c.Status(t.Context(), &st); !errors.Is(err, ErrClosed) {
		t.Errorf("after the daemon's end: %v", err)
	}
}

func TestSnapshotOfFailingMachine(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		r.source.setFail(errors.New("proc is gone"))
		time.Sleep(2 * time.Second) // the last sample is too old by then
		if m := p.call("snapshot", ""); m.code() != CodeInternal || !strings.Contains(fmt.Sprint(m), "proc is gone") {
			t.Errorf("got %v, want an internal error with the reason", m)
		}
	})
}

func TestClientEvents(t *testing.T) {
	r := onSocket(t, Options{})
	events := make(chan Event, 100)
	c, err := DialOptions{OnEvent: func(e Event) { events <- e }}.Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Burst(t.Context(), 100*time.Millisecond, time.Minute); err != nil {
		t.Fatal(err)
	}
	for seq := uint64(0); seq < 5; { // one that waits may give way to a newer one
		var s Snapshot
		e := <-events
		if e.Method != EventMetrics {
			continue
		}
		if err := json.Unmarshal(e.Params, &s); err != nil || s.Seq <= seq || s.CPU == nil {
			t.Fatalf("after %d came %s, %v", seq, e.Params, err)
		}
		seq = s.Seq
	}
}

// TestTooManyClients checks that connection 17 gets an error, that the 16 continue, and that
// a connection which closes makes way for another at once.
func TestTooManyClients(t *testing.T) {
	r := onSocket(t, Options{})
	var clients []*Client
	for range MaxClients {
		c, err := Dial(t.Context(), r.srv.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
	}
	for range 3 {
		var e *Error
		if _, err := Dial(t.Context(), r.srv.Addr()); !errors.As(err, &e) || e.Code != CodeRateLimited {
			t.Errorf("client %d: %v", MaxClients+1, err)
		}
	}
	for i, c := range clients {
		if _, err := c.Snapshot(t.Context()); err != nil {
			t.Errorf("client %d: %v", i, err)
		}
	}
	clients[0].Close()
	for r.srv.Stats().Clients >= MaxClients { // the refused ones may still be closing
		runtime.Gosched()
	}
	c, err := Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if s := r.srv.Stats(); s.Accepted != MaxClients+1 || s.Busy != 3 {
		t.Errorf("got %+v", s)
	}
}

// TestGoroutines checks that an idle client costs three goroutines, two of them jrpc2's, and
// that all of them end.
func TestGoroutines(t *testing.T) {
	r := onSocket(t, Options{})
	for range 2 { // until all that stays has started
		c, err := Dial(t.Context(), r.srv.Addr())
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		for r.srv.Stats().Clients > 0 {
			runtime.Gosched()
		}
	}
	before := runtime.NumGoroutine()
	var conns []net.Conn
	for range MaxClients {
		nc := r.dial()
		nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`)))
		if _, err := nc.Read(make([]byte, 1<<10)); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, nc)
	}
	settle(t, before+3*MaxClients)
	for _, nc := range conns {
		nc.Close()
	}
	settle(t, before)
}

func settle(t *testing.T, want int) {
	t.Helper()
	for begun := time.Now(); runtime.NumGoroutine() > want; time.Sleep(time.Millisecond) {
		if time.Since(begun) > 20*time.Second {
			b := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, want %d\n%s", runtime.NumGoroutine(), want, b[:runtime.Stack(b, true)])
		}
	}
}

// TestTornAndMergedWrites sends two requests a byte at a time, then many in one write.
func TestTornAndMergedWrites(t *testing.T) {
	r := onSocket(t, Options{})
	p := r.peer().hello("")
	two := append(frame([]byte(`{"jsonrpc":"2.0","id":"a","method":"snapshot"}`)), frame([]byte(`{"jsonrpc":"2.0","id":"b","method":"stop"}`))...)
	for _, c := range two {
		if err := p.raw(string(c)); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.raw(string(bytes.Repeat(two, 50))); err != nil {
		t.Fatal(err)
	}
	p.ok("snapshot", "")
	got := p.take("")
	if len(got) != 102 {
		t.Fatalf("got %d answers, want 102", len(got))
	}
	for i, m := range got {
		if m["id"] != []string{"a", "b"}[i%2] || m["error"] != nil {
			t.Fatalf("answer %d is %v", i, m)
		}
	}
}

// TestBadFramingClosesThatConnection, and no other.
func TestBadFramingClosesThatConnection(t *testing.T) {
	r := onSocket(t, Options{})
	good := r.peer().hello("")
	for _, in := range []string{
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"Content-Length: 1048577\r\n\r\n",
		"Content-Length: -5\r\n\r\n",
		"{\"jsonrpc\":\"2.0\"}\n",
		strings.Repeat("a", 1<<20),
		"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
	} {
		p := r.peer().hello("")
		p.raw(in) // may fail: the server may be gone before the end
		if in[0] == '\x16' {
			p.nc.(*net.UnixConn).CloseWrite() // too short to be wrong yet
		}
		<-p.ended
		if got := p.take(""); in[0] != '\x16' && (len(got) != 1 || got[0].code() != CodeParse) {
			t.Errorf("%.20q gives %v", in, got)
		}
		good.ok("snapshot", "")
	}
}

func TestLimitsOfMessages(t *testing.T) {
	r := onSocket(t, Options{})
	p := r.peer().hello("")
	pad := func(n int) string {
		const head, tail = `{"jsonrpc":"2.0","id":"big",`, `"method":"stop"}`
		return head + strings.Repeat(" ", n-len(head)-len(tail)) + tail
	}
	if err := p.send(pad(MaxMessage)); err != nil {
		t.Fatal(err)
	}
	if m := p.call("snapshot", `{"modules":["`+strings.Repeat("x", MaxParams)+`"]}`); m.code() != CodeInvalidParams || m.field() != "params" {
		t.Errorf("long params give %v", m)
	}
	if got := p.take(""); len(got) != 1 || got[0]["id"] != "big" || got[0]["error"] != nil {
		t.Errorf("a message of %d bytes gives %v", MaxMessage, got)
	}
	p.send(pad(MaxMessage + 1))
	<-p.ended
}

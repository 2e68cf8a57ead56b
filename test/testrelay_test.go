package test

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/sqlitefile/sqlitefiletest"
)

// testRelay is a whole relay in this process, with its state in a directory of the test. It
// listens on 127.0.0.1, or on memory inside a synctest bubble, where minutes cost nothing.
type testRelay struct {
	t      testing.TB
	relay  *relay.Relay
	url    string
	addr   string
	dir    string // state directory
	logs   *buffer
	http   *http.Client
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
	agent  string            // a token of tenant default with the default scopes
	agents map[string]string // the same, by tenant
	stop   func() error      // stops the relay and returns what Run returned
	tls    *tls.Config       // how clients and devices dial; nil: plain

	virtual bool // the relay runs in a synctest bubble
}

// newTestRelay starts a relay on 127.0.0.1.
func newTestRelay(t testing.TB, edit ...func(*relay.Options)) *testRelay {
	t.Helper()
	var d net.Dialer
	return openTestRelay(t, nil, d.DialContext, edit)
}

// bubble runs f with a relay on an in-memory network, inside a synctest bubble. Its clock starts
// in 2026, because the bubble's default start is before every timestamp that the wire allows.
func bubble(t *testing.T, f func(t *testing.T, r *testRelay), edit ...func(*relay.Options)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)))
		// The relay's tickers keep a bubble alive in which nobody gets what he waits for.
		defer time.AfterFunc(24*time.Hour, func() { panic("the test waits for ever") }).Stop()
		ln := &memoryListener{conns: make(chan net.Conn), done: make(chan struct{})}
		f(t, openTestRelay(t, ln, ln.dial, edit))
	})
}

func openTestRelay(t testing.TB, ln net.Listener, dial func(context.Context, string, string) (net.Conn, error), edit []func(*relay.Options)) *testRelay {
	t.Helper()
	r := &testRelay{t: t, dir: stateDir(t), logs: new(buffer), dial: dial, agents: make(map[string]string), virtual: ln != nil}
	enc := zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig())
	// The devices' tools alone, unless a test wants more.
	opt := relay.Options{StateDir: r.dir, Listener: ln, Listen: "127.0.0.1:0", Version: "test", DisabledPlugins: []string{relay.PluginTickets, relay.PluginDirectory},
		NoMemoryTuning: true, Logger: zap.New(zapcore.NewCore(enc, zapcore.AddSync(r.logs), zapcore.DebugLevel))}
	for _, e := range edit {
		e(&opt)
	}
	r.dir = opt.StateDir
	var err error
	if opt.Listener == nil {
		if opt.Listener, err = net.Listen("tcp", opt.Listen); err != nil {
			t.Fatal(err)
		}
	}
	r.addr = opt.Listener.Addr().String()
	r.url = "http://" + r.addr
	if opt.TLSCert != "" {
		r.url = "https://" + r.addr
	}
	if r.relay, err = relay.Open(opt); err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{DialContext: dial, DisableCompression: true, MaxIdleConnsPerHost: 16}
	r.http = &http.Client{Transport: tr, Timeout: patience}
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	r.relay.OnReady(func() { close(ready) })
	go func() { ended <- r.relay.Run(ctx) }()
	<-ready
	r.stop = sync.OnceValue(func() error {
		tr.CloseIdleConnections()
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(r.within(30 * time.Second)):
			return errors.New("the relay did not end in time")
		}
	})
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("the relay ended with %v", err)
		}
	})
	r.agent = r.agentFor(auth.DefaultTenant)
	return r
}

// stateDir is a temporary directory for the state of a relay in this process: in memory, where the
// machine has /dev/shm. Such tests are about protocols, and there are hundreds of them, each of which
// would wait for the disk a dozen times.
func stateDir(t testing.TB) string {
	t.Helper()
	if parent := memoryDir(); parent != "" {
		if dir, err := os.MkdirTemp(parent, ""); err == nil {
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			return dir
		}
	}
	return t.TempDir()
}

// memoryDir has the state of all relays of this process.
var memoryDir = sync.OnceValue(sqlitefiletest.MemoryDir)

func (r *testRelay) mint(req auth.MintRequest) auth.Minted {
	r.t.Helper()
	m, err := r.relay.Store().Mint(context.Background(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return m[0]
}

// agentOf mints an agent token of a tenant; without scopes it has the default ones.
func (r *testRelay) agentOf(tenant string, scopes ...string) string {
	r.t.Helper()
	return r.mint(auth.MintRequest{Class: "agent", Tenant: tenant, Scopes: scopes}).Token
}

// agentFor is agentOf with the default scopes, one token for each tenant.
func (r *testRelay) agentFor(tenant string) string {
	r.t.Helper()
	if r.agents[tenant] == "" {
		r.agents[tenant] = r.agentOf(tenant)
	}
	return r.agents[tenant]
}

// forge signs a token with the relay's own key after edit changed its header or claims. A
// claim that edit sets to nil is left out.
func (r *testRelay) forge(edit func(header, claims map[string]any)) string {
	r.t.Helper()
	keys, err := filepath.Glob(filepath.Join(r.dir, "keys", "*.pem"))
	if err != nil || len(keys) != 1 {
		r.t.Fatalf("keys %v, %v", keys, err)
	}
	b, err := os.ReadFile(keys[0])
	if err != nil {
		r.t.Fatal(err)
	}
	block, _ := pem.Decode(b)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		r.t.Fatal(err)
	}
	now := time.Now().Unix()
	header := map[string]any{"alg": "EdDSA", "typ": "at+jwt", "kid": strings.TrimSuffix(filepath.Base(keys[0]), ".pem")}
	claims := map[string]any{"iss": r.relay.Store().Issuer(), "aud": r.relay.Store().Audience(), "sub": "forger",
		"tid": auth.DefaultTenant, "cls": auth.ClassAgent, "scope": manifest.ScopeCallReadOnly, "jti": manifest.NewULID(),
		"iat": now - 600, "nbf": now - 600, "exp": now + 600}
	edit(header, claims)
	for k, v := range claims {
		if v == nil {
			delete(claims, k)
		}
	}
	h, _ := json.Marshal(header)
	c, _ := json.Marshal(claims)
	signed := base64.RawURLEncoding.EncodeToString(h) + "." + base64.RawURLEncoding.EncodeToString(c)
	return signed + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(key.(ed25519.PrivateKey), []byte(signed)))
}

// answer is one HTTP answer, read whole.
type answer struct {
	status int
	header http.Header
	body   string
}

// code is the error code of the envelope, "" when the body is none.
func (a *answer) code() string {
	var e envelope
	if json.Unmarshal([]byte(a.body), &e) != nil {
		return ""
	}
	return e.Error.Code
}

type envelope struct {
	Error struct {
		Code         string           `json:"code"`
		Message      string           `json:"message"`
		Outcome      manifest.Outcome `json:"outcome"`
		Reason       string           `json:"reason"`
		Retryable    *bool            `json:"retryable"`
		RetryAfterMS int64            `json:"retry_after_ms"`
		TraceID      string           `json:"trace_id"`
	} `json:"error"`
}

// do sends one request. A header with an empty value is not sent.
func (r *testRelay) do(method, path string, body string, header map[string]string) *answer {
	r.t.Helper()
	a, err := r.tryRequest(method, path, strings.NewReader(body), header)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

func (r *testRelay) tryRequest(method, path string, body io.Reader, header map[string]string) (*answer, error) {
	req, err := http.NewRequest(method, r.url+path, body)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		switch {
		case v == "":
		case k == "Host":
			req.Host = v
		default:
			req.Header.Set(k, v)
		}
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	return &answer{resp.StatusCode, resp.Header, string(b)}, err
}

// headers of a valid unary call with the default token; changes override or remove some.
func (r *testRelay) headers(changes ...string) map[string]string {
	h := map[string]string{"Authorization": "Bearer " + r.agent, "Content-Type": "application/json", "Accept": "application/json"}
	for i := 0; i+1 < len(changes); i += 2 {
		h[changes[i]] = changes[i+1]
	}
	return h
}

// callRaw posts a body to /mcp/tools/call.
func (r *testRelay) callRaw(body string, changes ...string) *answer {
	r.t.Helper()
	return r.do(http.MethodPost, "/mcp/tools/call", body, r.headers(changes...))
}

// call makes a unary call of a tool with arguments as JSON text.
func (r *testRelay) call(tool, args string, changes ...string) *answer {
	r.t.Helper()
	return r.callRaw(`{"tool":"`+tool+`","arguments":`+args+`}`, changes...)
}

// wantRefusal checks that an answer is the envelope with this status and code.
func (r *testRelay) wantRefusal(a *answer, status int, code manifest.Code) {
	r.t.Helper()
	if a.status != status || a.code() != string(code) {
		r.t.Errorf("got %d %s, want %d %s", a.status, a.body, status, code)
		return
	}
	checkEnvelope(r.t, a)
}

// checkEnvelope: one shape, closed, ASCII, nothing else.
func checkEnvelope(t testing.TB, a *answer) {
	t.Helper()
	var e envelope
	dec := json.NewDecoder(strings.NewReader(a.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		t.Errorf("%q is not the envelope: %v", a.body, err)
		return
	}
	code := manifest.Code(e.Error.Code)
	retryable := code.Retryable()
	switch e.Error.Outcome {
	case manifest.NotSent:
		retryable = true // no code of another kind has this outcome
	case manifest.OutcomeUnknown:
		retryable = true // the tools of these tests read only
	}
	if code == manifest.NodeOffline && e.Error.Outcome == "" {
		t.Errorf("an offline answer without an outcome: %s", a.body)
	}
	switch {
	case !manifest.Code(e.Error.Code).Valid(), e.Error.Message == "", len(e.Error.TraceID) != 32,
		e.Error.Retryable == nil || *e.Error.Retryable != retryable:
		t.Errorf("not a good envelope: %s", a.body)
	case a.header.Get("Content-Type") != "application/json":
		t.Errorf("an envelope of type %q", a.header.Get("Content-Type"))
	}
	for _, c := range e.Error.Message {
		if c < 0x20 || c > 0x7e {
			t.Errorf("message %q is not printable ASCII", e.Error.Message)
		}
	}
}

// audit reads the audit log; every line is JSON with the fields of RFC-0005 §12, the address of the client
// and the target of a change only.
func (r *testRelay) audit() []map[string]string {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.dir, "audit.jsonl"))
	if err != nil {
		r.t.Fatal(err)
	}
	var lines []map[string]string
	for line := range strings.Lines(string(b)) {
		var m map[string]string
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			r.t.Fatalf("audit line %q: %v", line, err)
		}
		for k := range m {
			if !strings.Contains(" ts tenant actor address tool node_id target decision code reason trace_id ", " "+k+" ") {
				r.t.Errorf("audit line has a field %s", k)
			}
		}
		lines = append(lines, m)
	}
	return lines
}

// waitAudited waits for an audit line that has all of want ("key=value").
func (r *testRelay) waitAudited(want ...string) {
	r.t.Helper()
	var read int64 // size of the file when it was read last
	eventually(r.t, "audit line with "+strings.Join(want, " "), func() bool {
		info, err := os.Stat(filepath.Join(r.dir, "audit.jsonl"))
		if err != nil || info.Size() == read {
			return false
		}
		read = info.Size()
		return slices.ContainsFunc(r.audit(), func(line map[string]string) bool {
			return !slices.ContainsFunc(want, func(pair string) bool {
				k, v, _ := strings.Cut(pair, "=")
				return line[k] != v
			})
		})
	})
}

// within is how long a test waits for what takes d at most: d in virtual time. A busy machine
// stretches the real clock.
func (r *testRelay) within(d time.Duration) time.Duration {
	if r.virtual {
		return d
	}
	return max(d, patience)
}

// eventually waits until ok, for patience at most. It is for what nobody can be notified of, such as an
// answer of the relay that changes.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !poll(5*time.Millisecond, ok) {
		t.Fatalf("%s passed without: %s", patience, what)
	}
}

// poll calls ok at an interval until it is true. It gives up after patience.
func poll(interval time.Duration, ok func() bool) bool {
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(interval) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// memoryListener is a listener whose connections are in memory.
type memoryListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (m *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-m.conns:
		return c, nil
	case <-m.done:
		return nil, net.ErrClosed
	}
}

func (m *memoryListener) Close() error {
	m.once.Do(func() { close(m.done) })
	return nil
}

func (m *memoryListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8460} }

func (m *memoryListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	up, upEnd := net.Pipe()
	down, downEnd := net.Pipe()
	select {
	case m.conns <- &pipeConn{upEnd, down}:
		return &pipeConn{downEnd, up}, nil
	case <-m.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// pipeConn is a connection of two one-way pipes, so that one way can be closed alone.
type pipeConn struct{ r, w net.Conn }

func (d *pipeConn) Read(b []byte) (int, error)  { return d.r.Read(b) }
func (d *pipeConn) Write(b []byte) (int, error) { return d.w.Write(b) }
func (d *pipeConn) CloseWrite() error           { return d.w.Close() }
func (d *pipeConn) Close() error                { return errors.Join(d.r.Close(), d.w.Close()) }
func (d *pipeConn) LocalAddr() net.Addr         { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8460} }
func (d *pipeConn) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 40000}
}
func (d *pipeConn) SetReadDeadline(t time.Time) error  { return d.r.SetReadDeadline(t) }
func (d *pipeConn) SetWriteDeadline(t time.Time) error { return d.w.SetWriteDeadline(t) }
func (d *pipeConn) SetDeadline(t time.Time) error {
	return errors.Join(d.r.SetReadDeadline(t), d.w.SetWriteDeadline(t))
}

//go:build !agentctl_omit_relay

package main

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"agentctl/relay/gateway"
)

// Builds without the gateway know its paths and its port too.
func TestEventsKnown(t *testing.T) {
	noEventsEnv(t)
	e, err := gateway.FromEnv(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	emit := newEventsEmit().Flag("url").DefValue
	if eventsStreamPath != gateway.StreamPath || eventsIngestPath != gateway.IngestPath || emit+eventsIngestPath != e.IngestURL {
		t.Errorf("the commands know %s, %s and %s", eventsStreamPath, eventsIngestPath, emit)
	}
}

func TestEventsServeRefuses(t *testing.T) {
	noEventsEnv(t)
	for _, tt := range []struct {
		env  map[string]string
		args []string
		code int
		says string
	}{
		{nil, []string{"--listen", "0.0.0.0:0"}, 2, "MCP_SSE_AUTH_TOKEN"},
		{map[string]string{"MCP_SSE_HOST": "0.0.0.0"}, nil, 2, "MCP_SSE_AUTH_TOKEN"},
		{map[string]string{"MCP_SSE_PORT": "x", "MCP_SSE_RING_MAX": "0"}, nil, 2, "MCP_SSE_RING_MAX"},
		{nil, []string{"--allow-origin", "https://a.example/path"}, 2, "--allow-origin: has"},
		{nil, []string{"--tls-cert", "cert.pem"}, 2, "go together"},
		{nil, []string{"--tls-cert", "no.pem", "--tls-key", "no.pem"}, 1, "no.pem"},
		{nil, []string{"--log-level", "loud"}, 2, "the levels are"},
		{map[string]string{"MCP_SSE_AUTH_TOKEN_FILE": "/no/such/file"}, nil, 2, "MCP_SSE_AUTH_TOKEN_FILE"},
	} {
		for k, v := range tt.env {
			t.Setenv(k, v)
		}
		code, out, errs := eventsCommand("", append([]string{"serve"}, tt.args...)...)
		if code != tt.code || out != "" || !strings.Contains(errs, tt.says) {
			t.Errorf("%v %v: exit %d, %q %q", tt.env, tt.args, code, out, errs)
		}
		for k := range tt.env {
			t.Setenv(k, "")
		}
	}
}

// A service gets its tokens as systemd credentials; a variable goes before them.
func TestEventsServeCredentials(t *testing.T) {
	noEventsEnv(t)
	dir := t.TempDir()
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	for name, v := range map[string]string{"mcp_sse_auth_token": "sub", "mcp_sse_ingest_token": "in\n", "mcp_sse_hmac_secret": "key"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("MCP_SSE_INGEST_TOKEN", "own")
	e, err := gatewayEnv()
	if err != nil || e.SubscribeToken != "sub" || e.IngestToken != "own" || string(e.HMACSecret) != "key" {
		t.Errorf("got %q %q %q, %v", e.SubscribeToken, e.IngestToken, e.HMACSecret, err)
	}
}

// gate holds up who writes through it until it is opened.
type gate struct {
	open chan struct{}
	w    io.Writer
}

func (g gate) Write(p []byte) (int, error) {
	<-g.open
	return g.w.Write(p)
}

// A tail that did not read for so long that the gateway dropped events asks for them again:
// in the end it has each once, in order.
func TestEventsTailCatchesUp(t *testing.T) {
	noEventsEnv(t)
	const events = 800 // of 8 KiB: more than what the sockets and the gateway's queue hold
	o := gateway.Options{Listen: "127.0.0.1:0", Ring: 2 * events, Shards: 1}
	g := serveGateway(t, o)
	var out, say bytes.Buffer
	small := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 16<<10) })
	}}
	tl := tail{out: gate{make(chan struct{}), &out}, say: &say, client: &http.Client{Transport: &http.Transport{DialContext: small.DialContext}}, count: events}
	tl.url, _ = eventsURL("http://"+g.Addr(), eventsStreamPath)
	var wg sync.WaitGroup
	var err error
	wg.Go(func() { err = tl.run(t.Context()) })
	waitFor(t, "the tail", func() bool { return g.Stats().Subscribers == 1 })
	first := g.Stats().LastID + 1
	for n := range uint64(events) {
		g.Emit("default", "t", strings.Repeat("x", 8<<10))
		waitFor(t, "room", func() bool { st := g.Stats(); return st.EmitLost == 0 && st.Delivered+st.Dropped+16 >= n })
	}
	waitFor(t, "a loss", func() bool { return g.Stats().Dropped > 0 })
	close(tl.out.(gate).open)
	wg.Wait()
	if err != nil || !strings.Contains(say.String(), "asking for them again") {
		t.Errorf("%v, stderr %q", err, say.String())
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for i, line := range lines {
		if want := `{"id":` + strconv.FormatUint(first+uint64(i), 10) + `,`; !strings.HasPrefix(line, want) {
			t.Fatalf("line %d is %.40s, want %s", i+1, line, want)
		}
	}
	if len(lines) != events {
		t.Errorf("%d events, want %d", len(lines), events)
	}
}

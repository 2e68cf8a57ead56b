package test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/gateway"
	"agentctl/relay/mcp/stdio"
)

// TestRefusalEvent: subscribers with kernel:admin get an event for each refused call, without
// its arguments; others may not subscribe.
func TestRefusalEvent(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, func(o *relay.Options) { o.SSE = &gateway.Options{Listen: "127.0.0.1:0"} })
	listen := func(token string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.relay.SSEURL()+"?topics=audit", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := r.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}
	if resp := listen(r.agent); resp.StatusCode != http.StatusForbidden {
		t.Errorf("an agent listens to audit: %s", resp.Status)
	}
	events := bufio.NewScanner(listen(r.admin()).Body)
	tool := "sysecho." + manifest.NewNodeID() + ".echo.invoke"
	r.call(tool, `{"message":"CANARY"}`)
	for events.Scan() {
		data, ok := strings.CutPrefix(events.Text(), "data: ")
		if !ok {
			continue
		}
		if !strings.Contains(data, `{"decision":"deny","code":"E_SAFETY_DENIED"`) || !strings.Contains(data, tool) || strings.Contains(data, "CANARY") {
			t.Error(data)
		}
		return
	}
	t.Error("the stream ended")
}

// TestStalledEventClients: fifty clients of the event gateway that never read hold up
// neither an MCP client on stdio nor a client that reads.
func TestStalledEventClients(t *testing.T) {
	t.Parallel()
	const events = 400 // of 8 KiB: far more than the kernel's buffers take
	r := newTestRelay(t, func(o *relay.Options) {
		o.SSE = &gateway.Options{Listen: "127.0.0.1:0", Ring: 10_000, OpenIngestRate: 1e6, IngestRate: 1e6}
	})
	token := r.agentOf(auth.DefaultTenant, manifest.ScopeEventsSubscribe, manifest.ScopeEventsIngest)
	for range 50 {
		nc := r.eventStream(token, "load")
		_ = nc.(*net.TCPConn).SetReadBuffer(4096)
	}
	reader := r.eventStream(token, "load")
	_ = reader.SetReadDeadline(time.Now().Add(patience))
	lines := bufio.NewScanner(reader)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), ": stream start") {
	}
	bridge := r.stdioBridge()
	bridge.ask(`{"jsonrpc":"2.0","id":"i","method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`)

	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		body := `{"topic":"load","data":"` + strings.Repeat("x", 8<<10) + `"}`
		for range events {
			if !r.ingest(token, body) {
				return
			}
		}
	})
	var took []time.Duration // of the answers while events are sent
	for n, got := 0, 0; got < events; n++ {
		began := time.Now()
		if m := bridge.ask(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, n)); m["error"] != nil {
			t.Fatal(m)
		}
		took = append(took, time.Since(began))
		for i := 0; i < 8 && got < events; i++ { // eight events for each answer
			for lines.Scan() && !strings.HasPrefix(lines.Text(), "event: load") {
			}
			if lines.Err() != nil {
				t.Fatalf("the reader got %d of %d events: %v", got, events, lines.Err())
			}
			got++
		}
	}
	slices.Sort(took)
	if median := took[len(took)/2]; median > 2*time.Second { // a busy machine delays some
		t.Errorf("half of the answers on stdio took %s or more, want less than 2 s", median)
	}
}

// eventStream subscribes to topics of the event gateway, and reads nothing.
func (r *testRelay) eventStream(token, topics string) net.Conn {
	r.t.Helper()
	u, err := url.Parse(r.relay.SSEURL())
	if err != nil {
		r.t.Fatal(err)
	}
	nc, err := net.Dial("tcp", u.Host)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = nc.Close() })
	if _, err := fmt.Fprintf(nc, "GET %s?topics=%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", u.Path, topics, u.Host, token); err != nil {
		r.t.Fatal(err)
	}
	return nc
}

// ingest publishes one event, and reports whether the gateway accepted it. It may run outside of the
// test's goroutine.
func (r *testRelay) ingest(token, body string) bool {
	req, err := http.NewRequest(http.MethodPost, strings.TrimSuffix(r.relay.SSEURL(), gateway.StreamPath)+gateway.IngestPath, strings.NewReader(body))
	if err != nil {
		r.t.Error(err)
		return false
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Errorf("ingest: %v", err)
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body)
	if resp.StatusCode != http.StatusAccepted {
		r.t.Errorf("ingest: %s", resp.Status)
	}
	return resp.StatusCode == http.StatusAccepted
}

// stdioBridge is the bridge of 'agentctl mcp' in this process, with its client's end.
type stdioBridge struct {
	t       testing.TB
	in      io.Writer
	answers *bufio.Scanner
}

func (r *testRelay) stdioBridge() *stdioBridge {
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		token := func(context.Context, string) (string, error) { return r.agent, nil }
		_ = stdio.Serve(context.Background(), inR, outW, stdio.Options{URL: r.url + "/mcp", Client: r.http, Token: token})
		_ = outW.Close()
	}()
	r.t.Cleanup(func() {
		_ = inW.Close()
		_ = outR.Close() // an answer that nobody reads does not hold up its end
		<-done
	})
	return &stdioBridge{r.t, inW, bufio.NewScanner(outR)}
}

// ask sends a request and returns its answer, past notifications.
func (b *stdioBridge) ask(request string) map[string]any {
	b.t.Helper()
	if _, err := io.WriteString(b.in, request+"\n"); err != nil {
		b.t.Fatal(err)
	}
	for b.answers.Scan() {
		var m map[string]any
		if json.Unmarshal(b.answers.Bytes(), &m) == nil && m["id"] != nil {
			return m
		}
	}
	b.t.Fatal("the bridge ended")
	return nil
}

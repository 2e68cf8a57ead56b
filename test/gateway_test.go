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
	r := newTestRelay(t, func(o *relay.Options) {
		o.SSE = &gateway.Options{Listen: "127.0.0.1:0", Ring: 10_000, OpenIngestRate: 1e6, IngestRate: 1e6}
	})
	token := r.agentOf(auth.DefaultTenant, manifest.ScopeEventsSubscribe, manifest.ScopeEventsIngest)
	u, err := url.Parse(r.relay.SSEURL())
	if err != nil {
		t.Fatal(err)
	}
	head := "GET " + u.Path + "?topics=load HTTP/1.1\r\nHost: " + u.Host + "\r\nAuthorization: Bearer " + token + "\r\n\r\n"
	for range 50 {
		nc, err := net.Dial("tcp", u.Host)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
		_ = nc.(*net.TCPConn).SetReadBuffer(4096)
		if _, err := io.WriteString(nc, head); err != nil {
			t.Fatal(err)
		}
	}
	reader, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reader.Close() })
	if _, err := io.WriteString(reader, head); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(reader)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), ": stream start") {
	}

	const events = 400 // of 8 KiB: far more than the kernel's buffers take
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		body := `{"topic":"load","data":"` + strings.Repeat("x", 8<<10) + `"}`
		for range events {
			req, err := http.NewRequest(http.MethodPost, strings.TrimSuffix(r.relay.SSEURL(), gateway.StreamPath)+gateway.IngestPath, strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Authorization", "Bearer "+token)
			resp, err := r.http.Do(req)
			if err != nil || resp.StatusCode != http.StatusAccepted {
				t.Errorf("ingest: %v %v", resp, err)
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	})

	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	wg.Go(func() {
		_ = stdio.Serve(context.Background(), inR, outW, stdio.Options{URL: r.url + "/mcp", Client: r.http, Token: func(context.Context, string) (string, error) { return r.agent, nil }})
		outW.Close()
	})
	defer inW.Close()
	answers := bufio.NewScanner(outR)
	var took []time.Duration // of the answers while events are sent
	ask := func(msg string) map[string]any {
		t.Helper()
		begin := time.Now()
		if _, err := io.WriteString(inW, msg+"\n"); err != nil {
			t.Fatal(err)
		}
		for answers.Scan() {
			var m map[string]any
			if json.Unmarshal(answers.Bytes(), &m) == nil && m["id"] != nil {
				took = append(took, time.Since(begin))
				return m
			}
		}
		t.Fatal("stdio ended")
		return nil
	}
	ask(`{"jsonrpc":"2.0","id":"i","method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`)
	got := 0
	deadline := time.Now().Add(patience)
	took = nil
	_ = reader.SetReadDeadline(deadline)
	for n := 0; got < events; n++ {
		if m := ask(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, n)); m["error"] != nil {
			t.Fatal(m)
		}
		for i := 0; i < 8 && got < events; i++ {
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
		t.Errorf("half of the answers on stdio took %s or more", median)
	}
}

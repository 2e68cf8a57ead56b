package mcp

import (
	"context"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/kernel"
)

// TestStalledReader: of many readers in both eras one never reads. The others get every
// notification, and the stalled one is cut.
func TestStalledReader(t *testing.T) {
	e := newEnv(t, Options{}, func(e *env) {
		e.conn = func(ctx context.Context, c net.Conn) context.Context {
			_ = c.(*net.TCPConn).SetWriteBuffer(4096) // so that a stall is soon felt
			return ctx
		}
	})
	e.load(newBoard("default", nodeA))
	addr := e.srv.Listener.Addr().String()
	const readers = stalledReaderPeers
	var streams []<-chan map[string]any
	listen := `{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{` + modernMeta + `,"notifications":{"toolsListChanged":true,"resourcesListChanged":true}}}`
	for i := range readers {
		var d net.Dialer
		if i == 0 {
			d.Control = func(_, _ string, raw syscall.RawConn) error { // before the first window is offered
				return raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
			}
		}
		c := dialWith(t, d, addr)
		if i == 0 {
			id := e.initialize("")
			if _, err := fmt.Fprintf(c.c, "GET /mcp HTTP/1.1\r\nHost: %s\r\nAccept: text/event-stream\r\nMcp-Protocol-Version: 2025-11-25\r\nMcp-Session-Id: %s\r\n\r\n", addr, id); err != nil {
				t.Fatal(err)
			}
			continue // and never reads
		}
		if i%2 == 0 {
			streams = append(streams, c.get("default/anybody", e.initialize("")))
			continue
		}
		s := c.stream("Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: subscriptions/listen\r\n", listen)
		wait(t, "acknowledgement", s)
		streams = append(streams, s)
	}
	until(t, "all streams", func() bool { return e.listeners("default") == readers })
	e.h.mu.RLock()
	ten := e.h.tenants["default"]
	e.h.mu.RUnlock()
	var slowest time.Duration
	rounds := 0
	for ; e.h.Stats().StalledStreams == 0; rounds++ {
		if rounds > 5000 {
			t.Fatal("the stalled reader is never cut")
		}
		start := time.Now()
		ten.notify(t.Context(), kernel.Change{Tools: true, Resources: true}, nil)
		for i, s := range streams {
			for range 2 {
				if m := wait(t, fmt.Sprintf("notification of reader %d in round %d", i, rounds), s); m["method"] == nil {
					t.Fatalf("reader %d got %v", i, m)
				}
			}
		}
		slowest = max(slowest, time.Since(start))
	}
	until(t, "end of the stalled stream", func() bool { return e.h.Stats().Streams == readers-1 })
	if s := e.h.Stats(); s.StalledStreams != 1 {
		t.Errorf("stats %+v, want one cut", s)
	}
	t.Logf("cut after %d rounds; the slowest round of the others took %v", rounds, slowest)
}

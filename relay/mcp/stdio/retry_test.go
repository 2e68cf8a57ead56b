package stdio

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// scripted is a server that answers initialize and tools/list, and calls in the ways of a list.
type scripted struct {
	mu    sync.Mutex
	calls []string // bodies
	ways  []string // one for each call; the last one repeats
}

const (
	hangUp   = "hang up"
	cutShort = "cut short" // in the middle of the answer
	begun    = "begun"     // a progress, and then a cut
)

// envelope is the relay's answer to a call that it could not finish.
func envelopeOf(outcome, reason string, retryable bool) string {
	return fmt.Sprintf(`{"error":{"code":"E_NODE_OFFLINE","message":"m","outcome":%q,"reason":%q,"retryable":%v}}`, outcome, reason, retryable)
}

func toolError(envelope string) string {
	return `{"jsonrpc":"2.0","id":7,"result":{"content":[],"isError":true,"structuredContent":` + envelope + `}}`
}

const good = `{"jsonrpc":"2.0","id":7,"result":{"content":[]}}`

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.Method == http.MethodGet:
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	case strings.Contains(string(body), `"initialize"`):
		w.Header().Set("Mcp-Session-Id", "s")
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":"i","result":{"protocolVersion":"2025-11-25"}}`)
		return
	case strings.Contains(string(body), `"tools/list"`):
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":2,"result":{"tools":[{"name":"reads","annotations":{"readOnlyHint":true}},{"name":"writes","annotations":{"readOnlyHint":false}},{"name":"silent"}]}}`)
		return
	case !strings.Contains(string(body), `"id":7`):
		w.WriteHeader(http.StatusAccepted)
		return
	}
	s.mu.Lock()
	way := s.ways[min(len(s.calls), len(s.ways)-1)]
	s.calls = append(s.calls, string(body))
	s.mu.Unlock()
	switch way {
	case hangUp, cutShort, begun:
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		switch way {
		case cutShort:
			_, _ = buf.WriteString("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n: ok\n\n\r\n")
		case begun:
			const progress = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{}}\n\n"
			_, _ = fmt.Fprintf(buf, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(progress), progress)
		}
		_ = buf.Flush()
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	default:
		status, answer, ok := strings.Cut(way, " ")
		if !ok || status != "503" {
			status, answer = "200", way
		}
		w.Header().Set("Content-Type", "application/json")
		if status == "503" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = io.WriteString(w, answer)
	}
}

// TestRetry: what happens to a call when the relay restarts or the connection breaks.
func TestRetry(t *testing.T) {
	stopping := "503 " + envelopeOf("not_sent", "stopping", true)
	tests := []struct {
		name, method, tool string
		ways               []string
		calls              int
		want               string // in the answer
	}{
		{"reads, connection lost", "tools/call", "reads", []string{hangUp, good}, 2, `"result"`},
		{"reads, answer cut short", "tools/call", "reads", []string{cutShort, good}, 2, `"result"`},
		{"reads, lost twice", "tools/call", "reads", []string{hangUp, hangUp, good}, 2, `"error"`},
		{"reads, its client has got something", "tools/call", "reads", []string{begun, good}, 1, `"error"`},
		{"writes, connection lost", "tools/call", "writes", []string{hangUp, good}, 1, `"error"`},
		{"without a hint, connection lost", "tools/call", "silent", []string{hangUp, good}, 1, `"error"`},
		{"not listed, connection lost", "tools/call", "unknown", []string{hangUp, good}, 1, `"error"`},
		{"a method that reads", "resources/read", "", []string{hangUp, good}, 2, `"result"`},
		{"writes, refused while stopping", "tools/call", "writes", []string{stopping, stopping, good}, 3, `"result"`},
		{"writes, cut by the stop", "tools/call", "writes", []string{toolError(envelopeOf("unknown", "stopping", false)), good}, 1, `"outcome":"unknown"`},
		{"reads, cut by the stop", "tools/call", "silent", []string{toolError(envelopeOf("unknown", "stopping", true)), good}, 2, `"content":[]}`},
		{"board not back yet", "tools/call", "writes", []string{stopping, toolError(envelopeOf("not_sent", "offline", true)), good}, 3, `"content":[]}`},
		{"board offline, no restart", "tools/call", "reads", []string{toolError(envelopeOf("not_sent", "offline", true)), good}, 1, `"reason":"offline"`},
		{"board lost, no restart", "tools/call", "reads", []string{toolError(envelopeOf("unknown", "in_doubt", true)), good}, 1, `"reason":"in_doubt"`},
		{"cut as a JSON-RPC error", "tools/call", "reads", []string{`{"jsonrpc":"2.0","id":7,"error":{"code":-31503,"message":"m","data":` + envelopeOf("unknown", "stopping", false) + `}}`, good}, 2, `"result"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := &scripted{ways: tt.ways}
			srv := httptest.NewServer(s)
			defer srv.Close()
			c := newClient(t, Options{URL: srv.URL})
			c.send(initialize)
			c.until(`"id":"i"`)
			c.send(`{"jsonrpc":"2.0","id":2,"method":"tools/list"}`)
			c.until(`"id":2`)
			c.send(`{"jsonrpc":"2.0","id":7,"method":"` + tt.method + `","params":{"name":"` + tt.tool + `","uri":"a:b"}}`)
			if line := c.until(`"id":7`); !strings.Contains(line, tt.want) {
				t.Errorf("answer %s, want %s", line, tt.want)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if len(s.calls) != tt.calls {
				t.Errorf("%d calls, want %d", len(s.calls), tt.calls)
			}
		})
	}
}

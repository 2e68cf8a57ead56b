package eventscmd

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli/clitest"
)

// eventsCommand runs `agentctl events ...` and returns its exit code and what it printed.
func eventsCommand(t *testing.T, stdin string, args ...string) (code int, out, errs string) {
	t.Helper()
	return clitest.Run(t, NewClient(func(name string) *cobra.Command { return &cobra.Command{Use: name} }), stdin, args...)
}

// A tail asks for the events that it lacks, whatever ends its streams, and reports what is lost.
func TestEventsTailResumes(t *testing.T) {
	clitest.HideEnvironment(t)
	visits := []struct {
		lastEventID string // that the tail sends
		status      int
		stream      string
	}{
		{"", 200, ": stream start id=101\n\n"}, // ends before any event came
		{"100", 503, `{"error":{"code":"E_INTERNAL","message":"stopping"}}`},
		{"100", 200, ": stream start id=101\n\nid: 101\nevent: a\ndata: {\"n\":1}\n\nevent: heartbeat\ndata: {\"ts\":1}\n\n" +
			"event: gateway/reset\ndata: {\"requested\":101,\"oldest\":104,\"dropped\":2}\n\nid: 104\nevent: a\ndata: 4\n\n"},
		{"101", 200, ": stream start id=105\n\nevent: gateway/reset\ndata: {\"requested\":101,\"oldest\":103}\n\n" +
			"id: 103\nevent: a/b\ndata: [3]\ndata: {\"sig\":\"00\"}\n\nid: 104\nevent: a\nda"},
		{"103", 200, ": stream start id=105\n\nid: 104\nevent: a\ndata: no JSON\n\nid: 105\nevent: a\ndata: 5\n\n"},
	}
	var mu sync.Mutex
	n := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if n >= len(visits) {
			t.Errorf("visit %d", n+1)
			return
		}
		v := visits[n]
		n++
		if got := r.Header.Get("Last-Event-ID"); got != v.lastEventID {
			t.Errorf("visit %d resumes after %q, want %q", n, got, v.lastEventID)
		}
		if r.URL.Path != client.StreamPath || r.URL.RawQuery != "topics=a%2Ca%2F%2A" {
			t.Errorf("visit %d goes to %s", n, r.URL)
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(v.status)
		_, _ = io.WriteString(w, v.stream)
	}))
	defer srv.Close()
	code, out, errs := eventsCommand(t, "", "tail", "--url", srv.URL, "--topics", "a,a/*", "--count", "3", "--for", "20s")
	want := `{"id":101,"topic":"a","data":{"n":1}}
{"id":103,"topic":"a/b","data":[3],"signature":{"sig":"00"}}
{"id":104,"topic":"a","data":"no JSON"}
`
	if code != 0 || out != want || n != len(visits) {
		t.Errorf("exit %d after %d visits\n%s\n%s", code, n, out, errs)
	}
	for _, s := range []string{"too slow for 2 events", "no longer has what came after 101", "the next is 103", "E_INTERNAL", "(EOF); connecting again\n", "connected again"} {
		if !strings.Contains(errs, s) {
			t.Errorf("stderr lacks %q:\n%s", s, errs)
		}
	}
}

// A stream that breaks before its first event is resumed at the id in its first line.
func TestEventsTailFirstLine(t *testing.T) {
	clitest.HideEnvironment(t)
	var resumed []string // Last-Event-ID of each stream
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resumed = append(resumed, r.Header.Get("Last-Event-ID"))
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, ": stream start id=8\n\n")
		if len(resumed) == 1 {
			return // which ends the stream
		}
		_, _ = io.WriteString(w, "id: 8\nevent: a\ndata: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	defer srv.Close()
	code, out, errs := eventsCommand(t, "", "tail", "--url", srv.URL, "--count", "1", "--for", "20s")
	if code != 0 || !strings.Contains(out, `"id":8`) {
		t.Errorf("exit %d, printed %q: %s; want event 8", code, out, errs)
	}
	if want := []string{"", "7"}; !slices.Equal(resumed, want) {
		t.Errorf("the streams resume after %q, want %q", resumed, want)
	}
}

// Each way in which a tail ends has its exit code, and its next step.
func TestEventsTailEnds(t *testing.T) {
	clitest.HideEnvironment(t)
	answer := func(status int, body string) string {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "" && r.Header.Get("Authorization") != "Bearer s3cret" {
				t.Errorf("the token is %q", r.Header.Get("Authorization"))
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}))
		t.Cleanup(srv.Close)
		return srv.URL
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	denied := `{"error":{"code":"E_SAFETY_DENIED","message":"the token is not good for this"}}`
	tests := []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no token", []string{"--url", answer(401, denied)}, 4, "--token-file"},
		{"bad token", []string{"--url", answer(401, denied), "--token-file", file}, 4, "token create --scope events:subscribe"},
		{"forbidden", []string{"--url", answer(403, denied)}, 4, "E_SAFETY_DENIED"},
		{"another server", []string{"--url", answer(200, "hello")}, 1, "is this the event gateway"},
		{"not found", []string{"--url", answer(404, "nope")}, 1, "is this the event gateway"},
		{"nobody", []string{"--url", "http://127.0.0.1:1"}, 3, "agentctl events serve"},
		{"in the clear", []string{"--url", "http://events.example", "--token-file", file}, 2, "in the clear"},
		{"no address", []string{"--url", "events.example"}, 2, "not of the form"},
		{"no id", []string{"--since", "yesterday"}, 2, "--since"},
		{"two addresses", []string{"--url", "http://127.0.0.1:1", "--relay", "http://127.0.0.1:1"}, 2, "either"},
		{"a table", []string{"-o", "yaml"}, 2, "-o ndjson"},
		{"nothing in time", []string{"--url", answer(503, "{}"), "--for", "50ms", "--count", "1"}, 7, "0 of 1"},
	}
	for _, tt := range tests {
		code, out, errs := eventsCommand(t, "", append([]string{"tail"}, tt.args...)...)
		if code != tt.code || out != "" || !strings.Contains(errs, tt.says) {
			t.Errorf("%s: exit %d, want %d: %q %q", tt.name, code, tt.code, out, errs)
		}
	}
}

// What comes off the wire cannot act on the terminal.
func TestPrintEvent(t *testing.T) {
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	if err := printEvent(cmd, client.Event{ID: "5", Topic: "a\x1b[2J", Data: []byte("{\"x\":\"\x1b]0;y\x07\"}")}, true); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); strings.ContainsAny(got, "\x1b\x07") || !strings.HasSuffix(got, `  5  a?[2J  {"x":"?]0;y?"}`+"\n") {
		t.Errorf("printed %q", got)
	}
}

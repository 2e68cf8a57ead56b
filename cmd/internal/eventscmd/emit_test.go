package eventscmd

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/cli/clitest"
)

// An event goes where MCP_SSE_INGEST_URL says, with the token.
func TestEventsEmit(t *testing.T) {
	clitest.HideEnvironment(t)
	var got []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = append(got, r.URL.Path+" "+r.Header.Get("Authorization")+" "+strings.TrimSpace(string(b)))
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, `{"id":7352863948800001}`)
	}))
	defer srv.Close()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("from-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("MCP_SSE_INGEST_URL", srv.URL+"/somewhere")
	t.Setenv("MCP_SSE_AUTH_TOKEN", "subscriber")
	runs := []struct {
		stdin string
		args  []string
		want  string
	}{
		{"", []string{"a/b", `{"x": 1}`}, `/somewhere Bearer subscriber {"data":{"x":1},"topic":"a/b"}`},
		{"[1]\n", []string{"a", "-", "--url", srv.URL}, client.IngestPath + ` Bearer subscriber {"data":[1],"topic":"a"}`},
		{"", []string{"a", `"<é>"`, "--token-file", file}, `/somewhere Bearer from-file {"data":"<é>","topic":"a"}`},
	}
	for i, r := range runs {
		code, out, errs := eventsCommand(t, r.stdin, append([]string{"emit", "-o", "ndjson"}, r.args...)...)
		if code != 0 || out != "{\"id\":7352863948800001}\n" || errs != "" || len(got) != i+1 || got[i] != r.want {
			t.Errorf("run %d: exit %d, %q %q, posted %q", i+1, code, out, errs, got)
		}
	}
	t.Setenv("MCP_SSE_INGEST_TOKEN_FILE", file)
	if code, out, errs := eventsCommand(t, "", "emit", "a", "1"); code != 0 || out+errs != "" || !strings.Contains(got[len(got)-1], "Bearer from-file") {
		t.Errorf("exit %d, %q %q, posted %q", code, out, errs, got[len(got)-1])
	}
}

// Whatever fails, emit returns after about a second and exits with 0; with --strict the exit
// code reports the failure.
func TestEventsEmitNeverFails(t *testing.T) {
	clitest.HideEnvironment(t)
	gone := make(chan struct{})
	hung := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-r.Context().Done():
		case <-gone:
		}
	}))
	t.Cleanup(hung.Close)
	t.Cleanup(func() { close(gone) }) // first
	answers := func(status int) string {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
		t.Cleanup(srv.Close)
		return srv.URL
	}
	for _, tt := range []struct {
		name, url, data string
		strict          int
	}{
		{"hung", hung.URL, "1", 7},
		{"dead", "http://127.0.0.1:1", "1", 3},
		{"no JSON", "http://127.0.0.1:1", "{", 2},
		{"no address", "nowhere", "1", 2},
		{"denied", answers(401), "1", 4},
		{"busy", answers(429), "1", 1},
		{"another server", answers(200), "1", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for strict, want := range map[string]int{"--strict=false": 0, "--strict": tt.strict} {
				t.Run(strict, func(t *testing.T) {
					t.Parallel()
					begin := time.Now()
					code, out, errs := eventsCommand(t, "", "emit", "a", tt.data, "--url", tt.url, strict)
					if code != want || out != "" || errs == "" {
						t.Errorf("exit %d, want %d: %q %q", code, want, out, errs)
					}
					if d := time.Since(begin); d > 3*emitTimeout {
						t.Errorf("it took %s, want about %s", d, emitTimeout)
					}
				})
			}
		})
	}
}

// An event that is too large is named as such: the part that was read is no JSON, whatever it is part of.
func TestEventsEmitTooLarge(t *testing.T) {
	clitest.HideEnvironment(t)
	large := `"` + strings.Repeat("x", maxEmitStdin) + `"`
	if code, _, errs := eventsCommand(t, large, "emit", "a", "-", "--strict"); code != cli.ExitUsage || !strings.Contains(errs, "more than 256 KiB") {
		t.Errorf("exit %d, %q", code, errs)
	}
}

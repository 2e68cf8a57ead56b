//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/gateway"
)

const eventsDocs = "../../../docs/events.md"

func eventsDoc(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(eventsDocs)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// docFile writes the block of the page that begins with the file's name, and returns its path.
func docFile(t *testing.T, name string) string {
	t.Helper()
	m := regexp.MustCompile("(?ms)^```\\w+\n((?:#|//) " + regexp.QuoteMeta(name) + "\\b.*?)^```$").FindStringSubmatch(eventsDoc(t))
	if m == nil {
		t.Fatalf("%s has no block %s", eventsDocs, name)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(m[1]), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func needs(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%s is not installed", p)
		}
	}
}

// serveGateway serves until the test ends; addr is where.
func serveGateway(t *testing.T, o gateway.Options) (g *gateway.Gateway, addr string) {
	t.Helper()
	g, err := gateway.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan string, 1), make(chan error, 1)
	g.OnReady(func(addr string) { ready <- addr })
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return g, <-ready
}

// liveGateway serves with tokens and a secret, and returns the variables that the page's
// scripts use.
func liveGateway(t *testing.T) (*gateway.Gateway, []string) {
	t.Helper()
	g, addr := serveGateway(t, gateway.Options{Listen: "127.0.0.1:0", SubscribeToken: "sub", IngestToken: "in", HMACSecret: []byte("s3 cr$t")})
	base := "http://" + addr
	return g, append(os.Environ(), "MCP_SSE_AUTH_TOKEN=sub", "MCP_SSE_INGEST_TOKEN=in", "MCP_SSE_HMAC_SECRET=s3 cr$t",
		"MCP_SSE_INGEST_URL="+base+gateway.IngestPath, "SSE_URL="+base+gateway.StreamPath)
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("15 s without %s", what)
		}
	}
}

// The page lists the variables that the gateway reads, and their defaults.
func TestEventsDocsEnvironment(t *testing.T) {
	_, table, _ := strings.Cut(eventsDoc(t), "\n## Environment\n")
	table, _, _ = strings.Cut(table, "\n## ")
	var documented []string
	defaults := make(map[string]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `?([^|`]*)`? \\|.*\\| (yes )?\\|$").FindAllStringSubmatch(table, -1) {
		documented = append(documented, m[1])
		defaults[m[1]] = m[2]
		if m[3] != "" {
			documented = append(documented, m[1]+"_FILE")
		}
	}
	var read []string
	e, err := gateway.FromEnv(func(name string) string {
		read = append(read, name)
		return ""
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(documented)
	slices.Sort(read)
	if read = slices.Compact(read); !slices.Equal(documented, read) {
		t.Errorf("%s documents\n%v\nthe gateway reads\n%v", eventsDocs, documented, read)
	}
	for name, is := range map[string]string{
		"MCP_SSE_PORT": strings.TrimPrefix(e.Listen, ":"), "MCP_SSE_HEARTBEAT_MS": fmt.Sprint(e.Heartbeat.Milliseconds()), "MCP_SSE_RING_MAX": fmt.Sprint(e.Ring),
	} {
		if defaults[name] != is {
			t.Errorf("%s: the default of %s is %q, the page has %q", eventsDocs, name, is, defaults[name])
		}
	}
}

// The one-liner emits, and does not fail its script when nobody is there.
func TestEventsDocsEmit(t *testing.T) {
	needs(t, "sh", "curl")
	g, vars := liveGateway(t)
	for _, at := range []string{"", "MCP_SSE_INGEST_URL=http://127.0.0.1:1/x"} {
		cmd := exec.Command("sh", docFile(t, "emit.sh"))
		if cmd.Env = vars; at != "" {
			cmd.Env = append(cmd.Env, at)
		}
		out, err := cmd.Output()
		if err != nil || len(out) > 0 {
			t.Errorf("%s: %v, printed %q", at, err, out)
		}
	}
	if st := g.Stats(); st.Ingested != 1 {
		t.Errorf("%d events came", st.Ingested)
	}
}

// signedEvents have in them what a shell might stumble over.
var signedEvents = [][2]string{
	{"log/level", `{"previous":"info","current":"debug"}`},
	{"a.b-c_d", `{"text":" \\n \"'$HOME` + "`id`" + ` %s -n \t é 💡","sig":"no","d":"0","ts":1}`},
	{"n", `-1`},
	{"empty", `""`},
	{"nothing", `null`},
}

// Both checks find every event of a live gateway good, through the page's own pipeline.
func TestEventsDocsCheck(t *testing.T) {
	line := regexp.MustCompile(`(?m)^    (curl -sN .*) \| sh check\.sh$`).FindStringSubmatch(eventsDoc(t))
	if line == nil {
		t.Fatalf("%s has no line that runs check.sh", eventsDocs)
	}
	for _, tt := range []struct{ file, program, also string }{{"check.sh", "sh", "openssl"}, {"check.mjs", "node", "node"}} {
		t.Run(tt.file, func(t *testing.T) {
			needs(t, "curl", tt.program, tt.also)
			g, vars := liveGateway(t)
			var out, errs lockedBuffer
			cmd := exec.Command("sh", "-c", line[1]+" | "+tt.program+" "+docFile(t, tt.file))
			cmd.Env, cmd.Stdout, cmd.Stderr = vars, &out, &errs
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
				_ = cmd.Wait()
			}()
			waitFor(t, "curl's connection", func() bool { return g.Stats().Subscribers == 1 })
			var want strings.Builder
			for i, e := range signedEvents {
				g.Emit("default", e[0], json.RawMessage(e[1]))
				fmt.Fprintf(&want, "ok %d %s\n", g.Stats().LastID, e[0])
				if st := g.Stats(); st.Ingested != uint64(i+1) {
					t.Fatalf("event %d was not taken", i+1)
				}
			}
			waitFor(t, "the checks", func() bool { return strings.Count(out.String(), "\n") >= len(signedEvents) })
			if out.String() != want.String() || errs.String() != "" {
				t.Errorf("printed\n%s%s\nwant\n%s", out.String(), errs.String(), want.String())
			}
		})
	}
}

// Whatever is changed on the way is found by both.
func TestEventsDocsCheckFindsChanges(t *testing.T) {
	g, vars := liveGateway(t)
	g.Emit("default", "a/b", map[string]int{"x": 1})
	url := ""
	for _, v := range vars {
		url = strings.TrimPrefix(v, "SSE_URL=") // the last one
	}
	req, _ := http.NewRequest(http.MethodGet, url+"?lastEventId=0", nil)
	req.Header.Set("Authorization", "Bearer sub")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var stream string
	for buf := make([]byte, 4096); !strings.HasSuffix(stream, "\"}\n\n"); {
		n, err := resp.Body.Read(buf)
		if stream += string(buf[:n]); err != nil {
			t.Fatalf("%v after %q", err, stream)
		}
	}
	changes := []struct{ name, old, new, want string }{
		{"nothing", "", "", "ok"},
		{"data", `{"x":1}`, `{"x":2}`, "BAD"},
		{"a blank in the data", `{"x":1}`, `{"x":1} `, "BAD"},
		{"the topic", "event: a/b", "event: a/c", "BAD"},
		{"the id", "\nid: ", "\nid: 1", "BAD"},
		{"the time", `"ts":`, `"ts":1`, "BAD"},
		{"the signature", `"sig":"`, `"sig":"0`, "BAD"},
		{"no signature", "data: {\"sig\"", "nodata: {\"sig\"", "BAD"},
	}
	for _, tt := range []struct{ file, program, also string }{{"check.sh", "sh", "openssl"}, {"check.mjs", "node", "node"}} {
		t.Run(tt.file, func(t *testing.T) {
			needs(t, tt.program, tt.also)
			file := docFile(t, tt.file)
			for _, c := range changes {
				changed := strings.Replace(stream, c.old, c.new, 1)
				if c.old != "" && changed == stream {
					t.Fatalf("%s: nothing changed in %q", c.name, stream)
				}
				cmd := exec.Command(tt.program, file)
				cmd.Env, cmd.Stdin = vars, strings.NewReader(changed)
				out, err := cmd.CombinedOutput()
				if err != nil || !strings.HasPrefix(string(out), c.want+" ") || bytes.Count(out, []byte("\n")) != 1 {
					t.Errorf("%s: %v, printed %q, want %s", c.name, err, out, c.want)
				}
			}
		})
	}
}

// lockedBuffer may be read while a process writes into it.
type lockedBuffer struct {
	mu sync.Mutex // protects b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

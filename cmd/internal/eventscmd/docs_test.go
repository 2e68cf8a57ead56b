//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/gateway"
)

// eventsPage is the page whose scripts and table these tests check: a reader copies both.
const eventsPage = "../../../docs/events.md"

func readPage(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(eventsPage)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// pageScript writes the code block of the page that begins with the file's name, and returns its path.
func pageScript(t *testing.T, name string) string {
	t.Helper()
	m := regexp.MustCompile("(?ms)^```\\w+\n((?:#|//) " + regexp.QuoteMeta(name) + "\\b.*?)^```$").FindStringSubmatch(readPage(t))
	if m == nil {
		t.Fatalf("%s has no block %s", eventsPage, name)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(m[1]), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// skipWithout skips a test on a machine that lacks one of the programs.
func skipWithout(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%s is not installed", p)
		}
	}
}

// signingGateway is a gateway that signs, on a free port.
type signingGateway struct {
	*gateway.Gateway
	streamURL string
	env       []string // the variables that the scripts of the page read
}

// newSigningGateway serves until the test ends. Its secret has characters that a shell would interpret.
func newSigningGateway(t *testing.T) *signingGateway {
	t.Helper()
	g, err := gateway.New(gateway.Options{Listen: "127.0.0.1:0", SubscribeToken: "sub", IngestToken: "in", HMACSecret: []byte("s3 cr$t")})
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
	base := "http://" + <-ready
	s := &signingGateway{Gateway: g, streamURL: base + gateway.StreamPath + "?lastEventId=0"} // with all events from the first one on
	s.env = append(os.Environ(), "MCP_SSE_AUTH_TOKEN=sub", "MCP_SSE_INGEST_TOKEN=in", "MCP_SSE_HMAC_SECRET=s3 cr$t",
		"MCP_SSE_INGEST_URL="+base+gateway.IngestPath, "SSE_URL="+s.streamURL)
	return s
}

// The page lists the variables that the gateway reads, and their defaults.
func TestPageEnvironment(t *testing.T) {
	_, table, _ := strings.Cut(readPage(t), "\n## Environment\n")
	table, _, _ = strings.Cut(table, "\n## ")
	row := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `?([^|`]*)`? \\|.*\\| (yes )?\\|$") // name, default, "yes" if a file can hold it
	var documented []string
	defaults := make(map[string]string)
	for _, m := range row.FindAllStringSubmatch(table, -1) {
		name, hasFile := m[1], m[3] != ""
		defaults[name] = m[2]
		documented = append(documented, name)
		if hasFile {
			documented = append(documented, name+"_FILE")
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
		t.Errorf("%s documents\n%v\nthe gateway reads\n%v", eventsPage, documented, read)
	}
	for name, want := range map[string]string{
		"MCP_SSE_PORT": strings.TrimPrefix(e.Listen, ":"), "MCP_SSE_HEARTBEAT_MS": fmt.Sprint(e.Heartbeat.Milliseconds()), "MCP_SSE_RING_MAX": fmt.Sprint(e.Ring),
	} {
		if defaults[name] != want {
			t.Errorf("%s: the default of %s is %q, the gateway has %q", eventsPage, name, defaults[name], want)
		}
	}
}

// The page's script publishes an event, prints nothing, and does not fail where no gateway answers.
func TestPageEmit(t *testing.T) {
	skipWithout(t, "sh", "curl")
	g := newSigningGateway(t)
	for _, tt := range []struct {
		name, variable string
		ingested       uint64 // events that the gateway has afterwards
	}{
		{"a gateway", "", 1},
		{"no gateway", "MCP_SSE_INGEST_URL=http://127.0.0.1:1/x", 1},
	} {
		cmd := exec.Command("sh", pageScript(t, "emit.sh"))
		if cmd.Env = g.env; tt.variable != "" {
			cmd.Env = append(cmd.Env, tt.variable)
		}
		out, err := cmd.Output()
		if err != nil || len(out) > 0 {
			t.Errorf("%s: %v, printed %q; want success and nothing printed", tt.name, err, out)
		}
		if n := g.Stats().Ingested; n != tt.ingested {
			t.Errorf("%s: the gateway has %d events, want %d", tt.name, n, tt.ingested)
		}
	}
}

//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/client"
	"agentctl/cmd/internal/cli/clitest"
	"agentctl/cmd/internal/serving"
	"agentctl/relay/gateway"
)

// Builds without the gateway know its paths and its port too.
func TestEventsKnown(t *testing.T) {
	clitest.HideEnvironment(t)
	e, err := gateway.FromEnv(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	emit := newEmit().Flag("url").DefValue
	if client.StreamPath != gateway.StreamPath || client.IngestPath != gateway.IngestPath || emit+client.IngestPath != e.IngestURL {
		t.Errorf("the commands know %s, %s and %s", client.StreamPath, client.IngestPath, emit)
	}
}

func TestEventsServeRefuses(t *testing.T) {
	clitest.HideEnvironment(t)
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
		code, out, errs := clitest.Run(t, New(), "", append([]string{"serve"}, tt.args...)...)
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
	clitest.HideEnvironment(t)
	dir := t.TempDir()
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	for name, v := range map[string]string{"mcp_sse_auth_token": "sub", "mcp_sse_ingest_token": "in\n", "mcp_sse_hmac_secret": "key"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("MCP_SSE_INGEST_TOKEN", "own")
	e, err := serving.GatewayEnv()
	if err != nil || e.SubscribeToken != "sub" || e.IngestToken != "own" || string(e.HMACSecret) != "key" {
		t.Errorf("got %q %q %q, %v", e.SubscribeToken, e.IngestToken, e.HMACSecret, err)
	}
}

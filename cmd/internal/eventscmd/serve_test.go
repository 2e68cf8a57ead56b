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

// emit publishes to the gateway of this machine unless a flag or variable names another: the address in
// its help is the one that a gateway takes by default.
func TestEmitDefaultAddress(t *testing.T) {
	clitest.HideEnvironment(t)
	e, err := gateway.FromEnv(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	if got := newEmit().Flag("url").DefValue + client.IngestPath; got != e.IngestURL {
		t.Errorf("emit publishes to %s, the gateway is at %s", got, e.IngestURL)
	}
}

// A gateway does not start with settings that are wrong, or that would leave it open to others.
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

// A service gets its tokens as systemd credentials; variables take precedence.
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

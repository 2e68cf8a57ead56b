package mcplocal_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/mcplocal"
)

// startDaemon runs a daemon without relay and history, and returns its socket.
func startDaemon(t *testing.T) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket = filepath.Join(dir, "a.sock")
	source := config.Source{Path: filepath.Join(dir, "config.yaml"), LookupEnv: func(string) (string, bool) { return "", false },
		Flags: config.Settings{"state_dir": {Value: dir}, "socket": {Value: socket}, "history.enabled": {Value: false}}}
	cfg, err := source.Load()
	if err != nil {
		t.Fatal(err)
	}
	d, err := daemon.New(daemon.Options{Source: source, Config: cfg, Log: zap.NewNop(), Level: zap.NewAtomicLevel()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return socket
}

// TestServeBoard checks that a client finds the board's tools and can call one.
func TestServeBoard(t *testing.T) {
	s, err := mcplocal.Open(t.Context(), mcplocal.Options{Socket: startDaemon(t), Version: "v1", Log: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	request := func(method, params string) string {
		t.Helper()
		const meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`
		req, err := http.NewRequest(http.MethodPost, mcplocal.URL, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"`+method+`","params":{`+params+meta+`}}`))
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
			"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method} {
			req.Header.Set(name, value)
		}
		if _, tool, ok := strings.Cut(params, `"name":"`); ok {
			tool, _, _ = strings.Cut(tool, `"`)
			req.Header.Set("Mcp-Name", tool)
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	list := request("tools/list", "")
	_, tool, ok := strings.Cut(list, `"sysecho.`)
	if !ok || !strings.Contains(list, ".metrics.snapshot") {
		t.Fatalf("tools/list answered %s", list)
	}
	tool, _, _ = strings.Cut(tool, `"`)
	if got := request("tools/call", `"name":"sysecho.`+tool+`","arguments":{"message":"hello"},`); !strings.Contains(got, `"message":"hello"`) {
		t.Errorf("tools/call answered %s", got)
	}
}

func TestOpenRefuses(t *testing.T) {
	tests := []struct {
		name    string
		options mcplocal.Options
		want    error
	}{
		{"no daemon", mcplocal.Options{Socket: filepath.Join(t.TempDir(), "none")}, control.ErrNotRunning},
		{"an agent id with a space", mcplocal.Options{AgentID: "a b"}, mcplocal.ErrAgentID},
		{"a long agent id", mcplocal.Options{AgentID: strings.Repeat("a", 129)}, mcplocal.ErrAgentID},
	}
	for _, tt := range tests {
		if _, err := mcplocal.Open(t.Context(), tt.options); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
}

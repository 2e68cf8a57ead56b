package test

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/relay/auth"
)

// The boards' binaries run, under qemu-user where it is installed: version, the daemon with
// its socket, one snapshot, and a link to a relay with one echo.
func TestBoards(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, qemu string
		env        []string
		goarm      string
		limit      int64 // the bar of 14 MB is arm64's; ARMv6 code is larger
	}{
		{"armv6", "qemu-arm-static", []string{"GOOS=linux", "GOARCH=arm", "GOARM=6"}, "6", 14_800_000},
		{"arm64", "qemu-aarch64-static", []string{"GOOS=linux", "GOARCH=arm64"}, "", 14_000_000},
		{"riscv64", "qemu-riscv64-static", []string{"GOOS=linux", "GOARCH=riscv64"}, "", 14_000_000},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if os.Getenv("AGENTCTL_QEMU") == "" {
				t.Skip("builds for three platforms; `make test-qemu` runs it (AGENTCTL_QEMU=1)")
			}
			qemu, err := exec.LookPath(tt.qemu)
			if err != nil {
				t.Skipf("%s is not installed", tt.qemu)
			}
			bin := binary(t, "agentctl-board-"+tt.name, "agentctl_omit_relay", tt.env...)
			if st, err := os.Stat(bin); err != nil || st.Size() > tt.limit {
				t.Errorf("the binary is missing or has more than %d bytes: %v", tt.limit, err)
			}
			v := startProcess(t, []string{qemu}, bin, "version", "-o", "json")
			<-v.ended
			var info struct {
				Version, OS, Arch string
				GOARM             string
			}
			if err := json.Unmarshal([]byte(v.out.String()), &info); err != nil || info.Version != testVersion ||
				"GOARCH="+info.Arch != tt.env[1] || !strings.HasPrefix(info.GOARM, tt.goarm) {
				t.Errorf("version: %s%s %v", v.out, v.err, err)
			}

			r := newTestRelay(t)
			minted := r.mint(auth.MintRequest{Class: "device"})
			dir, err := os.MkdirTemp("", "ac")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			token, socket := filepath.Join(dir, "token"), filepath.Join(dir, "s")
			if err := os.WriteFile(token, []byte(minted.Token), 0o600); err != nil {
				t.Fatal(err)
			}
			d := startProcess(t, []string{qemu}, bin, "run", "--relay", r.url, "--token-file", token, "--state-dir", filepath.Join(dir, "state"), "--socket", socket)
			d.waitOutput(`"msg":"ready"`)
			s := startProcess(t, []string{qemu}, bin, "snapshot", "--socket", socket, "-o", "json")
			<-s.ended
			var snap struct {
				CPU    map[string]float64
				Memory map[string]float64
			}
			if err := json.Unmarshal([]byte(s.out.String()), &snap); err != nil || snap.Memory["total"] < 1 {
				t.Errorf("snapshot: %s%s %v", s.out, s.err, err)
			}
			eventually(t, "an echo", func() bool {
				a := r.call("sysecho."+minted.NodeID+".echo.invoke", text(tt.name))
				return a.status == http.StatusOK && strings.Contains(a.body, `"message":"`+tt.name+`"`)
			})
			d.stop()
		})
	}
}

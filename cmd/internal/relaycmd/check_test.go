//go:build linux

package relaycmd

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/relay/checkup"
)

// Every kind of repair that package checkup names has a command, for the same state directory.
func TestRepairCommand(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		problem checkup.Problem
		want    string
	}{
		{checkup.Problem{Repair: checkup.RepairPermission, Path: "x/keys", Mode: 0o700}, "chmod 0700 x/keys"},
		{checkup.Problem{Repair: checkup.RepairPermission, Path: "x/keys", UID: 7, GID: 8}, "sudo chown 7:8 x/keys"},
		{checkup.Problem{Repair: checkup.RepairPermission, Path: "my state/keys", Mode: 0o700}, "chmod 0700 'my state/keys'"},
		{checkup.Problem{Repair: checkup.RepairRestore}, "agentctl relay restore BACKUP --state-dir x"},
		{checkup.Problem{Repair: checkup.RepairSalvage}, "agentctl relay salvage DIR --state-dir x"},
		{checkup.Problem{Repair: checkup.RepairRestart}, "start the relay, which makes it anew: agentctl relay --state-dir x"},
		{checkup.Problem{Repair: checkup.RepairUser}, "run this as the owner of the directory, or with sudo"},
		{checkup.Problem{}, ""},
	} {
		if got := repairCommand(&tt.problem, " --state-dir x"); got != tt.want {
			t.Errorf("%+v: got %q, want %q", tt.problem, got, tt.want)
		}
	}
}

// The name of a file in a damaged state directory does not control the terminal of whoever looks at it.
func TestCheckIsSafe(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	const name = "keys/\x1b]0;x\a"
	report := &checkup.Report{
		Stores:   []checkup.Store{{Name: name, State: name, Detail: name}},
		Problems: []checkup.Problem{{Path: name, Where: name, What: name, Next: name}},
	}
	if err := printCheckup(cmd, report); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(out.String(), "\x1b\a") {
		t.Errorf("%q", out.String())
	}
}

//go:build linux

package boardcmd

import (
	"strings"
	"testing"

	"agentctl/doctor"
)

func TestPrintReport(t *testing.T) {
	r := &doctor.Report{Failures: 1, Warnings: 1, Checks: []doctor.Finding{
		{Name: "mount", Status: doctor.Fail, Message: "no answer in time", Next: "see the kernel's log for a device or mount that hangs: dmesg"},
		{Name: "slow", Status: doctor.Warn, Message: "timed out", Next: "wait"},
		{Name: "good", Status: doctor.OK},
	}}
	want := `fail  mount       no answer in time
                  -> see the kernel's log for a device or mount that hangs: dmesg
warn  slow        timed out
                  -> wait
ok    good        
1 failure, 1 warning
`
	var b strings.Builder
	if err := printReport(&b, r); err != nil || b.String() != want {
		t.Errorf("got %v\n%s", err, b.String())
	}
}

//go:build linux

package boardcmd

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/transport/enroll"
)

// The next step after a leave that failed is about what leave does: it has no code, and no relay to ask.
func TestExplainLeave(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, "agentctl status"},
		{context.Canceled, "agentctl status"},
		{fmt.Errorf("control socket: %w", control.ErrClosed), "agentctl status"},
		{&enroll.StorageError{Dir: "/s", Err: fs.ErrPermission}, "use sudo"},
	} {
		got := cli.Explain(newLeave(), explainLeave(tt.err))
		if got.Code != cli.ExitFailure || !strings.Contains(got.Error(), tt.want) || strings.Contains(got.Error(), "code") {
			t.Errorf("%v: exit %d, %v", tt.err, got.Code, got)
		}
	}
}

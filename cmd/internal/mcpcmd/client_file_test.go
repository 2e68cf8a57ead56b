//go:build !agentctl_omit_relay

package mcpcmd

import (
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"

	"agentctl/clientconfig"
)

// An error of a file says that nothing was changed, unless the file has the change.
func TestExplainClientFile(t *testing.T) {
	for _, tt := range []struct {
		name    string
		err     error
		changed bool
	}{
		{"not synced", fmt.Errorf("%w, but: %w", clientconfig.ErrWritten, syscall.EIO), true},
		{"the directory cannot be read", fmt.Errorf("%w, but: %w", clientconfig.ErrWritten, fs.ErrPermission), true},
		{"full disk", syscall.ENOSPC, false},
		{"another user's", fs.ErrPermission, false},
		{"changed meanwhile", clientconfig.ErrChanged, false},
	} {
		err := explainClientFile(new(clientconfig.Client), &clientconfig.FileError{Path: "mcp.json", Err: tt.err})
		if changed := !strings.Contains(err.Error(), "Nothing was changed"); changed != tt.changed {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
}

//go:build !linux

package history

import "testing"

func mountTmpfs(t *testing.T, options string) string {
	t.Skip("filesystems of a test's own are made on Linux only")
	return ""
}

func remount(*testing.T, string, bool) {}
func fill(*testing.T, string)          {}

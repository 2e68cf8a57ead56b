// Package sqlitefiletest runs tests with databases where a commit does not wait for a disk.
//
//	func TestMain(m *testing.M) { sqlitefiletest.Main(m) }
//
// A power cut cannot be tested in memory; test/faultdisk has a disk for that.
package sqlitefiletest

import (
	"os"
	"testing"
)

// Main runs the tests of a package and exits. Their temporary directories are in memory if there is
// such a filesystem: a test that kills a process finds its files there too, and none cuts the power.
// AGENTCTL_SLOW=1 keeps them on the disk.
func Main(m *testing.M) {
	dir := ""
	if os.Getenv("AGENTCTL_SLOW") == "" {
		dir = MemoryDir()
	}
	if dir != "" {
		_ = os.Setenv("TMPDIR", dir)
	}
	code := m.Run()
	if dir != "" {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

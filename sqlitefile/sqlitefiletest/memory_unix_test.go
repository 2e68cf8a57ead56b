//go:build unix

package sqlitefiletest

import (
	"os"
	"testing"
)

// A directory is there while its process is, and the next process removes it.
func TestMemoryDir(t *testing.T) {
	dir := MemoryDir()
	if dir == "" {
		t.Skip("there is no filesystem in memory with enough space")
	}
	defer func() { _ = os.RemoveAll(dir) }()
	other := MemoryDir()
	defer func() { _ = os.RemoveAll(other) }()
	if _, err := os.Stat(dir); err != nil || other == dir {
		t.Errorf("a directory in use: %v; the other is %s", err, other)
	}
	for _, f := range locks { // as at the end of a process
		_ = f.Close()
	}
	locks = nil
	last := MemoryDir()
	defer func() { _ = os.RemoveAll(last) }()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("a directory of a process that ended: %v", err)
	}
}

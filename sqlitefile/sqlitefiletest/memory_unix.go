//go:build unix

package sqlitefiletest

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	memoryDir = "/dev/shm" // a filesystem in memory, on Linux
	prefix    = "agentctl-memory-"
	minFree   = 1 << 30 // bytes that memoryDir has to have free: more than the packages and their processes write
)

// locks are open as long as this process lives; the kernel releases them however it ends. Programs that
// it starts do not inherit them, because Go opens files with O_CLOEXEC.
var locks []*os.File

// MemoryDir makes a directory in memory, which the caller removes; "" if there is no such filesystem.
// It removes those of processes that ended without doing so, as a panic and a timeout of go test do:
// a directory is in use while it is locked. Those that nobody removes would fill the memory.
func MemoryDir() string {
	var st unix.Statfs_t
	if unix.Statfs(memoryDir, &st) != nil || uint64(st.Bavail)*uint64(st.Bsize) < minFree {
		return ""
	}
	left, _ := filepath.Glob(filepath.Join(memoryDir, prefix+"*"))
	for _, dir := range left {
		if f := lock(dir); f != nil {
			_ = os.RemoveAll(dir)
			_ = f.Close()
		}
	}
	for range 10 { // another process may remove a new directory before it is locked
		dir, err := os.MkdirTemp(memoryDir, prefix)
		if err != nil {
			return ""
		}
		if f := lock(dir); f != nil {
			locks = append(locks, f)
			if _, err := os.Stat(dir); err == nil {
				return dir
			}
		}
	}
	return ""
}

// lock locks a directory; nil if it is locked or gone.
func lock(dir string) *os.File {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		_ = f.Close()
		return nil
	}
	return f
}

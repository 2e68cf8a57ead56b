//go:build !windows

package edge

import "syscall"

// maxOpenFiles returns how many files this process may have open.
func maxOpenFiles() uint64 {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return limit.Cur
}

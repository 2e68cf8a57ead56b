package relay

import "syscall"

// RaiseMaxFiles raises the soft limit of open files to the hard one: each board and each
// subscriber is an open file, and the soft limit is 1024 on most systems.
func RaiseMaxFiles() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = limit.Max
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
}

//go:build !windows

package config

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// isOwn reports whether a file is this user's.
func isOwn(info fs.FileInfo) bool {
	owner, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(owner.Uid) == os.Geteuid()
}

// fingerprint describes a file as it is now, or says why it cannot be read.
func fingerprint(path string) string {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return fmt.Sprintln(err, st.Ino, st.Size, st.Mtim, st.Ctim, st.Mode)
}

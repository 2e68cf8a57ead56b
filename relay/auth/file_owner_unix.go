//go:build !windows

package auth

import (
	"io/fs"
	"syscall"
)

// ownerOf returns the owner of a file. known is false where the file system has no numeric owners.
func ownerOf(info fs.FileInfo) (uid, gid int, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, false
	}
	return int(st.Uid), int(st.Gid), true
}

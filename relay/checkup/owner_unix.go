//go:build unix

package checkup

import (
	"io/fs"
	"syscall"
)

// ownerOf returns the owner of a file, if the file system has owners.
func ownerOf(info fs.FileInfo) (uid, gid int, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, false
	}
	return int(st.Uid), int(st.Gid), true
}

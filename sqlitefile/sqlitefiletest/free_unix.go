//go:build unix

package sqlitefiletest

import "golang.org/x/sys/unix"

// freeBytes returns the free space of the filesystem of dir, 0 if there is no such folder.
func freeBytes(dir string) uint64 {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return 0
	}
	return uint64(st.Bavail) * uint64(st.Bsize)
}

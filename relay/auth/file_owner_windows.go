package auth

import "io/fs"

// ownerOf knows no owner: Windows has no numeric ones.
func ownerOf(fs.FileInfo) (uid, gid int, known bool) { return 0, 0, false }

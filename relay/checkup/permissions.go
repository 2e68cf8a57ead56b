package checkup

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// checkPermissions checks owner and mode of the directory, of the files in it and of the keys. Only the
// owner may read or change them, and a relay that runs as the owner must be able to. Files need not be
// exactly 0600, as package auth makes them: it is enough that group and others have no rights. What is in
// other directories is not checked, such as the programs of plugins, which others may have to read.
func (c *checker) checkPermissions(context.Context) (state, detail string) {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		c.fail("directory", c.dir, err, RepairNone)
		return "", ""
	}
	n := c.checkMode(c.dir, 0o700)
	for _, e := range entries {
		switch {
		case !e.IsDir():
			n += c.checkMode(c.path(e.Name()), 0o600)
		case e.Name() == "keys":
			n += c.checkMode(c.path(e.Name()), 0o700)
		} // other directories have other modes: plugins, and what operators keep here
	}
	for _, name := range c.list(storePatterns["keys"]) {
		n += c.checkMode(name, 0o600)
	}
	return "", fmt.Sprintf("owner and permissions of %d files", n)
}

// checkMode checks a file or directory that may have the permission bits allowed. It returns the
// number of files that it has checked: 0 if the file was removed in the meantime.
//
// It does not follow links. A link in this directory is a problem even if it leads to a good file: a relay
// that runs as root could write wherever it leads.
func (c *checker) checkMode(path string, allowed fs.FileMode) int {
	info, err := os.Lstat(path)
	if err != nil {
		return 0
	}
	switch info.Mode().Type() {
	case 0, fs.ModeDir:
	case fs.ModeSocket: // of a relay that runs
		return 1
	default:
		c.add(Problem{Store: "directory", Path: path, What: fmt.Sprintf("it is not a regular file (%s); move it away", info.Mode())})
		return 1
	}
	if perm := info.Mode().Perm(); perm&^allowed&0o077 != 0 {
		c.add(Problem{Store: "directory", Path: path, What: fmt.Sprintf("mode %04o: others can use it", perm), Repair: RepairPermission, Mode: cmp.Or(perm&allowed, allowed)})
	}
	// The relay runs as the owner of the directory, and may be unable to read what root has put there.
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != c.uid {
		c.add(Problem{Store: "directory", Path: path, What: fmt.Sprintf("it belongs to user %d, and the directory to user %d", st.Uid, c.uid), Repair: RepairPermission})
	}
	return 1
}

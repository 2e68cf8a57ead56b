package checkup

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// checkPermissions looks at the directory and the files in it, and at the keys. Nobody but the
// owner may read or change them, and a relay that runs as the owner must be able to.
func (c *checker) checkPermissions(context.Context) (state, detail string) {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		c.fail("directory", c.dir, err, RepairNone)
		return "", ""
	}
	n := c.checkMode(c.dir, 0o700)
	for _, e := range entries {
		mode := fs.FileMode(0o600)
		if e.IsDir() {
			mode = 0o700
			if e.Name() != "keys" { // plugins and what operators keep here have other modes
				continue
			}
		}
		n += c.checkMode(c.path(e.Name()), mode)
	}
	for _, name := range c.list("keys/*") {
		n += c.checkMode(name, 0o600)
	}
	return "", fmt.Sprintf("owner and permissions of %d files", n)
}

// checkMode checks one file or directory, and returns 1.
func (c *checker) checkMode(path string, most fs.FileMode) int {
	info, err := os.Lstat(path)
	if err != nil {
		return 0 // removed meanwhile
	}
	if t := info.Mode().Type(); t != 0 && t != fs.ModeDir {
		if t == fs.ModeSocket {
			return 1
		}
		c.add(Problem{Store: "directory", Path: path, What: fmt.Sprintf("it is not a regular file (%s); move it away", info.Mode())})
		return 1
	}
	if perm := info.Mode().Perm(); perm&^most&0o077 != 0 {
		c.add(Problem{Store: "directory", Path: path, What: fmt.Sprintf("mode %04o: others can use it", perm), Repair: RepairPermission, Mode: perm & most})
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != c.uid {
		c.add(Problem{Store: "directory", Path: path, What: fmt.Sprintf("it belongs to user %d, and the directory to user %d", st.Uid, c.uid), Repair: RepairPermission})
	}
	return 1
}

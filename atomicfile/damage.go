package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// maxAside is how many damaged versions of one file are kept. The oldest are removed first.
const maxAside = 3

// AsideMark separates the name of a file from the time at which it was set aside.
const AsideMark = ".damaged-"

// Damage reports a file that could not be used.
type Damage struct {
	Path    string // of the file
	Aside   string // where it is now; "": it is still at Path
	Problem string // why it could not be used
}

func (d *Damage) Error() string {
	if d.Aside == "" {
		return fmt.Sprintf("%s is not used: %s", d.Path, d.Problem)
	}
	return fmt.Sprintf("%s was set aside as %s: %s", d.Path, filepath.Base(d.Aside), d.Problem)
}

// SetAside renames a damaged file, or whatever has its place, so that a new one can be written
// and a person can still look at the old one. At most maxAside of one name are kept. The time in the new
// name has a fixed length, so the names sort by age; if a name is taken, the next free millisecond is used.
func SetAside(path string) (aside string, err error) {
	prefix := path + AsideMark
	for at := time.Now().UTC(); aside == ""; at = at.Add(time.Millisecond) {
		name := prefix + at.Format("20060102T150405.000")
		switch _, err := os.Lstat(name); {
		case errors.Is(err, fs.ErrNotExist):
			aside = name
		case err != nil: // the disk fails, or the name is too long: another name would fail as well
			return "", err
		}
	}
	if err := os.Rename(path, aside); err != nil {
		return "", err
	}
	old, err := Aside(filepath.Dir(path))
	if err != nil {
		return aside, nil // the renamed file counts; the bound holds again the next time
	}
	old = slices.DeleteFunc(old, func(name string) bool { // not the new one, which sorts first if the clock went back
		return !strings.HasPrefix(name, filepath.Base(prefix)) || name == filepath.Base(aside)
	})
	slices.Sort(old)
	for _, name := range old[:max(0, len(old)-maxAside+1)] {
		_ = os.Remove(filepath.Join(filepath.Dir(path), name))
	}
	return aside, SyncDir(filepath.Dir(path))
}

// Aside returns the names of the files in a directory that SetAside renamed. After an error of the disk
// it returns those that were read, with the error.
func Aside(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		if strings.Contains(e.Name(), AsideMark) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// staleAfter is the age from which a temporary file is not one that another process is writing.
const staleAfter = 10 * time.Minute

// RemoveStale removes temporary files that Replace left behind in a directory when the power was
// cut, and returns how many. Those of the last staleAfter stay: another process may be writing them. A
// time far in the future is stale too: a board without a clock starts in 1970.
func RemoveStale(dir string) (removed int, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if !isTemporary(e.Name()) {
			continue
		}
		info, ierr := e.Info()
		if ierr != nil || !info.Mode().IsRegular() || time.Since(info.ModTime()).Abs() < staleAfter {
			continue
		}
		if rerr := os.Remove(filepath.Join(dir, e.Name())); rerr == nil {
			removed++
		} else if !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return removed, err
}

// isTemporary reports whether a name is one that Replace gives: .NAME-DIGITS.
func isTemporary(name string) bool {
	i := strings.LastIndexByte(name, '-')
	return i > 1 && name[0] == '.' && i < len(name)-1 && strings.Trim(name[i+1:], "0123456789") == ""
}

// exists reports whether a name is taken. An error other than fs.ErrNotExist counts as taken, so that
// nothing is replaced that could not be seen.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

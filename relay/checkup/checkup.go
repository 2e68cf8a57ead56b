// Package checkup examines a relay's state directory: whether everything in it is what the relay
// wrote, and belongs together. It changes nothing there, not even the files that SQLite keeps
// beside a database, and works whether the relay runs or not.
package checkup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Repair is what helps against a problem.
type Repair string

// Repairs. The caller knows the commands.
const (
	RepairNone       Repair = ""            // no command helps; What says what to do
	RepairPermission Repair = "permissions" // chmod or chown of Path to Mode and Owner
	RepairRestore    Repair = "restore"     // restore a backup
	RepairSalvage    Repair = "salvage"     // read what is left of the event log, or restore a backup
	RepairRestart    Repair = "restart"     // the relay makes it anew when it starts
	RepairUser       Repair = "user"        // run the check as the owner of the directory
)

// Problem is something that is not as the relay left it.
type Problem struct {
	Store   string `json:"store"`           // relay.json, relay.db, events.db, audit, keys, authority or directory
	Path    string `json:"path"`            // the file
	Where   string `json:"where,omitempty"` // inside of it: a page, a line, an event
	What    string `json:"what"`            // one line
	Warning bool   `json:"warning"`         // the relay works, and nothing is lost
	Repair  Repair `json:"repair,omitempty"`
	Next    string `json:"next,omitempty"` // the command, set by the caller

	Mode fs.FileMode `json:"-"` // for RepairPermission; 0: only the owner is wrong
	UID  int         `json:"-"` // the owner of the directory
	GID  int         `json:"-"`
}

// States of a store.
const (
	Sound   = "sound"
	Damaged = "damaged" // there is at least one problem that is not a warning
	Absent  = "absent"  // it has never been made, or is not used
)

// Store is one part of the state directory.
type Store struct {
	Name   string `json:"name"`
	State  string `json:"state"`
	Bytes  int64  `json:"bytes"`
	Detail string `json:"detail"` // what was checked
}

// Report is the result of Run.
type Report struct {
	StateDir string    `json:"state_dir"`
	Sound    bool      `json:"sound"`
	Stores   []Store   `json:"stores"`
	Problems []Problem `json:"problems"`
}

// maxProblems bounds the problems of one store that are listed.
const maxProblems = 20

// checker is one run. The parts are checked one after the other, in the order in which one needs what
// another has read: relay.json before the databases, whose ids and sequence numbers it records.
type checker struct {
	dir      string
	uid, gid int // the owner of the directory
	report   *Report
	count    map[string]int // problems of each store, also those that are not listed
	record   record
}

// Run examines a state directory. An error says that it could not be examined at all.
func Run(ctx context.Context, dir string) (*Report, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		err = &fs.PathError{Op: "check", Path: dir, Err: errors.New("it is not a directory")}
	}
	if err == nil {
		_, err = os.ReadDir(dir) // of another user: that nothing in it can be read is no damage
	}
	if err != nil {
		return nil, err
	}
	c := &checker{dir: dir, report: &Report{StateDir: dir, Stores: []Store{}, Problems: []Problem{}}, count: map[string]int{}}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		c.uid, c.gid = int(st.Uid), int(st.Gid)
	}
	for _, part := range []struct {
		name  string
		check func(context.Context) (state, detail string)
	}{
		{"directory", c.checkPermissions},
		{"relay.json", c.checkRelayFile},
		{"relay.db", c.checkDatabase},
		{"keys", c.checkKeys},
		{"authority", c.checkAuthority},
		{"events.db", c.checkEventLog},
		{"audit", c.checkAudit},
	} {
		state, detail := part.check(ctx)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if more := c.count[part.name] - maxProblems; more > 0 {
			c.report.Problems = append(c.report.Problems, Problem{Store: part.name, Path: c.path(part.name), What: fmt.Sprintf("%d more problems like these", more), Warning: true})
		}
		if state == "" {
			if state = Sound; slices.ContainsFunc(c.report.Problems, func(p Problem) bool { return p.Store == part.name && !p.Warning }) {
				state = Damaged
			}
		}
		c.report.Stores = append(c.report.Stores, Store{part.name, state, c.bytes(part.name), detail})
	}
	c.report.Sound = !slices.ContainsFunc(c.report.Problems, func(p Problem) bool { return !p.Warning })
	return c.report, nil
}

func (c *checker) path(name string) string { return filepath.Join(c.dir, name) }

// add records a problem. An error of permissions has its own repair.
func (c *checker) add(p Problem) {
	p.UID, p.GID = c.uid, c.gid
	if !filepath.IsAbs(p.Path) {
		p.Path = c.path(p.Path)
	}
	p.What = strings.Join(strings.Fields(p.What), " ") // one line
	if c.count[p.Store]++; c.count[p.Store] <= maxProblems {
		c.report.Problems = append(c.report.Problems, p)
	}
}

// fail records that a file could not be read.
func (c *checker) fail(store, path string, err error, repair Repair) {
	if errors.Is(err, fs.ErrPermission) {
		repair = RepairUser
	}
	c.add(Problem{Store: store, Path: path, What: err.Error(), Repair: repair})
}

// bytes returns the size of a store's files.
func (c *checker) bytes(store string) (n int64) {
	pattern := map[string]string{"audit": "*.jsonl*", "keys": "keys/*", "authority": "*.pem", "directory": ""}
	glob, ok := pattern[store]
	if !ok {
		glob = store + "*"
	}
	for _, name := range c.list(glob) {
		if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
	}
	return n
}

// list returns the files that match a pattern, sorted.
func (c *checker) list(pattern string) []string {
	if pattern == "" {
		return nil
	}
	sub, pattern := filepath.Split(pattern)
	entries, _ := os.ReadDir(filepath.Join(c.dir, sub)) // checkPermissions reports a failure
	var names []string
	for _, e := range entries {
		if ok, _ := filepath.Match(pattern, e.Name()); ok {
			names = append(names, filepath.Join(c.dir, sub, e.Name()))
		}
	}
	return names
}

// readSmall reads a regular file of at most limit bytes.
func readSmall(path string, limit int64) ([]byte, error) {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, &fs.PathError{Op: "read", Path: path, Err: errors.New("it is not a regular file")}
	case info.Size() > limit:
		return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("it has %d bytes, more than %d", info.Size(), limit)}
	}
	return os.ReadFile(path)
}

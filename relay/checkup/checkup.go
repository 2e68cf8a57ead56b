// Package checkup examines a relay's state directory for `agentctl relay check`: whether each file is
// what the relay wrote, and whether the files belong together. It changes nothing there, not even the
// files that SQLite keeps beside a database, and works whether the relay runs or not.
//
//	report, err := checkup.Run(ctx, stateDir)
//	for _, p := range report.Problems { fmt.Println(p.Path, p.What) }
//
// The directory is divided into stores. Each has one check:
//
//	directory    owner and permissions            permissions.go
//	relay.json   form                             relayfile.go
//	relay.db     pages, write-ahead log, rows     database.go
//	keys         signing keys against relay.db    keys.go
//	authority    certificates against their keys  authority.go
//	events.db    pages, write-ahead log, hashes   events.go
//	audit        each line is JSON                audit.go
//
// A check adds what it finds to the report and goes on with what it can still read, so that one run
// shows as much as possible. Damage goes to Report.Problems; Run returns an error only if the directory
// cannot be examined at all.
//
// # While a relay runs
//
// The relay does not wait for a check: databases are opened with sqlitefile.ReadOnly, and other files are
// read as they are. What a running relay changes meanwhile is no damage: the last line of an audit file
// may be incomplete, relay.json may be behind relay.db, and relay.sock is in the directory. A write-ahead
// log counts as damaged if two scans see the damage in the same place.
//
// # What is not found
//
//   - a value that was replaced by another of the same form, if no index or checksum covers it, such as
//     the description of a board
//   - a write-ahead log that was cut off or removed, unless relay.json records more than what is left
//   - lines that are missing from an audit file
//
// Salvage puts an event log that was rebuilt from a damaged one in its place.
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

// Repair is what an operator can do about a problem. The caller of this package maps it to a command.
type Repair string

// The repairs.
const (
	RepairNone       Repair = ""            // no command helps; Problem.What has the advice
	RepairPermission Repair = "permissions" // chmod of Path to Mode, or chown to UID and GID
	RepairRestore    Repair = "restore"     // restore a backup
	RepairSalvage    Repair = "salvage"     // salvage the event log, or restore a backup
	RepairRestart    Repair = "restart"     // the relay writes the file again when it starts
	RepairUser       Repair = "user"        // run the check as the owner of the directory
)

// Problem is one thing that is not as the relay left it. Its JSON names are part of the output of
// `agentctl relay check -o json`, on which scripts rely.
type Problem struct {
	Store   string `json:"store"`           // Store.Name
	Path    string `json:"path"`            // of the file, absolute
	Where   string `json:"where,omitempty"` // inside the file: a page, a line, an event
	What    string `json:"what"`            // one line
	Warning bool   `json:"warning"`         // the relay works, and nothing is lost
	Repair  Repair `json:"repair,omitempty"`
	Next    string `json:"next,omitempty"` // the command, set by the caller

	Mode fs.FileMode `json:"-"` // of RepairPermission; 0: only the owner is wrong
	UID  int         `json:"-"` // the owner of the directory
	GID  int         `json:"-"`
}

// States of a store. A store that relay.json names, or that another file shows to have existed, is
// Damaged and not Absent when it is missing.
const (
	Sound   = "sound"
	Damaged = "damaged" // there is at least one problem that is not a warning
	Absent  = "absent"  // it has never been made, or is not used
)

// Store is one part of the state directory.
type Store struct {
	Name   string `json:"name"` // relay.json, relay.db, events.db, audit, keys, authority or directory
	State  string `json:"state"`
	Bytes  int64  `json:"bytes"`
	Detail string `json:"detail"` // what was checked
}

// Report is the result of Run.
type Report struct {
	StateDir string    `json:"state_dir"`
	Sound    bool      `json:"sound"` // there is no problem, or only warnings
	Stores   []Store   `json:"stores"`
	Problems []Problem `json:"problems"`
}

// maxProblems bounds the problems of one store that are listed, and separately its warnings: a store with
// many warnings, such as files of keys that nobody uses, must not seem sound when damage is found after
// them. One more warning says how many are left out.
const maxProblems = 20

// counted is a key of checker.count.
type counted struct {
	store   string
	warning bool
}

// checker is one run. It belongs to one goroutine.
type checker struct {
	dir      string // absolute: the commands that repair are printed with it, and work in any directory
	uid, gid int    // the owner of the directory
	report   *Report
	count    map[counted]int // problems and warnings by store, those that are not listed included
	record   record          // of relay.json; checkRelayFile sets it for the checks after it
}

// Run examines a state directory. An error says that it could not be examined at all: the path is wrong,
// the directory belongs to another user, or ctx has ended. A run reads every page of both databases and
// hashes all events, without a limit on its speed: a log of 256 MiB takes about ten seconds.
func Run(ctx context.Context, dir string) (*Report, error) {
	c, err := newChecker(dir)
	if err != nil {
		return nil, err
	}
	// In the order in which a check needs what another one has read: relay.json comes before the
	// databases, whose ids and counters it records, and relay.db before the keys that it lists.
	for _, store := range []struct {
		name string
		// check adds the problems of the store, and returns what it has checked. The state is
		// Absent, or "" to derive it from the problems.
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
		// A check that ctx has ended may have missed damage, so there is no report then.
		state, detail := store.check(ctx)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c.finish(store.name, state, detail)
	}
	c.report.Sound = !slices.ContainsFunc(c.report.Problems, func(p Problem) bool { return !p.Warning })
	return c.report, nil
}

// newChecker fails if the directory cannot be read at all, which is no damage. checkPermissions compares
// the owner of each file with that of the directory.
func newChecker(dir string) (*checker, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		err = &fs.PathError{Op: "check", Path: dir, Err: errors.New("it is not a directory")}
	}
	if err == nil {
		_, err = os.ReadDir(dir) // fails if it belongs to another user
	}
	if err != nil {
		return nil, err
	}
	c := &checker{dir: dir, report: &Report{StateDir: dir, Stores: []Store{}, Problems: []Problem{}}, count: map[counted]int{}}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		c.uid, c.gid = int(st.Uid), int(st.Gid)
	}
	return c, nil
}

// finish adds a store to the report after its check. A state of "" becomes Damaged if there is a problem
// that is not a warning, otherwise Sound. The listed problems suffice for that (maxProblems).
func (c *checker) finish(name, state, detail string) {
	more := max(0, c.count[counted{name, false}]-maxProblems) + max(0, c.count[counted{name, true}]-maxProblems)
	if more > 0 {
		path := c.path(name)
		if !exists(path) { // not every store is a file
			path = c.dir
		}
		c.report.Problems = append(c.report.Problems, Problem{Store: name, Path: path, What: fmt.Sprintf("%d more problems like these", more), Warning: true})
	}
	isDamage := func(p Problem) bool { return p.Store == name && !p.Warning }
	switch {
	case state != "":
	case slices.ContainsFunc(c.report.Problems, isDamage):
		state = Damaged
	default:
		state = Sound
	}
	c.report.Stores = append(c.report.Stores, Store{name, state, c.storeBytes(name), detail})
}

func (c *checker) path(name string) string { return filepath.Join(c.dir, name) }

// add records a problem. Its path may be relative to the directory. Line breaks in What, as in the errors
// of databases and in joined errors, become spaces: each problem is one row of the output.
func (c *checker) add(p Problem) {
	p.UID, p.GID = c.uid, c.gid
	if !filepath.IsAbs(p.Path) {
		p.Path = c.path(p.Path)
	}
	p.What = strings.Join(strings.Fields(p.What), " ")
	of := counted{p.Store, p.Warning}
	if c.count[of]++; c.count[of] <= maxProblems {
		c.report.Problems = append(c.report.Problems, p)
	}
}

// hasProblems reports whether a store has a problem or a warning so far.
func (c *checker) hasProblems(store string) bool {
	return c.count[counted{store, false}]+c.count[counted{store, true}] > 0
}

// fail records that a file could not be read. If permissions are the reason, the repair is to run the
// check as another user: the file may be sound.
func (c *checker) fail(store, path string, err error, repair Repair) {
	if errors.Is(err, fs.ErrPermission) {
		repair = RepairUser
	}
	c.add(Problem{Store: store, Path: path, What: err.Error(), Repair: repair})
}

// storePatterns select the files of a store. A store without a pattern is a file and what is kept beside
// it, NAME*: for a database also its write-ahead log (-wal) and the index of that (-shm). "*.jsonl*" is
// the audit log and the refusals, with their older parts.
var storePatterns = map[string]string{"directory": "", "audit": "*.jsonl*", "keys": "keys/*", "authority": "*.pem"}

// storeBytes returns the size of a store's regular files; 0 for the directory, which has none.
func (c *checker) storeBytes(store string) (n int64) {
	pattern, ok := storePatterns[store]
	if !ok {
		pattern = store + "*"
	}
	for _, name := range c.list(pattern) {
		if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
	}
	return n
}

// list returns the paths that match a pattern, sorted. It returns none if a directory cannot be read,
// which checkPermissions reports. Unlike filepath.Glob it accepts any characters in the path of the
// state directory.
func (c *checker) list(pattern string) []string {
	sub, pattern := filepath.Split(pattern)
	entries, _ := os.ReadDir(c.path(sub))
	var names []string
	for _, e := range entries {
		if ok, _ := filepath.Match(pattern, e.Name()); ok {
			names = append(names, filepath.Join(c.dir, sub, e.Name()))
		}
	}
	return names
}

// readSmall reads a regular file of at most limit bytes. It checks both before it opens the file: under
// the name of a key there may be a file of any size, or a pipe that blocks.
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

// isText reports whether b is printable text, as identities are. A byte that is not UTF-8 is decoded as
// U+FFFD, which counts as damage.
func isText(b []byte) bool {
	for _, r := range string(b) {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return false
		}
	}
	return true
}

// exists reports whether a path names anything, also a link that leads nowhere. It returns false if the
// directory cannot be searched.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

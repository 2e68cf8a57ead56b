package checkup

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// checkSound wants no problem, every store sound, and no file changed by the check.
func checkSound(t *testing.T, dir string) {
	t.Helper()
	before := describeFiles(t, dir)
	r := run(t, dir)
	if !r.Sound || len(r.Problems) != 0 {
		t.Errorf("the problems are %+v, want none", r.Problems)
	}
	for _, s := range r.Stores {
		if s.State != Sound {
			t.Errorf("the store is %+v, want it sound", s)
		}
	}
	if after := describeFiles(t, dir); after != before {
		t.Errorf("the check has changed files: before\n%s\nafter\n%s", before, after)
	}
}

// A relay that was stopped leaves a sound directory.
func TestStoppedRelay(t *testing.T) { checkSound(t, newStateDir(t)) }

// A relay that was killed leaves write-ahead logs, and is sound as well. So is a copy of the directory
// without the index of the log, which the check must not make.
func TestKilledRelay(t *testing.T) {
	running := newStateDir(t)
	store, err := auth.Open(auth.Options{StateDir: running})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if _, err := store.Mint(t.Context(), auth.MintRequest{Class: "agent", Tenant: "late"}); err != nil {
		t.Fatal(err)
	}
	killed := filepath.Join(t.TempDir(), "killed")
	for name, content := range readFiles(t, running) {
		path := filepath.Join(killed, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, content)
	}
	if _, err := os.Stat(filepath.Join(killed, "relay.db-wal")); err != nil {
		t.Fatalf("the write-ahead log is missing: %v", err)
	}
	checkSound(t, killed)
	if err := os.Remove(filepath.Join(killed, "relay.db-shm")); err != nil {
		t.Fatal(err)
	}
	checkSound(t, killed)
	// The index of the running one may change: this process has the database open itself.
	if r := run(t, running); !r.Sound {
		t.Errorf("while the relay runs, the problems are %+v, want none", r.Problems)
	}
}

// What is missing, cut, exchanged or open to others has a problem with a store, a repair and a text.
func TestProblems(t *testing.T) {
	remove := func(name string) func(string) error {
		return func(dir string) error { return os.RemoveAll(filepath.Join(dir, name)) }
	}
	truncate := func(name string, size int64) func(string) error {
		return func(dir string) error { return os.Truncate(filepath.Join(dir, name), size) }
	}
	chmod := func(pattern string, mode os.FileMode) func(string) error {
		return func(dir string) error {
			names, _ := filepath.Glob(filepath.Join(dir, pattern))
			return os.Chmod(names[0], mode)
		}
	}
	tests := []struct {
		name   string
		damage func(dir string) error
		store  string
		repair Repair
		what   string // a part of Problem.What
	}{
		{"a key that others can read", chmod("keys/*", 0o644), "directory", RepairPermission, "mode 0644"},
		{"a directory that others can read", chmod("", 0o755), "directory", RepairPermission, "mode 0755"},
		{"no relay.json", remove("relay.json"), "relay.json", RepairRestart, "no such file"},
		{"no relay.db", remove("relay.db"), "relay.db", RepairRestore, "missing"},
		{"an empty relay.db", truncate("relay.db", 0), "relay.db", RepairRestore, "empty"},
		{"no events.db", remove("events.db"), "events.db", RepairRestore, "missing"},
		{"half of events.db", truncate("events.db", 20_000), "events.db", RepairSalvage, ""},
		{"no signing key", remove("keys"), "keys", RepairRestore, "has no file"},
		{"no authority", remove("authority.pem"), "authority", RepairRestore, "missing"},
		{"the event log of another relay", func(dir string) error {
			other := readFile(t, filepath.Join(runRelay(t), "events.db"))
			return os.WriteFile(filepath.Join(dir, "events.db"), other, 0o600)
		}, "events.db", RepairRestore, "not the one that is recorded"},
		{"an audit line without its middle", func(dir string) error {
			b := readFile(t, filepath.Join(dir, "audit.jsonl"))
			return os.WriteFile(filepath.Join(dir, "audit.jsonl"), slices.Delete(b, 1000, 1030), 0o600)
		}, "audit", RepairNone, "not JSON"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := newStateDir(t)
			if err := tt.damage(dir); err != nil {
				t.Fatal(err)
			}
			r := run(t, dir)
			isWanted := func(p Problem) bool {
				return p.Store == tt.store && p.Repair == tt.repair && strings.Contains(p.What, tt.what) && !p.Warning
			}
			if r.Sound || !slices.ContainsFunc(r.Problems, isWanted) {
				t.Errorf("the problems are %+v, want one of %s with repair %q and %q", r.Problems, tt.store, tt.repair, tt.what)
			}
		})
	}
}

// Damage is reported also where warnings of the same store fill their list.
func TestDamageBehindWarnings(t *testing.T) {
	dir := newStateDir(t)
	var key string
	for name := range soundFiles {
		if strings.HasSuffix(name, ".pem") && filepath.Dir(name) == "keys" {
			key = name
		}
	}
	for i := range maxProblems + 5 {
		writeFile(t, filepath.Join(dir, "keys", fmt.Sprintf("unused-%d.pem", i)), soundFiles[key])
	}
	record := filepath.Join(dir, "keys", "relay.json")
	writeFile(t, record, []byte("{}"))
	r := run(t, dir)
	warnings := 0
	for _, p := range r.Problems {
		if p.Store == "keys" && p.Warning {
			warnings++
		}
	}
	isDamage := func(p Problem) bool { return p.Path == record && !p.Warning }
	last := r.Problems[len(r.Problems)-1]
	if r.Sound || !slices.ContainsFunc(r.Problems, isDamage) || warnings != maxProblems+1 || last.What != "5 more problems like these" || last.Path != filepath.Join(dir, "keys") {
		t.Errorf("sound is %v, %d warnings, and the problems are %+v", r.Sound, warnings, r.Problems)
	}
}

// The mode that a repair sets leaves the owner's rights, also to a file that has none.
func TestRepairedMode(t *testing.T) {
	for mode, want := range map[os.FileMode]os.FileMode{0o644: 0o600, 0o440: 0o400, 0o044: 0o600} {
		dir := newStateDir(t)
		path := filepath.Join(dir, "audit.jsonl")
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		isRepair := func(p Problem) bool {
			return p.Store == "directory" && p.Path == path && p.Repair == RepairPermission && p.Mode == want
		}
		if r := run(t, dir); !slices.ContainsFunc(r.Problems, isRepair) {
			t.Errorf("for mode %04o the problems are %+v, want a repair to %04o", mode, r.Problems, want)
		}
	}
}

// A part of the audit log that a relay removes while the check runs is no damage.
func TestRotatedAuditFile(t *testing.T) {
	c, err := newChecker(newStateDir(t))
	if err != nil {
		t.Fatal(err)
	}
	if n, err := c.checkLines(t.Context(), c.path("audit.jsonl.32")); n != 0 || err != nil {
		t.Errorf("got %d lines and %v, want none and no error", n, err)
	}
}

// blockSize is that of a disk, and of a page of a database.
const blockSize = 4096

// damages are the ways in which TestDamagedBlocks changes a block; n varies the place.
var damages = []struct {
	name  string
	apply func(block []byte, n int)
}{
	{"zeros", func(block []byte, _ int) { clear(block) }},
	{"ones", func(block []byte, _ int) { copy(block, bytes.Repeat([]byte{0xff}, len(block))) }},
	{"one bit", func(block []byte, n int) { block[(n*7919+1361)%len(block)] ^= 1 << (n % 8) }},
}

// Every block of every file is damaged, one at a time. The check notices it, unless the block holds
// nothing that a relay uses. The blocks of a large file get one kind of damage each, in turn, and all
// kinds with AGENTCTL_SLOW=1.
func TestDamagedBlocks(t *testing.T) {
	dir := newStateDir(t)
	for _, name := range slices.Sorted(maps.Keys(soundFiles)) {
		sound, path := soundFiles[name], filepath.Join(dir, name)
		blocks := (len(sound) + blockSize - 1) / blockSize
		for kind, damage := range damages {
			variants, tried, missed := 1, 0, 0
			if damage.name == "one bit" && slow() {
				variants = 16
			}
			for n := range blocks * variants {
				block := n % blocks
				if blocks > 5 && block%len(damages) != kind && !slow() {
					continue
				}
				damaged := slices.Clone(sound)
				damage.apply(damaged[block*blockSize:min((block+1)*blockSize, len(sound))], block+n/blocks)
				if bytes.Equal(damaged, sound) {
					continue // such as zeros in a block of zeros
				}
				tried++
				writeFile(t, path, damaged)
				if run(t, dir).Sound && !sameContent(t, name, sound, damaged) {
					missed++
				}
			}
			t.Logf("%s, %s: %d of %d not noticed", name, damage.name, missed, tried)
			// A letter that became another letter looks right where a text has no checksum.
			isText := damage.name == "one bit" && (name == "relay.db" || name == "audit.jsonl")
			if !isText && missed > 0 || isText && tried > 8 && missed > tried*3/4 {
				t.Errorf("%s, %s: %d of %d damages were not noticed", name, damage.name, missed, tried)
			}
		}
		writeFile(t, path, sound)
	}
	checkSound(t, dir)
}

// A salvaged log takes the place of a damaged one, which is kept, and the relay starts with it.
func TestSalvageAndReplace(t *testing.T) {
	dir := newStateDir(t)
	path := filepath.Join(dir, eventlog.FileName)
	damaged := slices.Clone(soundFiles[eventlog.FileName])
	middle := len(damaged) / 2 / blockSize * blockSize
	clear(damaged[middle : middle+blockSize])
	writeFile(t, path, damaged)
	if r := run(t, dir); r.Sound {
		t.Fatal("the damage was not noticed")
	}

	result, err := Salvage(t.Context(), dir, filepath.Join(t.TempDir(), "new"), true, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if result.Events < 100 {
		t.Errorf("%d of 150 events were salvaged, want at least 100: %+v", result.Events, result.SalvageReport)
	}
	if r := run(t, dir); !r.Sound {
		t.Errorf("afterwards the problems are %+v, want none", r.Problems)
	}
	if kept := readFile(t, filepath.Join(result.Replaced, eventlog.FileName)); !bytes.Equal(kept, damaged) {
		t.Error("the old log was not kept as it was")
	}

	store, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	record := store.EventLog()
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	log, err := eventlog.Open(eventlog.Options{Path: path, Expect: eventlog.Expect{Exists: true, ID: record.ID, Last: record.LastSeq}})
	if err != nil {
		t.Fatalf("the relay refuses the new log: %v", err)
	}
	if err := log.Close(); err != nil {
		t.Error(err)
	}
}

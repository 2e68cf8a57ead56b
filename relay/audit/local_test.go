package audit

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"agentctl/relay/kernel"
)

// A command's change has two lines of one trace, and the first is there before the change. The relay
// that has the file open goes on appending.
func TestLocalChange(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	read := func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if err := os.WriteFile(path, []byte("{\"ts\":\"cut"), 0o600); err != nil {
		t.Fatal(err)
	}
	unrecorded := func(err error) { t.Error(err) }
	change := func(r *kernel.Record) error {
		if s := read(); !strings.HasPrefix(s, "{\"ts\":\"cut\n{") || !strings.Contains(s, `"decision":"begin"`) {
			t.Errorf("before the change: %s", s)
		}
		r.Target = "T1"
		return nil
	}
	if err := LocalChange(dir, kernel.Record{Tenant: "a", Tool: "tokens.create"}, change, unrecorded); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("no")
	if err := LocalChange(dir, kernel.Record{Tool: "keys.rotate"}, func(*kernel.Record) error { return failure }, unrecorded); err != failure {
		t.Error(err)
	}
	if err := RecordLocal(dir, kernel.Record{Tool: "relay.restore", Target: "b"}); err != nil {
		t.Error(err)
	}
	lines := strings.Split(strings.TrimSpace(read()), "\n")
	for i, want := range []string{`cut`, `"decision":"begin"`, `"target":"T1","decision":"allow"`, `"tool":"keys.rotate","decision":"begin"`, `"decision":"fail"`, `"target":"b","decision":"allow"`} {
		if i >= len(lines) || !strings.Contains(lines[i], want) || i > 0 && !strings.Contains(lines[i], `"actor":"local:`) {
			t.Fatalf("line %d has no %s: %q", i, want, lines)
		}
	}
	trace := func(line string) string { _, id, _ := strings.Cut(line, `"trace_id":"`); return id }
	if a, b := trace(lines[1]), trace(lines[2]); len(a) < 32 || a != b {
		t.Errorf("trace ids %q, %q", a, b)
	}
}

// A change of several subjects has one begin and a line for each of them, of the same trace. One that fails has
// a single line.
func TestLocalChanges(t *testing.T) {
	dir := t.TempDir()
	unrecorded := func(err error) { t.Error(err) }
	subjects := []Subject{{"N1", "T1"}, {"N2", "T2"}}
	change := func(*kernel.Record) ([]Subject, error) { return subjects, nil }
	if err := LocalChanges(dir, kernel.Record{Tenant: "a", Tool: "tokens.create"}, change, unrecorded); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("no")
	if err := LocalChanges(dir, kernel.Record{Tool: "tokens.create"}, func(*kernel.Record) ([]Subject, error) { return nil, failure }, unrecorded); err != failure {
		t.Error(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, FileName))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	for i, want := range []string{`"decision":"begin"`, `"target":"T1","decision":"allow"`, `"target":"T2","decision":"allow"`, `"decision":"begin"`, `"decision":"fail"`} {
		if i >= len(lines) || !strings.Contains(lines[i], want) {
			t.Fatalf("line %d has no %s: %q", i, want, lines)
		}
	}
	trace := func(line string) string { _, id, _ := strings.Cut(line, `"trace_id":"`); return id }
	if len(lines) != 5 || trace(lines[0]) != trace(lines[1]) || trace(lines[1]) != trace(lines[2]) {
		t.Errorf("want 5 lines, the first three of one trace: %q", lines)
	}
}

// While the audit log cannot be written nothing is changed.
func TestLocalChangeWithoutDisk(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, FileName), 0o700); err != nil {
		t.Fatal(err)
	}
	changed := func(*kernel.Record) error { t.Error("changed"); return nil }
	if err := LocalChange(dir, kernel.Record{Tool: "keys.rotate"}, changed, nil); !errors.Is(err, syscall.EISDIR) {
		t.Error(err)
	}
}

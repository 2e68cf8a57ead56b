package backup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// A backup that is made while the relay writes is a state of one moment: every event in it is about a
// node that is in it, and a relay starts from it.
func TestBackupOfRunningRelay(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	ctx, cancel := context.WithCancel(t.Context())
	registered := make(chan struct{}, 1) // holds a signal: a node was registered; closed at the end
	go func() {                          // registers nodes, each before an event about it
		defer close(registered)
		for ctx.Err() == nil {
			s.appendEvent("presence.online", s.mintBoard().NodeID)
			select {
			case registered <- struct{}{}:
			default:
			}
		}
	}()
	var list []*Result
	for range 3 {
		<-registered // since the last backup
		list = append(list, s.backup(backups))
	}
	cancel()
	for range registered {
	}

	for _, r := range list {
		dir := filepath.Join(t.TempDir(), "restored")
		if _, err := Restore(t.Context(), RestoreOptions{StateDir: dir, Backup: r.Path, AcceptUnknown: true}); err != nil {
			t.Fatal(err)
		}
		if problems := checkRecords(t.Context(), dir); len(problems) > 0 {
			t.Errorf("restored, the state has the problems %v, want none", problems)
		}
		restored := openRelay(t, dir)
		err := restored.events.Replay(t.Context(), 0, func(e eventlog.Event) error {
			restored.checkNodes(e.Aggregate)
			return nil
		}, "presence.online")
		if err != nil {
			t.Error(err)
		}
		restored.stop()
	}
}

// A backup is also made of a relay that was stopped, up to its last event.
func TestBackupOfStoppedRelay(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	s.appendTicket("last")
	last := s.events.Last()
	s.stop()
	if r := s.backup(backups); r.LastSeq != last {
		t.Errorf("the last event of the backup is %d, want %d", r.LastSeq, last)
	}
}

// Only the owner can read a backup: it holds the signing keys.
func TestBackupPermissions(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	r := s.backup(backups)
	for _, dir := range []string{backups, r.Path, filepath.Join(r.Path, auth.KeysDir)} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s has mode %v, %v; want 0700", dir, info.Mode(), err)
		}
	}
	for _, f := range r.Files {
		info, err := os.Stat(filepath.Join(r.Path, f.Name))
		if err != nil || info.Mode().Perm() != 0o600 || info.Size() != f.Bytes {
			t.Errorf("%s has mode %v and %d bytes, %v; want 0600 and %d", f.Name, info.Mode(), info.Size(), err, f.Bytes)
		}
	}
}

// Create refuses directories that others can read, those inside the state directory, and a state
// directory that has none.
func TestCreateRefuses(t *testing.T) {
	t.Parallel()
	s, _ := newRelay(t)
	for _, mode := range []os.FileMode{0o755, 0o750, 0o701} {
		to := filepath.Join(t.TempDir(), "open")
		if err := errors.Join(os.Mkdir(to, mode), os.Chmod(to, mode)); err != nil { // whatever the umask
			t.Fatal(err)
		}
		_, err := Create(t.Context(), Options{StateDir: s.dir, Dir: to})
		if !errors.Is(err, errOpenDir) || !strings.Contains(err.Error(), "chmod 0700") {
			t.Errorf("into a directory of mode %v: got %v, want errOpenDir", mode, err)
		}
		if list, _ := os.ReadDir(to); len(list) > 0 {
			t.Errorf("something was written into a directory of mode %v", mode)
		}
	}
	for _, to := range []string{s.dir, s.path("backups")} {
		if _, err := Create(t.Context(), Options{StateDir: s.dir, Dir: to}); err == nil || !strings.Contains(err.Error(), "in the state directory") {
			t.Errorf("into %s: got %v, want that it is in the state directory", to, err)
		}
	}
	if _, err := Create(t.Context(), Options{StateDir: t.TempDir(), Dir: filepath.Join(t.TempDir(), "b")}); !errors.Is(err, auth.ErrNoState) {
		t.Errorf("of an empty directory: got %v, want ErrNoState", err)
	}
}

// What a killed backup leaves is no backup, and the next one deletes it. One whose process is alive is
// left alone.
func TestPartialBackups(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	good := s.backup(backups)
	killed, alive := filepath.Join(backups, namePrefix+"1"+partialSuffix), filepath.Join(backups, namePrefix+"2"+partialSuffix)
	if err := errors.Join(os.CopyFS(killed, os.DirFS(good.Path)), os.Remove(filepath.Join(killed, manifestFile))); err != nil {
		t.Fatal(err)
	}
	unlock, err := makePartial(alive)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()

	if _, err := Verify(t.Context(), killed); !errors.As(err, new(*DamagedError)) {
		t.Errorf("Verify of a partial backup: got %v, want a *DamagedError", err)
	}
	s.backup(backups)
	if _, err := os.Lstat(killed); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the killed backup is still there: %v", err)
	}
	if _, err := os.Lstat(alive); err != nil {
		t.Errorf("the backup that is being made is gone: %v", err)
	}
}

// A backup that is canceled leaves nothing.
func TestCanceledBackup(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	ctx, cancel := context.WithCancel(t.Context())
	now := func() time.Time { cancel(); return time.Now() } // Create asks for it as it begins to copy
	if _, err := Create(ctx, Options{StateDir: s.dir, Dir: backups, Now: now}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if list, err := os.ReadDir(backups); err != nil || len(list) > 0 {
		t.Errorf("the directory of backups has %v, %v; want nothing", list, err)
	}
}

// Options.Keep deletes the oldest backups of this relay, and nothing else.
func TestKeep(t *testing.T) {
	t.Parallel()
	s, backups := newRelay(t)
	if err := os.MkdirAll(filepath.Join(backups, namePrefix+"notes"), 0o700); err != nil {
		t.Fatal(err)
	}
	for hour := 3; hour <= 6; hour++ {
		now := func() time.Time { return time.Date(2026, 1, 2, hour, 0, 0, 0, time.UTC) }
		if _, err := Create(t.Context(), Options{StateDir: s.dir, Dir: backups, Keep: 2, Now: now}); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	list, _ := os.ReadDir(backups)
	for _, e := range list {
		names = append(names, e.Name())
	}
	if want := []string{"agentctl-20260102T050000Z", "agentctl-20260102T060000Z", "agentctl-notes"}; !slices.Equal(names, want) {
		t.Errorf("the backups are %v, want %v", names, want)
	}
}

package backup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile"
)

// Loss says what AcceptLoss gave up.
type Loss struct {
	StateDir string   `json:"state_dir"`
	Store    string   `json:"store"`
	Aside    string   `json:"replaced,omitempty"` // directory with what was left of it
	Kept     bool     `json:"kept"`               // an older store goes on as it is
	Lost     []string `json:"lost"`               // sentences
}

// ErrSound refuses to give up a store that is the right one.
var ErrSound = errors.New("nothing is lost: it is the one that the relay had")

// lostStores are the stores that AcceptLoss can give up, and what is lost with each.
var lostStores = map[string][]string{
	auth.DatabaseFile: {
		"every token that was made is void, because it is not known which were revoked: the signing keys are replaced",
		"every board and agent that has joined has to join again (agentctl invite), and all invites are gone",
		"names, tags and descriptions of boards are gone",
	},
	eventlog.FileName: {
		"all tickets, approvals and the history of events are gone",
		"subscribers cannot resume, and are notified",
	},
	auth.RelayFile: {
		"the relay gets a new id: every token that was made with agentctl token create is void; what has joined gets new ones by itself",
	},
}

// AcceptLoss lets a relay start again without a store that its state directory refuses: one that
// is missing, empty, damaged or of another relay is made anew, and what is left of it moved aside.
// An older event log goes on as it is. A store that is sound is ErrSound. The relay must not run.
func AcceptLoss(ctx context.Context, stateDir, store string, now time.Time) (*Loss, error) {
	if lostStores[store] == nil {
		return nil, fmt.Errorf("no such store: %q (%s, %s and %s can be lost)", store, auth.DatabaseFile, eventlog.FileName, auth.RelayFile)
	}
	if _, err := os.Stat(stateDir); err != nil {
		return nil, err
	}
	l := &Loss{StateDir: stateDir, Store: store}
	x, unlock, err := lockState(stateDir)
	if err != nil {
		return nil, err
	}
	err = l.moveAside(ctx, x, now)
	if err := errors.Join(err, unlock()); err != nil {
		return nil, err
	}
	s, err := auth.Open(auth.Options{StateDir: stateDir, StartOver: store != eventlog.FileName})
	if err != nil {
		return nil, err
	}
	if store == eventlog.FileName {
		err = s.ForgetEventLog(ctx)
	}
	return l, errors.Join(err, s.Close())
}

// moveAside moves what is left of the store away.
func (l *Loss) moveAside(ctx context.Context, x *auth.Exclusive, now time.Time) error {
	path := filepath.Join(l.StateDir, l.Store)
	info, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	exists := err == nil && info.Size() > 0
	problem, damaged := l.problem(ctx)
	l.Lost = l.lost(problem, damaged)
	var names []string
	switch l.Store {
	case auth.RelayFile:
		record, err := auth.ReadDatabase(ctx, l.StateDir)
		switch {
		case problem != nil && problem.Problem == auth.StoreForeign:
		case problem == nil && !damaged, err == nil && record.RelayID != "":
			return fmt.Errorf("%s in %s: %w, or is made anew from %s at the next start", l.Store, l.StateDir, ErrSound, auth.DatabaseFile)
		}
		names = []string{auth.RelayFile}
	case auth.DatabaseFile:
		names = append(databaseFiles(auth.DatabaseFile), auth.KeysDir)
	case eventlog.FileName:
		if problem != nil && problem.Problem == auth.StoreOlder && !damaged {
			l.Kept = true
			return nil
		}
		names = databaseFiles(eventlog.FileName)
	}
	if problem == nil && !damaged && l.Store != auth.RelayFile {
		return fmt.Errorf("%s in %s: %w", l.Store, l.StateDir, ErrSound)
	}
	aside := auth.AsideName(now)
	if exists || l.Store == auth.DatabaseFile {
		l.Aside = filepath.Join(l.StateDir, aside)
	}
	return x.Swap(aside, names)
}

// problem returns what the records say about the store, and whether it cannot be read.
func (l *Loss) problem(ctx context.Context) (problem *auth.StateError, damaged bool) {
	for _, err := range checkRecords(ctx, l.StateDir) {
		if e := (*auth.StateError)(nil); errors.As(err, &e) && e.Store == l.Store {
			problem = e
		}
	}
	path := filepath.Join(l.StateDir, l.Store)
	if _, err := os.Lstat(path); err != nil {
		if problem == nil && l.Store != eventlog.FileName {
			problem = &auth.StateError{Dir: l.StateDir, Store: l.Store, Problem: auth.StoreMissing}
		}
		return problem, false
	}
	switch l.Store {
	case auth.RelayFile:
		_, err := auth.ReadRelayFile(l.StateDir)
		damaged = err != nil
	default:
		damaged = inspectDatabase(ctx, path) != nil
	}
	return problem, damaged
}

// inspectDatabase reports damage of a database, without changing it.
func inspectDatabase(ctx context.Context, path string) error {
	if err := sqlitefile.ScanWAL(path); err != nil {
		return err
	}
	s, err := openSnapshot(ctx, path)
	if err != nil {
		return err
	}
	defer s.close()
	var result string
	if err := s.conn.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&result); err != nil {
		return err
	}
	if result != "ok" {
		return errors.New(result)
	}
	return nil
}

// LostWith says what AcceptLoss would give up, in sentences; nothing for a store that it does not know.
func LostWith(ctx context.Context, stateDir, store string) []string {
	l := &Loss{StateDir: stateDir, Store: store}
	problem, damaged := l.problem(ctx)
	return l.lost(problem, damaged)
}

// lost says what is lost with a store that has this problem.
func (l *Loss) lost(problem *auth.StateError, damaged bool) []string {
	switch {
	case problem == nil || damaged:
	case l.Store == auth.RelayFile && problem.Problem == auth.StoreForeign:
		return []string{"nothing: it is made anew from " + auth.DatabaseFile}
	case l.Store == eventlog.FileName && problem.Problem == auth.StoreOlder:
		return []string{"the events that it lacks, and with them what happened to tickets meanwhile: " + problem.Detail}
	}
	return lostStores[l.Store]
}

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
	Lost     []string `json:"lost"`               // sentences for the operator
}

// ErrSound refuses to give up a store that is the one that the relay had.
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

// AcceptLoss lets a relay start again that refuses its state directory because of one store: the store
// is missing, empty, damaged or of another relay. What is left of it is moved aside, and the next
// start makes a new one. An older event log goes on as it is. The error is ErrSound if the store has
// no such problem, and auth.ErrInUse while a relay runs.
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
	// relay.db and relay.json still record the event log that is given up: only that entry is removed.
	s, err := auth.Open(auth.Options{StateDir: stateDir, StartOver: store != eventlog.FileName})
	if err != nil {
		return nil, err
	}
	if store == eventlog.FileName {
		err = s.ForgetEventLog(ctx)
	}
	return l, errors.Join(err, s.Close())
}

// moveAside moves what is left of the store away. The signing keys go with relay.db: the tokens that
// they signed may be revoked ones.
//
//	relay.json   sound, or relay.db has its values   ErrSound
//	             of another relay                    moved aside, also if relay.db has values
//	             anything else                       moved aside
//	relay.db     sound                               ErrSound
//	             anything else                       moved aside with keys/
//	events.db    sound                               ErrSound
//	             older than recorded, and readable   stays in place
//	             anything else                       moved aside
func (l *Loss) moveAside(ctx context.Context, x *auth.Exclusive, now time.Time) error {
	info, err := os.Lstat(filepath.Join(l.StateDir, l.Store))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	hasContent := err == nil && info.Size() > 0
	c := examineStore(ctx, l.StateDir, l.Store)
	l.Lost = c.lost(l.Store)
	var names []string
	switch {
	case l.Store == auth.RelayFile && !c.is(auth.StoreForeign) && (c.isSound() || canRemakeRelayFile(ctx, l.StateDir)):
		return fmt.Errorf("%s in %s: %w, or is made anew from %s at the next start", l.Store, l.StateDir, ErrSound, auth.DatabaseFile)
	case l.Store == auth.RelayFile:
		names = []string{auth.RelayFile}
	case c.isSound():
		return fmt.Errorf("%s in %s: %w", l.Store, l.StateDir, ErrSound)
	case l.Store == auth.DatabaseFile:
		names = append(databaseFiles(auth.DatabaseFile), auth.KeysDir)
	case c.is(auth.StoreOlder) && !c.isDamaged:
		l.Kept = true
		return nil
	default:
		names = databaseFiles(eventlog.FileName)
	}
	aside := auth.AsideName(now)
	// Also where relay.db is missing: its keys are moved aside.
	if hasContent || l.Store == auth.DatabaseFile {
		l.Aside = filepath.Join(l.StateDir, aside)
	}
	return x.Swap(aside, names)
}

// canRemakeRelayFile reports whether relay.db has the values of relay.json.
func canRemakeRelayFile(ctx context.Context, stateDir string) bool {
	record, err := auth.ReadDatabase(ctx, stateDir)
	return err == nil && record.RelayID != ""
}

// condition is what is wrong with a store.
type condition struct {
	problem   *auth.StateError // it is not the store that is recorded; nil: it is
	isDamaged bool             // its content cannot be read
}

func (c condition) isSound() bool { return c.problem == nil && !c.isDamaged }

// is reports whether the store has a problem of auth, such as auth.StoreOlder.
func (c condition) is(problem string) bool { return c.problem != nil && c.problem.Problem == problem }

// examineStore returns the condition of a store. It changes nothing on disk.
func examineStore(ctx context.Context, stateDir, store string) (c condition) {
	for _, err := range checkRecords(ctx, stateDir) {
		if e, ok := errors.AsType[*auth.StateError](err); ok && e.Store == store {
			c.problem = e
		}
	}
	path := filepath.Join(stateDir, store)
	if _, err := os.Lstat(path); err != nil {
		if c.problem == nil && store != eventlog.FileName { // a relay may have no event log
			c.problem = &auth.StateError{Dir: stateDir, Store: store, Problem: auth.StoreMissing}
		}
		return c
	}
	if store == auth.RelayFile {
		_, err := auth.ReadRelayFile(stateDir)
		c.isDamaged = err != nil
	} else {
		c.isDamaged = readDatabase(ctx, path) != nil
	}
	return c
}

// readDatabase reads a database and its write-ahead log to the end, and returns an error if one of
// them is damaged.
func readDatabase(ctx context.Context, path string) error {
	if err := sqlitefile.ScanWAL(path); err != nil {
		return err
	}
	s, err := openSnapshot(ctx, path)
	if err != nil {
		return err
	}
	defer s.close()
	return quickCheck(ctx, s.conn)
}

// LostWith returns sentences that say what AcceptLoss would give up; none for a store that it does not
// know.
func LostWith(ctx context.Context, stateDir, store string) []string {
	return examineStore(ctx, stateDir, store).lost(store)
}

// lost says what is lost when a store in this condition is given up.
func (c condition) lost(store string) []string {
	switch {
	case c.isDamaged:
	case store == auth.RelayFile && c.is(auth.StoreForeign):
		return []string{"nothing: it is made anew from " + auth.DatabaseFile}
	case store == eventlog.FileName && c.is(auth.StoreOlder):
		return []string{"the events that it lacks, and with them what happened to tickets meanwhile: " + c.problem.Detail}
	}
	return lostStores[store]
}

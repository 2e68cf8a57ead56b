package backup

import (
	"database/sql"
	"errors"
	"os"
	"testing"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile"
)

func acceptLoss(t *testing.T, s *relayState, store string) (*Loss, error) {
	return AcceptLoss(t.Context(), s.dir, store, time.Now())
}

// A database that is missing, empty or damaged is given up, and the relay starts with the same
// audience. Tokens hold without the event log, and are void without relay.db.
func TestAcceptLossOfDatabase(t *testing.T) {
	t.Parallel()
	for _, store := range []string{auth.DatabaseFile, eventlog.FileName} {
		for name, spoil := range spoilDatabase {
			t.Run(store+" "+name, func(t *testing.T) {
				t.Parallel()
				s, _ := newRelay(t)
				token, audience := s.mintAgent(), s.store.Audience()
				s.stop()
				if err := spoil(s.path(store)); err != nil {
					t.Fatal(err)
				}
				l, err := acceptLoss(t, s, store)
				if err != nil || len(l.Lost) == 0 {
					t.Fatalf("got %+v, %v; want a list of what is lost", l, err)
				}
				if problems := checkRecords(t.Context(), s.dir); len(problems) > 0 {
					t.Errorf("afterwards the state has the problems %v, want none", problems)
				}
				s = openRelay(t, s.dir)
				if got := s.store.Audience(); got != audience {
					t.Errorf("the audience is %s, want %s", got, audience)
				}
				tokens := map[string]auth.Minted{"token": token}
				if store == auth.DatabaseFile {
					s.checkTokens(nil, tokens)
				} else {
					s.checkTokens(tokens, nil)
				}
			})
		}
	}
}

// A sound store is not given up, nor is relay.json while relay.db has its values.
func TestAcceptLossOfSoundStore(t *testing.T) {
	t.Parallel()
	s, _ := newRelay(t)
	s.stop()
	for _, store := range []string{auth.DatabaseFile, eventlog.FileName, auth.RelayFile} {
		if _, err := acceptLoss(t, s, store); !errors.Is(err, ErrSound) {
			t.Errorf("%s: got %v, want ErrSound", store, err)
		}
	}
	if err := os.Remove(s.path(auth.RelayFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := acceptLoss(t, s, auth.RelayFile); !errors.Is(err, ErrSound) {
		t.Errorf("relay.json that relay.db has: got %v, want ErrSound", err)
	}
	if _, err := acceptLoss(t, s, "keys"); err == nil {
		t.Error("a store that cannot be given up was accepted")
	}
}

// relay.db of an earlier agentctl has no copy of relay.json. Without both, the relay gets a new id, and
// its tokens are void.
func TestAcceptLossOfRelayFile(t *testing.T) {
	t.Parallel()
	s, _ := newRelay(t)
	token := s.mintAgent()
	s.stop()
	forgetRelayFile(t, s)
	var refused *auth.StateError
	if _, err := auth.Open(auth.Options{StateDir: s.dir}); !errors.As(err, &refused) || refused.Store != auth.RelayFile {
		t.Fatalf("Open: got %v, want a StateError of relay.json", err)
	}
	if _, err := acceptLoss(t, s, auth.RelayFile); err != nil {
		t.Fatal(err)
	}
	openRelay(t, s.dir).checkTokens(nil, map[string]auth.Minted{"of the lost relay id": token})
}

// forgetRelayFile removes relay.json, its copy in keys/ and its values in relay.db.
func forgetRelayFile(t *testing.T, s *relayState) {
	t.Helper()
	db, err := sql.Open("sqlite", sqlitefile.DSN(s.path(auth.DatabaseFile), ""))
	if err != nil {
		t.Fatal(err)
	}
	_, err = db.Exec("DELETE FROM relay")
	err = errors.Join(err, db.Close(), os.Remove(s.path(auth.RelayFile)), os.Remove(s.path(auth.KeysDir+"/"+auth.RelayFile)))
	if err != nil {
		t.Fatal(err)
	}
}

package auth

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"modernc.org/sqlite"

	"agentctl/manifest"
	"agentctl/relay/storage"
)

// hungTimeout is Options.WriteTimeout of the stores of these tests. Their time is virtual, so that a disk
// that is busy does not count as one that hangs.
const hungTimeout = 2 * time.Second

// wantHung checks that an error says that the disk hangs, and that it may be tried again.
func wantHung(t *testing.T, what string, err error) {
	t.Helper()
	if e := manifest.AsError(err); storage.Classify(err) != storage.Hung || e.Reason != storage.Reason || e.Code != manifest.Internal || !e.Retryable() {
		t.Errorf("%s: got %v, want that the disk hangs", what, err)
	}
}

// While relay.db hangs, changes give up after WriteTimeout, and what was given up before it began is not
// made. Known tokens verify, and what was revoked stays refused.
func TestHungDatabase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, Options{Watch: storage.NewWatch(dbFile), WriteTimeout: hungTimeout})
		node := manifest.NewNodeID()
		upsert(t, s, DefaultTenant, node, "", "")
		good, revoked := mint(t, s, MintRequest{Class: "agent"}), mint(t, s, MintRequest{Class: "agent"})
		if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: revoked.JTI}); err != nil {
			t.Fatal(err)
		}

		s.db.writeSlot <- struct{}{} // as a writer whose fsync does not return
		began := time.Now()
		_, err := s.Mint(t.Context(), MintRequest{Class: "agent"})
		wantHung(t, "Mint", err)
		_, err = s.UpsertNode(t.Context(), DefaultTenant, manifest.NewNodeID(), "", nil)
		wantHung(t, "UpsertNode of a new node", err)
		ctx, cancel := context.WithTimeout(t.Context(), 0)
		defer cancel()
		_, err = s.Revoke(ctx, RevokeRequest{JTI: good.JTI})
		wantHung(t, "Revoke without time", err)
		if d := time.Since(began); d != 2*hungTimeout {
			t.Errorf("the three changes took %v, want %v", d, 2*hungTimeout)
		}
		verifies(t, s, good.Token)
		_, err = s.Verify(revoked.Token)
		refused(t, err, revoked.Token, ErrRevoked, "revoked")
		upsert(t, s, DefaultTenant, node, "", "") // changes nothing

		<-s.db.writeSlot
		verifies(t, s, mint(t, s, MintRequest{Class: "agent"}).Token)
		verifies(t, s, good.Token) // Revoke was given up before it began
		if err := s.probe(t.Context()); err != nil {
			t.Errorf("the probe afterwards: %v", err)
		}
	})
}

// A caller whose transaction hangs gives up after WriteTimeout. The next transaction runs when it ends.
func TestHungTransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, Options{WriteTimeout: hungTimeout})
		hang := make(chan struct{})
		began := time.Now()
		err := s.db.write(t.Context(), func(*sql.Tx) error { <-hang; return nil }, nil)
		wantHung(t, "write", err)
		if d := time.Since(began); d != hungTimeout {
			t.Errorf("it took %v, want %v", d, hungTimeout)
		}
		close(hang)
		mint(t, s, MintRequest{Class: "agent"})
	})
}

// hangingQuery is the function hang_for_test() of SQL: it calls enter and then leave.
var hangingQuery struct{ enter, leave func() }

// registerHangingQuery registers it, once in a process.
var registerHangingQuery = sync.OnceValue(func() error {
	return sqlite.RegisterScalarFunction("hang_for_test", 0, func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) {
		hangingQuery.enter()
		hangingQuery.leave()
		return int64(1), nil
	})
})

// A query that the disk holds is given up by its caller, and so are those behind it.
func TestHungRead(t *testing.T) {
	if err := registerHangingQuery(); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		entered, hang := make(chan struct{}), make(chan struct{})
		hangingQuery.enter, hangingQuery.leave = func() { close(entered) }, func() { <-hang }
		s := openStore(t, Options{Watch: storage.NewWatch(dbFile), WriteTimeout: hungTimeout})
		rows := 0
		row := func(func(...any) error) error { rows++; return nil }
		first := make(chan error)
		go func() { first <- s.query(t.Context(), row, "SELECT hang_for_test()") }()
		<-entered
		_, err := s.Tokens(t.Context())
		wantHung(t, "Tokens, behind a query that hangs", err)
		wantHung(t, "the query that hangs", <-first)
		began := time.Now()
		if s.lookupKey(s.Issuer(), "none") != nil || time.Since(began) > storage.SlowAfter {
			t.Errorf("the search for an unknown key took %v, want at most %v", time.Since(began), storage.SlowAfter)
		}
		close(hang)
		synctest.Wait()
		if err := s.query(t.Context(), row, "SELECT 1"); err != nil || rows != 1 {
			t.Errorf("afterwards: %d rows, %v; want 1", rows, err)
		}
	})
}

// A consent whose transaction hangs is in force once it is stored, although its caller has given up, and
// what was under way with the earlier one is ended then.
func TestHungConsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, Options{WriteTimeout: hungTimeout})
		hang := make(chan struct{})
		s.db.writeSlot <- struct{}{} // until both are queued, for one transaction
		go func() { _ = s.db.write(t.Context(), func(*sql.Tx) error { <-hang; return nil }, nil) }()
		synctest.Wait()
		given := make(chan error)
		var atCommit []Consent
		go func() {
			_, err := s.SetConsent(t.Context(), Consent{Plugin: "notes", Digest: "d1", Tenants: []string{"a"}}, func() {
				c, _ := s.Consent("notes")
				atCommit = append(atCommit, c)
			})
			given <- err
		}()
		synctest.Wait()
		<-s.db.writeSlot
		wantHung(t, "SetConsent", <-given)
		if len(atCommit) != 0 {
			t.Errorf("before the commit: %+v", atCommit)
		}
		close(hang)
		synctest.Wait()
		if len(atCommit) != 1 || atCommit[0].Digest != "d1" {
			t.Errorf("at the commit: %+v", atCommit)
		}
		if c, ok := s.Consent("notes"); !ok || c.Digest != "d1" {
			t.Errorf("after the commit: %+v %t", c, ok)
		}
	})
}

package auth

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"
	"time"

	"modernc.org/sqlite"

	"agentctl/manifest"
	"agentctl/relay/storage"
)

// While relay.db hangs, changes give up with reason storage, known tokens verify, what was revoked
// stays refused, and nobody waits without a bound. What was given up before it began is not made.
func TestHungDatabase(t *testing.T) {
	watch := storage.NewWatch(dbFile)
	s := openStore(t, Options{Watch: watch})
	normal := s.db.writeTimeout
	node := manifest.NewNodeID()
	if _, err := s.UpsertNode(t.Context(), DefaultTenant, node, "", nil); err != nil {
		t.Fatal(err)
	}
	good, revoked := mint(t, s, MintRequest{Class: "agent"}), mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: revoked.JTI}); err != nil {
		t.Fatal(err)
	}
	s.db.writeTimeout = 50 * time.Millisecond // not before: a busy disk takes longer
	s.db.writeSlot <- struct{}{}              // as a writer whose fsync does not return
	isStorage := func(what string, err error) {
		t.Helper()
		if e := manifest.AsError(err); e.Reason != storage.Reason || e.Code != manifest.Internal || !e.Retryable() {
			t.Errorf("%s: %v", what, err)
		}
	}
	began := time.Now()
	_, err := s.Mint(t.Context(), MintRequest{Class: "agent"})
	isStorage("mint", err)
	_, err = s.UpsertNode(t.Context(), DefaultTenant, manifest.NewNodeID(), "", nil)
	isStorage("register", err)
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	_, err = s.Revoke(ctx, RevokeRequest{JTI: good.JTI})
	isStorage("revoke", err)
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("three changes took %v", d)
	}
	if _, err := s.Verify(good.Token, ClassAgent); err != nil {
		t.Errorf("a good token: %v", err)
	}
	if _, err := s.Verify(revoked.Token, ClassAgent); err == nil {
		t.Error("a revoked token is accepted")
	}
	if _, err := s.UpsertNode(t.Context(), DefaultTenant, node, "", nil); err != nil {
		t.Errorf("a known node that changes nothing: %v", err)
	}
	<-s.db.writeSlot
	s.db.writeTimeout = normal
	again := mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.Verify(again.Token, ClassAgent); err != nil {
		t.Errorf("after the fault: %v", err)
	}
	if _, err := s.Verify(good.Token, ClassAgent); err != nil {
		t.Errorf("a revocation that was given up is in force: %v", err)
	}
	if err := s.probe(t.Context()); err != nil {
		t.Errorf("the probe: %v", err)
	}
}

// A transaction that hangs is waited for by those who are in it for their time only, and its
// result counts although they have left.
func TestHungTransaction(t *testing.T) {
	s := openStore(t, Options{})
	normal := s.db.writeTimeout
	s.db.writeTimeout = 50 * time.Millisecond // not while it opens: a busy disk takes longer
	hold, held := make(chan struct{}), make(chan struct{})
	done := make(chan error)
	go func() {
		done <- s.db.write(t.Context(), func(*sql.Tx) error { close(held); <-hold; return nil }, nil)
	}()
	<-held
	if err := <-done; storage.Classify(err) != storage.Hung {
		t.Errorf("in a transaction that hangs: %v", err)
	}
	close(hold)
	s.db.writeTimeout = normal
	mint(t, s, MintRequest{Class: "agent"}) // the next one is served
}

// A query that the disk holds is given up by its caller, and so are those behind it.
func TestHungRead(t *testing.T) {
	release, held := make(chan struct{}), make(chan struct{})
	if err := sqlite.RegisterScalarFunction("hang_for_test", 0, func(*sqlite.FunctionContext, []driver.Value) (driver.Value, error) {
		close(held)
		<-release
		return int64(1), nil
	}); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, Options{Watch: storage.NewWatch(dbFile)})
	s.db.writeTimeout = 50 * time.Millisecond // not while it opens: a busy disk takes longer
	rows := 0
	row := func(func(...any) error) error { rows++; return nil }
	first := make(chan error)
	go func() { first <- s.query(t.Context(), row, "SELECT hang_for_test()") }()
	<-held
	if _, err := s.Tokens(t.Context()); storage.Classify(err) != storage.Hung {
		t.Errorf("behind a query that hangs: %v", err)
	}
	if err := <-first; storage.Classify(err) != storage.Hung {
		t.Errorf("a query that hangs: %v", err)
	}
	began := time.Now()
	if s.lookupKey(s.Issuer(), "none") != nil || time.Since(began) > 2*storage.SlowAfter {
		t.Errorf("a key that is not known: %v", time.Since(began))
	}
	close(release)
	if err := s.query(t.Context(), row, "SELECT 1"); err != nil || rows != 1 {
		t.Errorf("afterwards: %v, %d rows", err, rows)
	}
}

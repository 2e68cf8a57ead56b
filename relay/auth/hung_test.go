package auth

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/storage"
)

// While relay.db hangs, changes give up with reason storage, known tokens verify, what was revoked
// stays refused, and nobody waits without a bound. What was given up before it began is not made.
func TestHungDatabase(t *testing.T) {
	watch := storage.NewWatch(dbFile)
	s := openStore(t, Options{Watch: watch, WriteTimeout: 50 * time.Millisecond})
	node := manifest.NewNodeID()
	if _, err := s.UpsertNode(t.Context(), DefaultTenant, node, "", nil); err != nil {
		t.Fatal(err)
	}
	good, revoked := mint(t, s, MintRequest{Class: "agent"}), mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: revoked.JTI}); err != nil {
		t.Fatal(err)
	}
	s.db.writeSlot <- struct{}{} // as a writer whose fsync does not return
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
	s := openStore(t, Options{WriteTimeout: 50 * time.Millisecond})
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
	mint(t, s, MintRequest{Class: "agent"}) // the next one is served
}

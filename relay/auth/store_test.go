package auth

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/manifest"
)

// A known token costs no memory: neither to verify, nor to ask what it may, nor to ask
// whether it still holds.
func TestHotPathAllocatesNothing(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: manifest.NewULID()}); err != nil {
		t.Fatal(err)
	}
	id, err := s.Verify(m.Token)
	if err != nil {
		t.Fatal(err)
	}
	bad := strings.Repeat("A", MaxTokenLen+1)
	for name, fn := range map[string]func(){
		"Verify": func() { _, _ = s.Verify(m.Token, ClassAgent) },
		"Has":    func() { id.Has(manifest.ScopeKernelAdmin) },
		"Active": func() { _ = s.Active(id) },
		"Owner":  func() { s.NodeTenant("01hzx9k3m4p7q8r9s0t1v2w3xy") },
		"huge":   func() { _, _ = s.Verify(bad, ClassAgent) },
	} {
		if n := testing.AllocsPerRun(100, fn); n != 0 {
			t.Errorf("%s: got %v allocations, want 0", name, n)
		}
	}
}

func TestCacheSizeIsBounded(t *testing.T) {
	var c tokenCache
	key := func(i uint64) tokenDigest {
		return sha256.Sum256(binary.LittleEndian.AppendUint64(nil, i))
	}
	hot := &Identity{Subject: "hot"}
	c.add(key(0), hot)
	const bound = cacheShards * maxGeneration * 2
	for i := range uint64(3 * bound) {
		id := &Identity{Gen: int(i)}
		c.add(key(i+1), id)
		if c.get(key(i+1)) != id {
			t.Fatalf("entry %d was not kept", i)
		}
		if i%100 == 0 && c.get(key(0)) != hot {
			t.Fatalf("an entry in use was dropped after %d others", i)
		}
	}
	if n := c.size(); n > bound || n < bound/3 {
		t.Errorf("got %d entries, want at most %d", n, bound)
	}
	if c.get(key(1)) != nil {
		t.Error("an entry that nobody asked for is still there")
	}
}

// Verify, mint, revoke and poll at once, for the race detector; a revoked token stays so.
func TestConcurrentUse(t *testing.T) {
	s := openStore(t, Options{})
	victim := mint(t, s, MintRequest{Class: "agent", Subject: "victim"})
	steady := mint(t, s, MintRequest{Class: "agent"})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			revoked := false
			for {
				if _, err := s.Verify(steady.Token); err != nil {
					t.Error(err)
				}
				_, err := s.Verify(victim.Token)
				if revoked && err == nil {
					t.Error("a revoked token came back")
				}
				revoked = err != nil
				select {
				case <-stop:
					if !revoked {
						t.Error("the token was not revoked")
					}
					return
				default:
				}
			}
		})
	}
	wg.Go(func() {
		for range 20 {
			if err := s.Refresh(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range 10 {
		mint(t, s, MintRequest{Class: "device"})
		if i == 5 {
			if _, err := s.Revoke(t.Context(), RevokeRequest{Subject: "victim"}); err != nil {
				t.Error(err)
			}
		}
	}
	close(stop)
	wg.Wait()
}

// While another process holds the write lock, reads succeed and writes fail with the reason.
func TestLockedByAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	s, other := openStore(t, Options{StateDir: dir}), openStore(t, Options{StateDir: dir})
	m := mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.db.writeDB.Exec("PRAGMA busy_timeout = 1"); err != nil {
		t.Fatal(err)
	}
	tx, err := other.db.writeDB.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Mint(t.Context(), MintRequest{Class: "agent"}); err == nil || !strings.Contains(err.Error(), "fuser -v") {
		t.Errorf("mint: got %v", err)
	}
	if _, err := s.Verify(m.Token); err != nil {
		t.Error(err)
	}
	if err := s.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	if list, err := s.Tokens(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("got %d, %v", len(list), err)
	}
	tx.Rollback()
	mint(t, s, MintRequest{Class: "agent"})
}

// A full disk refuses what it cannot keep, in memory too, and is got over.
func TestDiskFull(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.db.writeDB.Exec("PRAGMA max_page_count = 1"); err != nil { // no page more than there are
		t.Fatal(err)
	}
	const count = 100 // their rows need more pages
	list, err := s.Mint(t.Context(), MintRequest{Class: "device", Count: count})
	if err == nil || list != nil || !strings.Contains(err.Error(), "full disk") || !strings.Contains(err.Error(), "df -h") {
		t.Fatalf("mint: got %d, %v", len(list), err)
	}
	node := manifest.NewNodeID()
	if _, err := s.UpsertNode(t.Context(), "acme", node, "", bytes.Repeat([]byte("1"), 100_000)); err == nil {
		t.Fatal("upsert: no error")
	}
	if _, ok := s.NodeTenant(node); ok || len(s.registry.byID) != 0 {
		t.Errorf("memory keeps what the disk does not: %d nodes", len(s.registry.byID))
	}
	if _, err := s.Verify(m.Token); err != nil {
		t.Error(err)
	}
	if _, err := s.db.writeDB.Exec("PRAGMA max_page_count = 100000"); err != nil {
		t.Fatal(err)
	}
	mint(t, s, MintRequest{Class: "device", Count: count})
}

// A state directory that fails is reported once, and once when it works again; what is
// known stays in force.
func TestRunReportsFailureOnce(t *testing.T) {
	var log bytes.Buffer
	logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&log), zap.DebugLevel))
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, Options{StateDir: dir, Logger: logger})
		m := mint(t, s, MintRequest{Class: "agent"})
		ctx, cancel := context.WithCancel(t.Context())
		var works atomic.Bool
		var failures atomic.Int32
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.runEvery(ctx, PollInterval, "test", func(context.Context) error {
				if works.Load() {
					return nil
				}
				failures.Add(1)
				return errors.New("no disk")
			})
		}()
		time.Sleep(5*PollInterval + time.Millisecond)
		if _, err := s.Verify(m.Token); err != nil {
			t.Error(err)
		}
		works.Store(true)
		time.Sleep(5 * PollInterval)
		cancel()
		<-done
		if n := failures.Load(); n != 5 {
			t.Errorf("%d rounds failed, want 5", n)
		}
	})
	if out := log.String(); strings.Count(out, "no disk") != 1 || strings.Count(out, "works again") != 1 {
		t.Errorf("log: %s", out)
	}
}

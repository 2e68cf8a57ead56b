package auth

import (
	"context"
	"strconv"
	"testing"

	"agentctl/manifest"
)

func BenchmarkVerifyCached(b *testing.B) {
	s := openStore(b, Options{})
	token := mint(b, s, MintRequest{Class: "agent"}).Token
	b.ReportAllocs()
	for b.Loop() {
		id, err := s.Verify(token, ClassAgent)
		if err != nil || !id.Has(manifest.ScopeCallReadOnly) {
			b.Fatal(err)
		}
	}
}

// As above, with a deny list of 1,000 entries of each kind.
func BenchmarkVerifyCachedDenyList(b *testing.B) {
	s := openStore(b, Options{})
	token := mint(b, s, MintRequest{Class: "device"}).Token
	d := &denyList{revision: 1, jti: map[string]int64{}, sub: map[string]int64{}, node: map[string]int64{}, tenant: map[string]int64{}}
	for i := range 1000 {
		d.jti[manifest.NewULID()] = 1
		d.sub["s"+strconv.Itoa(i)], d.node[manifest.NewNodeID()], d.tenant["t"+strconv.Itoa(i)] = 1, 1, 1
	}
	s.installDenyList(d)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Verify(token, ClassDevice); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerifyCachedParallel(b *testing.B) {
	s := openStore(b, Options{})
	list, err := s.Mint(context.Background(), MintRequest{Class: "agent", Count: 64})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			if _, err := s.Verify(list[i%len(list)].Token, ClassAgent); err != nil {
				b.Error(err)
			}
		}
	})
}

func BenchmarkVerifyCold(b *testing.B) {
	s := openStore(b, Options{})
	token := mint(b, s, MintRequest{Class: "agent"}).Token
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.checkToken(token); err != nil {
			b.Fatal(err)
		}
	}
}

// A token of a foreign key costs no signature check.
func BenchmarkVerifyUnknownKey(b *testing.B) {
	s, other := openStore(b, Options{}), openStore(b, Options{})
	token := mint(b, other, MintRequest{Class: "agent"}).Token
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Verify(token, ClassAgent); err == nil {
			b.Fatal("accepted")
		}
	}
}

func BenchmarkVerifyGarbage(b *testing.B) {
	s := openStore(b, Options{})
	garbage := string(make([]byte, 2000))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Verify(garbage, ClassAgent); err == nil {
			b.Fatal("accepted")
		}
	}
}

func BenchmarkActive(b *testing.B) {
	s := openStore(b, Options{})
	id, err := s.Verify(mint(b, s, MintRequest{Class: "agent"}).Token)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Active(id); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkNodeTenant(b *testing.B) {
	s := openStore(b, Options{})
	list, err := s.Mint(context.Background(), MintRequest{Class: "device", Count: 5000})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, ok := s.NodeTenant(list[i%len(list)].NodeID); !ok {
			b.Fatal("unknown")
		}
	}
}

func BenchmarkRefreshNothingNew(b *testing.B) {
	s := openStore(b, Options{})
	for b.Loop() {
		if err := s.Refresh(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

// 1,000 boards announce for the first time, all at once.
func BenchmarkUpsertFleet(b *testing.B) {
	s := openStore(b, Options{})
	m := []byte(`[{"cap_id":"echo"},{"cap_id":"metrics"}]`)
	for b.Loop() {
		done := make(chan error, 1000)
		for range 1000 {
			go func() {
				_, err := s.UpsertNode(context.Background(), "acme", manifest.NewNodeID(), "", m)
				done <- err
			}()
		}
		for range 1000 {
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		if _, err := s.db.writeDB.Exec("DELETE FROM nodes"); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

func BenchmarkMint1000(b *testing.B) {
	s := openStore(b, Options{})
	for b.Loop() {
		if _, err := s.Mint(context.Background(), MintRequest{Class: "agent", Count: 1000}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if _, err := s.db.writeDB.Exec("DELETE FROM tokens"); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

package auth

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// Two Stores on one directory act as the relay and the command line. The relay has
// the tokens cached, and Run is the only way in which it learns of it.
func TestRevocationReachesRunningStore(t *testing.T) {
	tests := []struct {
		name string
		req  func(agent, device Minted) RevokeRequest
		// which of agent, device and the bystander of another tenant are stopped
		agent, device, bystander bool
		live                     int
	}{
		{"jti", func(a, _ Minted) RevokeRequest { return RevokeRequest{JTI: a.JTI} }, true, false, false, 1},
		{"jti in lower case", func(a, _ Minted) RevokeRequest { return RevokeRequest{JTI: strings.ToLower(a.JTI)} }, true, false, false, 1},
		{"subject", func(a, _ Minted) RevokeRequest { return RevokeRequest{Subject: a.Subject} }, true, false, false, 1},
		{"node", func(_, d Minted) RevokeRequest { return RevokeRequest{Node: d.NodeID} }, false, true, false, 1},
		{"node as subject", func(_, d Minted) RevokeRequest { return RevokeRequest{Subject: d.NodeID} }, false, true, false, 1},
		{"node by name", func(_, d Minted) RevokeRequest { return RevokeRequest{Node: "node-" + d.NodeID[20:]} }, false, true, false, 1},
		{"tenant", func(_, _ Minted) RevokeRequest { return RevokeRequest{Tenant: "acme"} }, true, true, false, 2},
		{"other tenant", func(_, _ Minted) RevokeRequest { return RevokeRequest{Tenant: "zeta"} }, false, false, true, 1},
		{"unknown jti", func(_, _ Minted) RevokeRequest { return RevokeRequest{JTI: manifest.NewULID()} }, false, false, false, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				relay := openStore(t, Options{StateDir: dir})
				cli := openStore(t, Options{StateDir: dir})
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error)
				go func() { done <- relay.Run(ctx) }()

				agent := mint(t, cli, MintRequest{Class: "agent", Tenant: "acme", Subject: "claude"})
				device := mint(t, cli, MintRequest{Class: "device", Tenant: "acme"})
				bystander := mint(t, cli, MintRequest{Class: "agent", Tenant: "zeta"})
				var ids []*Identity
				for _, m := range []Minted{agent, device, bystander} {
					id, err := relay.Verify(m.Token)
					if err != nil {
						t.Fatal(err)
					}
					ids = append(ids, id)
				}
				n, err := cli.Revoke(ctx, tt.req(agent, device))
				if err != nil || n != tt.live {
					t.Fatalf("revoke: got %d, %v, want %d", n, err, tt.live)
				}
				for _, id := range ids {
					if err := relay.Active(id); err != nil {
						t.Errorf("before the poll: %v", err)
					}
				}
				time.Sleep(PollInterval)
				synctest.Wait()
				for i, want := range []bool{tt.agent, tt.device, tt.bystander} {
					m := []Minted{agent, device, bystander}[i]
					for _, s := range []*Store{relay, cli} {
						_, err := s.Verify(m.Token)
						active := s.Active(ids[i])
						if !want {
							if err != nil || active != nil {
								t.Errorf("token %d: got %v, %v, want no refusal", i, err, active)
							}
							continue
						}
						refused(t, err, m.Token, ErrRevoked, "revoked")
						refused(t, active, m.Token, ErrRevoked, "revoked")
					}
				}
				cancel()
				if err := <-done; err != nil {
					t.Errorf("run: %v", err)
				}
			})
		})
	}
}

func TestRevoke(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent"})
	id, err := s.Verify(m.Token)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.Revoke(t.Context(), RevokeRequest{JTI: m.JTI}); n != 1 || err != nil {
		t.Fatalf("got %d, %v", n, err)
	}
	refused(t, s.Active(id), m.Token, ErrRevoked, "revoked")
	if n, err := s.Revoke(t.Context(), RevokeRequest{Tenant: DefaultTenant}); n != 0 || err != nil {
		t.Errorf("a token that is revoked already: got %d, %v, want 0", n, err)
	}
	list, err := s.Tokens(t.Context())
	if err != nil || len(list) != 1 || !list[0].Revoked || list[0].Expired || list[0].JTI != m.JTI {
		t.Errorf("list: got %+v, %v", list, err)
	}
}

// After a revocation by subject, node or tenant a new token works, even in the
// same second, and can itself be revoked in that second.
func TestMintAfterRevoke(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	node := manifest.NewNodeID()
	for round := range 3 {
		for _, tt := range []struct {
			mint   MintRequest
			revoke RevokeRequest
		}{
			{MintRequest{Class: "agent", Tenant: "acme", Subject: "claude"}, RevokeRequest{Subject: "claude"}},
			{MintRequest{Class: "device", Tenant: "acme", NodeID: node}, RevokeRequest{Node: node}},
			{MintRequest{Class: "agent", Tenant: "acme"}, RevokeRequest{Tenant: "acme"}},
		} {
			m := mint(t, s, tt.mint)
			if _, err := s.Verify(m.Token); err != nil {
				t.Fatalf("round %d, %+v: %v", round, tt.revoke, err)
			}
			if n, err := s.Revoke(t.Context(), tt.revoke); n != 1 || err != nil {
				t.Errorf("round %d, %+v: got %d, %v", round, tt.revoke, n, err)
			}
			_, err := s.Verify(m.Token)
			refused(t, err, m.Token, ErrRevoked, "revoked")
		}
	}
	ck.t = testTime.Add(-time.Hour) // the clock was ahead; what was revoked stays so, what is minted works
	m := mint(t, s, MintRequest{Class: "agent", Tenant: "acme", Subject: "claude", TTL: time.Minute})
	if _, err := s.Verify(m.Token); err != nil {
		t.Errorf("after the clock was set back: %v", err)
	}
}

func TestRevokeRefuses(t *testing.T) {
	s := openStore(t, Options{})
	for _, m := range []string{"acme", "zeta"} {
		node := mint(t, s, MintRequest{Class: "device", Tenant: m}).NodeID
		if _, err := s.UpsertNode(t.Context(), m, node, "lab", nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		req  RevokeRequest
		want string
	}{
		{RevokeRequest{}, "exactly one"},
		{RevokeRequest{JTI: manifest.NewULID(), Tenant: "acme"}, "exactly one"},
		{RevokeRequest{JTI: "x"}, "malformed"},
		{RevokeRequest{Subject: "a b"}, "malformed"},
		{RevokeRequest{Tenant: "A"}, "malformed"},
		{RevokeRequest{Node: "nobody"}, "agentctl token ls"},
		{RevokeRequest{Node: "lab"}, "give the node id"},
	} {
		if n, err := s.Revoke(t.Context(), tt.req); n != 0 || err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: got %d, %v, want an error with %q", tt.req, n, err, tt.want)
		}
	}
	if d := s.deny.Load(); len(d.jti)+len(d.sub)+len(d.node)+len(d.tenant) != 0 {
		t.Errorf("got revocations %+v", d)
	}
}

// A deny list never forgets what it needs: below half its bound nothing is dropped, not
// even when the clock jumps far ahead; above, only what can stop no living token.
func TestDenyListIsBounded(t *testing.T) {
	s := openStore(t, Options{})
	now := testTime.Unix()
	add := func(until int64) (err error) {
		return s.db.write(t.Context(), func(tx *sql.Tx) error {
			jti := manifest.NewULID()
			if _, err := addRevocation(tx, "jti", jti, now, 20); err != nil {
				return err
			}
			_, err := tx.Exec("UPDATE revocations SET until = ? WHERE value = ?", until, jti)
			return err
		}, nil)
	}
	size := func() int {
		d, err := loadDenyList(t.Context(), s.db.readDB)
		if err != nil {
			t.Fatal(err)
		}
		return len(d.jti)
	}
	for i := range 30 {
		until := now + 1
		if i < 10 {
			until = now - 1
		}
		err := add(until)
		switch {
		case i < 10 && (err != nil || size() != i+1):
			t.Fatalf("short list, %d: got %d, %v, want nothing dropped", i, size(), err)
		case i >= 10 && (err != nil || size() != i-9):
			t.Fatalf("long list, %d: got %d, %v, want the old ones dropped", i, size(), err)
		}
	}
	if err := add(now + 1); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "revoke by tenant") {
		t.Errorf("full list: got %v", err)
	}
	if size() != 20 {
		t.Errorf("got %d", size())
	}
}

// A poll that read before a revocation of ours must not undo it by finishing after it.
func TestOlderDenyListIsIgnored(t *testing.T) {
	s := openStore(t, Options{})
	stale, err := loadDenyList(t.Context(), s.db.readDB)
	if err != nil {
		t.Fatal(err)
	}
	m := mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: m.JTI}); err != nil {
		t.Fatal(err)
	}
	s.installDenyList(stale)
	_, err = s.Verify(m.Token)
	refused(t, err, m.Token, ErrRevoked, "revoked")
}

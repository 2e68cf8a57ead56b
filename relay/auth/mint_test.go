package auth

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/manifest"
)

func TestMintRefuses(t *testing.T) {
	s := openStore(t, Options{})
	node := manifest.NewNodeID()
	tests := []struct {
		name string
		req  MintRequest
		want string // in the error: what to do
	}{
		{"no class", MintRequest{}, "use agent, device, enroll, tenant-admin, operator or admin"},
		{"unknown class", MintRequest{Class: "root"}, "use agent, device, enroll, tenant-admin, operator or admin"},
		{"unknown scope", MintRequest{Class: "agent", Scopes: []string{"tools:call:mutating"}}, "the scopes are tools:call:read_only"},
		{"two scopes in one", MintRequest{Class: "agent", Scopes: []string{"tools:list tickets:read"}}, "not a scope"},
		{"device scope on an agent", MintRequest{Class: "agent", Scopes: []string{"device:connect"}}, "cannot hold device:connect"},
		{"agent scope on a device", MintRequest{Class: "device", Scopes: []string{"device:connect", "tools:list"}}, "cannot hold tools:list"},
		{"bad tenant", MintRequest{Class: "agent", Tenant: "Acme"}, "a-z, 0-9"},
		{"bad subject", MintRequest{Class: "agent", Subject: "a b"}, "not a subject"},
		{"node on an agent", MintRequest{Class: "agent", NodeID: node}, "class device"},
		{"subject on a device", MintRequest{Class: "device", Subject: "me"}, "set the node"},
		{"one node many times", MintRequest{Class: "device", NodeID: node, Count: 2}, "leave out the node"},
		{"unknown node name", MintRequest{Class: "device", NodeID: "lab"}, "agentctl ls"},
		{"bad instance", MintRequest{Class: "device", Instance: "a b"}, "malformed"},
		{"too many", MintRequest{Class: "agent", Count: MaxMintCount + 1}, "1..10000"},
		{"negative count", MintRequest{Class: "agent", Count: -1}, "1..10000"},
		{"too short", MintRequest{Class: "agent", TTL: time.Millisecond}, "out of range"},
		{"too long", MintRequest{Class: "agent", TTL: MaxTTL + time.Second}, "out of range"},
		{"enrollment for a day", MintRequest{Class: "enroll", TTL: 24 * time.Hour}, "1h0m0s"},
	}
	for _, tt := range tests {
		list, err := s.Mint(t.Context(), tt.req)
		if err == nil || list != nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want an error with %q", tt.name, err, tt.want)
		}
	}
	if list, err := s.Tokens(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("refused requests left %d rows, %v", len(list), err)
	}
}

func TestMintMany(t *testing.T) {
	s := openStore(t, Options{})
	const count = mintBatch + 10 // two transactions
	list, err := s.Mint(t.Context(), MintRequest{Class: "device", Tenant: "acme", Count: count})
	if err != nil || len(list) != count {
		t.Fatalf("got %d, %v", len(list), err)
	}
	jtis, nodes := map[string]bool{}, map[string]bool{}
	for _, m := range list {
		id, err := s.Verify(m.Token, ClassDevice)
		if err != nil {
			t.Fatal(err)
		}
		if tenant, ok := s.NodeTenant(id.NodeID); !ok || tenant != "acme" {
			t.Errorf("owner: got %q, %v", tenant, ok)
		}
		jtis[id.JTI], nodes[id.NodeID] = true, true
	}
	if len(jtis) != count || len(nodes) != count {
		t.Errorf("got %d jti and %d nodes", len(jtis), len(nodes))
	}
}

// No file of the state directory and no log line holds a token.
func TestTokensAreNotStored(t *testing.T) {
	var log bytes.Buffer
	logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&log), zap.DebugLevel))
	dir := filepath.Join(t.TempDir(), "state")
	s := openStore(t, Options{StateDir: dir, Logger: logger})
	m := mint(t, s, MintRequest{Class: "agent"})
	if _, err := s.Verify(m.Token); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Verify(m.Token + "x"); err == nil {
		t.Fatal("accepted")
	}
	parts := strings.Split(m.Token, ".")
	search := func(where string, b []byte) {
		for _, part := range parts[1:] {
			if bytes.Contains(b, []byte(part)) {
				t.Errorf("a part of the token is in %s", where)
			}
		}
	}
	search("the log", log.Bytes())
	files := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		b, err := os.ReadFile(path)
		search(path, b)
		return err
	})
	if err != nil || files < 3 {
		t.Errorf("looked into %d files, %v", files, err)
	}
}

func TestTokensPrunesLongExpired(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	old := mint(t, s, MintRequest{Class: "enroll"})
	ck.t = testTime.Add(2 * time.Hour)
	list, err := s.Tokens(t.Context())
	if err != nil || len(list) != 1 || !list[0].Expired || list[0].JTI != old.JTI {
		t.Fatalf("got %+v, %v", list, err)
	}
	ck.t = testTime.Add(expiredTokenRetention + 2*time.Hour)
	young := mint(t, s, MintRequest{Class: "agent"})
	if list, err := s.Tokens(t.Context()); err != nil || len(list) != 1 || list[0].JTI != young.JTI {
		t.Errorf("got %+v, %v", list, err)
	}
}

func TestScopesAsText(t *testing.T) {
	if got := knownScopes("notes:write tools:list notes:read notes:write root nodes:read").String(); got != "tools:list notes:read notes:write" {
		t.Errorf("a claim with words that are no scopes: %q", got)
	}
	if len(manifest.Scopes) != len(scopeWords) {
		t.Errorf("manifest knows %d scopes, this package %d", len(manifest.Scopes), len(scopeWords))
	}
	for i, w := range scopeWords {
		if b := scopeBit(w); b != 1<<i {
			t.Errorf("%s: bit %b, want %b", w, b, 1<<i)
		}
	}
	for bits := range relayScopes(1 << len(scopeWords)) {
		set := Scopes{relay: bits, plugins: []string{"", "notes:read", "memo:a notes:read notes:write"}[bits%3]}
		b, err := json.Marshal(set)
		if err != nil {
			t.Fatal(err)
		}
		var back Scopes
		if err := json.Unmarshal(b, &back); err != nil || back != set {
			t.Fatalf("%s: got %v, %v", b, back, err)
		}
		if back, err := ParseScopes(set.Words()...); err != nil || back != set || knownScopes(set.String()) != set {
			t.Fatalf("%s: got %v, %v", set, back, err)
		}
	}
	var s Scopes
	if err := s.UnmarshalText([]byte("tools:list root")); err == nil {
		t.Error("an unknown word was taken")
	}
}

// A creator whose token is older than boards:inspect still makes agents and presets, without that
// scope; it cannot give the scope by name.
func TestOlderCreatorLacksBoardsInspect(t *testing.T) {
	older := &Identity{Tenant: DefaultTenant, Subject: "older", Scopes: Scopes{relay: tenantAdminScopes &^ bitBoardsInspect}}
	for _, tt := range []struct {
		req  MintRequest
		want relayScopes // 0: refused
	}{
		{MintRequest{Class: "agent"}, agentDefaults &^ bitBoardsInspect},
		{MintRequest{Class: PresetTenantAdmin}, tenantAdminScopes &^ bitBoardsInspect},
		{MintRequest{Class: PresetAdmin}, 0},
		{MintRequest{Class: "agent", Scopes: []string{"boards:inspect"}}, 0},
	} {
		ask := grantRequest{class: tt.req.Class, scopes: tt.req.Scopes, creator: older}
		got, err := ask.resolve()
		if (err == nil) != (tt.want != 0) || err == nil && got.scopes != (Scopes{relay: tt.want}) {
			t.Errorf("%s %v: got %q, %v; want %q", tt.req.Class, tt.req.Scopes, got.scopes, err, Scopes{relay: tt.want})
		}
	}
}

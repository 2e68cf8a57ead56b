package relay

import (
	"encoding/json"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/auth"
)

// A token that is made over HTTP holds nothing that its creator lacks, in scope or tenant,
// except device:connect.
func TestCreateToken(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Subject: "ann"}).Token
	narrow := a.mint(auth.MintRequest{Class: "agent", Scopes: []string{"tokens:write", "tools:list"}}).Token
	reader := a.mint(auth.MintRequest{Class: "agent"}).Token
	operator := a.mint(auth.MintRequest{Class: auth.PresetOperator}).Token
	limited := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Topics: []string{"build/*", "alert"}}).Token
	own := a.mint(auth.MintRequest{Class: "device"}).NodeID
	foreign := a.mint(auth.MintRequest{Class: "device", Tenant: "zeta"}).NodeID
	const path = "/v1/tokens"
	for _, tt := range []struct {
		token, body string
		status      int
		part        string
	}{
		{admin, ``, 200, `"scopes":"tools:call:read_only tools:list events:subscribe tickets:read boards:inspect"`},
		{admin, `{"subject":"ci","scopes":["tickets:write"],"ttl_ms":3600000}`, 200, `"subject":"ci","scopes":"tickets:write"`},
		{admin, `{"class":"tenant-admin"}`, 200, "tokens:write"},
		{admin, `{"class":"device"}`, 200, `"scopes":"device:connect"`},
		{admin, `{"class":"device","node":"` + own[:24] + `"}`, 200, `"node_id":"` + own + `"`},
		{admin, `{"tenant":"default"}`, 200, "token"},
		{narrow, ``, 200, `"scopes":"tools:list"`}, // cut down to what the creator has
		{narrow, `{"class":"device"}`, 200, `"scopes":"device:connect"`},

		{admin, `{"tenant":"zeta"}`, 403, "for the tenant of the token that makes it"},
		{admin, `{"class":"device","tenant":"zeta"}`, 403, "for the tenant of the token that makes it"},
		{admin, `{"class":"admin"}`, 403, "lacks: events:ingest kernel:admin"},
		{admin, `{"class":"operator"}`, 403, "lacks: kernel:admin"},
		{admin, `{"class":"enroll"}`, 403, "lacks: device:enroll"},
		{admin, `{"scopes":["kernel:admin"]}`, 403, "lacks: kernel:admin"},
		{narrow, `{"class":"tenant-admin"}`, 403, "lacks: "},
		{narrow, `{"scopes":["tools:call:read_only"]}`, 403, "lacks: tools:call:read_only"},
		{reader, ``, 403, "tokens:write"},
		{operator, ``, 403, "tokens:write"},
		{"", ``, 401, "no token"},
		{admin, `{"class":"device","node":"` + foreign + `"}`, 403, "may not use that node"},
		{admin, `{"class":"device","node":"` + manifest.NewNodeID() + `"}`, 403, "may not use that node"},
		{admin, `{"class":"device","scopes":["tools:list"]}`, 400, "scopes are those of the class"},
		{admin, `{"class":"agent","scopes":["device:connect"]}`, 400, "scopes are those of the class"},
		{admin, `{"class":"agent","scopes":["root"]}`, 400, `not a scope: \"root\"`},
		{admin, `{"add_scopes":["tools:lsit"]}`, 400, `did you mean \"tools:list\"?`},
		{admin, `{"add_scopes":["notes:read"]}`, 403, "lacks: notes:read"}, // the same answer whether there is one or not
		{admin, `{"topics":["build/*"]}`, 200, `"topics":["build/*"]`},
		{admin, `{"topics":["build/*"],"scopes":["tools:list"]}`, 400, "topics, for agents with a scope for events"},
		{admin, `{"topics":[""]}`, 400, "topics, for agents"},
		{limited, `{}`, 200, `"topics":["alert","build/*"]`},
		{limited, `{"topics":["build/x"]}`, 200, `"topics":["build/x"]`},
		{limited, `{"topics":["log/*"]}`, 403, "topics that the token that makes it lacks"},
		{admin, `{"class":"root"}`, 400, "class is agent"},
		{admin, `{"subject":"a b"}`, 400, "subject"},
		{admin, `{"class":"agent","node":"x"}`, 400, "node is for class device"},
		{admin, `{"ttl_ms":1}`, 400, "ttl_ms"},
		{admin, `{"ttl_ms":-1}`, 400, "ttl_ms"},
		{admin, `{"ttl_ms":9223372036854775807}`, 400, "ttl_ms"},
		{admin, `{"tenant":"A"}`, 400, "class is"},
		{admin, `{"count":2}`, 400, "strict JSON"},
		{admin, `[]`, 400, "strict JSON"},
	} {
		a.want(tt.token, "POST", path, tt.body, tt.status, tt.part)
	}
	if got := a.want(admin, "POST", path+"?dry_run=true", `{"subject":"dry"}`, 200, `"subject":"dry"`); strings.Contains(got, `"token"`) {
		t.Errorf("a dry run made %s", got)
	}

	// What was made works, and dies with its jti; the list and the revocation are the tenant's.
	var made auth.Minted
	if err := json.Unmarshal([]byte(a.want(admin, "POST", path, `{"subject":"ci"}`, 200, "token")), &made); err != nil {
		t.Fatal(err)
	}
	a.want(made.Token, "GET", "/v1/nodes", "", 200, "nodes")
	zeta := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Tenant: "zeta"}).Token
	a.want(zeta, "DELETE", tokensPath+made.JTI, "", 400, "your tenant has no token")
	a.want(admin, "DELETE", tokensPath+"x", "", 400, "your tenant has no token")
	a.want(admin, "DELETE", tokensPath+manifest.NewULID(), "", 400, "your tenant has no token")
	a.want(admin, "DELETE", tokensPath+made.JTI+"?dry_run=true", "", 200, `"revoked_tokens":1`)
	a.want(made.Token, "GET", "/v1/nodes", "", 200, "nodes")
	a.want(admin, "DELETE", tokensPath+made.JTI, "", 200, `"revoked_tokens":1`)
	a.want(made.Token, "GET", "/v1/nodes", "", 403, "revoked")
	if got := a.want(zeta, "GET", path, "", 200, `"tenant":"zeta"`); strings.Contains(got, `"tenant":"default"`) {
		t.Errorf("another tenant's tokens: %s", got)
	}
	for _, line := range a.audited("tokens.create") {
		if strings.Contains(line, "eyJ") {
			t.Errorf("a token is in the audit log: %s", line)
		}
	}
}

// Whoever has a token of an agent learns what it may do, and nothing about others.
func TestSelf(t *testing.T) {
	a := newAdminTest(t)
	limited := a.mint(auth.MintRequest{Class: "agent", Tenant: "zeta", Subject: "ann", Scopes: []string{"events:subscribe", "notes:read"}, PluginScopes: []string{"notes:read"}, Topics: []string{"log/*"}}).Token
	if got, want := a.want(limited, "GET", "/v1/self", "", 200, ""), `{"tenant":"zeta","agent_id":"ann","scopes":["events:subscribe","notes:read"],"topics":["log/*"]}`; strings.TrimSpace(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
	a.want(a.mint(auth.MintRequest{Class: "agent", Scopes: []string{"tools:list"}}).Token, "GET", "/v1/self", "", 200, `"scopes":["tools:list"]}`)
	a.want(a.mint(auth.MintRequest{Class: "device"}).Token, "GET", "/v1/self", "", 403, "class")
	a.want("", "GET", "/v1/self", "", 401, "no token")
}

func TestListTokensPages(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	a.mint(auth.MintRequest{Class: "device", Count: 7})
	seen, before := map[string]bool{}, ""
	for range 10 {
		var page struct {
			Tokens []auth.TokenInfo
			Next   string
		}
		if err := json.Unmarshal([]byte(a.want(admin, "GET", "/v1/tokens?limit=3&before="+before, "", 200, "tokens")), &page); err != nil {
			t.Fatal(err)
		}
		for _, tok := range page.Tokens {
			seen[tok.JTI] = true
		}
		if before = page.Next; before == "" {
			break
		}
	}
	if len(seen) != 8 {
		t.Errorf("%d tokens on the pages", len(seen))
	}
	for _, query := range []string{"limit=0", "limit=x", "limit=5001", "before=x"} {
		a.want(admin, "GET", "/v1/tokens?"+query, "", 400, "E_BAD_REQUEST")
	}
}

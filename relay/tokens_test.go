package relay

import (
	"encoding/json"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/auth"
)

// TestCreateToken: by default a token gets the scopes of its class, cut down to those of its
// creator.
func TestCreateToken(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Subject: "ann"}).Token
	narrow := a.mint(auth.MintRequest{Class: "agent", Scopes: []string{"tokens:write", "tools:list"}}).Token
	limited := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Topics: []string{"build/*", "alert"}}).Token
	board := a.mint(auth.MintRequest{Class: "device"}).NodeID
	for _, tt := range []struct {
		creator, body string
		want          string // part of the answer
	}{
		{admin, ``, `"scopes":"tools:call:read_only tools:list events:subscribe tickets:read boards:inspect"`},
		{admin, `{"subject":"ci","scopes":["tickets:write"],"ttl_ms":3600000}`, `"subject":"ci","scopes":"tickets:write"`},
		{admin, `{"tenant":"default"}`, "token"},
		{admin, `{"class":"tenant-admin"}`, "tokens:write"},
		{admin, `{"class":"device"}`, `"scopes":"device:connect"`},
		{admin, `{"class":"device","node":"` + board[:24] + `"}`, `"node_id":"` + board + `"`},
		{admin, `{"topics":["build/*"]}`, `"topics":["build/*"]`},
		{narrow, ``, `"scopes":"tools:list"`},
		{narrow, `{"class":"device"}`, `"scopes":"device:connect"`},
		{limited, `{}`, `"topics":["alert","build/*"]`},
		{limited, `{"topics":["build/x"]}`, `"topics":["build/x"]`},
	} {
		a.want(tt.creator, "POST", "/v1/tokens", tt.body, 200, tt.want)
	}
}

// TestCreateTokenDenied: a token holds nothing that its creator lacks, in scope, topic, tenant or
// board, except device:connect.
func TestCreateTokenDenied(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	narrow := a.mint(auth.MintRequest{Class: "agent", Scopes: []string{"tokens:write", "tools:list"}}).Token
	limited := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Topics: []string{"build/*"}}).Token
	reader := a.mint(auth.MintRequest{Class: "agent"}).Token
	operator := a.mint(auth.MintRequest{Class: auth.PresetOperator}).Token
	foreign := a.mint(auth.MintRequest{Class: "device", Tenant: "zeta"}).NodeID
	for _, tt := range []struct {
		creator, body string
		status        int
		want          string // part of the answer
	}{
		{"", ``, 401, "no token"},
		{reader, ``, 403, "tokens:write"},
		{operator, ``, 403, "tokens:write"},
		{admin, `{"tenant":"zeta"}`, 403, "for the tenant of the token that makes it"},
		{admin, `{"class":"device","tenant":"zeta"}`, 403, "for the tenant of the token that makes it"},
		{admin, `{"class":"admin"}`, 403, "lacks: events:ingest kernel:admin"},
		{admin, `{"class":"operator"}`, 403, "lacks: kernel:admin"},
		{admin, `{"class":"enroll"}`, 403, "lacks: device:enroll"},
		{admin, `{"scopes":["kernel:admin"]}`, 403, "lacks: kernel:admin"},
		{admin, `{"add_scopes":["notes:read"]}`, 403, "lacks: notes:read"}, // the same answer whether there is one or not
		{narrow, `{"class":"tenant-admin"}`, 403, "lacks: "},
		{narrow, `{"scopes":["tools:call:read_only"]}`, 403, "lacks: tools:call:read_only"},
		{limited, `{"topics":["log/*"]}`, 403, "topics that the token that makes it lacks"},
		{admin, `{"class":"device","node":"` + foreign + `"}`, 403, "may not use that node"},
		{admin, `{"class":"device","node":"` + manifest.NewNodeID() + `"}`, 403, "may not use that node"},
	} {
		a.want(tt.creator, "POST", "/v1/tokens", tt.body, tt.status, tt.want)
	}
}

// TestCreateTokenMalformed: a request that makes no sense is refused, whoever sends it, and the
// answer says what is wrong.
func TestCreateTokenMalformed(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	for body, want := range map[string]string{
		`[]`:                                             "strict JSON",
		`{"count":2}`:                                    "strict JSON",
		`{"class":"root"}`:                               "class is agent",
		`{"tenant":"A"}`:                                 "class is",
		`{"subject":"a b"}`:                              "subject",
		`{"class":"agent","node":"x"}`:                   "node is for class device",
		`{"ttl_ms":1}`:                                   "ttl_ms",
		`{"ttl_ms":-1}`:                                  "ttl_ms",
		`{"ttl_ms":9223372036854775807}`:                 "ttl_ms",
		`{"topics":[""]}`:                                "topics, for agents",
		`{"add_scopes":["tools:lsit"]}`:                  `did you mean \"tools:list\"?`,
		`{"class":"agent","scopes":["root"]}`:            "not a scope: \\\"root\\\"",
		`{"class":"device","scopes":["tools:list"]}`:     "scopes are those of the class",
		`{"class":"agent","scopes":["device:connect"]}`:  "scopes are those of the class",
		`{"topics":["build/*"],"scopes":["tools:list"]}`: "topics, for agents with a scope for events",
	} {
		a.want(admin, "POST", "/v1/tokens", body, 400, want)
	}
}

// TestCreateTokenDryRun: a dry run answers like the creation, without a token.
func TestCreateTokenDryRun(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	if got := a.want(admin, "POST", "/v1/tokens?dry_run=true", `{"subject":"dry"}`, 200, `"subject":"dry"`); strings.Contains(got, `"token"`) {
		t.Errorf("the answer has a token: %s", got)
	}
}

// TestRevokeToken: a created token works until an administrator of its tenant revokes it by its jti.
func TestRevokeToken(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	zeta := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Tenant: "zeta"}).Token
	var created auth.Minted
	if err := json.Unmarshal([]byte(a.want(admin, "POST", "/v1/tokens", `{"subject":"ci"}`, 200, "token")), &created); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		token, method, path string
		status              int
		want                string // part of the answer
	}{
		{created.Token, "GET", "/v1/nodes", 200, "nodes"},
		{zeta, "DELETE", tokensPath + created.JTI, 400, "your tenant has no token"},
		{admin, "DELETE", tokensPath + "x", 400, "your tenant has no token"},
		{admin, "DELETE", tokensPath + manifest.NewULID(), 400, "your tenant has no token"},
		{admin, "DELETE", tokensPath + created.JTI + "?dry_run=true", 200, `"revoked_tokens":1`},
		{created.Token, "GET", "/v1/nodes", 200, "nodes"}, // still
		{admin, "DELETE", tokensPath + created.JTI, 200, `"revoked_tokens":1`},
		{created.Token, "GET", "/v1/nodes", 403, "revoked"},
	} {
		a.want(step.token, step.method, step.path, "", step.status, step.want)
	}
	if got := a.want(zeta, "GET", "/v1/tokens", "", 200, `"tenant":"zeta"`); strings.Contains(got, `"tenant":"default"`) {
		t.Errorf("the list of zeta has tokens of another tenant: %s", got)
	}
	for _, line := range a.audited("tokens.create") {
		if strings.Contains(line, "eyJ") { // how every token begins
			t.Errorf("a token is in the audit log: %s", line)
		}
	}
}

// TestSelf: any agent token may ask what it may do; the answer has nothing about others.
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

// TestListTokensPages: the pages together have each token once.
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

package auth

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"agentctl/manifest"
)

var notesScopes = []string{"notes:admin_delete", "notes:read", "notes:write"}

// No class, preset or role holds the scope of a plugin unless it was asked for.
func TestPluginScopesAreDeniedByDefault(t *testing.T) {
	s := openStore(t, Options{})
	for word := range classWords {
		m := mint(t, s, MintRequest{Class: word, PluginScopes: notesScopes})
		if m.Scopes.plugins != "" {
			t.Errorf("class %s has %q", word, m.Scopes)
		}
		if id, err := s.Verify(m.Token); err != nil || id.Has("notes:read") {
			t.Errorf("class %s: %v, %v", word, id, err)
		}
	}
	inv, code := invite(t, s, InviteRequest{Class: InviteAgent, PluginScopes: notesScopes})
	if inv.Scopes.plugins != "" {
		t.Errorf("an invite has %q", inv.Scopes)
	}
	id, err := s.Verify(newHolder(t, s, code).mustEnroll().Token)
	if err != nil || id.Has("notes:read") {
		t.Errorf("an agent that joined: %v, %v", id, err)
	}
}

func TestPluginScopes(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent", AddScopes: []string{"notes:write", "notes:read"}, PluginScopes: notesScopes})
	id, err := s.Verify(m.Token, ClassAgent)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Scopes{relay: agentDefaults, plugins: "notes:read notes:write"}); id.Scopes != want || m.Scopes != want {
		t.Errorf("got %q, want %q", id.Scopes, want)
	}
	for scope, want := range map[string]bool{"notes:read": true, "notes:write": true, "notes:admin_delete": false, "notes:rea": false, "notes": false,
		"notes:read notes:write": false, "read": false, "": false, "memo:read": false, manifest.ScopeToolsList: true, manifest.ScopeKernelAdmin: false} {
		if id.Has(scope) != want {
			t.Errorf("Has(%q) is %v", scope, !want)
		}
	}
	if n := testing.AllocsPerRun(100, func() { id.Has("notes:write"); id.Has("notes:none") }); n != 0 {
		t.Errorf("Has allocates %v times", n)
	}
	if m := mint(t, s, MintRequest{Class: "agent", Scopes: []string{"notes:read"}, PluginScopes: notesScopes}); m.Scopes != (Scopes{plugins: "notes:read"}) {
		t.Errorf("in place of the defaults: %q", m.Scopes)
	}
	list, err := s.Tokens(t.Context())
	if err != nil || !slices.ContainsFunc(list, func(i TokenInfo) bool { return i.JTI == m.JTI && strings.HasSuffix(i.Scopes, "notes:read notes:write") }) {
		t.Errorf("the list has %+v, %v", list, err)
	}

	many := make([]string, 20)
	for i := range many {
		many[i] = fmt.Sprintf("%s:%s%02d", strings.Repeat("p", 32), strings.Repeat("a", 30), i)
	}
	for _, tt := range []struct {
		req  MintRequest
		want string
	}{
		{MintRequest{Class: "agent", Scopes: []string{"notes:raed"}}, `not a scope: "notes:raed", did you mean "notes:read"? (plugin notes has notes:admin_delete notes:read notes:write)`},
		{MintRequest{Class: "agent", Scopes: []string{"memo:archive"}}, `not a scope: "memo:archive" (there is no plugin memo that declares it; plugins have notes:admin_delete notes:read notes:write)`},
		{MintRequest{Class: "agent", Scopes: []string{"tickets:raed"}}, `not a scope: "tickets:raed", did you mean "tickets:read"? (the scopes are tools:call:read_only `},
		{MintRequest{Class: "agent", AddScopes: []string{"nodes:read"}}, `not a scope: "nodes:read", did you mean`},
		{MintRequest{Class: "device", AddScopes: []string{"notes:read"}}, `a token of class device_runtime cannot hold notes:read; it may hold device:connect`},
		{MintRequest{Class: "enroll", Scopes: []string{"notes:read"}}, `cannot hold notes:read`},
		{MintRequest{Class: "agent", Scopes: many, PluginScopes: many}, `the scopes of plugins take 1319 bytes, and a token has space for 768`},
	} {
		if tt.req.PluginScopes == nil {
			tt.req.PluginScopes = notesScopes
		}
		if _, err := s.Mint(t.Context(), tt.req); !errors.Is(err, ErrRequest) || !strings.Contains(fmt.Sprint(err), tt.want) {
			t.Errorf("%v %v: %v, want %s", tt.req.Scopes, tt.req.AddScopes, err, tt.want)
		}
	}
}

// A token that makes tokens or invites gives no scope of a plugin that it lacks, and does not learn
// which ones there are.
func TestCreatorLacksPluginScopes(t *testing.T) {
	s := openStore(t, Options{})
	creator := func(words ...string) *Identity {
		id, err := s.Verify(mint(t, s, MintRequest{Class: PresetTenantAdmin, AddScopes: words, PluginScopes: notesScopes}).Token)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	without, reader := creator(), creator("notes:read")
	for _, tt := range []struct {
		name    string
		creator *Identity
		add     []string
		plugins []string
		kind    error // nil: granted
	}{
		{"lacking", without, []string{"notes:read"}, notesScopes, ErrGrant},
		{"lacking, of no plugin", without, []string{"memo:read"}, notesScopes, ErrGrant},
		{"lacking, of the relay", without, []string{manifest.ScopeKernelAdmin}, notesScopes, ErrGrant},
		{"held", reader, []string{"notes:read"}, notesScopes, nil},
		{"more than held", reader, []string{"notes:read", "notes:write"}, notesScopes, ErrGrant},
		{"held, and the plugin is gone", reader, []string{"notes:read"}, nil, ErrRequest},
	} {
		_, err := s.Mint(t.Context(), MintRequest{Class: "agent", AddScopes: tt.add, PluginScopes: tt.plugins, Creator: tt.creator})
		if !errors.Is(err, tt.kind) || strings.Contains(fmt.Sprint(err), "notes:admin_delete") {
			t.Errorf("a token, %s: %v, want %v", tt.name, err, tt.kind)
		}
		_, _, err = s.CreateInvite(t.Context(), InviteRequest{Class: InviteAgent, AddScopes: tt.add, PluginScopes: tt.plugins, Creator: tt.creator})
		if !errors.Is(err, tt.kind) || strings.Contains(fmt.Sprint(err), "notes:admin_delete") {
			t.Errorf("an invite, %s: %v, want %v", tt.name, err, tt.kind)
		}
	}
	// The defaults of a class are none of a plugin's, whatever the creator has.
	if m := mint(t, s, MintRequest{Class: "agent", PluginScopes: notesScopes, Creator: reader}); m.Scopes.plugins != "" {
		t.Errorf("got %q", m.Scopes)
	}
}

// A login keeps the scopes and topics of its invite, over a refresh too.
func TestInviteKeepsScopesAndTopics(t *testing.T) {
	s := openStore(t, Options{})
	inv, code := invite(t, s, InviteRequest{Class: InviteAgent, AddScopes: []string{"notes:read"}, PluginScopes: notesScopes, Topics: []string{"log/*", "x"}})
	b := newHolder(t, s, code)
	out := b.mustEnroll()
	check := func(token string) {
		t.Helper()
		id, err := s.Verify(token, ClassAgent)
		if err != nil || id.Scopes != inv.Scopes || !id.Has("notes:read") || id.Topics().String() != "log/*,x" {
			t.Errorf("got %+v, %v", id, err)
		}
	}
	check(out.Token)
	renewed, err := b.refresh(out.Gen, manifest.NewULID())
	if err != nil {
		t.Fatal(err)
	}
	check(renewed.Token)
	list, err := s.Invites(t.Context(), "")
	if err != nil || len(list) != 1 || list[0].Scopes != inv.Scopes || list[0].Topics.String() != "log/*,x" {
		t.Errorf("the list has %+v, %v", list, err)
	}
	for _, req := range []InviteRequest{{AddScopes: []string{"notes:read"}, PluginScopes: notesScopes}, {Topics: []string{"a"}}} {
		if _, _, err := s.CreateInvite(t.Context(), req); !errors.Is(err, ErrRequest) {
			t.Errorf("a board's invite: %v", err)
		}
	}
}

func TestTokenTopics(t *testing.T) {
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent", Topics: []string{"log/*,x", "a"}})
	id, err := s.Verify(m.Token)
	if err != nil || id.Topics().String() != "a,log/*,x" || !id.HasTopic("log/level") || id.HasTopic("log") || m.Topics.String() != "a,log/*,x" {
		t.Fatalf("got %+v, %v", id, err)
	}
	if all, err := s.Verify(mint(t, s, MintRequest{Class: "agent"}).Token); err != nil || all.Topics() != nil || !all.HasTopic("anything") {
		t.Errorf("a token without topics: %+v, %v", all, err)
	}
	if list, err := s.Tokens(t.Context()); err != nil || !slices.ContainsFunc(list, func(i TokenInfo) bool { return i.JTI == m.JTI && i.Topics.String() == "a,log/*,x" }) {
		t.Errorf("the list has %+v, %v", list, err)
	}
	admin, err := s.Verify(mint(t, s, MintRequest{Class: PresetTenantAdmin, Topics: []string{"log/*"}}).Token)
	if err != nil {
		t.Fatal(err)
	}
	var large []string
	for i := range 32 {
		large = append(large, fmt.Sprint(strings.Repeat("t", 30), i))
	}
	for _, tt := range []struct {
		req  MintRequest
		kind error
		want string // of the topics, or of the error
	}{
		{MintRequest{Class: "agent", Creator: admin}, nil, "log/*"},
		{MintRequest{Class: "agent", Creator: admin, Topics: []string{"log/level"}}, nil, "log/level"},
		{MintRequest{Class: "agent", Creator: admin, Topics: []string{"x"}}, ErrGrant, "topics that the token that makes it lacks"},
		{MintRequest{Class: "agent", Creator: admin, Topics: []string{"log/*", "x/*"}}, ErrGrant, "lacks"},
		{MintRequest{Class: "agent", Creator: admin, Scopes: []string{manifest.ScopeToolsList}}, nil, "*"}, // without the scopes for events
		{MintRequest{Class: "device", Creator: admin}, nil, "*"},
		{MintRequest{Class: "agent", Topics: []string{""}}, ErrRequest, "for all topics, give none"},
		{MintRequest{Class: "agent", Topics: []string{"*"}}, ErrRequest, "for all topics, give none"},
		{MintRequest{Class: "agent", Topics: []string{"a b"}}, ErrRequest, `not a topic: "a b"`},
		{MintRequest{Class: "agent", Topics: large}, ErrRequest, "a token has space for 768"},
		{MintRequest{Class: "agent", Scopes: []string{manifest.ScopeToolsList}, Topics: []string{"a"}}, ErrRequest, "topics limit the scopes events:subscribe and events:ingest"},
		{MintRequest{Class: "device", Topics: []string{"a"}}, ErrRequest, "topics limit the scopes"},
	} {
		minted, err := s.Mint(t.Context(), tt.req)
		if tt.kind != nil {
			if !errors.Is(err, tt.kind) || !strings.Contains(fmt.Sprint(err), tt.want) {
				t.Errorf("%+v: %v, want %s", tt.req, err, tt.want)
			}
			continue
		}
		if err != nil || minted[0].Topics.String() != tt.want {
			t.Errorf("%+v: got %+v, %v", tt.req, minted, err)
		}
	}
}

// A claim of topics that this relay does not write must not mean all topics.
func TestTopicsClaim(t *testing.T) {
	s := openStore(t, Options{})
	for value, good := range map[any]bool{"a": true, "a,log/*": true, "": false, "*": false, ",": false, "a,*": false, "a b": false, 7: false, nil: true} {
		id, err := s.Verify(forge(t, s, map[string]any{"topics": value})) // nil: no claim
		if (err == nil) != good {
			t.Errorf("topics %v: %+v, %v", value, id, err)
		}
	}
	device := map[string]any{"cls": ClassDevice, "scope": manifest.ScopeDeviceConnect, "sub": manifest.NewNodeID(), "topics": "a"}
	if id, err := s.Verify(forge(t, s, device)); err == nil {
		t.Errorf("a device token with topics: %+v", id)
	}
}

// The largest token that can be made can be verified.
func TestLargestToken(t *testing.T) {
	s := openStore(t, Options{Audience: strings.Repeat("a", 256)})
	var plugins, topics []string
	for i := range 11 {
		plugins = append(plugins, fmt.Sprintf("%s:%s%02d", strings.Repeat("p", 32), strings.Repeat("a", 30), i))
	}
	for i := range 23 {
		topics = append(topics, fmt.Sprintf("%s%02d", strings.Repeat("t", 30), i))
	}
	m := mint(t, s, MintRequest{Tenant: strings.Repeat("t", 32), Subject: strings.Repeat("s", 64), TTL: MaxTTL,
		Class: PresetAdmin, AddScopes: plugins, PluginScopes: plugins, Topics: topics})
	if len(m.Scopes.plugins) < maxPluginScopes-66 || len(m.Topics.String()) < maxTopicsSize-33 {
		t.Fatalf("%d bytes of scopes and %d of topics are not the most", len(m.Scopes.plugins), len(m.Topics.String()))
	}
	const cnf = 100 // of a token that is bound to a key, in base64
	if _, err := s.Verify(m.Token); err != nil || len(m.Token)+cnf > MaxTokenLen {
		t.Errorf("%d bytes: %v", len(m.Token), err)
	}
}

// Each linked board keeps its identity in memory.
func TestIdentitySize(t *testing.T) {
	if size := unsafe.Sizeof(Identity{}); size > 192 && unsafe.Sizeof(uintptr(0)) == 8 {
		t.Errorf("an identity takes %d bytes; the next size class above 192 is 208", size)
	}
}

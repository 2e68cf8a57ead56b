package auth

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/manifest"
)

func TestVerifyMinted(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	tests := []struct {
		req     MintRequest
		class   string
		scopes  string
		ttl     time.Duration
		subject string // prefix
	}{
		{MintRequest{Class: "agent", Tenant: "acme"}, ClassAgent,
			"tools:call:read_only tools:list events:subscribe tickets:read boards:inspect", 90 * 24 * time.Hour, "agent-"},
		{MintRequest{Class: "agent", Subject: "claude@desk", Scopes: []string{"tools:list"}, TTL: time.Minute}, ClassAgent,
			"tools:list", time.Minute, "claude@desk"},
		{MintRequest{Class: "admin"}, ClassAgent,
			"tools:call:read_only tools:list events:subscribe events:ingest tickets:read tickets:write kernel:admin nodes:write tokens:write invites:write boards:inspect",
			90 * 24 * time.Hour, "agent-"},
		{MintRequest{Class: "tenant-admin", Tenant: "acme"}, ClassAgent,
			"tools:call:read_only tools:list events:subscribe tickets:read tickets:write nodes:write tokens:write invites:write boards:inspect", 90 * 24 * time.Hour, "agent-"},
		{MintRequest{Class: "operator"}, ClassAgent, "tools:list events:subscribe kernel:admin", 90 * 24 * time.Hour, "agent-"},
		{MintRequest{Class: "device"}, ClassDevice, "device:connect", 365 * 24 * time.Hour, ""},
		{MintRequest{Class: "device", Instance: "abc_DEF-1", Gen: 7}, ClassDevice, "device:connect", 365 * 24 * time.Hour, ""},
		{MintRequest{Class: "enroll"}, ClassEnroll, "device:enroll", time.Hour, "enroll-"},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%s %s", tt.req.Class, tt.req.Subject), func(t *testing.T) {
			m := mint(t, s, tt.req)
			var first *Identity
			for range 2 { // the second time from the cache
				id, err := s.Verify(m.Token, tt.class)
				if err != nil {
					t.Fatal(err)
				}
				if first == nil {
					first = id
				} else if id != first {
					t.Error("checked again, not taken from the cache")
				}
				tenant := tt.req.Tenant
				if tenant == "" {
					tenant = DefaultTenant
				}
				if id.Tenant != tenant || id.Class != tt.class || id.JTI != m.JTI || id.Scopes.String() != tt.scopes ||
					!strings.HasPrefix(id.Subject, tt.subject) || id.Subject != m.Subject || id.NodeID != m.NodeID {
					t.Errorf("got %+v for %+v", id, tt.req)
				}
				if id.expires != testTime.Add(tt.ttl).Unix() || m.Expires.Unix() != id.expires {
					t.Errorf("expires: got %v, want %v after", id.expires, tt.ttl)
				}
				if tt.class == ClassDevice && (!manifest.ValidNodeID(id.NodeID) || id.NodeID != id.Subject || id.Gen != max(tt.req.Gen, 1) || id.Instance != tt.req.Instance) {
					t.Errorf("device claims: got %+v", id)
				}
				for _, word := range manifest.Scopes {
					if got, want := id.Has(word), strings.Contains(" "+tt.scopes+" ", " "+word+" "); got != want {
						t.Errorf("Has(%q): got %v, want %v", word, got, want)
					}
				}
			}
		})
	}
	if n := s.cache.size(); n != len(tests) {
		t.Errorf("%d tokens are cached, want %d", n, len(tests))
	}
}

func TestVerifyRefuses(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	other := openStore(t, Options{Now: ck.now})
	good := mint(t, s, MintRequest{Class: "agent"}).Token
	parts := strings.Split(good, ".")
	claimsText := func() string { return string(unb64(t, parts[1])) }
	now := testTime.Unix()
	kid := s.keyring.Load().signKID
	pub := s.keyring.Load().signKey.Public().(ed25519.PublicKey)
	hs := func(header string) string {
		text := b64([]byte(header)) + "." + parts[1]
		mac := hmac.New(sha256.New, pub)
		mac.Write([]byte(text))
		return text + "." + b64(mac.Sum(nil))
	}
	withHeader := func(h string) string { return signRaw(h, claimsText(), s.keyring.Load().signKey) }
	extra := func(name, value string) string {
		return withHeader(`{"alg":"EdDSA","kid":"` + kid + `","typ":"at+jwt","` + name + `":` + value + `}`)
	}
	withClaims := func(c string) string { return signRaw(goodHeader(s), c, s.keyring.Load().signKey) }
	f := func(kv ...any) string {
		m := map[string]any{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i].(string)] = kv[i+1]
		}
		return forge(t, s, m)
	}
	_, otherKey, _ := ed25519.GenerateKey(rand.Reader)

	tests := []struct {
		name, token string
		kind        error
		reason      string
	}{
		{"none at all", "", ErrMissing, "no_token"},
		{"a word", "hello", ErrInvalid, "malformed"},
		{"one dot", parts[0] + "." + parts[1], ErrInvalid, "malformed"},
		{"three dots", good + ".x", ErrInvalid, "malformed"},
		{"dots alone", "..", ErrInvalid, "malformed"},
		{"many dots", strings.Repeat(".", MaxTokenLen), ErrInvalid, "malformed"},
		{"too long", good + strings.Repeat("A", MaxTokenLen), ErrInvalid, "malformed"},
		{"huge", strings.Repeat("A", 1<<20), ErrInvalid, "malformed"},
		{"line break inside", good[:50] + "\n" + good[50:], ErrInvalid, "malformed"},
		{"padding", good + "=", ErrInvalid, "malformed"},
		{"space in front", " " + good, ErrInvalid, "malformed"},
		{"standard base64", strings.Replace(good, ".", ".+", 1), ErrInvalid, "malformed"},
		{"empty signature", parts[0] + "." + parts[1] + ".", ErrInvalid, "malformed"},
		{"header is no JSON", b64([]byte("nope")) + "." + parts[1] + "." + parts[2], ErrInvalid, "header"},
		{"header bits left over", leftover(t, goodHeader(s)) + "." + parts[1] + "." + parts[2], ErrInvalid, "header"},
		{"claims bits left over", parts[0] + "." + leftover(t, claimsText()) + "." + parts[2], ErrInvalid, "malformed"},

		{"alg none", withHeader(`{"alg":"none","kid":"` + kid + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"alg none unsigned", b64([]byte(`{"alg":"none","kid":"`+kid+`","typ":"at+jwt"}`)) + "." + parts[1] + ".AA", ErrInvalid, "header"},
		{"HS256 with the public key", hs(`{"alg":"HS256","kid":"` + kid + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"HMAC called EdDSA", hs(goodHeader(s)), ErrInvalid, "signature"},
		{"RS256", rs256(t, `{"alg":"RS256","kid":"`+kid+`","typ":"at+jwt"}`, parts[1]), ErrInvalid, "header"},
		{"alg in the wrong case", withHeader(`{"alg":"eddsa","kid":"` + kid + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"alg twice", withHeader(`{"alg":"none","alg":"EdDSA","kid":"` + kid + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"alg key in the wrong case", withHeader(`{"Alg":"EdDSA","kid":"` + kid + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"no typ", withHeader(`{"alg":"EdDSA","kid":"` + kid + `"}`), ErrInvalid, "header"},
		{"typ JWT", withHeader(`{"alg":"EdDSA","kid":"` + kid + `","typ":"JWT"}`), ErrInvalid, "header"},
		{"no kid", withHeader(`{"alg":"EdDSA","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"kid null", withHeader(`{"alg":"EdDSA","kid":null,"typ":"at+jwt"}`), ErrInvalid, "header"},
		{"kid climbs", withHeader(`{"alg":"EdDSA","kid":"../keys/` + kid + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"kid is an absolute path", withHeader(`{"alg":"EdDSA","kid":"/dev/null","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"kid with NUL", withHeader(`{"alg":"EdDSA","kid":"` + kid + `\u0000","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"kid too long", withHeader(`{"alg":"EdDSA","kid":"` + strings.Repeat("k", 65) + `","typ":"at+jwt"}`), ErrInvalid, "header"},
		{"unknown kid", withHeader(`{"alg":"EdDSA","kid":"nobody","typ":"at+jwt"}`), ErrInvalid, "key"},
		{"kid with its file suffix", withHeader(`{"alg":"EdDSA","kid":"` + kid + `.pem","typ":"at+jwt"}`), ErrInvalid, "header"},

		{"jku", extra("jku", `"http://127.0.0.1/keys"`), ErrInvalid, "header"},
		{"jwk", extra("jwk", `{"kty":"OKP","crv":"Ed25519","x":"`+b64(pub)+`"}`), ErrInvalid, "header"},
		{"x5u", extra("x5u", `"http://127.0.0.1/cert"`), ErrInvalid, "header"},
		{"x5c", extra("x5c", `["AA"]`), ErrInvalid, "header"},
		{"crit", extra("crit", `["exp"]`), ErrInvalid, "header"},

		{"other relay", mint(t, other, MintRequest{Class: "agent"}).Token, ErrInvalid, "issuer"},
		{"other key, our kid", signRaw(goodHeader(s), claimsText(), otherKey), ErrInvalid, "signature"},
		{"payload swapped", parts[0] + "." + strings.Split(f("tid", "acme"), ".")[1] + "." + parts[2], ErrInvalid, "signature"},
		{"signature cut", good[:len(good)-2], ErrInvalid, "signature"},
		{"signature bits left over", flipLast(good), ErrInvalid, "malformed"},

		{"other issuer", f("iss", "agentctl:other"), ErrInvalid, "issuer"},
		{"other audience", f("aud", "agentctl:other"), ErrInvalid, "audience"},
		{"audience is a prefix", f("aud", s.Audience()+"x"), ErrInvalid, "audience"},
		{"no audience", f("aud", nil), ErrInvalid, "claims"},
		{"audience is a list", f("aud", []string{s.Audience()}), ErrInvalid, "malformed"},
		{"expired", f("iat", now-3600, "nbf", now-3600, "exp", now-60), ErrInvalid, "expired"},
		{"not yet valid", f("nbf", now+61), ErrInvalid, "not_yet_valid"},
		{"no exp", f("exp", nil), ErrInvalid, "claims"},
		{"no nbf", f("nbf", nil), ErrInvalid, "claims"},
		{"no iat", f("iat", nil), ErrInvalid, "claims"},
		{"exp is text", f("exp", "4102444800"), ErrInvalid, "malformed"},
		{"exp has a fraction", f("exp", float64(now)+3600.5), ErrInvalid, "malformed"},
		{"exp out of range", f("exp", uint64(math.MaxUint64)), ErrInvalid, "malformed"},
		{"exp beyond the calendar", f("exp", int64(math.MaxInt64)), ErrInvalid, "claims"},
		{"exp negative", f("exp", -1), ErrInvalid, "claims"},
		{"a life too long", f("exp", now+int64(MaxTTL/time.Second)+1), ErrInvalid, "claims"},
		{"issued after its end", f("iat", now+3601), ErrInvalid, "claims"},
		{"no class", f("cls", nil), ErrInvalid, "claims"},
		{"unknown class", f("cls", "admin"), ErrInvalid, "claims"},
		{"bad tenant", f("tid", "../acme"), ErrInvalid, "claims"},
		{"no tenant", f("tid", nil), ErrInvalid, "claims"},
		{"no subject", f("sub", nil), ErrInvalid, "claims"},
		{"subject with a line break", f("sub", "a\nb"), ErrInvalid, "claims"},
		{"no jti", f("jti", nil), ErrInvalid, "claims"},
		{"jti is no ULID", f("jti", "1234"), ErrInvalid, "claims"},
		{"device without a node id", f("cls", ClassDevice, "scope", "device:connect"), ErrInvalid, "claims"},
		{"agent with gen", f("gen", 1), ErrInvalid, "claims"},
		{"gen negative", f("cls", ClassDevice, "scope", "device:connect", "sub", manifest.NewNodeID(), "gen", -1), ErrInvalid, "claims"},
		{"iid empty", f("cls", ClassDevice, "scope", "device:connect", "sub", manifest.NewNodeID(), "iid", ""), ErrInvalid, "claims"},
		{"unknown claim", f("act", map[string]string{"sub": "x"}), ErrInvalid, "malformed"},
		{"cnf null", f2(t, s, `"cls"`, `"cnf":null,"cls"`), ErrInvalid, "malformed"},
		{"cnf with another member", f("cnf", map[string]string{"jkt": strings.Repeat("x", 43), "kid": "x"}), ErrInvalid, "malformed"},
		{"cnf without a thumbprint", f("cnf", map[string]string{}), ErrInvalid, "claims"},
		{"cnf of a wrong length", f("cnf", map[string]string{"jkt": "x"}), ErrInvalid, "claims"},
		{"claims no object", withClaims(`[]`), ErrInvalid, "malformed"},
		{"claims null", withClaims(`null`), ErrInvalid, "issuer"},
		{"claim twice", withClaims(strings.Replace(claimsText(), `"tid":"default"`, `"tid":"default","tid":"acme"`, 1)), ErrInvalid, "malformed"},
		{"claim twice by case", withClaims(strings.Replace(claimsText(), `"tid":"default"`, `"tid":"default","TID":"acme"`, 1)), ErrInvalid, "malformed"},
		{"claim in the wrong case", withClaims(strings.Replace(claimsText(), `"tid"`, `"Tid"`, 1)), ErrInvalid, "malformed"},
		{"invalid UTF-8", withClaims(strings.Replace(claimsText(), `"default"`, "\"def\xffault\"", 1)), ErrInvalid, "malformed"},
		{"bytes behind", withClaims(claimsText() + "{}"), ErrInvalid, "malformed"},
		{"scope null", f2(t, s, `"scope":"tools:call:read_only"`, `"scope":null`), ErrInvalid, "malformed"},
		{"scope is a list", f("scope", []string{"tools:list"}), ErrInvalid, "malformed"},

		{"no scope claim", f("scope", nil), ErrScope, "no_scope"},
		{"empty scope", f("scope", ""), ErrScope, "no_scope"},
		{"unknown scope alone", f("scope", "tools:call:destructive root"), ErrScope, "no_scope"},
		{"device scope on an agent", f("scope", "device:connect"), ErrScope, "no_scope"},
		{"agent scope on a device", f("cls", ClassDevice, "sub", manifest.NewNodeID()), ErrScope, "no_scope"},
		{"device token", mint(t, s, MintRequest{Class: "device"}).Token, ErrClass, "class"},
		{"enroll token", mint(t, s, MintRequest{Class: "enroll"}).Token, ErrClass, "class"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for range 2 {
				id, err := s.Verify(tt.token, ClassAgent)
				if id != nil || err == nil {
					t.Fatalf("accepted: %+v", id)
				}
				refused(t, err, tt.token, tt.kind, tt.reason)
			}
		})
	}
	if _, err := s.Verify(good, ClassAgent); err != nil {
		t.Errorf("the good token after all that: %v", err)
	}
	if id, err := s.Verify(f("scope", "tools:list  frobnicate device:connect")); err != nil || id.Scopes != (Scopes{relay: bitToolsList}) {
		t.Errorf("unknown words and those of another class grant nothing: got %v, %v", id, err)
	}
	if id, err := s.Verify(good, ClassDevice, ClassEnroll); id != nil || err == nil {
		t.Error("an agent token passed as a device's")
	} else {
		refused(t, err, good, ErrClass, "class")
	}
}

// f2 is forge with a replacement in the claims text.
func f2(t *testing.T, s *Store, old, now string) string {
	parts := strings.Split(forge(t, s, nil), ".")
	text := string(unb64(t, parts[1]))
	if !strings.Contains(text, old) {
		t.Fatalf("no %s in %s", old, text)
	}
	return signRaw(goodHeader(s), strings.Replace(text, old, now, 1), s.keyring.Load().signKey)
}

func unb64(t testing.TB, s string) []byte {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// leftover encodes JSON with a bit set that no byte of it owns.
func leftover(t *testing.T, text string) string {
	for len(text)%3 != 1 {
		text += " "
	}
	seg := flipLast(b64([]byte(text)))
	if b, err := base64.RawURLEncoding.DecodeString(seg); err != nil || string(b) != text {
		t.Fatalf("a lax decoder reads %q, %v", b, err)
	}
	return seg
}

// flipLast sets an unused bit of the last character, which must have one: the same
// bytes to a lax decoder, another token to a cache.
func flipLast(token string) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	i := strings.IndexByte(alphabet, token[len(token)-1])
	return token[:len(token)-1] + string(alphabet[i|1])
}

func rs256(t *testing.T, header, claims string) string {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	text := b64([]byte(header)) + "." + claims
	sum := sha256.Sum256([]byte(text))
	sig, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	return text + "." + b64(sig)
}

func TestExpiryAndLeeway(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	m := mint(t, s, MintRequest{Class: "agent", TTL: 10 * time.Minute})
	id, err := s.Verify(m.Token)
	if err != nil {
		t.Fatal(err)
	}
	ck.t = testTime.Add(11*time.Minute - time.Second) // inside the leeway
	if _, err := s.Verify(m.Token); err != nil || s.Active(id) != nil {
		t.Errorf("59 s after exp: got %v, %v", err, s.Active(id))
	}
	ck.t = testTime.Add(11 * time.Minute)
	_, err = s.Verify(m.Token) // known to the cache
	refused(t, err, m.Token, ErrInvalid, "expired")
	refused(t, s.Active(id), m.Token, ErrInvalid, "expired")
	fresh := openStore(t, Options{StateDir: s.dir.path, Now: ck.now})
	_, err = fresh.Verify(m.Token) // not known to it
	refused(t, err, m.Token, ErrInvalid, "expired")

	ck.t = testTime.Add(-time.Minute) // a relay whose clock is behind
	if _, err := openStore(t, Options{StateDir: s.dir.path, Now: ck.now}).Verify(m.Token); err != nil {
		t.Errorf("60 s before nbf: got %v", err)
	}
	ck.t = testTime.Add(-61 * time.Second)
	_, err = openStore(t, Options{StateDir: s.dir.path, Now: ck.now}).Verify(m.Token)
	refused(t, err, m.Token, ErrInvalid, "not_yet_valid")
}

func TestScopelessTolerance(t *testing.T) {
	var log bytes.Buffer
	logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&log), zap.DebugLevel))
	ck := &clock{testTime}
	dir := t.TempDir()
	strict := openStore(t, Options{StateDir: dir, Now: ck.now})
	s := openStore(t, Options{StateDir: dir, Now: ck.now, ScopelessUntil: testTime.Add(time.Hour), Logger: logger})
	token := forge(t, s, map[string]any{"scope": nil, "exp": testTime.Add(24 * time.Hour).Unix()})

	_, err := strict.Verify(token)
	refused(t, err, token, ErrScope, "no_scope")

	id, err := s.Verify(token)
	if err != nil {
		t.Fatal(err)
	}
	if id.Scopes != (Scopes{relay: bitCallReadOnly}) {
		t.Errorf("got scopes %q", id.Scopes)
	}
	second := forge(t, s, map[string]any{"scope": nil})
	if _, err := s.Verify(second); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(log.String(), "without a scope"); n != 1 || !strings.Contains(log.String(), `"level":"warn"`) {
		t.Errorf("got %d warnings, want 1: %s", n, log.String())
	}
	if strings.Contains(log.String(), strings.Split(token, ".")[2]) {
		t.Error("a token is in the log")
	}
	// Only an absent claim of an agent is tolerated.
	for _, change := range []map[string]any{
		{"scope": ""}, {"scope": "nonsense"},
		{"scope": nil, "cls": ClassDevice, "sub": manifest.NewNodeID()},
		{"scope": nil, "cls": ClassEnroll},
	} {
		tok := forge(t, s, change)
		_, err := s.Verify(tok)
		refused(t, err, tok, ErrScope, "no_scope")
	}
	ck.t = testTime.Add(time.Hour) // the tolerance ends, for known tokens and new ones
	refused(t, s.Active(id), token, ErrScope, "scopeless")
	_, err = s.Verify(token)
	refused(t, err, token, ErrScope, "scopeless")
	third := forge(t, s, map[string]any{"scope": nil})
	_, err = s.Verify(third)
	refused(t, err, third, ErrScope, "scopeless")
}

func TestNilIdentity(t *testing.T) {
	var nobody *Identity
	if nobody.Has(manifest.ScopeCallReadOnly) {
		t.Error("a nil identity holds a scope")
	}
	s := openStore(t, Options{})
	front := &Identity{Tenant: "default", Subject: "anonymous", Class: ClassAgent, Scopes: Scopes{relay: bitCallReadOnly}} // made without a token
	if err := s.Active(front); err != nil {
		t.Errorf("an identity without expiry: got %v", err)
	}
}

func TestWellFormed(t *testing.T) {
	for token, want := range map[string]bool{
		"a.b.c": true, "A-_9.zZ.0": true, strings.Repeat("a", MaxTokenLen-4) + ".b.c": true,
		"": false, "a": false, "a.b": false, "a.b.": false, ".b.c": false, "a..c": false, "a.b.c.": false, "a.b.c.d": false,
		"a.b.c=": false, "a.b+.c": false, "a.b/.c": false, "a.b.c\n": false, "a.b.c\x00": false, "a.b.\u00e9": false,
		strings.Repeat("a", MaxTokenLen-3) + ".b.c": false,
	} {
		if got := wellFormed(token); got != want {
			t.Errorf("%.20q: got %v, want %v", token, got, want)
		}
	}
}

package auth

import (
	"encoding/json"
	"strings"
	"testing"

	"agentctl/manifest"
)

// Whatever is thrown at Verify, it does not panic and accepts only what was minted.
func FuzzVerify(f *testing.F) {
	s := openStore(f, Options{})
	minted := map[string]bool{}
	for _, class := range []string{"agent", "admin", "device", "enroll"} {
		m := mint(f, s, MintRequest{Class: class})
		minted[m.Token] = true
		parts := strings.Split(m.Token, ".")
		for _, seed := range []string{m.Token, parts[0] + "." + parts[1], m.Token + ".", parts[0] + ".." + parts[2],
			b64([]byte(`{"alg":"none","typ":"at+jwt","kid":"a"}`)) + "." + parts[1] + "." + parts[2]} {
			f.Add(seed)
		}
	}
	f.Add("")
	f.Add("..")
	f.Fuzz(func(t *testing.T, token string) {
		id, err := s.Verify(token)
		if (id == nil) == (err == nil) {
			t.Fatalf("got %v and %v", id, err)
		}
		if err == nil && !minted[token] {
			t.Fatalf("accepted a token that was not minted: %q", token)
		}
		if err != nil && manifest.AsError(err).Code != manifest.SafetyDenied {
			t.Fatalf("got %v", err)
		}
	})
}

// Claims of any shape under a good signature: no panic, and what is accepted reads the
// same to another decoder.
func FuzzClaims(f *testing.F) {
	s := openStore(f, Options{})
	for _, class := range []string{"agent", "device", "enroll"} {
		text := string(unb64(f, strings.Split(mint(f, s, MintRequest{Class: class, Instance: map[bool]string{true: "abc"}[class == "device"]}).Token, ".")[1]))
		f.Add(goodHeader(s), text)
		f.Add(goodHeader(s), strings.Replace(text, `"exp"`, `"exp":1,"exp"`, 1))
		f.Add(goodHeader(s), strings.Replace(text, `"tid":`, `"TID":`, 1))
		f.Add(`{"alg":"EdDSA","kid":"x","typ":"at+jwt","jku":"http://127.0.0.1/"}`, text)
	}
	f.Fuzz(func(t *testing.T, header, text string) {
		id, err := s.Verify(signRaw(header, text, s.keyring.Load().signKey))
		if err != nil {
			return
		}
		var h, c map[string]any
		if json.Unmarshal([]byte(header), &h) != nil || json.Unmarshal([]byte(text), &c) != nil {
			t.Fatalf("accepted what is not JSON: %q %q", header, text)
		}
		if len(h) != 3 || h["alg"] != "EdDSA" || h["typ"] != "at+jwt" || h["kid"] != s.keyring.Load().signKID {
			t.Fatalf("accepted the header %q", header)
		}
		scope, _ := c["scope"].(string)
		if c["iss"] != s.Issuer() || c["aud"] != s.Audience() || c["tid"] != id.Tenant || c["sub"] != id.Subject || c["cls"] != id.Class ||
			c["exp"] != float64(id.expires) || id.Scopes.IsZero() || !id.Scopes.without(knownScopes(scope)).IsZero() || id.Scopes != id.Scopes.ofClass(id.Class) {
			t.Fatalf("accepted %q as %+v", text, id)
		}
		if err := s.Active(id); err != nil {
			t.Fatalf("verified and not active: %v", err)
		}
	})
}

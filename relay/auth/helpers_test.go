package auth

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/sqlitefile/sqlitefiletest"
)

// clock is a hand-set time.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

var testTime = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func openStore(t testing.TB, o Options) *Store {
	t.Helper()
	if o.StateDir == "" {
		o.StateDir = filepath.Join(t.TempDir(), "state")
	}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func mint(t testing.TB, s *Store, req MintRequest) Minted {
	t.Helper()
	list, err := s.Mint(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if n := max(req.Count, 1); len(list) != n {
		t.Fatalf("got %d tokens, want %d", len(list), n)
	}
	return list[0]
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// signRaw makes a token of any header and claims text with a key.
func signRaw(header, claims string, key ed25519.PrivateKey) string {
	text := b64([]byte(header)) + "." + b64([]byte(claims))
	return text + "." + b64(ed25519.Sign(key, []byte(text)))
}

// forge is a token of this relay's own key, with claims changed: nil removes one.
func forge(t testing.TB, s *Store, change map[string]any) string {
	t.Helper()
	now := s.now().Unix()
	c := map[string]any{
		"iss": s.Issuer(), "aud": s.Audience(), "sub": "tester", "tid": "default", "cls": ClassAgent,
		"scope": manifest.ScopeCallReadOnly, "jti": manifest.NewULID(), "iat": now, "nbf": now, "exp": now + 3600,
	}
	maps.Copy(c, change)
	maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return signRaw(goodHeader(s), string(b), s.keyring.Load().signKey)
}

func goodHeader(s *Store) string {
	return `{"alg":"EdDSA","kid":"` + s.keyring.Load().signKID + `","typ":"at+jwt"}`
}

// refused checks kind and reason of a refusal, and that nothing of the token is in it.
func refused(t *testing.T, err error, token string, kind error, reason string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("got error %v, want an *Error", err)
	}
	if !errors.Is(err, kind) || e.Reason != reason {
		t.Errorf("got %v (%s), want %v (%s)", e.Kind, e.Reason, kind, reason)
	}
	for part := range strings.SplitSeq(token, ".") {
		if len(part) > 3 && strings.Contains(err.Error(), part) {
			t.Errorf("the error %q holds a part of the token", err)
		}
	}
	wire := manifest.AsError(err)
	if wire.Code != manifest.SafetyDenied || wire.Reason != reason || wire.Message == "" {
		t.Errorf("as a wire error: got %+v", wire)
	}
	for _, c := range wire.Message {
		if c < ' ' || c > '~' {
			t.Errorf("the message %q is not printable ASCII", wire.Message)
		}
	}
}

func TestMain(m *testing.M) {
	if job := os.Getenv("AUTH_TEST_JOB"); job != "" {
		os.Exit(runJob(job))
	}
	sqlitefiletest.Main(m)
}

// size counts the cached identities.
func (c *tokenCache) size() (n int) {
	for i := range c.shards {
		n += len(c.shards[i].young) + len(c.shards[i].old)
	}
	return n
}

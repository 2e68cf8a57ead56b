package enrollment

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"testing"
)

// TestThumbprint checks the example of RFC 8037 appendix A.3.
func TestThumbprint(t *testing.T) {
	key, err := ParseKey("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := Thumbprint(key), "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"; got != want {
		t.Errorf("Thumbprint = %s, want %s", got, want)
	}
}

func TestProof(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(nil)
	other, _, _ := ed25519.GenerateKey(nil)
	msg := EnrollMessage("n", "7K3M-9QTR-2HXW-DB5N", "00112233445566778899aabbccddeeff")
	proof := Sign(key, msg)
	if !Verify(pub, msg, proof) {
		t.Error("a good proof is refused")
	}
	for name, ok := range map[string]bool{
		"another message": Verify(pub, TokenMessage("n", "node", 1, "r"), proof),
		"another key":     Verify(other, msg, proof),
		"no key":          Verify(nil, msg, proof),
		"no base64":       Verify(pub, msg, proof+"="),
		"empty":           Verify(pub, msg, ""),
	} {
		if ok {
			t.Errorf("%s: a wrong proof is accepted", name)
		}
	}
}

// TestMessages checks that each purpose signs its own text, byte for byte.
func TestMessages(t *testing.T) {
	for _, c := range []struct {
		got  []byte
		want string
	}{
		{EnrollMessage("N", "C", "I"), "agentctl-enroll-v1|N|6b23c0d5f35d1b11f9b683f0b0a617355deb11277d91ae091d399c655b87940d|I"},
		{TokenMessage("N", "S", 7, "R"), "agentctl-token-v1|N|S|7|R"},
		{LinkMessage("N", "D", "T"), "agentctl-auth-v1|N|D|e632b7095b0bf32c260fa4c539e9fd7b852d0de454e9be26f24d0d6f91d069d3"},
	} {
		if !bytes.Equal(c.got, []byte(c.want)) {
			t.Errorf("message %q, want %q", c.got, c.want)
		}
	}
}

func TestParseCode(t *testing.T) {
	const want = "7K3M-9QTR-2HXW-DB01"
	for _, s := range []string{want, "7k3m9qtr2hxwdb01", " 7K3M 9QTR 2HXW DBOl\n"} {
		if got, err := ParseCode(s); err != nil || got != want {
			t.Errorf("ParseCode(%q) = %q, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "7K3M-9QTR-2HXW-DB5", "7K3M-9QTR-2HXW-DB5U", "7K3M-9QTR-2HXW-DB5NN", "7K3M_9QTR_2HXW_DB5N"} {
		if got, err := ParseCode(s); err == nil {
			t.Errorf("ParseCode(%q) = %q, want an error", s, got)
		}
	}
	code := NewCode()
	if got, err := ParseCode(code); err != nil || got != code {
		t.Errorf("NewCode made %q, which ParseCode reads as %q, %v", code, got, err)
	}
}

func TestParseKey(t *testing.T) {
	for _, s := range []string{"", "AA", base64.URLEncoding.EncodeToString(make([]byte, 32))} {
		if _, err := ParseKey(s); err == nil {
			t.Errorf("ParseKey(%q) accepted", s)
		}
	}
}

func TestPrivateKey(t *testing.T) {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParsePrivateKey(EncodePrivateKey(key)); err != nil || !got.Equal(key) {
		t.Errorf("not the same key: %v", err)
	}
	for _, bad := range []string{"", "x", EncodePrivateKey(key) + "=", EncodePrivateKey(key)[1:], EncodeKey(key.Public().(ed25519.PublicKey)) + "AA"} {
		if _, err := ParsePrivateKey(bad); err == nil {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

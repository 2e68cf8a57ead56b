package auth

import (
	"slices"
	"testing"
)

func TestConsent(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := s.Consent("notes"); ok {
		t.Error("a new relay has a consent")
	}
	for _, tenants := range [][]string{{"a", "b"}, {"*"}, nil, {"c"}} {
		if _, err := s.SetConsent(t.Context(), Consent{Plugin: "notes", Digest: "d1", Tenants: tenants, Actor: "ann"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	before, err := s.Record(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.SetConsent(t.Context(), Consent{Plugin: "notes", Digest: "d2", Tenants: []string{"a", "b"}, Actor: "bob"}, nil); err != nil {
		t.Fatal(err)
	}
	// A database from before a consent was changed is an older one.
	if after, err := s.Record(t.Context()); err != nil || after.Epoch <= before.Epoch {
		t.Errorf("the epoch went from %d to %d: %v", before.Epoch, after.Epoch, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = Open(Options{StateDir: dir}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	c, ok := s.Consent("notes")
	if !ok || c.Digest != "d2" || c.Actor != "bob" || !slices.Equal(c.Tenants, []string{"a", "b"}) || c.AtMS == 0 {
		t.Errorf("after a restart: %+v %t", c, ok)
	}
}

// No token has the identity of a plugin.
func TestPluginSubject(t *testing.T) {
	s, err := Open(Options{StateDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if _, err := s.Mint(t.Context(), MintRequest{Class: "agent", Subject: "plugin:triage"}); err == nil {
		t.Error("minted")
	}
	if _, _, err := s.CreateInvite(t.Context(), InviteRequest{Class: InviteAgent, Name: "plugin:triage"}); err == nil {
		t.Error("invited")
	}
	if _, _, err := s.CreateInvite(t.Context(), InviteRequest{Class: InviteAgent, Name: "plugins"}); err != nil {
		t.Error(err)
	}
}

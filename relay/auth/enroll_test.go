package auth

import (
	"context"
	"crypto/ed25519"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
)

const testInstance = "00112233445566778899aabbccddeeff"

// holder is a board or an agent that joins: a key and what it has stored.
type holder struct {
	t       testing.TB
	s       *Store
	key     ed25519.PrivateKey
	code    string
	subject string
	isAgent bool
	gen     int
	token   string
}

func newHolder(t testing.TB, s *Store, code string) *holder {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &holder{t: t, s: s, key: key, code: code}
}

func (h *holder) request() *enrollment.EnrollRequest {
	nonce := h.s.Nonce()
	return &enrollment.EnrollRequest{
		Nonce: nonce, Code: h.code, PublicKey: enrollment.EncodeKey(h.key.Public().(ed25519.PublicKey)), InstanceID: testInstance,
		AgentVersion: "v1", Proof: enrollment.Sign(h.key, enrollment.EnrollMessage(nonce, h.code, testInstance)),
	}
}

// enroll joins and keeps the answer.
func (h *holder) enroll() (*Enrolled, error) {
	out, err := h.s.Enroll(context.Background(), h.request())
	h.keep(out)
	return out, err
}

func (h *holder) keep(out *Enrolled) {
	if out != nil {
		h.subject, h.isAgent, h.gen, h.token = out.Subject, out.Class == ClassAgent, out.Gen, out.Token
	}
}

func (h *holder) mustEnroll() *Enrolled {
	h.t.Helper()
	out, err := h.enroll()
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

func (h *holder) tokenRequest(gen int, requestID string) *enrollment.TokenRequest {
	nonce := h.s.Nonce()
	req := &enrollment.TokenRequest{Gen: gen, RequestID: requestID, Nonce: nonce,
		Proof: enrollment.Sign(h.key, enrollment.TokenMessage(nonce, h.subject, gen, requestID))}
	if h.isAgent {
		req.AgentID = h.subject
	} else {
		req.NodeID = h.subject
	}
	return req
}

func admitAll(context.Context, string) bool { return true }

// refresh names a generation; it does not keep the answer.
func (h *holder) refresh(gen int, requestID string) (*Enrolled, error) {
	return h.s.RenewToken(context.Background(), h.tokenRequest(gen, requestID), admitAll)
}

func invite(t testing.TB, s *Store, req InviteRequest) (*Invite, string) {
	t.Helper()
	inv, code, err := s.CreateInvite(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	return inv, code
}

// wantReason checks a refusal of joining.
func wantReason(t testing.TB, err error, reason string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || !errors.Is(err, ErrJoin) || e.Reason != reason {
		t.Errorf("got %v, want a refusal with the reason %s", err, reason)
		return
	}
	if m := manifest.AsError(err); m.PublicReason() != reason || m.Code != manifest.SafetyDenied {
		t.Errorf("on the wire: %+v", m)
	}
}

func TestEnrollBoard(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	inv, code := invite(t, s, InviteRequest{Name: "attic", Tags: []string{"roof", "east", "roof"}})
	if inv.Prefix != code[:4] || inv.State != "open" || !slices.Equal(inv.Tags, []string{"east", "roof"}) {
		t.Errorf("invite %+v for the code %s", inv, code)
	}
	b := newHolder(t, s, code)
	out := b.mustEnroll()
	if out.Class != ClassDevice || out.Name != "attic" || out.Gen != 1 || out.Repeat || !out.Expires.Equal(testTime.Add(BoardTokenTTL)) {
		t.Errorf("enrolled as %+v", out)
	}
	a, _ := s.NodeAttributes(out.Subject)
	if !a.NameSet || !slices.Equal(a.Tags, []string{"east", "roof"}) {
		t.Errorf("the node has %+v", a)
	}
	id, err := s.Verify(out.Token, ClassDevice)
	if err != nil {
		t.Fatal(err)
	}
	if id.NodeID != out.Subject || id.Gen != 1 || id.KeyThumbprint != enrollment.Thumbprint(b.key.Public().(ed25519.PublicKey)) ||
		!id.BoundTo(testInstance) || id.BoundTo(strings.Repeat("0", 32)) {
		t.Errorf("the token says %+v", id)
	}
	// The clock of the relay is set back by a year: nbf is not checked.
	ck.t = testTime.Add(-365 * day)
	fresh := openStore(t, Options{StateDir: s.dir.path, Now: ck.now})
	if _, err := fresh.Verify(out.Token, ClassDevice); err != nil {
		t.Errorf("before nbf: %v", err)
	}
	ck.t = testTime.Add(BoardTokenTTL + Leeway)
	_, err = s.Verify(out.Token, ClassDevice)
	refused(t, err, out.Token, ErrInvalid, "expired")

	// A repeat gives the same node, although the code is used up and has expired.
	ck.t = testTime.Add(48 * time.Hour)
	again := b.mustEnroll()
	if again.Subject != out.Subject || !again.Repeat || again.Gen != 1 || again.Token == out.Token {
		t.Errorf("the repeat: %+v", again)
	}
	list, err := s.Invites(t.Context(), "")
	if err != nil || len(list) != 1 || list[0].Used != 1 || list[0].State != "used" {
		t.Errorf("invites %+v, %v", list, err)
	}
	if tokens, _ := s.Tokens(t.Context()); len(tokens) != 1 {
		t.Errorf("%d rows of tokens, want 1 for a key", len(tokens))
	}
	_, err = newHolder(t, s, code).enroll()
	wantReason(t, err, enrollment.ReasonUsed)
}

func TestEnrollRefusals(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	_, code := invite(t, s, InviteRequest{Uses: 100, TTL: time.Hour})
	known := newHolder(t, s, code)
	known.mustEnroll()
	_, otherCode := invite(t, s, InviteRequest{})
	other := openStore(t, Options{})

	change := func(f func(r *enrollment.EnrollRequest)) error {
		r := newHolder(t, s, code).request()
		f(r)
		_, err := s.Enroll(t.Context(), r)
		return err
	}
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.Nonce = "" }), enrollment.ReasonNonce)
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.Nonce = other.Nonce() }), enrollment.ReasonNonce)
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.Nonce = s.Nonce() }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.Proof = "" }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.InstanceID = strings.Repeat("0", 32) }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.Code = "attic" }), enrollment.ReasonCodeUnknown)
	wantReason(t, change(func(r *enrollment.EnrollRequest) { r.PublicKey = known.request().PublicKey }), enrollment.ReasonProof)
	for name, f := range map[string]func(r *enrollment.EnrollRequest){
		"key":      func(r *enrollment.EnrollRequest) { r.PublicKey = "AAAA" },
		"instance": func(r *enrollment.EnrollRequest) { r.InstanceID = "x" },
		"name":     func(r *enrollment.EnrollRequest) { r.Name = "Attic!" },
		"version":  func(r *enrollment.EnrollRequest) { r.AgentVersion = "v1\n" },
	} {
		if err := change(f); !errors.Is(err, ErrRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
	unknown := newHolder(t, s, enrollment.NewCode())
	_, err := unknown.enroll()
	wantReason(t, err, enrollment.ReasonCodeUnknown)

	known.code = otherCode
	_, err = known.enroll()
	wantReason(t, err, enrollment.ReasonKeyInUse)
	known.code = code

	// The code is read as people type it, and the proof is of its canonical form.
	r := newHolder(t, s, code).request()
	r.Code = strings.ToLower(strings.ReplaceAll(code, "-", " "))
	if _, err := s.Enroll(t.Context(), r); err != nil {
		t.Errorf("a code in lower case: %v", err)
	}

	ck.t = testTime.Add(time.Hour)
	_, err = newHolder(t, s, code).enroll()
	wantReason(t, err, enrollment.ReasonExpired)
	if _, err := s.RevokeInvite(t.Context(), "", code[:4], false); err != nil {
		t.Fatal(err)
	}
	_, err = newHolder(t, s, code).enroll()
	wantReason(t, err, enrollment.ReasonRevoked)
	_, err = known.enroll() // a repeat
	wantReason(t, err, enrollment.ReasonRevoked)
	if _, err := known.refresh(1, manifest.NewULID()); err != nil {
		t.Errorf("what has joined stays: %v", err)
	}
}

// TestEnrollNonceExpires is in real time: the nonce's clock is monotonic.
func TestNonce(t *testing.T) {
	n := newNonceMaker()
	nonce := n.make()
	if !n.valid(nonce) || n.valid(nonce+"A") || n.valid("") || newNonceMaker().valid(nonce) {
		t.Error("a nonce is good on the relay that made it, and whole")
	}
	if at, ok := n.issuedAt(nonce); !ok || at > time.Minute {
		t.Errorf("issued at %v, %v", at, ok)
	}
	n.started = n.started.Add(-NonceLifetime - 10*time.Millisecond)
	if n.valid(nonce) {
		t.Error("a nonce is good for 60 s")
	}
	seen := map[string]bool{}
	for range 1000 {
		seen[n.make()] = true
	}
	if len(seen) != 1000 {
		t.Error("nonces repeat")
	}
}

// TestLastUse: of boards that claim the last uses at once, as many as there are uses get one,
// each a separate node.
func TestLastUse(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{Uses: 3})
	var mu sync.Mutex
	nodes := map[string]bool{}
	used := 0
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			out, err := newHolder(t, s, code).enroll()
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				nodes[out.Subject] = true
				return
			}
			wantReason(t, err, enrollment.ReasonUsed)
			used++
		})
	}
	wg.Wait()
	if len(nodes) != 3 || used != 9 {
		t.Errorf("%d nodes and %d refusals, want 3 and 9", len(nodes), used)
	}
}

// TestSameKeyAtOnce: one board that sends its enrollment several times at once gets one node
// and uses the code up once.
func TestSameKeyAtOnce(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{})
	b := newHolder(t, s, code)
	nodes := make([]string, 6)
	var wg sync.WaitGroup
	for i := range nodes {
		wg.Go(func() {
			if out, err := s.Enroll(context.Background(), b.request()); err != nil {
				t.Error(err)
			} else {
				nodes[i] = out.Subject
			}
		})
	}
	wg.Wait()
	if len(slices.Compact(nodes)) != 1 {
		t.Errorf("one key has the nodes %v", nodes)
	}
}

func TestNamesOfInvites(t *testing.T) {
	s := openStore(t, Options{})
	_, first := invite(t, s, InviteRequest{Name: "attic"})
	_, second := invite(t, s, InviteRequest{Name: "attic"})
	_, fleet := invite(t, s, InviteRequest{Uses: 10, Tags: []string{"fleet"}})
	if out := newHolder(t, s, first).mustEnroll(); out.Name != "attic" {
		t.Errorf("name %q", out.Name)
	}
	if out := newHolder(t, s, second).mustEnroll(); out.Name == "attic" || !strings.HasPrefix(out.Name, "attic-") {
		t.Errorf("a name that is taken became %q", out.Name)
	}
	r := newHolder(t, s, fleet).request()
	r.Name = "shed"
	out, err := s.Enroll(t.Context(), r)
	if err != nil || out.Name != "shed" {
		t.Fatalf("%+v, %v", out, err)
	}
	if a, _ := s.NodeAttributes(out.Subject); a.NameSet || !slices.Equal(a.Tags, []string{"fleet"}) {
		t.Errorf("a proposed name counts as an operator's: %+v", a)
	}
}

func TestInviteRequests(t *testing.T) {
	s := openStore(t, Options{})
	admin := &Identity{Tenant: "acme", Subject: "root", JTI: manifest.NewULID(), Scopes: Scopes{relay: tenantAdminScopes}}
	weak := &Identity{Tenant: "acme", Subject: "weak", JTI: manifest.NewULID(), Scopes: Scopes{relay: bitInvitesWrite}}
	tags := make([]string, 17)
	for i := range tags {
		tags[i] = fmt.Sprint("t", i)
	}
	for name, tt := range map[string]struct {
		req  InviteRequest
		kind error
	}{
		"class":            {InviteRequest{Class: "enroll"}, ErrRequest},
		"tenant":           {InviteRequest{Tenant: "../x"}, ErrRequest},
		"uses":             {InviteRequest{Uses: -1}, ErrRequest},
		"too many uses":    {InviteRequest{Uses: MaxInviteUses + 1}, ErrRequest},
		"ttl":              {InviteRequest{TTL: MaxInviteTTL + 1}, ErrRequest},
		"short ttl":        {InviteRequest{TTL: time.Second}, ErrRequest},
		"name":             {InviteRequest{Name: "Attic"}, ErrRequest},
		"name for many":    {InviteRequest{Name: "attic", Uses: 2}, ErrRequest},
		"tag":              {InviteRequest{Tags: []string{"a b"}}, ErrRequest},
		"tags":             {InviteRequest{Tags: tags}, ErrRequest},
		"board's scopes":   {InviteRequest{Scopes: []string{manifest.ScopeToolsList}}, ErrRequest},
		"agent's tags":     {InviteRequest{Class: InviteAgent, Tags: []string{"a"}}, ErrRequest},
		"agent's name":     {InviteRequest{Class: InviteAgent, Name: "a b"}, ErrRequest},
		"unknown scope":    {InviteRequest{Class: InviteAgent, Scopes: []string{"root"}}, ErrRequest},
		"device scope":     {InviteRequest{Class: InviteAgent, Scopes: []string{manifest.ScopeDeviceConnect}}, ErrRequest},
		"foreign tenant":   {InviteRequest{Tenant: "default", Creator: admin}, ErrGrant},
		"more than it has": {InviteRequest{Class: InviteAgent, Scopes: []string{manifest.ScopeKernelAdmin}, Creator: admin}, ErrGrant},
		"nothing to give":  {InviteRequest{Class: InviteAgent, Creator: weak}, ErrGrant},
	} {
		if _, code, err := s.CreateInvite(t.Context(), tt.req); !errors.Is(err, tt.kind) || code != "" {
			t.Errorf("%s: %v, want %v", name, err, tt.kind)
		}
	}
	// A board's only scope may be given by whoever may invite.
	inv, code := invite(t, s, InviteRequest{Creator: weak})
	if inv.Tenant != "acme" || inv.Scopes != (Scopes{relay: bitDeviceConnect}) || inv.Creator != "weak" {
		t.Errorf("invite %+v", inv)
	}
	if out := newHolder(t, s, code).mustEnroll(); out.Tenant != "acme" {
		t.Errorf("joined %s", out.Tenant)
	}
	if inv, code, err := s.CreateInvite(t.Context(), InviteRequest{DryRun: true}); err != nil || code != "" || inv.State != "open" {
		t.Errorf("dry run: %+v, %q, %v", inv, code, err)
	}
	// Tenants see and stop their own invites only.
	_, foreign := invite(t, s, InviteRequest{})
	if list, _ := s.Invites(t.Context(), "acme"); len(list) != 1 {
		t.Errorf("acme sees %+v", list)
	}
	if _, err := s.RevokeInvite(t.Context(), "acme", foreign[:4], false); !errors.Is(err, ErrNoInvite) {
		t.Errorf("acme revokes a foreign invite: %v", err)
	}
	if inv, err := s.RevokeInvite(t.Context(), "default", foreign[:4], true); err != nil || inv.State != "revoked" {
		t.Errorf("dry run: %+v, %v", inv, err)
	}
	newHolder(t, s, foreign).mustEnroll()
}

// TestInviteEndsWithItsCreator: invites that a stolen token made stop with that token.
func TestInviteEndsWithItsCreator(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	creator := &Identity{Tenant: "acme", Subject: "root", JTI: manifest.NewULID(), Scopes: Scopes{relay: tenantAdminScopes}}
	for name, req := range map[string]RevokeRequest{"jti": {JTI: creator.JTI}, "subject": {Subject: "root"}, "tenant": {Tenant: "acme"}} {
		creator.JTI, req.JTI = manifest.NewULID(), ""
		if name == "jti" {
			req.JTI = creator.JTI
		}
		_, code := invite(t, s, InviteRequest{Creator: creator, Uses: 5})
		b := newHolder(t, s, code)
		b.mustEnroll()
		if _, err := s.Revoke(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		_, err := newHolder(t, s, code).enroll()
		wantReason(t, err, enrollment.ReasonRevoked)
		_, err = b.enroll()
		wantReason(t, err, enrollment.ReasonRevoked)
		ck.t = ck.t.Add(time.Minute)
		creator.JTI = manifest.NewULID()
		_, code = invite(t, s, InviteRequest{Creator: creator})
		newHolder(t, s, code).mustEnroll() // a new one works
	}
}

func TestEnrollAgent(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	_, code := invite(t, s, InviteRequest{Class: InviteAgent, Name: "claude", Uses: 2})
	a := newHolder(t, s, code)
	out := a.mustEnroll()
	if out.Class != ClassAgent || out.Subject != "claude" || !out.Expires.Equal(testTime.Add(AgentTokenTTL)) {
		t.Errorf("%+v", out)
	}
	id, err := s.Verify(out.Token, ClassAgent)
	if err != nil || id.Scopes != (Scopes{relay: agentDefaults}) || id.KeyThumbprint == "" {
		t.Fatalf("%+v, %v", id, err)
	}
	second := newHolder(t, s, code).mustEnroll()
	if second.Subject == "claude" || !strings.HasPrefix(second.Subject, "claude-") {
		t.Errorf("the second agent is %q", second.Subject)
	}
	next, err := a.refresh(1, manifest.NewULID())
	if err != nil || next.Gen != 2 {
		t.Fatalf("%+v, %v", next, err)
	}
	if _, err = s.Verify(next.Token, ClassAgent); err != nil {
		t.Error(err)
	}
	_, err = a.refresh(1, manifest.NewULID()) // for agents not even once
	wantReason(t, err, enrollment.ReasonGenerationUsed)
	r := newHolder(t, s, code).request()
	r.Token = mint(t, s, MintRequest{Class: "device"}).Token
	_, err = s.Enroll(t.Context(), r)
	wantReason(t, err, enrollment.ReasonUsed)
}

func TestRefresh(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{})
	b := newHolder(t, s, code)
	b.mustEnroll()
	step := func(gen int, requestID string, wantGen int, repeat, suspect bool) {
		t.Helper()
		out, err := b.refresh(gen, requestID)
		if err != nil {
			t.Fatalf("gen %d: %v", gen, err)
		}
		if out.Gen != wantGen || out.Repeat != repeat || out.CloneSuspected != suspect {
			t.Errorf("gen %d: %+v, want gen %d, repeat %t, suspect %t", gen, out, wantGen, repeat, suspect)
		}
		if id, err := s.Verify(out.Token, ClassDevice); err != nil || id.Gen != wantGen {
			t.Errorf("gen %d: token %+v, %v", gen, id, err)
		}
	}
	var r [9]string
	for i := range r {
		r[i] = manifest.NewULID()
	}
	step(1, r[1], 2, false, false)
	step(1, r[1], 2, true, false) // the answer was lost
	step(2, r[2], 3, false, false)
	step(2, r[3], 4, false, true) // the answer was not written: once
	step(2, r[3], 4, true, false) // and that answer was lost
	_, err := b.refresh(3, r[4])
	wantReason(t, err, enrollment.ReasonGenerationUsed)
	_, err = b.refresh(2, r[4])
	wantReason(t, err, enrollment.ReasonGenerationUsed)
	step(4, r[5], 5, false, false)
	step(4, r[6], 6, false, true) // a served current generation allows it again
	step(9, r[7], 10, false, false)
	_, err = b.refresh(6, r[8])
	wantReason(t, err, enrollment.ReasonGenerationUsed)
	if tokens, _ := s.Tokens(t.Context()); len(tokens) != 1 {
		t.Errorf("%d rows of tokens, want 1 for a key", len(tokens))
	}
}

// TestRefreshReplay: a recorded request changes nothing after the answer to it was used.
func TestRefreshReplay(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{})
	b := newHolder(t, s, code)
	b.mustEnroll()
	first := b.tokenRequest(1, manifest.NewULID())
	renew := func(req *enrollment.TokenRequest) (*Enrolled, error) { return s.RenewToken(t.Context(), req, admitAll) }
	out, err := renew(first)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := renew(first); err != nil || !again.Repeat || again.Gen != 2 {
		t.Errorf("the same bytes before it was used: %+v, %v", again, err)
	}
	id, _ := s.Verify(out.Token, ClassDevice)
	nonce := "hello"
	proof := enrollment.Sign(b.key, enrollment.LinkMessage(nonce, id.NodeID, out.Token))
	if err := s.VerifyLinkProof(t.Context(), id, out.Token, nonce, proof); err != nil {
		t.Fatal(err)
	}
	_, err = renew(first)
	wantReason(t, err, enrollment.ReasonNonce)
	second := b.tokenRequest(2, manifest.NewULID())
	if out, err = renew(second); err != nil || out.Gen != 3 {
		t.Fatalf("%+v, %v", out, err)
	}
	s.nonces.started = s.nonces.started.Add(-time.Millisecond) // so that the next nonce is from a later one
	if _, err := renew(b.tokenRequest(3, manifest.NewULID())); err != nil {
		t.Fatal(err)
	}
	_, err = renew(second)
	wantReason(t, err, enrollment.ReasonNonce)
	// A lost write: the board has stored the request, not its answer, and the token was used.
	again, err := b.refresh(3, manifest.NewULID())
	if err != nil || !again.CloneSuspected {
		t.Errorf("the generation before, with a new nonce: %+v, %v", again, err)
	}
}

// TestRefreshState checks the rules on every short history of two holders of one key: each
// has a generation and either keeps an answer or loses it. Whatever they do, two holders that
// both go on refreshing do not both stay unsuspected.
func TestRefreshState(t *testing.T) {
	for history := range 1 << 10 {
		r := refreshState{gen: 1}
		gens := [2]int{1, 1}
		asked := [2]bool{}
		suspected := false
		for step := range 5 {
			bits := history >> (2 * step)
			who, lost := bits&1, bits&2 != 0
			asked[who] = true
			before := r
			repeat, suspect, ok := r.apply(gens[who], fmt.Sprint(history, step), true)
			if repeat {
				t.Fatal("a new request is no repeat")
			}
			if !ok && r != before {
				t.Fatalf("a refusal changed %+v to %+v", before, r)
			}
			if ok && r.gen != before.gen+1 {
				t.Fatalf("from generation %d to %d", before.gen, r.gen)
			}
			suspected = suspected || suspect || !ok
			if ok && !lost {
				gens[who] = r.gen
			}
		}
		if asked[0] && asked[1] && !suspected {
			t.Fatalf("history %b: two holders, and no suspicion", history)
		}
	}
}

func TestRefreshRefusals(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{})
	b := newHolder(t, s, code)
	b.mustEnroll()
	change := func(f func(r *enrollment.TokenRequest)) error {
		r := b.tokenRequest(1, manifest.NewULID())
		f(r)
		_, err := s.RenewToken(t.Context(), r, admitAll)
		return err
	}
	wantReason(t, change(func(r *enrollment.TokenRequest) { r.Nonce = "x" }), enrollment.ReasonNonce)
	wantReason(t, change(func(r *enrollment.TokenRequest) { r.Nonce = s.Nonce() }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.TokenRequest) { r.Gen = 2 }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.TokenRequest) { r.RequestID = manifest.NewULID() }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.TokenRequest) { r.NodeID = manifest.NewNodeID() }), enrollment.ReasonProof)
	wantReason(t, change(func(r *enrollment.TokenRequest) { r.AgentID, r.NodeID = r.NodeID, "" }), enrollment.ReasonProof)
	for name, f := range map[string]func(r *enrollment.TokenRequest){
		"both ids":   func(r *enrollment.TokenRequest) { r.AgentID = "a" },
		"no id":      func(r *enrollment.TokenRequest) { r.NodeID = "" },
		"node id":    func(r *enrollment.TokenRequest) { r.NodeID = "x" },
		"gen 0":      func(r *enrollment.TokenRequest) { r.Gen = 0 },
		"gen huge":   func(r *enrollment.TokenRequest) { r.Gen = maxTokenGen },
		"request id": func(r *enrollment.TokenRequest) { r.RequestID = "r" },
		"session id": func(r *enrollment.TokenRequest) { r.SessionID = "s" },
	} {
		if err := change(f); !errors.Is(err, ErrRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := b.tokenRequest(1, manifest.NewULID())
	_, err := s.RenewToken(t.Context(), r, func(_ context.Context, id string) bool { return id != b.subject })
	wantReason(t, err, enrollment.ReasonSession)
	// A copy that hangs up during the ping, so that the link seems not to answer.
	ctx, hangUp := context.WithCancel(t.Context())
	_, err = s.RenewToken(ctx, b.tokenRequest(1, manifest.NewULID()), func(context.Context, string) bool { hangUp(); return true })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that left: %v", err)
	}
	if out, err := b.refresh(1, manifest.NewULID()); err != nil || out.CloneSuspected {
		t.Errorf("after all the refusals: %+v, %v", out, err)
	}
}

// TestRevokedKeys: whatever an operator revokes of a holder stops its key, at once and also
// for a relay that has not read the revocation yet.
func TestRevokedKeys(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	cli := openStore(t, Options{StateDir: s.dir.path, Now: ck.now})
	for name, revoke := range map[string]func(h *holder, jti string) error{
		"node": func(h *holder, _ string) error {
			_, err := cli.Revoke(t.Context(), RevokeRequest{Node: h.subject})
			return err
		},
		"sub": func(h *holder, _ string) error {
			_, err := cli.Revoke(t.Context(), RevokeRequest{Subject: h.subject})
			return err
		},
		"tenant": func(*holder, string) error {
			_, err := cli.Revoke(t.Context(), RevokeRequest{Tenant: "default"})
			return err
		},
		"jti": func(_ *holder, jti string) error {
			_, err := cli.Revoke(t.Context(), RevokeRequest{JTI: jti})
			return err
		},
		"remove": func(h *holder, _ string) error {
			_, err := cli.RemoveNode(t.Context(), "default", h.subject, false)
			return err
		},
	} {
		ck.t = ck.t.Add(time.Hour)
		_, code := invite(t, s, InviteRequest{Uses: 2})
		b := newHolder(t, s, code)
		first := b.mustEnroll()
		id, err := s.Verify(first.Token)
		if err != nil {
			t.Fatal(name, err)
		}
		if err := revoke(b, id.JTI); err != nil {
			t.Fatal(name, err)
		}
		_, err = b.refresh(1, manifest.NewULID())
		wantReason(t, err, enrollment.ReasonRevoked)
		_, err = b.enroll()
		wantReason(t, err, enrollment.ReasonRevoked)
		if err := s.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s.CheckRevoked(id) == nil {
			t.Errorf("%s: the link goes on", name)
		}
		proof := enrollment.Sign(b.key, enrollment.LinkMessage("n", id.NodeID, first.Token))
		wantReason(t, s.VerifyLinkProof(t.Context(), id, first.Token, "n", proof), enrollment.ReasonRevoked)
		if name != "tenant" { // the way back is a new key
			if out, err := newHolder(t, s, code).enroll(); err != nil || out.Subject == b.subject {
				t.Errorf("%s: %+v, %v", name, out, err)
			}
		}
	}
}

// TestRevokedHolder: revoking the present token of an agent stops its key, the tokens that it
// had before and the invites that it made, and nobody else of that name.
func TestRevokedHolder(t *testing.T) {
	s := openStore(t, Options{})
	namesake := mint(t, s, MintRequest{Class: "agent", Tenant: "other", Subject: "ann"})
	_, code := invite(t, s, InviteRequest{Class: InviteAgent, Name: "ann", Tenant: "acme", Scopes: []string{manifest.ScopeInvitesWrite}})
	ann := newHolder(t, s, code)
	first := ann.mustEnroll()
	id, err := s.Verify(first.Token)
	if err != nil {
		t.Fatal(err)
	}
	_, made := invite(t, s, InviteRequest{Creator: id, Uses: 2})
	board := newHolder(t, s, made)
	board.mustEnroll()
	second, err := ann.refresh(1, manifest.NewULID())
	if err != nil {
		t.Fatal(err)
	}
	now, err := s.Verify(second.Token)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Revoke(t.Context(), RevokeRequest{JTI: now.JTI}); err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{first.Token, second.Token} {
		_, err := s.Verify(token)
		refused(t, err, token, ErrRevoked, "revoked")
	}
	_, err = ann.refresh(2, manifest.NewULID())
	wantReason(t, err, enrollment.ReasonRevoked)
	for _, b := range []*holder{board, newHolder(t, s, made)} {
		_, err := b.enroll()
		wantReason(t, err, enrollment.ReasonRevoked)
	}
	if _, err := board.refresh(1, manifest.NewULID()); err != nil {
		t.Errorf("what has joined stays: %v", err)
	}
	if _, err := s.Verify(namesake.Token); err != nil {
		t.Errorf("a namesake in another tenant: %v", err)
	}
}

func TestLinkProof(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{Uses: 2})
	b, thief := newHolder(t, s, code), newHolder(t, s, code)
	b.mustEnroll()
	thief.mustEnroll()
	id, err := s.Verify(b.token)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(key ed25519.PrivateKey, nonce, node, token string) string {
		return enrollment.Sign(key, enrollment.LinkMessage(nonce, node, token))
	}
	for name, proof := range map[string]string{
		"none":          "",
		"another key":   sign(thief.key, "n", id.NodeID, b.token),
		"another nonce": sign(b.key, "m", id.NodeID, b.token),
		"another node":  sign(b.key, "n", thief.subject, b.token),
		"another token": sign(b.key, "n", id.NodeID, thief.token),
	} {
		if err := s.VerifyLinkProof(t.Context(), id, b.token, "n", proof); err == nil {
			t.Errorf("%s: accepted", name)
		} else {
			wantReason(t, err, enrollment.ReasonProof)
		}
	}
	if err := s.VerifyLinkProof(t.Context(), id, b.token, "n", sign(b.key, "n", id.NodeID, b.token)); err != nil {
		t.Error(err)
	}
	// A relay restored from a backup of before: the key is unknown.
	other := openStore(t, Options{})
	if err := other.VerifyLinkProof(t.Context(), id, b.token, "n", sign(b.key, "n", id.NodeID, b.token)); err == nil {
		t.Error("an unknown key is accepted")
	}
}

// migrate joins with the earlier token of a board, whose node is to be kept.
func (h *holder) migrate(earlier string) (*Enrolled, error) {
	r := h.request()
	r.Token, r.Name = earlier, "ignored" // the node keeps its name
	out, err := h.s.Enroll(context.Background(), r)
	h.keep(out)
	return out, err
}

// A board joins with a device token of its tenant that is for its installation and not bound to a key; any
// other token is refused.
func TestMigrationRefusals(t *testing.T) {
	s := openStore(t, Options{})
	_, code := invite(t, s, InviteRequest{Uses: 2})
	_, acmeCode := invite(t, s, InviteRequest{Tenant: "acme"})
	tests := map[string]struct{ code, token string }{
		"no token at all":           {code, "x"},
		"of an agent":               {code, mint(t, s, MintRequest{Class: "agent"}).Token},
		"of another tenant":         {acmeCode, mint(t, s, MintRequest{Class: "device"}).Token},
		"for another installation":  {code, mint(t, s, MintRequest{Class: "device", Instance: strings.Repeat("a", 64)}).Token},
		"of a board that has a key": {code, newHolder(t, s, code).mustEnroll().Token},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := newHolder(t, s, tt.code).migrate(tt.token)
			wantReason(t, err, enrollment.ReasonTokenInvalid)
		})
	}
}

// A board that joins with its earlier token keeps its node. Its earlier tokens work until its first link
// with its key, and are revoked then.
func TestMigration(t *testing.T) {
	s := openStore(t, Options{})
	old := mint(t, s, MintRequest{Class: "device"})
	spare := mint(t, s, MintRequest{Class: "device", NodeID: old.NodeID})
	upsert(t, s, DefaultTenant, old.NodeID, "attic", "")
	_, code := invite(t, s, InviteRequest{Tags: []string{"roof"}})
	b := newHolder(t, s, code)
	out, err := b.migrate(old.Token)
	if err != nil || out.Subject != old.NodeID || out.Name != "attic" {
		t.Fatalf("joined as %+v, %v; want node %s, attic", out, err, old.NodeID)
	}
	if a, _ := s.NodeAttributes(old.NodeID); a.NameSet || !slices.Equal(a.Tags, []string{"roof"}) {
		t.Errorf("the attributes are %+v, want the tags of the invite and the name that the board proposed", a)
	}
	verifies(t, s, old.Token)
	restarted := openStore(t, Options{StateDir: s.dir.path})
	if !s.IsMigrating(old.NodeID) || !restarted.IsMigrating(old.NodeID) {
		t.Errorf("migrating: %v, after a restart: %v; want both", s.IsMigrating(old.NodeID), restarted.IsMigrating(old.NodeID))
	}

	if err := s.FinishMigration(t.Context(), old.NodeID); err != nil || s.IsMigrating(old.NodeID) {
		t.Errorf("after the first link: migrating is %v, %v; want that it is finished", s.IsMigrating(old.NodeID), err)
	}
	for _, token := range []string{old.Token, spare.Token} {
		_, err := s.Verify(token)
		refused(t, err, token, ErrRevoked, "revoked")
	}
	verifies(t, s, b.token)
	if _, err := b.migrate(old.Token); err != nil {
		t.Errorf("a repeat, which does not check the earlier token: %v", err)
	}
	if _, err := b.refresh(1, manifest.NewULID()); err != nil {
		t.Errorf("a refresh: %v", err)
	}
	verifies(t, s, mint(t, s, MintRequest{Class: "device", NodeID: old.NodeID}).Token) // an operator mints it later
}

// A board whose key was lost before its first link joins again with its earlier token. The lost key does
// not get another token.
func TestMigrationWithLostKey(t *testing.T) {
	s := openStore(t, Options{})
	old := mint(t, s, MintRequest{Class: "device"})
	_, code := invite(t, s, InviteRequest{Uses: 2})
	lost, b := newHolder(t, s, code), newHolder(t, s, code)
	for _, h := range []*holder{lost, b} {
		if out, err := h.migrate(old.Token); err != nil || out.Subject != old.NodeID {
			t.Fatalf("joined as %+v, %v; want node %s", out, err, old.NodeID)
		}
	}
	_, err := lost.refresh(1, manifest.NewULID())
	wantReason(t, err, enrollment.ReasonRevoked)
	if _, err := b.refresh(1, manifest.NewULID()); err != nil {
		t.Errorf("the present key: %v", err)
	}
}

func TestInviteBounds(t *testing.T) {
	ck := &clock{testTime}
	s := openStore(t, Options{Now: ck.now})
	_, code := invite(t, s, InviteRequest{TTL: time.Hour})
	b := newHolder(t, s, code)
	b.mustEnroll()
	ck.t = testTime.Add(time.Hour + inviteRetention + time.Minute)
	invite(t, s, InviteRequest{})
	if list, _ := s.Invites(t.Context(), ""); len(list) != 1 {
		t.Errorf("%d invites, want only the new one", len(list))
	}
	if _, err := b.enroll(); err != nil {
		t.Errorf("a repeat after the invite is gone: %v", err)
	}
	_, err := newHolder(t, s, code).enroll()
	wantReason(t, err, enrollment.ReasonCodeUnknown)
	err = s.db.write(t.Context(), func(tx *sql.Tx) error { // one transaction, not a thousand
		for i := range maxTenantInvites - 1 {
			if _, err := tx.Exec("INSERT INTO invites SELECT NULL, ?1, ?1, class, tenant, '', '', scopes, 1, 0, '', '', created, expires, 0, topics FROM invites LIMIT 1", fmt.Sprint(i)); err != nil {
				return err
			}
		}
		return nil
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.CreateInvite(t.Context(), InviteRequest{}); !errors.Is(err, ErrFull) {
		t.Errorf("one too many: %v", err)
	}
	invite(t, s, InviteRequest{Tenant: "acme"})
	ck.t = ck.t.Add(DefaultInviteTTL + time.Minute)
	invite(t, s, InviteRequest{}) // all of them have ended
}

// FuzzEnroll: no request panics, and without a proof of its key none is served.
func FuzzEnroll(f *testing.F) {
	s := openStore(f, Options{})
	_, code := invite(f, s, InviteRequest{Uses: MaxInviteUses})
	r := newHolder(f, s, code).request()
	f.Add(r.Nonce, r.Code, r.PublicKey, r.InstanceID, r.Name, r.AgentVersion, r.Proof, r.Token)
	f.Fuzz(func(t *testing.T, nonce, code, key, instance, name, version, proof, token string) {
		_, err := s.Enroll(context.Background(), &enrollment.EnrollRequest{Nonce: nonce, Code: code, PublicKey: key, InstanceID: instance,
			Name: name, AgentVersion: version, Proof: proof, Token: token})
		if err == nil && proof != r.Proof {
			t.Fatal("served without a proof")
		}
		if err != nil && manifest.AsError(err).Code == manifest.Internal {
			t.Fatal(err)
		}
	})
}

// FuzzRenewToken: as FuzzEnroll, for refreshes.
func FuzzRenewToken(f *testing.F) {
	s := openStore(f, Options{})
	_, code := invite(f, s, InviteRequest{})
	b := newHolder(f, s, code)
	b.mustEnroll()
	r := b.tokenRequest(1, manifest.NewULID())
	f.Add(r.NodeID, r.AgentID, r.Gen, r.RequestID, r.Nonce, r.Proof, r.SessionID)
	f.Fuzz(func(t *testing.T, node, agent string, gen int, request, nonce, proof, session string) {
		_, err := s.RenewToken(context.Background(), &enrollment.TokenRequest{NodeID: node, AgentID: agent, Gen: gen, RequestID: request,
			Nonce: nonce, Proof: proof, SessionID: session}, admitAll)
		if err == nil && proof != r.Proof {
			t.Fatal("served without a proof")
		}
		if err != nil && manifest.AsError(err).Code == manifest.Internal {
			t.Fatal(err)
		}
	})
}

package test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"agentctl/enrollment"
	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/transport/clock"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// authOnce opens a link, answers hello with an auth message, and returns the close code, 0
// when the relay accepts it. edit changes the message; it gets the relay's nonce.
func (r *testRelay) authOnce(protocol string, edit func(nonce string, a *link.Auth)) int {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), r.within(10*time.Second))
	defer cancel()
	conn, err := link.Dial(ctx, r.url, link.DialOptions{Subprotocols: []string{protocol}})
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = conn.Close(link.CloseNormal, "") }()
	conn.OnPing(func(bool, []byte) {})
	var hello link.Hello
	read := func(typ string, v any) error {
		return conn.Read(func(msg []byte) error {
			e, err := link.Decode(msg)
			if err == nil && e.Type != typ {
				err = errors.New("unexpected " + e.Type)
			}
			if err == nil && v != nil {
				err = e.Decode(v)
			}
			return err
		})
	}
	if err := read(link.TypeHello, &hello); err != nil {
		r.t.Fatal(err)
	}
	a := link.Auth{AgentVersion: "v1", BootID: link.NewID(), InstanceID: traceInstance}
	edit(hello.Nonce, &a)
	if err := conn.Write(link.Encode(link.TypeAuth, link.NewID(), "", a)); err != nil {
		r.t.Fatal(err)
	}
	if err := read(link.TypeAuthOK, nil); err != nil {
		return link.CloseCode(err)
	}
	return 0
}

// TestStolenToken: a token that is bound to a key is worth nothing without the key, on another
// install or on v2, which has no proof.
func TestStolenToken(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	b, other := r.join(), r.join()
	hand := r.mint(auth.MintRequest{Class: "device"}).Token
	proof := func(signer *joinedBoard, node, token string) func(nonce string, a *link.Auth) {
		return func(nonce string, a *link.Auth) {
			a.Token, a.Proof = token, enrollment.Sign(signer.key, enrollment.LinkMessage(nonce, node, token))
		}
	}
	tests := []struct {
		name, protocol string
		edit           func(nonce string, a *link.Auth)
		code           int
	}{
		{"its own key", link.Subprotocol21, proof(b, b.node, b.token), 0},
		{"no proof", link.Subprotocol21, func(_ string, a *link.Auth) { a.Token = b.token }, link.CloseAuthFailed},
		{"another key", link.Subprotocol21, proof(other, b.node, b.token), link.CloseAuthFailed},
		{"another node", link.Subprotocol21, proof(b, other.node, b.token), link.CloseAuthFailed},
		{"an old nonce", link.Subprotocol21, func(_ string, a *link.Auth) { proof(b, b.node, b.token)("n", a) }, link.CloseAuthFailed},
		{"another install", link.Subprotocol21, func(nonce string, a *link.Auth) {
			proof(b, b.node, b.token)(nonce, a)
			a.InstanceID = "ffffffffffffffffffffffffffffffff"
		}, link.CloseForbidden},
		{"v2", link.Subprotocol, proof(b, b.node, b.token), link.CloseUpgradeRequired},
		{"made by hand", link.Subprotocol21, func(_ string, a *link.Auth) { a.Token = hand }, 0},
		{"made by hand, on v2", link.Subprotocol, func(_ string, a *link.Auth) { a.Token = hand }, 0},
	}
	for _, tt := range tests {
		if code := r.authOnce(tt.protocol, tt.edit); code != tt.code {
			t.Errorf("%s: closed with %d, want %d", tt.name, code, tt.code)
		}
	}
}

// TestRequireProof: with Options.RequireProof only boards that have joined are linked.
func TestRequireProof(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, func(o *relay.Options) { o.RequireProof = true })
	b := r.join()
	hand := r.mint(auth.MintRequest{Class: "device"}).Token
	if code := r.authOnce(link.Subprotocol21, func(_ string, a *link.Auth) { a.Token = hand }); code != link.CloseForbidden {
		t.Errorf("a token made by hand: %d", code)
	}
	if code := r.authOnce(link.Subprotocol21, func(nonce string, a *link.Auth) {
		a.Token = b.token
		a.Proof, _ = b.sign(nonce, b.token)
	}); code != 0 {
		t.Errorf("a board that has joined: %d", code)
	}
}

// run links the board and returns the ids of its sessions as they become ready.
func (b *joinedBoard) run(t *testing.T, r *testRelay) <-chan string {
	t.Helper()
	sessions := make(chan string, 8)
	cl := clock.New(time.Time{}, nil)
	mux, err := handlers.New(handlers.Options{}, handlers.NewEcho(cl.NowMS))
	if err != nil {
		t.Fatal(err)
	}
	client := link.NewClient(link.ClientOptions{
		Dial:  func(ctx context.Context) (link.Conn, error) { return link.Dial(ctx, r.url, link.DialOptions{}) },
		Token: func() (string, error) { return b.token, nil }, Version: "v1", InstanceID: traceInstance, Handler: mux, Clock: cl, Sign: b.sign,
		OnReady: func(ok link.AuthOK) { sessions <- ok.SessionID },
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return sessions
}

// refresh names a generation and a session, from outside.
func (b *joinedBoard) refresh(t *testing.T, r *testRelay, gen int, session string) (*enrollment.TokenAnswer, string) {
	t.Helper()
	a, err := (&enroll.Client{URL: r.url}).Refresh(t.Context(), enroll.RefreshOptions{NodeID: b.node, Gen: gen, RequestID: manifest.NewULID(), SessionID: func() string { return session }, Key: b.key})
	var refused *enroll.Error
	if errors.As(err, &refused) {
		return nil, refused.Reason
	}
	if err != nil {
		t.Fatal(err)
	}
	return a, ""
}

// TestRefreshOfLinkedBoard: the link that answers decides who may refresh, and a copy of the
// board's files that tries is noticed.
func TestRefreshOfLinkedBoard(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	b := r.join()
	session := <-b.run(t, r)
	if a, reason := b.refresh(t, r, 1, session); reason != "" || a.Gen != 2 {
		t.Fatalf("%+v, %s", a, reason)
	}
	if _, reason := b.refresh(t, r, 2, ""); reason != enrollment.ReasonSession {
		t.Errorf("a copy: %q", reason)
	}
	r.waitAudited("reason=clone_suspected", "node_id="+b.node)
	if a, reason := b.refresh(t, r, 2, session); reason != "" || a.Gen != 3 {
		t.Errorf("after that: %+v, %s", a, reason)
	}
	if a := r.call("sysecho."+b.node+".echo.invoke", `{"message":"hi"}`); a.status != 200 {
		t.Errorf("the board: %+v", a)
	}
}

// TestMigratedBoard: a board joins with the token that it has, and keeps its node. Its tokens
// of before work until it is linked with its key.
func TestMigratedBoard(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	old := r.mint(auth.MintRequest{Class: "device"})
	_, code, err := r.relay.Store().CreateInvite(t.Context(), auth.InviteRequest{})
	if err != nil {
		t.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := (&enroll.Client{URL: r.url}).Enroll(t.Context(), enroll.EnrollOptions{Code: code, InstanceID: traceInstance, Version: "v1", Token: old.Token,
		Key: func() (ed25519.PrivateKey, error) { return key, nil }})
	if err != nil || a.NodeID != old.NodeID {
		t.Fatalf("%+v, %v", a, err)
	}
	b := &joinedBoard{key, a.NodeID, a.DeviceToken}
	hand := func(_ string, a *link.Auth) { a.Token = old.Token }
	if code := r.authOnce(link.Subprotocol, hand); code != 0 {
		t.Errorf("the old token before the first link: %d", code)
	}
	<-b.run(t, r)
	eventually(t, "the old token is revoked", func() bool { return r.authOnce(link.Subprotocol, hand) == link.CloseAuthFailed })
}

// TestRelayRestored: a relay that is restored from yesterday's backup knows an older
// generation than the board has, and serves the board.
func TestRelayRestored(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	start := func(dir string) *testRelay { return newTestRelay(t, func(o *relay.Options) { o.StateDir = dir }) }
	r := start(state)
	b := r.join()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	backup := filepath.Join(t.TempDir(), "backup")
	if err := os.CopyFS(backup, os.DirFS(state)); err != nil {
		t.Fatal(err)
	}
	r = start(state)
	late := r.join() // is not in the backup
	var token string
	for gen := 1; gen < 4; gen++ {
		a, reason := b.refresh(t, r, gen, "")
		if reason != "" {
			t.Fatal(gen, reason)
		}
		token = a.Token
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	r = start(backup)
	b.token = token
	session := <-b.run(t, r)
	if a, reason := b.refresh(t, r, 4, session); reason != "" || a.Gen != 5 {
		t.Errorf("%+v, %s", a, reason)
	}
	if _, reason := b.refresh(t, r, 4, session); reason != "" {
		t.Errorf("a lost write: %s", reason)
	}
	// Its node and key are not in the backup: it has to join again.
	if code := r.authOnce(link.Subprotocol21, func(nonce string, a *link.Auth) {
		a.Token = late.token
		a.Proof, _ = late.sign(nonce, late.token)
	}); code != link.CloseAuthFailed {
		t.Errorf("a key that the backup does not know: %d", code)
	}
	if _, reason := late.refresh(t, r, 1, ""); reason != enrollment.ReasonProof {
		t.Errorf("a key that the backup does not know: %q", reason)
	}
}

package enroll

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/atomicfile"
	"agentctl/enrollment"
	"agentctl/manifest"
)

// keeperTest is a Keeper with a scripted relay, in virtual time.
type keeperTest struct {
	*Keeper
	guard  sync.Mutex // held by the test, and by the Keeper in its callbacks
	dir    string
	cred   *Credential
	asked  []RefreshOptions
	answer func(context.Context, RefreshOptions) (*enrollment.TokenAnswer, error) // the relay
	err    error                                                                  // that the relay answers; nil: the next token
	tokens int                                                                    // OnToken
	isDown atomic.Bool                                                            // the link
	failed []error
}

// tokenOf makes a token with a life; nobody verifies it here.
func tokenOf(gen int, life time.Duration) string {
	claims := fmt.Sprintf(`{"iat":1000,"exp":%d,"gen":%d}`, 1000+int(life.Seconds()), gen)
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".sig"
}

func newKeeperTest(t *testing.T) *keeperTest {
	t.Helper()
	key, err := newKey()
	if err != nil {
		t.Fatal(err)
	}
	k := &keeperTest{dir: t.TempDir(), cred: &Credential{Relay: "https://relay.example", NodeID: manifest.NewNodeID(), TenantID: "default",
		CodeSHA256: "x", Key: key, Token: tokenOf(1, 24*time.Hour), Gen: 1, ExpiresAtMS: 1, RequestID: "r1"}}
	if err := k.cred.save(k.dir); err != nil {
		t.Fatal(err)
	}
	k.Keeper, err = NewKeeper(KeeperOptions{StateDir: k.dir, Credential: k.cred,
		SessionID: func() string {
			if k.isDown.Load() {
				return ""
			}
			return "s"
		},
		OnToken: func() { k.guard.Lock(); k.tokens++; k.guard.Unlock() },
		OnError: func(err error) { k.guard.Lock(); k.failed = append(k.failed, err); k.guard.Unlock() }})
	if err != nil {
		t.Fatal(err)
	}
	k.refresh = func(ctx context.Context, o RefreshOptions) (*enrollment.TokenAnswer, error) {
		k.guard.Lock()
		defer k.guard.Unlock()
		return k.answer(ctx, o)
	}
	k.answer = func(_ context.Context, o RefreshOptions) (*enrollment.TokenAnswer, error) {
		k.asked = append(k.asked, o)
		if k.err != nil {
			return nil, k.err
		}
		return &enrollment.TokenAnswer{Token: tokenOf(o.Gen+1, 24*time.Hour), Gen: o.Gen + 1, ExpiresAtMS: time.Now().Add(24 * time.Hour).UnixMilli()}, nil
	}
	return k
}

// sleep lets the Keeper run for d, until it waits again. The test holds guard otherwise.
func (k *keeperTest) sleep(d time.Duration) {
	k.guard.Unlock()
	time.Sleep(d)
	synctest.Wait()
	k.guard.Lock()
}

// run runs the test in virtual time, with the Keeper running.
func run(t *testing.T, fn func(t *testing.T, k *keeperTest)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		k := newKeeperTest(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- k.Run(ctx) }()
		k.guard.Lock()
		fn(t, k)
		k.guard.Unlock()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
}

// TestNoRefreshWithoutLink: a refresh that could cross the link's return waits for it, or for the
// relay's refusal of the token.
func TestNoRefreshWithoutLink(t *testing.T) {
	for _, isRefused := range []bool{false, true} {
		run(t, func(t *testing.T, k *keeperTest) {
			k.Ready(0)
			k.isDown.Store(true)
			k.sleep(48 * time.Hour)
			if len(k.asked) != 0 {
				t.Fatalf("refreshed without a link: %+v", k.asked)
			}
			if isRefused {
				k.Refused()
			} else {
				k.isDown.Store(false)
			}
			k.sleep(linkPollInterval)
			if len(k.asked) != 1 || k.tokens != 1 {
				t.Errorf("refused %v: asked %+v", isRefused, k.asked)
			}
		})
	}
}

// TestRefreshIsEarlyAndSpread: a token is refreshed between a half and three quarters of its
// life, whatever the local clock says, and each refresh goes on from the one before.
func TestRefreshIsEarlyAndSpread(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		relayMS := int64(40 * 24 * time.Hour / time.Millisecond) // the relay's clock is far from ours
		k.Keeper.cred.ExpiresAtMS = relayMS + (24 * time.Hour).Milliseconds()
		k.Ready(relayMS)
		k.sleep(12*time.Hour - time.Second)
		if len(k.asked) != 0 {
			t.Fatal("refreshed before half of the life")
		}
		k.sleep(6*time.Hour + 2*time.Second)
		k.sleep(0)
		if len(k.asked) != 1 || k.tokens != 1 || k.asked[0].Gen != 1 || k.asked[0].RequestID != "r1" || k.asked[0].SessionID() != "s" {
			t.Fatalf("asked %+v, %d tokens", k.asked, k.tokens)
		}
		disk, err := LoadCredential(k.dir)
		if err != nil || disk.Gen != 2 || disk.Token != k.Token() || disk.RequestID == "r1" {
			t.Fatalf("stored %+v, %v", disk, err)
		}
		k.sleep(18*time.Hour + time.Second)
		k.sleep(0)
		if len(k.asked) != 2 || k.asked[1].Gen != 2 || k.asked[1].RequestID != disk.RequestID {
			t.Errorf("asked %+v", k.asked)
		}
	})
}

// TestOldTokenIsRefreshedSoon: a board that comes back late in the life of its token waits a
// minute at most.
func TestOldTokenIsRefreshedSoon(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		k.Keeper.cred.ExpiresAtMS = 10 * time.Hour.Milliseconds()
		k.Ready(9*time.Hour.Milliseconds() + 1000)
		k.sleep(time.Minute)
		if len(k.asked) != 1 {
			t.Errorf("asked %d times", len(k.asked))
		}
	})
}

// TestRefused: a refused token is refreshed at once; when the new one is refused, too, the
// attempts become rare, since each one that works writes to the disk.
func TestRefused(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		k.Refused()
		k.sleep(0)
		if len(k.asked) != 1 || k.tokens != 1 {
			t.Fatalf("asked %d times, %d tokens", len(k.asked), k.tokens)
		}
		for end := time.Now().Add(24 * time.Hour); time.Now().Before(end); k.sleep(5 * time.Second) {
			k.Refused()
		}
		if n := len(k.asked); n < 40 || n > 100 {
			t.Errorf("%d refreshes in a day of refusals", n)
		}
	})
}

// TestRefreshFails: failures are repeated with a back-off, and a final refusal once an hour.
func TestRefreshFails(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		k.err = &Error{Kind: Unreachable, Err: errors.New("nobody")}
		k.Refused()
		k.sleep(10 * time.Second)
		k.sleep(0)
		if n := len(k.asked); n < 2 || n > 6 {
			t.Errorf("%d attempts in 10 s", n)
		}
		if s := k.Status(); s.LastErr == nil || s.NextTry.IsZero() {
			t.Errorf("status %+v", s)
		}
		k.sleep(time.Hour)
		k.err = &Error{Kind: Refused, Reason: enrollment.ReasonGenerationUsed, Err: errors.New("copied")}
		k.sleep(5 * time.Minute)
		k.asked = nil
		k.sleep(24 * time.Hour)
		if n := len(k.asked); n < 20 || n > 24 || !IsFinal(k.Status().LastErr) {
			t.Errorf("%d attempts in a day after a final refusal: %v", n, k.Status().LastErr)
		}
		k.err = nil
		k.sleep(2 * time.Hour)
		k.sleep(0)
		if s := k.Status(); s.LastErr != nil || k.tokens != 1 {
			t.Errorf("status %+v, %d tokens", s, k.tokens)
		}
	})
}

// TestFullDisk: the token is renewed from memory, with the request that the disk has, so that
// the board can restart at any time.
func TestFullDisk(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		path := filepath.Join(k.dir, CredentialFile)
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		answer := k.answer
		k.answer = func(ctx context.Context, o RefreshOptions) (*enrollment.TokenAnswer, error) {
			// A directory in the way makes the write fail; loading has succeeded by now.
			_ = os.Remove(path)
			_ = os.MkdirAll(filepath.Join(path, "full"), 0o700)
			return answer(ctx, o)
		}
		for i := range 3 {
			k.Refused()
			k.sleep(0)
			_ = os.RemoveAll(path)
			if err := os.WriteFile(path, good, 0o600); err != nil {
				t.Fatal(err)
			}
			if len(k.asked) != i+1 || k.asked[i].Gen != 1 || k.asked[i].RequestID != "r1" || k.Token() == k.cred.Token || k.Status().NotStored == nil {
				t.Fatalf("asked %+v, status %+v", k.asked, k.Status())
			}
			k.sleep(time.Hour)
		}
		k.answer = answer
		k.Refused()
		k.sleep(0)
		if disk, err := LoadCredential(k.dir); err != nil || disk.Gen != 2 || k.Status().NotStored != nil {
			t.Errorf("after the disk is back: %+v, %v", disk, err)
		}
	})
}

// TestRefreshWithoutCredential: a credential that was damaged, or cannot be read, while the daemon
// runs does not end the refreshes. The damaged file is kept, and replaced.
func TestRefreshWithoutCredential(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		path := filepath.Join(k.dir, CredentialFile)
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		k.Refused()
		k.sleep(0)
		if len(k.asked) != 1 || k.asked[0].Gen != 1 || k.asked[0].RequestID != "r1" || k.Status().NotStored != nil {
			t.Fatalf("asked %+v, status %+v", k.asked, k.Status())
		}
		if disk, err := LoadCredential(k.dir); err != nil || disk.Gen != 2 || disk.Token != k.Token() {
			t.Errorf("stored %+v, %v", disk, err)
		}
		if aside, err := atomicfile.Aside(k.dir); err != nil || len(aside) != 1 {
			t.Errorf("set aside %q, %v", aside, err)
		}
	})
}

// TestHungDisk: a refresh that waits for the disk is the only one, and does not keep Run from
// its end.
func TestHungDisk(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		hang := make(chan struct{})
		defer close(hang)
		asked := 0
		k.answer = func(context.Context, RefreshOptions) (*enrollment.TokenAnswer, error) {
			asked++
			k.guard.Unlock()
			defer k.guard.Lock()
			<-hang // unlike a request, a write to the disk does not end with its context
			return nil, errors.New("end")
		}
		k.Refused()
		k.sleep(time.Hour)
		if !errors.Is(k.Status().LastErr, errHung) || asked != 1 {
			t.Errorf("%v after %d attempts, want one that hangs", k.Status().LastErr, asked)
		}
	})
}

// TestOtherProcess: a token that another process refreshed is taken over, and nothing is asked
// for a credential that is gone.
func TestOtherProcess(t *testing.T) {
	run(t, func(t *testing.T, k *keeperTest) {
		newer := *k.cred
		newer.Gen, newer.Token = 5, tokenOf(5, time.Hour)
		if err := newer.save(k.dir); err != nil {
			t.Fatal(err)
		}
		k.Refused()
		k.sleep(0)
		if len(k.asked) != 0 || k.Token() != newer.Token || k.tokens != 1 {
			t.Errorf("asked %+v, token %s", k.asked, k.Token())
		}
		if err := os.Remove(filepath.Join(k.dir, CredentialFile)); err != nil {
			t.Fatal(err)
		}
		k.sleep(time.Hour)
		k.Refused()
		k.sleep(0)
		if len(k.asked) != 0 || len(k.failed) != 0 {
			t.Errorf("asked %+v, errors %v", k.asked, k.failed)
		}
	})
}

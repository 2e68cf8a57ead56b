package enroll

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/enrollment"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestJoinAndLeave(t *testing.T) {
	f, srv := newFakeRelay(t)
	dir := filepath.Join(t.TempDir(), "state")
	o := JoinOptions{StateDir: dir, Relay: strings.Replace(srv.URL, "http", "ws", 1) + "/", Code: strings.ToLower(f.code), Name: "attic", Version: "v1", Token: "x.y.z"}
	c, already, err := Join(t.Context(), o)
	if err != nil || already || c.NodeID != f.nodeID || c.Relay != srv.URL {
		t.Fatalf("Join: %+v %v %v", c, already, err)
	}
	if q := f.enrolls[0]; q.Token != "x.y.z" || q.Name != "attic" {
		t.Errorf("the request was %+v", q)
	}
	if got, want := names(t, dir), []string{CredentialFile, FileName}; !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	if st, err := os.Stat(filepath.Join(dir, CredentialFile)); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v %v, want 0600", st.Mode(), err)
	}
	again, already, err := Join(t.Context(), o)
	if err != nil || !already || again.NodeID != c.NodeID || len(f.enrolls) != 1 {
		t.Errorf("a repeat: %+v %v %v after %d requests", again, already, err, len(f.enrolls))
	}
	var joined *JoinedError
	other := o
	other.Relay = "wss://other.example"
	if _, _, err := Join(t.Context(), other); !errors.As(err, &joined) || joined.Pin {
		t.Errorf("another relay: %v", err)
	}
	other = o
	other.CASHA256 = strings.Repeat("00", 32)
	if _, _, err := Join(t.Context(), other); !errors.As(err, &joined) || !joined.Pin {
		t.Errorf("another authority: %v", err)
	}

	before, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	oldInstance := before.InstanceID()
	if gone, err := Leave(t.Context(), dir); err != nil || gone.NodeID != c.NodeID {
		t.Fatalf("Leave: %+v %v", gone, err)
	}
	if got, want := names(t, dir), []string{FileName, leftFile}; !slices.Equal(got, want) {
		t.Errorf("files after Leave %v, want %v", got, want)
	}
	if err := before.Reload(); err != nil || before.InstanceID() == oldInstance {
		t.Errorf("Reload after Leave: %v, instance id %s as before", err, oldInstance)
	}
	if _, err := Leave(t.Context(), dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Leave again: %v", err)
	}
}

// TestLostAnswer: the key of an attempt whose answer was lost is used again for the same code,
// so that the relay gives the same node. Another code gets another key.
func TestLostAnswer(t *testing.T) {
	f, _ := newFakeRelay(t)
	var lose atomic.Bool
	lose.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && lose.Load() {
			f.ServeHTTP(httptest.NewRecorder(), r)
			cancel() // no second attempt
			panic(http.ErrAbortHandler)
		}
		f.ServeHTTP(w, r)
	}))
	defer srv.Close()
	dir := t.TempDir()
	o := JoinOptions{StateDir: dir, Relay: srv.URL, Code: f.code}
	if _, _, err := Join(ctx, o); err == nil {
		t.Fatal("Join succeeded without an answer")
	}
	if got, want := names(t, dir), []string{FileName, pendingFile}; !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	another := o
	another.Code = enrollment.NewCode()
	lose.Store(false)
	saved, err := os.ReadFile(filepath.Join(dir, pendingFile))
	if err != nil {
		t.Fatal(err)
	}
	var e *Error
	if _, _, err := Join(t.Context(), another); !errors.As(err, &e) || e.Reason != enrollment.ReasonCodeUnknown {
		t.Errorf("another code: %v", err)
	}
	last := f.enrolls[len(f.enrolls)-1]
	if last.PublicKey == f.enrolls[0].PublicKey {
		t.Error("another code was sent with the key of the first one")
	}
	if exists(dir, pendingFile) {
		t.Error("the key of a refused code is kept")
	}
	if err := os.WriteFile(filepath.Join(dir, pendingFile), saved, 0o600); err != nil {
		t.Fatal(err)
	}
	if c, _, err := Join(t.Context(), o); err != nil || c.NodeID != f.nodeID {
		t.Errorf("the repeat: %+v, %v", c, err)
	}
}

// TestJoinStoresNothingHalf: a directory that does not take the key stops Join before the code
// is sent; one that does not take the credential leaves the key for a repeat.
// TestCodeForAgent: the code is used up by then, and its key is of no use for a board.
func TestCodeForAgent(t *testing.T) {
	f, srv := newFakeRelay(t)
	f.asAgent = true
	dir := t.TempDir()
	var e *Error
	if _, _, err := Join(t.Context(), JoinOptions{StateDir: dir, Relay: srv.URL, Code: f.code}); !errors.As(err, &e) || e.Kind != ForAgent || !strings.Contains(err.Error(), "used up") {
		t.Errorf("a code for an agent: %v", err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{FileName}) {
		t.Errorf("files %v", got)
	}
}

// TestStorageError: the message names the directory, and not a file that is gone.
func TestStorageError(t *testing.T) {
	_, err := os.Create(filepath.Join(t.TempDir(), "none", "temporary"))
	if got := (&StorageError{"/state", fmt.Errorf("write: %w", err)}).Error(); got != "store the identity in /state: no such file or directory" {
		t.Error(got)
	}
}

func TestJoinStoresNothingHalf(t *testing.T) {
	f, srv := newFakeRelay(t)
	dir := t.TempDir()
	block := func() (unblock func()) { // the directory is gone, and a file has its place
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return func() { _, _ = os.Remove(dir), os.Rename(dir+".away", dir) }
	}
	o := JoinOptions{StateDir: dir, Relay: srv.URL, Code: f.code}
	unblock := block()
	var storage *StorageError
	if _, _, err := Join(t.Context(), o); !errors.As(err, &storage) || len(f.enrolls) > 0 {
		t.Errorf("no key can be stored: %v after %d requests", err, len(f.enrolls))
	}
	unblock()
	// A directory that goes away between the check and the write stands for a disk that is full by
	// then.
	f.mu.Lock()
	f.onEnroll = func() { unblock = block() }
	f.mu.Unlock()
	if _, _, err := Join(t.Context(), o); !errors.As(err, &storage) {
		t.Errorf("no credential can be stored: %v", err)
	}
	unblock()
	f.onEnroll = nil
	if c, already, err := Join(t.Context(), o); err != nil || already || c.NodeID != f.nodeID {
		t.Errorf("the repeat: %+v %v %v", c, already, err)
	}
}

func TestDamagedCredential(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, CredentialFile)
	var damaged *DamagedError
	for _, text := range []string{"", "{}", `{"relay":"https://x","node_id":"x"}`, strings.Repeat(" ", maxFileBytes+1)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadCredential(dir); !errors.As(err, &damaged) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
	if _, err := Leave(t.Context(), dir); err != nil || exists(dir, CredentialFile) {
		t.Errorf("Leave: %v", err)
	}
	if !HasLeft(dir, "AAAA") {
		t.Error("a join file would undo the Leave: nobody knows with which code the board had joined")
	}
}

func TestLock(t *testing.T) {
	dir := t.TempDir()
	release, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	var used *InUseError
	if _, err := Lock(dir); !errors.As(err, &used) || used.PID != os.Getpid() {
		t.Errorf("a second lock: %v, want an InUseError with process %d", err, os.Getpid())
	}
	release()
	if release, err = Lock(dir); err != nil {
		t.Fatal(err)
	}
	release()
	if _, err := Lock(filepath.Join(dir, "none")); err == nil || errors.As(err, &used) {
		t.Errorf("no directory: %v", err)
	}
}

func TestCredentialLock(t *testing.T) {
	dir := t.TempDir()
	release, err := lockCredential(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := lockCredential(ctx, dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a busy lock: %v", err)
	}
	release()
	if release, err = lockCredential(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	release()
}

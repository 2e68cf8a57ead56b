package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// joinRelay answers enrollments, and refuses the device link.
type joinRelay struct {
	*httptest.Server
	code, node string

	mu     sync.Mutex
	reason string // of a refusal; "": none
	asked  int    // enrollments
}

func newJoinRelay(t *testing.T) *joinRelay {
	t.Helper()
	r := &joinRelay{code: enrollment.NewCode(), node: manifest.NewNodeID()}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *joinRelay) refuse(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reason = reason
}

func (r *joinRelay) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

func (r *joinRelay) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case q.URL.Path != enrollment.EnrollPath:
		w.WriteHeader(http.StatusServiceUnavailable)
	case q.Method == http.MethodGet:
		_ = json.NewEncoder(w).Encode(enrollment.Nonce{Nonce: "n"})
	case r.reason != "":
		r.asked++
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = w.Write([]byte(`{"error":{"code":"E_SAFETY_DENIED","message":"no","reason":"` + r.reason + `"}}`))
	default:
		r.asked++
		_ = json.NewEncoder(w).Encode(enrollment.EnrollAnswer{NodeID: r.node, TenantID: "acme", Name: "attic", DeviceToken: "a.b.c", Gen: 1, ExpiresAtMS: time.Now().Add(time.Hour).UnixMilli()})
	}
}

// follow runs the membership and the watcher's part of it until the test ends.
func (b *testDaemon) follow() {
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.runMembership(ctx) }()
	b.t.Cleanup(func() { cancel(); <-done })
}

func (b *testDaemon) stateDir() string { return b.config().Text("state_dir") }

// waitFor polls a condition that another goroutine brings about.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// TestJoinAndLeaveWhileRunning: a credential that another process stores or removes changes the
// relay and the node, without a restart.
func TestJoinAndLeaveWhileRunning(t *testing.T) {
	relay := newJoinRelay(t)
	b := newTestDaemon(t, "")
	b.follow()
	alone, instance := b.id.NodeID(), b.id.InstanceID()
	if b.device.link() != nil || b.status().Join != nil || b.relay() != "" {
		t.Fatalf("a new board: %+v", b.status())
	}
	if _, _, err := enroll.Join(t.Context(), enroll.JoinOptions{StateDir: b.stateDir(), Relay: relay.URL, Code: relay.code}); err != nil {
		t.Fatal(err)
	}
	if !b.credentialChanged(t) {
		t.Error("the credential is not noticed")
	}
	if err := b.updateMembership(); err != nil || b.credentialChanged(t) {
		t.Fatal(err)
	}
	s := b.status()
	if s.NodeID != relay.node || s.Name != "attic" || s.Link.Relay != relay.URL || s.Join == nil || s.Join.State != JoinJoined || b.device.link() == nil {
		t.Fatalf("joined: %+v, join %+v", s, s.Join)
	}
	if got, err := enroll.Load(b.stateDir()); err != nil || got.NodeID() != relay.node {
		t.Errorf("the node id is not stored: %v", err)
	}
	before := b.device.link()
	if err := b.updateMembership(); err != nil || b.device.link() != before {
		t.Errorf("the same credential replaced the link: %v", err)
	}
	if _, err := enroll.Leave(t.Context(), b.stateDir()); err != nil {
		t.Fatal(err)
	}
	if err := b.updateMembership(); err != nil {
		t.Fatal(err)
	}
	s = b.status()
	if s.Join != nil || s.Link.State != LinkDisabled || b.device.link() != nil || s.NodeID == relay.node || s.NodeID == alone || b.id.InstanceID() == instance {
		t.Errorf("left: %+v", s)
	}
}

// TestConfiguredRelayWins: what a person configured takes precedence over a join for another
// relay; for the same relay the credential does.
func TestConfiguredRelayWins(t *testing.T) {
	relay := newJoinRelay(t)
	b := newTestDaemon(t, "")
	if _, _, err := enroll.Join(t.Context(), enroll.JoinOptions{StateDir: b.stateDir(), Relay: relay.URL, Code: relay.code}); err != nil {
		t.Fatal(err)
	}
	if err := b.reloadWith("relay: wss://127.0.0.1:1\ntoken_file: /t\n"); err != nil {
		t.Fatal(err)
	}
	if s := b.status(); s.Join == nil || s.Join.State != JoinOverridden || !strings.Contains(s.Join.Hint, "config.yaml:1") || s.Link.Relay != "wss://127.0.0.1:1" {
		t.Errorf("another relay: %+v, join %+v", s.Link, s.Join)
	}
	for _, text := range []string{"relay: " + strings.Replace(relay.URL, "http", "ws", 1) + "/\ntoken_file: /t\n", "relay: " + strings.Replace(relay.URL, "http", "ws", 1) + "\n"} {
		if err := b.reloadWith(text); err != nil {
			t.Fatal(err)
		}
		if s := b.status(); s.Join == nil || s.Join.State != JoinJoined || s.Link.Relay != relay.URL || s.NodeID != relay.node {
			t.Errorf("%s: %+v, join %+v", text, s.Link, s.Join)
		}
	}
}

// TestReloadWithChangedCredential: a reload that replaces the link keeps the credential in force
// when the file has become unreadable, and takes the new identity of a board that has left.
func TestReloadWithChangedCredential(t *testing.T) {
	relay := newJoinRelay(t)
	b := newTestDaemon(t, "")
	if _, _, err := enroll.Join(t.Context(), enroll.JoinOptions{StateDir: b.stateDir(), Relay: relay.URL, Code: relay.code}); err != nil {
		t.Fatal(err)
	}
	if err := b.updateMembership(); err != nil {
		t.Fatal(err)
	}
	before, instance := b.device.link(), b.id.InstanceID()
	path := filepath.Join(b.stateDir(), enroll.CredentialFile)
	if err := os.Rename(path, path+".good"); err != nil {
		t.Fatal(err)
	}
	writeFile(t, path, "{")
	var damaged *enroll.DamagedError
	if err := b.reloadWith("name: roof\n"); !errors.As(err, &damaged) || b.device.link() != before || b.relay() != relay.URL {
		t.Errorf("a damaged credential: %v, relay %q", err, b.relay())
	}
	if err := os.Rename(path+".good", path); err != nil {
		t.Fatal(err)
	}
	if _, err := enroll.Leave(t.Context(), b.stateDir()); err != nil {
		t.Fatal(err)
	}
	if err := b.reloadWith("name: attic\n"); err != nil || b.device.link() != nil || b.credentialChanged(t) {
		t.Fatalf("after the leave: %v", err)
	}
	if b.id.InstanceID() == instance || b.id.NodeID() == relay.node {
		t.Error("the board keeps the identity that it had before the leave")
	}
}

// TestDamagedCredential: the board works alone, says so, and joins again after a leave.
func TestDamagedCredential(t *testing.T) {
	b := newTestDaemon(t, "")
	path := filepath.Join(b.stateDir(), enroll.CredentialFile)
	writeFile(t, path, "{")
	if b.updateMembership() == nil || b.credentialChanged(t) {
		t.Error("the damage is not reported, or reported again and again")
	}
	if s := b.status(); s.Join == nil || s.Join.State != JoinDamaged || !strings.Contains(s.Join.Hint, "agentctl invite") {
		t.Errorf("join %+v", s.Join)
	}
	if _, err := enroll.Leave(t.Context(), b.stateDir()); err != nil {
		t.Fatal(err)
	}
	instance := b.id.InstanceID()
	if err := b.updateMembership(); err != nil || b.status().Join != nil || b.id.InstanceID() == instance {
		t.Errorf("after the leave: %v, %+v", err, b.status().Join)
	}
}

// TestJoinWithAnotherIdentity: a join may make the identity anew, because the daemon could not
// store its own. The relay knows the one on the disk.
func TestJoinWithAnotherIdentity(t *testing.T) {
	relay := newJoinRelay(t)
	b := newTestDaemon(t, "")
	if err := os.Remove(filepath.Join(b.stateDir(), enroll.FileName)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := enroll.Join(t.Context(), enroll.JoinOptions{StateDir: b.stateDir(), Relay: relay.URL, Code: relay.code}); err != nil {
		t.Fatal(err)
	}
	disk, err := enroll.Load(b.stateDir())
	if err != nil {
		t.Fatal(err)
	}
	joined := disk.InstanceID()
	if err := b.updateMembership(); err != nil {
		t.Fatal(err)
	}
	if disk, err = enroll.Load(b.stateDir()); err != nil || b.id.InstanceID() != joined || disk.InstanceID() != joined || disk.NodeID() != relay.node {
		t.Errorf("joined with %s; the daemon has %s, the disk %s of node %s, %v", joined, b.id.InstanceID(), disk.InstanceID(), disk.NodeID(), err)
	}
}

// TestAlertsSurviveReload: a reload that replaces the link loses no alert that waits, and is not
// a restart of the device.
func TestAlertsSurviveReload(t *testing.T) {
	b := newTestDaemon(t, "relay: ws://127.0.0.1:1\ntoken_file: /t\n")
	before := b.device.link()
	before.SendEvent(link.TopicAlert, []byte(`{"n":1}`))
	if err := b.reloadWith("relay: ws://127.0.0.1:1\ntoken_file: /t\nname: attic\n"); err != nil {
		t.Fatal(err)
	}
	after := b.device.link()
	if after == before || before.Pending() != 0 || after.Pending() != 1 {
		t.Errorf("replaced %v; alerts that wait: %d before, %d after", after != before, before.Pending(), after.Pending())
	}
}

// TestJoinByFile: the line that an image brings makes the board join by itself; a stored
// identity wins over it, and a leave is not undone by it.
func TestJoinByFile(t *testing.T) {
	relay := newJoinRelay(t)
	b := newTestDaemon(t, "")
	file := writeFile(t, filepath.Join(filepath.Dir(b.path), JoinFile), "not a line\n")
	b.follow()
	waitFor(t, "the file is refused", func() bool { j := b.status().Join; return j != nil && j.State == JoinRefused && j.File == file })
	if j := b.status().Join; !strings.Contains(j.Error, "URL CODE") {
		t.Errorf("join %+v", j)
	}

	writeFile(t, file, relay.URL+" "+relay.code+"\n")
	relay.refuse(enrollment.ReasonExpired)
	b.restartMembership()
	waitFor(t, "the code is refused", func() bool { j := b.status().Join; return j != nil && strings.Contains(j.Error, "expired") })
	if j := b.status().Join; j.State != JoinRefused || time.Until(time.UnixMilli(j.NextTryMS)) < 59*time.Minute || !strings.Contains(j.Hint, "agentctl invite") {
		t.Errorf("join %+v", j)
	}
	if left, _ := filepath.Glob(filepath.Join(b.stateDir(), "joining*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}

	relay.refuse("")
	b.restartMembership()
	waitFor(t, "the board joins", func() bool { return b.status().NodeID == relay.node })
	asked := relay.count()
	b.restartMembership()
	if _, err := enroll.Leave(t.Context(), b.stateDir()); err != nil {
		t.Fatal(err)
	}
	if err := b.updateMembership(); err != nil {
		t.Fatal(err)
	}
	b.restartMembership()
	waitFor(t, "the board is alone", func() bool { return b.status().Join == nil })
	if relay.count() != asked {
		t.Error("the file was used again after the leave")
	}
}

// TestJoinPause: what may pass is tried soon, what a person has to change once an hour.
func TestJoinPause(t *testing.T) {
	for attempt := range 40 {
		if d := joinPause(&enroll.Error{Kind: enroll.NoDNS}, attempt); d < minJoinPause/2 || d > maxJoinPause+minJoinPause {
			t.Errorf("attempt %d: %v", attempt, d)
		}
		for _, err := range []error{errors.New("bad line"), &enroll.Error{Kind: enroll.Refused}, &enroll.Error{Kind: enroll.ForAgent}} {
			if d := joinPause(err, attempt); d < finalJoinPause {
				t.Errorf("%v, attempt %d: %v", err, attempt, d)
			}
		}
		for _, err := range []error{&enroll.StorageError{Err: errors.New("full")}, &enroll.Error{Kind: enroll.Untrusted}, &enroll.Error{Kind: enroll.WrongAuthority}} {
			if d := joinPause(err, attempt); d > maxJoinPause+minJoinPause {
				t.Errorf("%T, attempt %d: %v", err, attempt, d)
			}
		}
	}
	if d := joinPause(&enroll.Error{Kind: enroll.RateLimited, RetryAfter: 5 * time.Minute}, 0); d != 5*time.Minute {
		t.Errorf("the relay asked for 5 min: %v", d)
	}
}

// TestRefusedToken: a token that the relay refuses is passed to the keeper.
func TestRefusedToken(t *testing.T) {
	relay := newJoinRelay(t)
	b := newTestDaemon(t, "")
	if _, _, err := enroll.Join(t.Context(), enroll.JoinOptions{StateDir: b.stateDir(), Relay: relay.URL, Code: relay.code}); err != nil {
		t.Fatal(err)
	}
	if err := b.updateMembership(); err != nil {
		t.Fatal(err)
	}
	b.follow()
	onLinkState(b.membership().keeper)(link.Status{State: link.StateRefused, LastCode: link.CloseAuthFailed})
	waitFor(t, "a refresh is tried", func() bool { return b.membership().keeper.Status().LastErr != nil })
	if j := b.status().Join; j.State != JoinJoined || j.Error == "" || !strings.Contains(j.Hint, "by itself") || j.NextTryMS == 0 {
		t.Errorf("join %+v", j)
	}
}

// TestSecondDaemon: a state directory belongs to one daemon.
func TestSecondDaemon(t *testing.T) {
	b := newTestDaemon(t, "")
	var used *enroll.InUseError
	_, err := New(Options{Source: b.source, Config: b.config(), Log: b.log, Level: b.level})
	if !errors.As(err, &used) || used.PID != os.Getpid() {
		t.Errorf("a second daemon: %v", err)
	}
}

// TestJoinHints: each error has a next step.
func TestJoinHints(t *testing.T) {
	for kind := enroll.Broken; kind <= enroll.Malformed; kind++ {
		if JoinHint(&enroll.Error{Kind: kind}) == "" {
			t.Errorf("kind %d has no next step", kind)
		}
	}
	for _, err := range []error{&enroll.StorageError{}, &enroll.JoinedError{}, &enroll.DamagedError{}, &ConfiguredRelayError{}, errors.New("x")} {
		if JoinHint(err) == "" {
			t.Errorf("%T has no next step", err)
		}
	}
}

// credentialChanged reports whether the daemon would read the credential again.
func (b *testDaemon) credentialChanged(t *testing.T) bool {
	t.Helper()
	_, credential, err := b.filesOnDisk()
	if err != nil {
		t.Fatal(err)
	}
	return credential != b.membership().file
}

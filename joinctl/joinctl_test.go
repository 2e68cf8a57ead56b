package joinctl

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/config"
	"agentctl/daemon"
	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/transport/enroll"
)

// newRelay answers each code with a new node, and remembers the last request.
func newRelay(t *testing.T) (url string, last *enrollment.EnrollRequest) {
	t.Helper()
	last = new(enrollment.EnrollRequest)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodGet {
			_ = json.NewEncoder(w).Encode(enrollment.Nonce{Nonce: "n"})
			return
		}
		_ = json.NewDecoder(r.Body).Decode(last)
		_ = json.NewEncoder(w).Encode(enrollment.EnrollAnswer{NodeID: manifest.NewNodeID(), TenantID: "acme", DeviceToken: "a.b.c", Gen: 1})
	}))
	t.Cleanup(srv.Close)
	return srv.URL, last
}

// find finds a board without a daemon, whose configuration is text.
func find(t *testing.T, text string) *Target {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	target, err := Find(t.Context(), Options{Socket: filepath.Join(dir, "none.sock"), StateDir: filepath.Join(dir, "state"),
		Source: config.Source{Path: path, LookupEnv: func(string) (string, bool) { return "", false }}})
	if err != nil {
		t.Fatal(err)
	}
	if target.Daemon != nil || target.StateDir != filepath.Join(dir, "state") {
		t.Fatalf("found %+v", target)
	}
	return target
}

// TestJoinWithoutDaemon: the files say which board it is; what they name is passed on.
func TestJoinWithoutDaemon(t *testing.T) {
	url, last := newRelay(t)
	target := find(t, "name: attic\n")
	o := enroll.JoinOptions{Relay: url, Code: enrollment.NewCode()}
	j, err := target.Join(t.Context(), o, time.Time{})
	if err != nil || j.Already || j.Unused != "" || last.Name != "attic" {
		t.Fatalf("%+v, %v, name %q", j, err, last.Name)
	}
	again, err := target.Join(t.Context(), o, time.Time{})
	if err != nil || !again.Already || again.NodeID != j.NodeID {
		t.Errorf("a repeat: %+v, %v", again, err)
	}
	if cred, err := target.Leave(t.Context()); err != nil || cred.NodeID != j.NodeID {
		t.Errorf("Leave: %+v, %v", cred, err)
	}
}

// TestConfiguredRelay: another relay in the configuration stops a join before anything is
// sent; the same one is named as no longer used.
func TestConfiguredRelay(t *testing.T) {
	url, last := newRelay(t)
	o := enroll.JoinOptions{Relay: url, Code: enrollment.NewCode()}
	var configured *daemon.ConfiguredRelayError
	if _, err := find(t, "relay: wss://other.example\n").Join(t.Context(), o, time.Time{}); !errors.As(err, &configured) ||
		!strings.HasSuffix(configured.Origin, "config.yaml:1") || last.Code != "" {
		t.Errorf("another relay: %v, sent %+v", err, last)
	}
	same := "relay: " + strings.Replace(url, "http", "ws", 1) + "/\ntoken_file: /t\n"
	if j, err := find(t, same).Join(t.Context(), o, time.Time{}); err != nil || !strings.Contains(j.Unused, "config.yaml:1") || !strings.Contains(j.Unused, "token_file") {
		t.Errorf("the same relay: %+v, %v", j, err)
	}
}

func TestIsSameDir(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if !isSameDir(dir+"/", dir) || !isSameDir(link, dir) || isSameDir(dir, t.TempDir()) || isSameDir(dir, filepath.Join(dir, "none")) {
		t.Error("directories are compared wrongly")
	}
}

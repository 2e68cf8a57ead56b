package process

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/kernel"
)

func TestDeclaredScopes(t *testing.T) {
	dir := t.TempDir()
	add := func(folder, text string, mode os.FileMode) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, folder, manifestFile)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, mode); err != nil { // whatever the umask is
			t.Fatal(err)
		}
	}
	declares := func(name, capabilities string) string {
		return fmt.Sprintf(`{"name": %q, "version": "1.0.0", "capabilities": [%s]}`, name, capabilities)
	}
	add("notes", declares("notes", `"notes.write", "tickets.read", "notes:read"`), 0o644)
	add("plain", declares("plain", `"tickets.read"`), 0o644)
	if got, err := DeclaredScopes(dir); err != nil || !slices.Equal(got, []string{"notes:read", "notes:write"}) {
		t.Errorf("got %v, %v", got, err)
	}
	// What is wrong is named, and takes nothing from the others.
	add("bad", `{`, 0o644)
	add("open", declares("open", `"open.read"`), 0o666)
	add("thief", declares("notes", `"notes.admin"`), 0o644)
	add("tickets", declares("tickets", ""), 0o644) // a name of the relay: not a plugin
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "notes"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	got, err := DeclaredScopes(dir)
	if !slices.Equal(got, []string{"notes:read", "notes:write"}) {
		t.Errorf("got %v", got)
	}
	text := fmt.Sprint(err)
	for _, want := range []string{"plugin bad: ", "plugin open: open/plugin.json must not be a link, and other users must not write to it", "plugin thief: its manifest names the plugin notes"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in: %s", want, text)
		}
	}
	if lines := strings.Count(text, "\n") + 1; lines != 4 { // two of them for the plugin bad
		t.Errorf("more is wrong than was: %s", text)
	}
	if got, err := DeclaredScopes(filepath.Join(dir, "none")); got != nil || err != nil {
		t.Errorf("a directory that is not there: %v, %v", got, err)
	}
}

// onlyTopic is a caller that is limited to one topic.
type onlyTopic string

func (onlyTopic) Has(string) bool              { return true }
func (s onlyTopic) HasTopic(topic string) bool { return topic == string(s) }

// While a plugin serves a call it has no topics that the caller's token lacks.
func TestBusKeepsTopics(t *testing.T) {
	for _, tt := range []struct {
		scopes busScopes
		want   bool
	}{
		{busScopes{onlyTopic("alert"), true}, false},
		{busScopes{onlyTopic("join"), true}, true},
		{busScopes{scopes{"events:subscribe"}, true}, true}, // not limited
		{busScopes{nil, false}, true},                       // on its own account
	} {
		if got := (&kernel.Caller{Scopes: tt.scopes}).HasTopic("join"); got != tt.want {
			t.Errorf("%+v: HasTopic is %v", tt.scopes, got)
		}
	}
}

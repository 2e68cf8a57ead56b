package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// complete returns the completions that the shell gets for these words.
func complete(t *testing.T, words ...string) string {
	t.Helper()
	candidates, _ := completeWords(t, words...)
	return candidates
}

// completeWords returns the completions and the directive that the shell gets for these words.
func completeWords(t *testing.T, words ...string) (candidates, directive string) {
	t.Helper()
	if words = append([]string{"__complete"}, words...); !completing(words) {
		t.Error("this is no completion")
	}
	root := newRoot()
	addCompletion(root)
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&bytes.Buffer{})
	root.SetArgs(words)
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := len(lines) - 1
	return strings.Join(lines[:last], " "), lines[last]
}

// Files and directories are left to the shell, wherever a command takes one.
func TestCompletionOfFiles(t *testing.T) {
	files, dirs, none := cobra.ShellCompDirectiveDefault, cobra.ShellCompDirectiveFilterDirs, cobra.ShellCompDirectiveNoFileComp
	for _, tt := range []struct {
		words []string
		want  cobra.ShellCompDirective
	}{
		{[]string{"status", "--socket", ""}, files},
		{[]string{"run", "--disk-path", ""}, files},
		{[]string{"run", "--state-dir", ""}, dirs},
		{[]string{"ls", "--token-file", ""}, files},
		{[]string{"config", "validate", ""}, files},
		{[]string{"config", "validate", "a.yaml", ""}, none},
		{[]string{"config", "set", "name", ""}, none},
		{[]string{"burst", "--interval", ""}, none},
	} {
		if got, directive := completeWords(t, tt.words...); got != "" || directive != fmt.Sprintf(":%d", tt.want) {
			t.Errorf("%q: got %q and directive %s, want :%d", tt.words, got, directive, tt.want)
		}
	}
}

// completionTest is a command line and the candidates for its last word.
type completionTest struct {
	words []string
	want  string
}

// checkCompletion completes against a relay with two boards.
func checkCompletion(t *testing.T, tests []completionTest) {
	t.Helper()
	relay := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"nodes":[{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","name":"attic","online":true,"tags":["north","roof"],
			"capabilities":[{"cap_id":"echo","kind":"system.echo","verbs":["invoke"]},{"cap_id":"metrics","kind":"system.metrics","verbs":["snapshot","subscribe"]}]},
			{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xz","name":"","online":false}]}`))
	}))
	defer relay.Close()
	t.Setenv("AGENTCTL_RELAY", relay.URL)
	for _, tt := range tests {
		if got := complete(t, tt.words...); got != tt.want {
			t.Errorf("%q: got %q, want %q", tt.words, got, tt.want)
		}
	}
}

func TestCompletion(t *testing.T) {
	checkCompletion(t, []completionTest{
		{[]string{"history", "-o", ""}, "csv json ndjson yaml"},
		{[]string{"status", "-o", ""}, "json yaml ndjson"},
		{[]string{"watch", "-o", ""}, "ndjson"},
		{[]string{"watch", "--modules", "cpu,m"}, "cpu,memory"},
		{[]string{"start", "cpu", "d"}, "disk"},
		{[]string{"stop", ""}, ""},
		{[]string{"config", "set", "log_"}, "log_level"},
		{[]string{"config", "set", "log_level", ""}, "debug info warn error"},
		{[]string{"config", "set", "history.enabled", "t"}, "true"},
		{[]string{"config", "set", "name", ""}, ""},
		{[]string{"call", ""}, "attic:\tonline 01hzx9k3m4p7q8r9s0t1v2w3xz:\toffline"},
		{[]string{"call", "attic:"}, "attic:echo attic:snapshot attic:subscribe"},
		{[]string{"call", "attic:e"}, "attic:echo"},
		{[]string{"burst", "--for", ""}, ""},
		{[]string{"describe", "a"}, "attic\tonline"},
		{[]string{"ls", "--tag", ""}, "north roof"},
	})
}

// A relay that is slow, or not there, is left out without a word, and soon.
func TestCompletionSlow(t *testing.T) {
	release := make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer slow.Close()
	defer close(release)
	for _, url := range []string{slow.URL, "http://127.0.0.1:1", "nonsense"} {
		t.Setenv("AGENTCTL_RELAY", url)
		start := time.Now()
		if got := complete(t, "call", ""); got != "" || time.Since(start) > 3*time.Second {
			t.Errorf("%s: got %q after %v", url, got, time.Since(start))
		}
	}
}

// The verbs of one board do not cost a list of all boards.
func TestCompletionAsksForOneBoard(t *testing.T) {
	var asked []string
	relay := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.RequestURI())
		_, _ = w.Write([]byte(`{"nodes":[{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","name":"attic","capabilities":[{"cap_id":"echo","kind":"system.echo","verbs":["invoke"]}]}]}`))
	}))
	defer relay.Close()
	t.Setenv("AGENTCTL_RELAY", relay.URL)
	if got := complete(t, "call", "attic:"); got != "attic:echo" || len(asked) != 1 || !strings.Contains(asked[0], "node=attic") {
		t.Errorf("got %q after %q", got, asked)
	}
}

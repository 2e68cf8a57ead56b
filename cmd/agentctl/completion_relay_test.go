//go:build linux && !agentctl_omit_relay

package main

import (
	"fmt"
	"testing"

	"github.com/spf13/cobra"
)

func TestCompletionNode(t *testing.T) {
	checkCompletion(t, []completionTest{
		{[]string{"node", "tag", "att"}, "attic\tonline"},
		{[]string{"node", "untag", "attic", "north", ""}, "roof"},
		{[]string{"node", "rename", "att"}, "attic\tonline"},
		{[]string{"node", "rename", "attic", ""}, ""},
	})
}

// TestCompletionOfFiles for the commands of the full build.
func TestCompletionOfRelayFiles(t *testing.T) {
	files, dirs := cobra.ShellCompDirectiveDefault, cobra.ShellCompDirectiveFilterDirs
	for _, tt := range []struct {
		words []string
		want  cobra.ShellCompDirective
	}{
		{[]string{"token", "create", "--out", ""}, files},
		{[]string{"mcp", "connect", "--file", ""}, files},
		{[]string{"relay", "--plugin-sockets", ""}, dirs},
		{[]string{"relay", "restore", ""}, dirs},
		{[]string{"relay", "backup", ""}, dirs},
		{[]string{"plugin", "validate", ""}, files},
		{[]string{"verify", ""}, files},
	} {
		if got, directive := completeWords(t, tt.words...); got != "" || directive != fmt.Sprintf(":%d", tt.want) {
			t.Errorf("%q: got %q and directive %s, want :%d", tt.words, got, directive, tt.want)
		}
	}
}

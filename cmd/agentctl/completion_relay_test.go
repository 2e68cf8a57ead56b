//go:build linux && !agentctl_omit_relay

package main

import "testing"

func TestCompletionNode(t *testing.T) {
	checkCompletion(t, []completionTest{
		{[]string{"node", "tag", "att"}, "attic\tonline"},
		{[]string{"node", "untag", "attic", "north", ""}, "roof"},
		{[]string{"node", "rename", "att"}, "attic\tonline"},
		{[]string{"node", "rename", "attic", ""}, ""},
	})
}

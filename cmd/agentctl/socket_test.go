//go:build linux

package main

import (
	"testing"

	"github.com/spf13/cobra"

	"agentctl/config"
)

// Every command that asks a daemon asks the same one by default: this user's, else that of the service.
// The test shows a difference only where the service is installed and this user runs no daemon.
func TestDefaultSocket(t *testing.T) {
	t.Setenv("AGENTCTL_SOCKET", "")
	found := 0
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		// run opens a socket, and config chooses it when it runs.
		if f := c.Flags().Lookup("socket"); f != nil && c.Name() != "run" && f.DefValue != "" {
			found++
			if want := config.ClientSocket(); f.DefValue != want {
				t.Errorf("%s asks %s, want %s", c.CommandPath(), f.DefValue, want)
			}
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
	if found < 5 {
		t.Errorf("%d commands with --socket", found)
	}
}

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
)

// buildInfo is what `agentctl version -o json` prints. Tags shows which build it is: those of the board build
// contain agentctl_omit_relay, and the full build has none.
type buildInfo struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	ARM     string `json:"goarm,omitempty"`
	Tags    string `json:"tags,omitempty"`
}

// readBuildInfo returns what this binary is. GOARM and the tags are those that the go command
// recorded, since the program cannot see them otherwise.
func readBuildInfo() buildInfo {
	b := buildInfo{Version: cli.Version, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if bi, ok := debug.ReadBuildInfo(); ok {
		for _, s := range bi.Settings {
			switch s.Key {
			case "GOARM":
				b.ARM = s.Value
			case "-tags":
				b.Tags = s.Value
			}
		}
	}
	return b
}

// newVersion returns the command version, for people and bug reports; --version prints the version alone.
// Both describe this binary. A daemon or relay that runs may be of another version until it is restarted:
// 'agentctl status' and 'agentctl relay status' print theirs.
func newVersion() *cobra.Command {
	var out cli.Output
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the version and the platform",
		Example: "  agentctl version\n  agentctl version -o json",
		// In place of the one of all commands: nothing here has to be stopped by a signal (run).
		PersistentPreRun: func(*cobra.Command, []string) {},
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := readBuildInfo()
			return out.Print(cmd, b, func() error {
				arch := b.OS + "/" + b.Arch
				if b.ARM != "" {
					arch += " v" + b.ARM
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "agentctl %s (%s, %s)\n", b.Version, arch, b.Go)
				return err
			})
		},
	}
	out.AddFlags(c)
	return c
}

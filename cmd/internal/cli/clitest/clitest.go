// Package clitest runs commands in tests of the packages that make them.
//
//	clitest.HideEnvironment(t)
//	code, out, errs := clitest.Run(t, clientcmd.NewLs(), "", "--relay", url)
//
// The command runs in the test's process, so that a test needs no binary and can give it fakes. What only
// package main does is in tests of the binary: test/testdata/script.
package clitest

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
)

// Run runs command with args below a root command, as main does, and returns its exit code and what
// it printed. errs ends with the error's text. args are those after the command's name. What main adds to
// the whole tree is missing: wrong arguments as usage errors, help topics and completion.
func Run(t testing.TB, command *cobra.Command, stdin string, args ...string) (code int, out, errs string) {
	t.Helper()
	root := &cobra.Command{Use: "agentctl", SilenceErrors: true, SilenceUsage: true}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cli.Errorf(cli.ExitUsage, "%w", err) })
	root.AddCommand(command)
	var o, e bytes.Buffer
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&o)
	root.SetErr(&e)
	root.SetArgs(append([]string{command.Name()}, args...))
	cmd, err := root.ExecuteContextC(t.Context())
	if failure := cli.Explain(cmd, err); failure != nil {
		code = failure.Code
		e.WriteString(failure.Error())
	}
	return code, o.String(), e.String()
}

// HideEnvironment hides the variables of agentctl that whoever runs the test has set. Call it before the
// commands are made: their flags take defaults from the environment. As with t.Setenv, the test cannot be
// parallel.
func HideEnvironment(t testing.TB) {
	for _, kv := range os.Environ() {
		if k, _, _ := strings.Cut(kv, "="); strings.HasPrefix(k, "AGENTCTL_") || strings.HasPrefix(k, "MCP_") {
			t.Setenv(k, "")
		}
	}
}

//go:build linux

package boardcmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/journal"
	"agentctl/prober/inspect"
)

// newJournalHelper makes the command of agentctl-journal@.service. It is hidden: it answers the one
// request on the socket that systemd gives it as stdin.
func newJournalHelper() *cobra.Command {
	var journalctl string
	c := &cobra.Command{
		Use: "journal-helper", Hidden: true, Args: cobra.NoArgs,
		Short: "Answer one request for lines of the journal, on stdin",
		RunE: func(cmd *cobra.Command, _ []string) error {
			conn, err := stdinSocket("agentctl-journal.socket")
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 2*journal.MaxTime)
			defer cancel()
			err = journal.Serve(ctx, conn, journalctl)
			var refused *journal.Error
			if errors.As(err, &refused) && refused.Code != journal.CodeFailed {
				fmt.Fprintln(cmd.ErrOrStderr(), err) // the request's fault, not the unit's
				return nil
			}
			return err
		},
	}
	c.Flags().StringVar(&journalctl, "journalctl", "/usr/bin/journalctl", "the `PROGRAM` that reads the journal")
	return c
}

// newProcessesHelper makes the command of agentctl-processes@.service, likewise.
func newProcessesHelper() *cobra.Command {
	return &cobra.Command{
		Use: "processes-helper", Hidden: true, Args: cobra.NoArgs,
		Short: "Answer one request for processes, on stdin",
		RunE: func(cmd *cobra.Command, _ []string) error {
			conn, err := stdinSocket("agentctl-processes.socket")
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 2*journal.MaxTime)
			defer cancel()
			machine := inspect.New(inspect.Options{Now: func() (int64, bool) { return time.Now().UnixMilli(), true }})
			if err := inspect.ServeProcesses(ctx, conn, machine); err != nil {
				fmt.Fprintln(cmd.ErrOrStderr(), err) // the daemon's fault, not the unit's
			}
			return nil
		},
	}
}

// stdinSocket returns the connection that a socket unit gives to its service.
func stdinSocket(unit string) (net.Conn, error) {
	conn, err := net.FileConn(os.Stdin)
	if err != nil {
		return nil, cli.Errorf(cli.ExitUsage, "stdin is not a socket; %s starts this command", unit)
	}
	return conn, nil
}

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"

	"agentctl/journal"
)

// newJournalHelper makes the command of agentctl-journal@.service. It is hidden: it answers the one
// request on the socket that systemd gives it as stdin.
func newJournalHelper() *cobra.Command {
	var journalctl string
	c := &cobra.Command{
		Use: "journal-helper", Hidden: true, Args: cobra.NoArgs,
		Short: "Answer one request for lines of the journal, on stdin",
		RunE: func(cmd *cobra.Command, _ []string) error {
			conn, err := net.FileConn(os.Stdin)
			if err != nil {
				return exit(exitUsage, "stdin is not a socket; agentctl-journal.socket starts this command")
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

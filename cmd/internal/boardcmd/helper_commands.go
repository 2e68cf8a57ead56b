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

// The daemon's sandbox hides the journal and the processes of other users from it. It connects to a socket
// of systemd, which starts one helper for each connection (Accept=yes, systemd.socket(5)) under another user,
// in a sandbox with that one right. So an attacker who controls the daemon gets no more than the helpers
// answer.
//
//	daemon ── request ──► agentctl-journal.socket ──► agentctl-journal@N.service: this command
//	       ◄── answer ── then the command ends
//
// Neither side trusts the other: package unixrpc bounds sizes and times on both. The context ends after
// 10 s, twice journal.MaxTime: once for the work, and once for reading the request and writing the answer.
// The units kill a process after 15 s (RuntimeMaxSec=).
//
// A bad request is logged on stderr and has exit code 0: with another code systemd would report a failed
// unit, and the unit is not at fault.

// newJournalHelper makes the command of agentctl-journal@.service. It is hidden: it answers the one
// request on the socket that systemd gives it as stdin.
//
// A journalctl that cannot be run or fails (journal.CodeFailed) is a fault of this machine: exit code 1.
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

// newProcessesHelper makes the command of agentctl-processes@.service, likewise. Its errors are those of the
// request or the connection: what cannot be read is in the answer, as unfinished.
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

// stdinSocket returns the connection that a socket unit gives to its service (StandardInput=socket). It
// fails for a person who types the command; unit names what starts it.
func stdinSocket(unit string) (net.Conn, error) {
	conn, err := net.FileConn(os.Stdin)
	if err != nil {
		return nil, cli.Errorf(cli.ExitUsage, "stdin is not a socket; %s starts this command", unit)
	}
	return conn, nil
}

//go:build linux

package relaycmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay"
	"agentctl/relay/storage"
	"agentctl/term"
)

// statusTimeout bounds the question. The relay answers from memory; what can take longer is to open
// the socket in a directory whose disk hangs. The relay closes a connection after the same time.
const statusTimeout = 5 * time.Second

// newStatus returns the command status. It asks over a socket in the state directory, not over HTTP:
// it needs no token, and works where the listener or its certificate is the problem. The exit code
// says which reaction helps: start the relay (3), ask as another user (4), look at the disk (7), read what
// is printed (1). The state is printed before the command fails with 1. Warnings alone do not make it fail,
// so that a monitor can use the exit code as it is.
func newStatus() *cobra.Command {
	var out cli.Output
	var dir string
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the running relay: stores, boards, events, clock, plugins",
		Long: `Show the state of the relay that runs on the state directory. It answers while its disk hangs.

The exit code is 1 while something keeps the relay from working fully: a store that fails, a clock
that cannot be right, or --start-degraded. It is 3 if no relay runs there.`,
		Example: "  agentctl relay status\n  agentctl relay status -o json | jq '.stores[] | select(.ok | not)'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusTimeout)
			defer cancel()
			s, err := relay.ReadStatus(ctx, dir)
			switch {
			case errors.Is(err, relay.ErrNotRunning):
				return cli.Errorf(cli.ExitNotRunning, "%w: %s\nstart it with: agentctl relay%s", err, dir, cli.StateDirHint(cmd))
			case errors.Is(err, fs.ErrNotExist):
				return cli.Errorf(cli.ExitNotRunning, "%w: there is no directory %s; name the relay's with --state-dir", relay.ErrNotRunning, dir)
			case errors.Is(err, fs.ErrPermission):
				return cli.Errorf(cli.ExitUnauthorized, "ask the relay: %w; run this as the owner of %s (sudo)", err, dir)
			case errors.Is(err, context.DeadlineExceeded):
				return cli.Errorf(cli.ExitTimeout, "no answer in %s: the disk of %s may hang; ask the relay over HTTP: GET /readyz", statusTimeout, dir)
			case err != nil:
				return cli.Errorf(cli.ExitFailure, "ask the relay: %w", err)
			}
			if err := out.Print(cmd, s, func() error { return printStatus(cmd.OutOrStdout(), s) }); err != nil {
				return err
			}
			if !s.Healthy() {
				return cli.Errorf(cli.ExitFailure, "the relay is not healthy; what to do: docs/operations.md, or agentctl relay check%s", cli.StateDirHint(cmd))
			}
			return nil
		},
	}
	out.AddFlags(c)
	cli.AddStateDirFlag(c, &dir)
	return c
}

// printStatus prints the state of a relay: a line for each part, the shared pools, and at the end what
// is wrong, where a person looks last. An empty key continues the part above. Names of plugins and texts of
// errors may have characters that control a terminal: rows pass term.SafeLine, and the table does the same.
func printStatus(w io.Writer, s *relay.Status) error {
	row := func(key, format string, args ...any) {
		fmt.Fprintf(w, "%-10s%s\n", key, term.SafeLine(fmt.Sprintf(format, args...)))
	}
	row("Relay", "%s, up %s, process %d", s.Version, (time.Duration(s.UptimeS) * time.Second).String(), s.PID)
	row("State", "%s", s.StateDir)
	for i, l := range s.Listeners {
		key := ""
		if i == 0 {
			key = "Serves"
		}
		row(key, "%-8s %s", l.Name, l.URL)
	}
	row("Boards", "%d linked of %d registered, %d metric streams", s.Boards.Linked, s.Boards.Registered, s.Boards.Streams)
	row("Agents", "%d MCP sessions, %d metric streams", s.Agents.MCPSessions, s.Agents.Streams)
	printStores(row, s)
	if s.Degraded != "" {
		row("Events", "NONE: this relay runs without its event log (--start-degraded)")
	} else {
		row("Events", "%d, the last is %d; %d wait for the disk, %d lost since the start", s.Events.Count, s.Events.Last, s.Events.Waiting, s.Events.Lost)
	}
	for _, c := range s.Events.Classes {
		row("", "%-8s %d events, %s", c.Class, c.Count, term.Bytes(uint64(max(c.Bytes, 0))))
	}
	row("Audit", "%d lines, %d lost, %d refusals of strangers, since the start", s.Audit.Lines, s.Audit.Lost, s.Audit.Refusals)
	if s.Clock.OK {
		row("Clock", "%s", time.UnixMilli(s.Clock.NowMS).UTC().Format(time.RFC3339))
	} else {
		row("Clock", "WRONG: %s", s.Clock.Problem)
	}
	var plugins []string
	for _, p := range s.Plugins {
		name := p.Name + " " + p.Version
		if p.State != "loaded" {
			name += " (" + p.State + ")"
		}
		plugins = append(plugins, name)
	}
	row("Plugins", "%s", strings.Join(plugins, ", "))
	fmt.Fprintln(w)
	t := term.NewTable(w, "SHARED", "IN USE", "LIMIT", "REFUSED")
	for _, p := range s.Pools {
		t.Row(p.Name, p.InUse, p.Limit, p.Refused)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(s.Problems) > 0 {
		fmt.Fprintln(w)
	}
	for _, p := range s.Problems {
		fmt.Fprintf(w, "- %s\n", term.SafeLine(p))
	}
	return nil
}

// printStores prints a line for each store, with the kind of its first problem as its state, and lines that
// describe each problem. relay.db has no MaxBytes: the number of its records is bounded, not their size.
func printStores(row func(key, format string, args ...any), s *relay.Status) {
	key := "Stores"
	for i := range s.Stores {
		st := &s.Stores[i]
		state := "ok"
		if len(st.Problems) > 0 {
			state = string(st.Problems[0].Kind)
		}
		size := term.Bytes(uint64(max(st.Bytes, 0)))
		if st.MaxBytes > 0 {
			size += " of at most " + term.Bytes(uint64(st.MaxBytes))
		}
		row(key, "%-10s %-10s %s", st.Store, state, size)
		key = ""
		for _, p := range st.Problems {
			row("", "  %s", storage.Describe(st.Store, p, time.Now()))
			if p.Detail != "" {
				row("", "  %s", p.Detail)
			}
		}
	}
}

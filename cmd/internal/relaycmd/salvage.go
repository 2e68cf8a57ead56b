//go:build linux

package relaycmd

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/checkup"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/term"
)

// newSalvage returns the command salvage. It replaces nothing unless it is asked to: the damaged log is
// the only source for another attempt.
//
// It reads pages itself and not through SQLite, which stops at the first damaged one. DIR needs space for the
// new log and a temporary copy of the events; with --replace the state directory needs space for the new log
// too. Only --replace changes the state directory, and is in its audit log.
func newSalvage() *cobra.Command {
	var dir string
	var replace bool
	var out cli.Output
	c := &cobra.Command{
		Use:   "salvage DIR",
		Args:  cobra.ExactArgs(1),
		Short: "Make a new event log of what is left of a damaged one",
		Long: `Read every event that can be read of a damaged event log, also where SQLite cannot, and write a new,
sound log into DIR. The old files stay as they are. Events keep their numbers, so that subscribers
can resume, and the new log ends with an event that says what is lost.

Each event is checked against the hash of the one before it: "unverified" are events next to a gap,
events that were changed, and all events of a log that an older agentctl wrote without hashes.

The relay must not run. With --replace the new log takes the place of the old one, which is moved
into a separate directory; without, the commands for that are printed.

A backup is better if it is recent: see 'agentctl relay restore'. There is no salvage of relay.db,
because a guess about who may do what is worse than none.`,
		Example: "  agentctl relay salvage /var/tmp/salvaged\n  agentctl relay salvage --replace --state-dir /var/lib/agentctl-relay /var/tmp/salvaged",
		RunE: func(cmd *cobra.Command, args []string) error {
			result, err := checkup.Salvage(cmd.Context(), dir, args[0], replace, time.Now())
			switch {
			case errors.Is(err, fs.ErrExist):
				return err // it says to name another directory
			case errors.Is(err, fs.ErrNotExist):
				return fmt.Errorf("there is no event log to read: %w; name the relay's directory with --state-dir", err)
			case errors.Is(err, auth.ErrInUse):
				return fmt.Errorf("%w; stop the relay first", err)
			case err != nil:
				return ExplainState(cmd, err)
			case replace:
				recordLocal(cmd, dir, kernel.Record{Tool: "relay.salvage", Target: filepath.Base(args[0])})
			}
			return out.Print(cmd, result, func() error { return printSalvage(cmd, dir, result) })
		},
	}
	cli.AddStateDirFlag(c, &dir)
	c.Flags().BoolVar(&replace, "replace", false, "put the new log in the place of the old one, whose files are kept beside it")
	out.AddFlags(c)
	return c
}

// printSalvage prints what was read, what is lost, and how to put the new log in place or back. The counts
// come first, because by them an operator chooses between this log and a backup.
//
// For a range of lost events only an upper bound is known (AT MOST): all chains share the sequence numbers,
// and a missing number may be of any. At most 256 ranges are listed. The commands do what --replace does:
// mode 0700, since the log has the data of all tenants, and the directory's owner, since the relay runs as
// that user.
func printSalvage(cmd *cobra.Command, dir string, r *checkup.SalvageResult) error {
	w := cmd.OutOrStdout()
	fmt.Fprintf(w, "%d events are in %s: %d verified, %d unverified, seq %d to %d\n", r.Events, r.To, r.Verified, r.Unverified, r.First, r.Last)
	if r.WAL != "" {
		fmt.Fprintf(w, "damage: %s\n", r.WAL)
	}
	if r.Unreadable > 0 {
		fmt.Fprintf(w, "%d events are lost of which parts were found\n", r.Unreadable)
	}
	if len(r.Lost) == 0 {
		fmt.Fprintln(w, "no gap was found between the events")
	} else {
		table := term.NewTable(w, "LOST FROM", "TO", "AT MOST", "TENANT", "CLASS")
		for _, l := range r.Lost {
			tenant, class := fmt.Sprintf("%q", l.Tenant), string(l.Class)
			if class == "" {
				tenant, class = "any", "any"
			}
			table.Row(l.From, l.To, l.AtMost, tenant, class)
		}
		if err := table.Flush(); err != nil {
			return err
		}
		if r.LostMore > 0 {
			fmt.Fprintf(w, "and %d more\n", r.LostMore)
		}
	}
	if r.Replaced != "" {
		// The undo replaces the new log, and with it the events that a relay has appended since.
		fmt.Fprintf(w, "\nthe old log is in %s; undo with the relay stopped: mv %s/* %s/\n", r.Replaced, cli.ShellQuote(r.Replaced), cli.ShellQuote(dir))
		return nil
	}
	log := filepath.Join(dir, eventlog.FileName)
	fmt.Fprintf(w, "\nThe old log is unchanged. To use the new one, with the relay stopped (--replace does the same):\n"+
		"  mkdir -m 700 %[1]s/damaged && mv %[2]s* %[1]s/damaged/\n"+
		"  cp %[3]s %[1]s/ && chown --reference=%[1]s %[2]s\n", cli.ShellQuote(filepath.Clean(dir)), cli.ShellQuote(log), cli.ShellQuote(r.To))
	return nil
}

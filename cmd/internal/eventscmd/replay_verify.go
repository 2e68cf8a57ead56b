//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay"
	"agentctl/relay/eventlog"
	"agentctl/term"
)

// events replay --verify makes three checks (relay.VerifyReplay has the method):
//
//	two rebuilds from the log give the same state     the rebuild is deterministic
//	the running relay has that state                  a restart would lose nothing that is in its memory
//	the hashes of the events used fit                 no single event was damaged or edited
//
// It writes nothing, and tries again by itself when events are removed while it reads. It needs the rights of
// the relay's user or root: the state of a running relay is read over its local socket.

// verifyReplay is events replay --verify. What it finds goes to stdout first, so that -o json has it;
// the error that follows decides the exit code and names the next command.
func verifyReplay(cmd *cobra.Command, out *cli.Output, dir string) error {
	res, err := relay.VerifyReplay(cmd.Context(), dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: name the relay's with --state-dir DIR", err)
	case errors.Is(err, fs.ErrPermission):
		return cli.Errorf(cli.ExitUnauthorized, "compare the state with that of the relay: %w; run this as the owner of %s (sudo)", err, dir)
	case errors.Is(err, eventlog.ErrDamaged):
		return fmt.Errorf("%w\nsee what is damaged with: agentctl relay check%s", err, cli.StateDirHint(cmd))
	case err != nil:
		return fmt.Errorf("compare the state with that of the relay: %w", err)
	}
	if err := out.Print(cmd, res, func() error { return printReplayed(cmd.OutOrStdout(), res, dir) }); err != nil {
		return err
	}
	switch {
	// A changed log comes first: differences may be its consequence.
	case len(res.Faults) > 0:
		return cli.Errorf(cli.ExitFailure, "%w\nsee what is damaged with: agentctl relay check%s", &res.Faults[0], cli.StateDirHint(cmd))
	case res.Total == 0:
		return nil
	}
	first := res.Differences[0]
	return cli.Errorf(cli.ExitFailure, "%d of the tickets, boards and agents differ, the first is %s\nsee its events with: agentctl events replay%s, and whether the log is sound with: agentctl relay check%s",
		res.Total, term.SafeLine(first.Aggregate), cli.StateDirHint(cmd), cli.StateDirHint(cmd))
}

// printReplayed prints the outcome for people, with each difference on a line. Differences are listed up
// to the bound of relay.VerifyReplay, and counted beyond; the counts of DIFFER are of those listed.
func printReplayed(w io.Writer, res *relay.Replayed, dir string) error {
	count := map[string]int{}
	for _, d := range res.Differences {
		count[d.Between]++
	}
	verdict := func(between string) string {
		if n := count[between]; n > 0 {
			return fmt.Sprintf("%d DIFFER", n)
		}
		return "the same"
	}
	fmt.Fprintf(w, "State      after event %d: %d tickets, %d boards and agents\n", res.Seq, res.Tickets, res.Presences)
	fmt.Fprintf(w, "Rebuilt    twice from the log: %s\n", verdict("rebuilds"))
	if n := len(res.Faults); n > 0 {
		fmt.Fprintf(w, "Hashes     the log was changed in %d of its chains\n", n)
	} else {
		fmt.Fprintln(w, "Hashes     they fit the events")
	}
	if res.Live {
		fmt.Fprintf(w, "Live       the relay of process %d: %s\n", res.PID, verdict("live"))
	} else {
		fmt.Fprintf(w, "Live       not compared: no relay runs on %s\n", term.SafeLine(dir))
	}
	for _, d := range res.Differences {
		what := "differs"
		switch {
		// Digests are empty for what one side does not have.
		case d.Log == "":
			what = "is not in the log"
		case d.Other == "":
			what = "is in the log only"
		}
		fmt.Fprintf(w, "- %s %s (%s)\n", term.SafeLine(d.Aggregate), what, d.Between)
	}
	if n := res.Total - len(res.Differences); n > 0 {
		fmt.Fprintf(w, "- and %d more\n", n)
	}
	return nil
}

//go:build linux

package relaycmd

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/checkup"
	"agentctl/term"
)

// newCheck returns the command check. The exit code is 1 if the directory is not sound, so that a
// timer or a deployment script can use it as it is. The report is printed first, also with -o, so that
// stdout has it whatever the exit code is; the last line, on stderr, only sums it up.
//
// It writes nothing, not even into the audit log, and takes no lock that a relay waits for.
func newCheck() *cobra.Command {
	var dir string
	var out cli.Output
	c := &cobra.Command{
		Use:   "check",
		Short: "Check a relay's state directory for damage",
		Long: `Check that everything in a relay's state directory is what the relay wrote: permissions, both
databases with their write-ahead logs, the hashes of all events, the signing keys, the relay's own
authority, the audit files, and that all of them belong together.

It writes nothing, and works whether the relay runs or not. It reads every byte of the databases: a
log of 256 MiB takes about ten seconds. Exit code 0: sound, perhaps with warnings; 1: not sound, with
what, where and the next command.`,
		Example: "  agentctl relay check\n  agentctl relay check --state-dir /var/lib/agentctl-relay -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := checkup.Run(cmd.Context(), dir)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w; name the relay's with --state-dir DIR", err)
			} else if err != nil {
				return ExplainState(cmd, err)
			}
			for i := range report.Problems {
				report.Problems[i].Next = repairCommand(&report.Problems[i], cli.StateDirHint(cmd))
			}
			if err := out.Print(cmd, report, func() error { return printCheckup(cmd, report) }); err != nil {
				return err
			}
			if !report.Sound {
				return cli.Errorf(cli.ExitFailure, "the state directory %s is not sound", report.StateDir)
			}
			return nil
		},
	}
	cli.AddStateDirFlag(c, &dir)
	out.AddFlags(c)
	return c
}

// repairCommand is what to type about a problem, "" if there is no command for it. stateDir is the
// flag that selects the same directory. Package checkup knows the kind of repair and no commands.
// Words in capitals, as BACKUP, are for the person to fill in: the check does not know where backups are.
// The owner of a file can change its mode; to give it to another user takes root.
func repairCommand(p *checkup.Problem, stateDir string) string {
	switch p.Repair {
	case checkup.RepairPermission:
		if p.Mode != 0 {
			return fmt.Sprintf("chmod %04o %s", p.Mode, cli.ShellQuote(p.Path))
		}
		return fmt.Sprintf("sudo chown %d:%d %s", p.UID, p.GID, cli.ShellQuote(p.Path))
	case checkup.RepairRestore:
		return "agentctl relay restore BACKUP" + stateDir
	case checkup.RepairSalvage:
		return "agentctl relay salvage DIR" + stateDir
	case checkup.RepairRestart:
		return "start the relay, which makes it anew: agentctl relay" + stateDir
	case checkup.RepairUser:
		return "run this as the owner of the directory, or with sudo"
	}
	return ""
}

// printCheckup prints a line for each store, then each problem with its repair below it, in the order in
// which the stores were checked. Damage in an early store can cause problems in a later one.
func printCheckup(cmd *cobra.Command, r *checkup.Report) error {
	table := term.NewTable(cmd.OutOrStdout(), "STORE", "STATE", "BYTES", "CHECKED")
	for _, s := range r.Stores {
		table.Row(s.Name, s.State, s.Bytes, s.Detail)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, p := range r.Problems {
		kind := "problem"
		if p.Warning {
			kind = "warning"
		}
		where := p.Path
		if p.Where != "" {
			where += ", " + p.Where
		}
		// Names of files and what SQLite says about damage may have any bytes.
		fmt.Fprintf(cmd.OutOrStdout(), "\n%s: %s: %s\n", kind, term.SafeLine(where), term.SafeText(p.What))
		if p.Next != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "  %s\n", term.SafeLine(p.Next))
		}
	}
	return nil
}

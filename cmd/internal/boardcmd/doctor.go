//go:build linux

package boardcmd

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/doctor"
	"agentctl/term"
)

// newDoctor returns the command doctor. The checks are in package doctor; it also runs them inside the
// daemon, for agents (InsideDoctor). Flags are passed on as settings of the daemon, with their origin, so
// that a finding can name the flag that is wrong.
//
// The flags are not parsed here: a wrong one is a finding like a wrong line of a file, and the other checks
// go on. An empty flag is left out of the settings, where it would hide the file's value.
//
// The report goes to stdout also if the exit code is 1; the error adds a line on stderr.
func newDoctor() *cobra.Command {
	var out cli.Output
	var o doctor.Options
	var strict bool
	values := map[string]*string{} // flags by key of the configuration
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Find problems on this machine and print how to fix them",
		Long: `Find problems of agentctl on this machine and print how to fix them. Checked are configuration,
state directory, socket, daemon, clock, relay (name, TCP, certificate), token, power, temperature,
SD card wear, history and service. The checks run in parallel, take at most 5 s and change nothing.

Relay, token and certificate authority are those of the running daemon, unless flags, the
environment, the configuration file or /etc/default/agentctl set others. The exit code is 0 if
no check fails (warnings are allowed), otherwise 1.`,
		Example: "  agentctl doctor\n  sudo agentctl doctor --warnings-as-errors\n  agentctl doctor -o json | jq '.checks[] | select(.status != \"ok\")'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Version, o.BuiltAt, o.Settings = cli.Version, cli.BuildTime(), config.Settings{}
			for key, value := range values {
				if *value != "" {
					o.Settings[key] = config.Setting{Value: *value, Origin: "--" + flagName(key)}
				}
			}
			r := doctor.Examine(cmd.Context(), o)
			if err := out.Print(cmd, r, func() error { return printReport(cmd.OutOrStdout(), r) }); err != nil {
				return err
			}
			switch { // the report above names each; the error is for the exit code
			case r.Failures > 0:
				return cli.Errorf(cli.ExitFailure, "%s failed", counted(r.Failures, "check"))
			case strict && r.Warnings > 0:
				return cli.Errorf(cli.ExitFailure, "%s", counted(r.Warnings, "warning"))
			}
			return nil
		},
	}
	out.AddFlags(c)
	f := c.Flags()
	f.StringVar(&o.Socket, "socket", cli.EnvOr("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	f.StringVar(&o.ConfigFile, "config", cli.EnvOr("AGENTCTL_CONFIG", ""), "configuration `FILE` of the daemon [AGENTCTL_CONFIG]")
	for _, setting := range []struct{ key, usage string }{
		{"state_dir", "`DIR` of the daemon's state"},
		{"relay", "`URL` of the relay"},
		{"token_file", "`FILE` with the device token"},
		{"ca_file", "PEM `FILE` with the authority that signed the relay's certificate"},
		{"ca_sha256", "SHA-256 of the relay's own authority in `HEX`, in place of --ca-file"},
	} {
		values[setting.key] = f.String(flagName(setting.key), "", setting.usage+" ["+config.FindKey(setting.key).Env()+"]")
	}
	f.BoolVar(&strict, "warnings-as-errors", false, "exit with 1 if there are warnings")
	return c
}

// printReport prints the findings, wrapped at the width of a terminal: status, name and message in
// columns, and below the message the next step, bold after "->". Elsewhere than on a terminal no line is
// wrapped, so that grep finds all of a message.
//
// Messages may quote what a relay answered, so control characters are replaced.
func printReport(w io.Writer, r *doctor.Report) error {
	// Columns: 4 of the status, 2 spaces, 11 of the name, 1 space.
	const indent = 18
	width, _, isTerminal := term.Size(w)
	if !isTerminal {
		width = 1 << 16
	}
	colored := term.ColorEnabled(w)
	colors := map[doctor.Status]string{doctor.OK: term.Green, doctor.Warn: term.Yellow, doctor.Fail: term.Red, doctor.Skip: term.Faint}
	margin := strings.Repeat(" ", indent)
	for _, f := range r.Checks {
		fmt.Fprintf(w, "%s  %-11s ", term.Paint(colored, colors[f.Status], fmt.Sprintf("%-4s", f.Status)), f.Name)
		fmt.Fprintln(w, strings.Join(term.Wrap(term.SafeLine(f.Message), width-indent), "\n"+margin))
		if f.Next == "" {
			continue
		}
		prefix := "->"
		for _, line := range term.Wrap(term.SafeLine(f.Next), width-indent-3) {
			fmt.Fprintf(w, "%s%s %s\n", margin, prefix, term.Paint(colored, term.Bold, line))
			prefix = "  "
		}
	}
	_, err := fmt.Fprintf(w, "%s, %s\n", counted(r.Failures, "failure"), counted(r.Warnings, "warning"))
	return err
}

// counted is a number with its noun, which gets its plural: "1 check", "2 checks".
func counted(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"agentctl/term"
)

// Statuses of a finding.
const (
	findOK   = "ok"
	findWarn = "warn"
	findFail = "fail"
	findSkip = "skip" // it does not apply here, or cannot be seen by this user
)

// finding is what one check found.
type finding struct {
	Name    string `json:"name"`
	Status  string `json:"status"`
	Message string `json:"message"`
	Next    string `json:"next,omitempty"` // what to do about it
}

// diagnosis is what `agentctl doctor -o json` prints.
type diagnosis struct {
	Checks   []finding `json:"checks"`
	Warnings int       `json:"warnings"`
	Failures int       `json:"failures"`
}

// check is a question to the machine. It may have several answers; what is left of names
// when its time is over is reported as unanswered.
type check struct {
	names []string
	run   func(ctx context.Context) []finding
}

// checkTime is what a check may take.
const checkTime = 5 * time.Second

func newDoctor() *cobra.Command {
	var out output
	var p patient
	var strict bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Find out what is wrong with this box's agentctl, and what to do",
		Long: `Find out what is wrong with this box's agentctl, and what to do: configuration, state directory,
socket, daemon, clock, relay (name, TCP, certificate), token, power, heat, wear of the card,
history, service. The checks run side by side and take 5 s at most; nothing is changed.

The relay, its token and its authority are those of the running daemon, unless flags, the
environment, the configuration file or /etc/default/agentctl name others. Exit 0 when all is
well or there are only warnings, 1 when something fails.`,
		Example: "  agentctl doctor\n  sudo agentctl doctor --warnings-as-errors\n  agentctl doctor -o json | jq '.checks[] | select(.status != \"ok\")'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			p.resolve()
			d := diagnose(cmd.Context(), p.checks(), checkTime)
			w := cmd.OutOrStdout()
			if err := out.print(cmd, d, func() error { return d.write(w) }); err != nil {
				return err
			}
			switch {
			case d.Failures > 0:
				return exit(exitFailure, "%s", counted(d.Failures, "check")+" failed")
			case strict && d.Warnings > 0:
				return exit(exitFailure, "%s", counted(d.Warnings, "warning"))
			}
			return nil
		},
	}
	out.flags(c)
	p.flags(c)
	c.Flags().BoolVar(&strict, "warnings-as-errors", false, "exit 1 when there are warnings")
	return c
}

func counted(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// diagnose runs all checks side by side, each for limit at most. A check that hangs in the
// kernel (a dead network mount) is left behind: the process ends soon.
func diagnose(ctx context.Context, checks []check, limit time.Duration) *diagnosis {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found := make([][]finding, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() { found[i] = c.within(ctx) })
	}
	wg.Wait()
	d := &diagnosis{Checks: []finding{}}
	for _, fs := range found {
		for _, f := range fs {
			switch f.Status {
			case findWarn:
				d.Warnings++
			case findFail:
				d.Failures++
			}
			d.Checks = append(d.Checks, f)
		}
	}
	return d
}

// within runs the check until ctx ends.
func (c check) within(ctx context.Context) []finding {
	done := make(chan []finding, 1)
	go func() { done <- c.run(ctx) }()
	select {
	case fs := <-done:
		return fs
	case <-ctx.Done():
	}
	select { // what it says when its time is over is better than nothing
	case fs := <-done:
		return fs
	case <-time.After(100 * time.Millisecond):
	}
	fs := make([]finding, 0, len(c.names))
	for _, n := range c.names {
		fs = append(fs, finding{n, findFail, "no answer in time", "see the kernel's log for a device or mount that hangs: dmesg"})
	}
	return fs
}

// write prints the findings, on a terminal in its width.
func (d *diagnosis) write(w io.Writer) error {
	const indent = 18
	width, _, terminal := term.Size(w)
	if !terminal {
		width = 1 << 16
	}
	colour := term.ColorEnabled(w)
	sgr := map[string]string{findOK: term.Green, findWarn: term.Yellow, findFail: term.Red, findSkip: term.Faint}
	for _, f := range d.Checks {
		fmt.Fprintf(w, "%s  %-11s ", term.Paint(colour, sgr[f.Status], fmt.Sprintf("%-4s", f.Status)), f.Name)
		for i, line := range term.Wrap(term.SafeLine(f.Message), width-indent) {
			if i > 0 {
				line = strings.Repeat(" ", indent) + line
			}
			fmt.Fprintln(w, line)
		}
		if f.Next == "" {
			continue
		}
		for i, line := range term.Wrap(term.SafeLine(f.Next), width-indent-3) {
			fmt.Fprintf(w, "%s%s %s\n", strings.Repeat(" ", indent), []string{"->", "  "}[min(i, 1)], term.Paint(colour, term.Bold, line))
		}
	}
	_, err := fmt.Fprintf(w, "%s, %s\n", counted(d.Failures, "failure"), counted(d.Warnings, "warning"))
	return err
}

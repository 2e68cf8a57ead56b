//go:build linux

package boardcmd

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/term"
)

// newStatus returns the command status. Its exit code is 0 whatever the daemon reports, even without a
// link. A script that wants a verdict uses 'agentctl doctor'.
func newStatus() *cobra.Command {
	var out cli.Output
	var socket socketFlag
	c := &cobra.Command{
		Use:     "status",
		Short:   "Show the state of the daemon: identity, link, clock, storage, sampling",
		Example: "  agentctl status\n  agentctl status -o json | jq .link.state",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return socket.withClient(cmd, func(ctx context.Context, cl *control.Client) error {
				var s daemon.Status
				if err := cl.Status(ctx, &s); err != nil {
					return err
				}
				return out.Print(cmd, s, func() error { return printStatus(cmd.OutOrStdout(), &s) })
			})
		},
	}
	out.AddFlags(c)
	socket.addFlags(c)
	return c
}

// printStatus prints one row per subject: a word in the first column, and its state. An error and its next
// step follow as rows without a word. On a terminal a long row is wrapped in its own column; elsewhere
// each row is one line, so that grep finds all of it.
//
// A relay may have chosen the board's name and the words of an error: what could control the terminal
// is replaced.
//
// Rows that only matter when something is wrong (Join, State, Config, Alert) are absent otherwise.
func printStatus(w io.Writer, s *daemon.Status) error {
	const indent = 10
	width, _, terminal := term.Size(w)
	row := func(k, format string, args ...any) {
		text := term.SafeLine(fmt.Sprintf(format, args...))
		lines := []string{text}
		if terminal && indent+utf8.RuneCountInString(text) > width {
			lines = term.Wrap(text, max(width-indent, 1))
		}
		for _, l := range lines {
			fmt.Fprintf(w, "%-*s%s\n", indent, k, l)
			k = ""
		}
	}
	name := s.NodeID
	if s.Name != "" {
		name = s.Name + " (" + s.NodeID + ")"
	}
	row("Node", "%s", name)
	row("Version", "%s, up %s", s.Version, (time.Duration(s.UptimeS) * time.Second).String())
	switch s.Link.State {
	case daemon.LinkDisabled:
		row("Link", "none: this board works alone; for a relay, type there: agentctl invite, and paste the line here")
	case daemon.LinkReady:
		row("Link", "ready, %s, since %s", s.Link.Relay, term.Ago(s.Link.SinceMS))
	default:
		row("Link", "%s, %s, since %s%s", s.Link.State, s.Link.Relay, term.Ago(s.Link.SinceMS), nextTry(s.Link.NextTryMS))
	}
	// Once the link is up again, its last error is of no interest.
	if e := s.Link.LastError; e != nil && s.Link.State != daemon.LinkReady {
		row("", "last error: %s", e.Message)
		row("", "%s", s.LinkHint())
	}
	// Without a problem there is no hint, and no row.
	if j := s.Join; j != nil && j.Hint != "" {
		row("Join", "%s", joinText(j))
		row("", "%s", j.Hint)
	}
	row("Clock", "%s", clockText(s))
	printStateDir(row, &s.StateDir)
	printStorage(row, s)
	if c := s.Config; c != nil && c.Error != "" {
		row("Config", "the files have errors, the previous settings stay in force; see: agentctl config validate")
	} else if c != nil && len(c.RestartNeeded) > 0 {
		row("Config", "changed, and waits for a restart: %s", strings.Join(c.RestartNeeded, ", "))
	}
	// The rows below need a sample: alerts too are evaluated on samples.
	if s.Sample == nil {
		row("Sampling", "no sample yet: %s", s.Sampling.LastError)
		return nil
	}
	each := (time.Duration(s.Sampling.IntervalMS) * time.Millisecond).String()
	if s.Sampling.Running {
		row("Sampling", "every %s; pushed to local clients: %s", each, strings.Join(s.Sampling.Modules, ", "))
	} else {
		row("Sampling", "every %s; push and recording are stopped, go on with: agentctl start", each)
	}
	m := s.Sample
	row("CPU", "%.1f %%   load %.2f %.2f %.2f", m.CPUPct, m.Load1, m.Load5, m.Load15)
	row("Memory", "%s of %s", term.Bytes(m.MemBytes), term.Bytes(m.MemTotalBytes))
	if m.DiskPct != nil {
		row("Disk", "%.1f %% used", *m.DiskPct)
	} else {
		row("Disk", "%s", s.Sampling.DiskError)
	}
	for _, a := range s.Alerts {
		row("Alert", "%s: %s%s", a.Level, a.Message, alertAge(a.TS, s.Clock.NowMS))
	}
	return nil
}

// alertAge is the age of an alert, in parentheses. Both times are by the daemon's clock, which may be
// off by hours on a board without a battery: the difference is right also then. It is empty if the
// time was not known when the alert was raised.
func alertAge(ts, nowMS int64) string {
	if ts == 0 || nowMS == 0 {
		return ""
	}
	return " (" + term.Ago(time.Now().UnixMilli()-max(nowMS-ts, 0)) + ")"
}

// printStateDir reports what is wrong with the state directory; nothing when all is well.
func printStateDir(row func(k, format string, args ...any), s *daemon.StateDirStatus) {
	if !s.IsOK() {
		row("State", "the disk of %s: %s since %s: %s", s.Path, s.State, term.Ago(s.SinceMS), s.Detail)
		row("", "%s", s.Hint())
	}
	for _, f := range s.SetAside {
		row("State", "%s", f.Text())
	}
	if len(s.SetAside) > 0 {
		row("", "%s", s.SetAsideHint())
	}
}

// nextTry says when the daemon dials again; nothing if it does not wait for that.
//
// The daemon computes the time for each answer from a duration and this machine's clock, so that a clock that
// was set meanwhile does not matter.
func nextTry(atMS int64) string {
	if atMS == 0 {
		return ""
	}
	switch wait := time.Until(time.UnixMilli(atMS)); {
	case wait < time.Second:
		return ", next try now"
	case wait < 2*time.Minute:
		return fmt.Sprintf(", next try in %.0f s", wait.Seconds())
	default:
		return fmt.Sprintf(", next try in %.0f min", wait.Minutes())
	}
}

// joinText says what is wrong with the join of this board: its state, the relay unless the error names it,
// the error, and the join file that asks for it.
func joinText(j *daemon.JoinStatus) string {
	text := j.State
	if j.Relay != "" && !strings.Contains(j.Error, j.Relay) {
		text += ", " + j.Relay
	}
	if j.Error != "" {
		text += ": " + j.Error
	}
	if j.File != "" {
		text += " (by " + j.File + ")"
	}
	return text
}

// clockText reports whether the time is trusted, and how it compares with the relay's.
func clockText(s *daemon.Status) string {
	switch {
	case s.Clock.State == daemon.ClockUnsynced:
		return "not set yet; samples are kept and get their time when it is known"
	// Without a relay there is no other clock to compare with.
	case s.Link.State == daemon.LinkDisabled:
		return "this machine's own"
	}
	return fmt.Sprintf("%s, %d ms off the relay's", s.Clock.State, s.Clock.OffsetMS)
}

// printStorage prints the state of the history. While it cannot be written, samples are kept in memory
// only, and the row below says how to repair that.
func printStorage(row func(k, format string, args ...any), status *daemon.Status) {
	s := &status.Storage
	switch s.State {
	case "off":
		row("History", "off; turn it on with: agentctl config set history.enabled true")
	case "ok":
		if s.Bytes == 0 { // the file is opened with the first write
			row("History", "%d samples in memory, not written yet", s.Unsaved)
			break
		}
		row("History", "%d samples in %s, %s written today", s.Rows+int64(s.Unsaved), term.Bytes(uint64(s.Bytes)), term.Bytes(uint64(s.WrittenTodayBytes)))
		if s.LastError != "" {
			row("", "last error%s: %s", alertAge(s.LastErrorMS, status.Clock.NowMS), s.LastError)
		}
	default:
		row("History", "%s, in memory only: %s", s.State, s.Detail)
		row("", "%s", s.Hint())
	}
}

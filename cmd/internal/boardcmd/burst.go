//go:build linux

package boardcmd

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/control"
	"agentctl/duration"
	"agentctl/term"
)

// maxBurst is the longest burst that the daemon accepts, as docs/control.md has it: control.maxBurstTTL.
const maxBurst = 10 * time.Minute

// newBurst returns the command burst. It checks the bounds that the daemon has too, because a value out of
// range is a mistake in the command and not a failure of the daemon (exit code 2, not 1).
//
// The daemon keeps bursts in memory and ends them itself: nothing is left behind if this process is killed,
// and a restart of the daemon ends all of them. At most 8 run at a time, of all clients together
// (control.maxBursts); the daemon refuses another one, which is exit code 1.
func newBurst() *cobra.Command {
	var c changer
	var interval, dur time.Duration
	cmd := &cobra.Command{
		Use:   "burst",
		Short: "Sample faster for a while",
		Long: `Make the daemon sample and push faster for a limited time, for all local clients. Then the
previous interval applies again. When bursts overlap, the fastest one wins.`,
		Example: "  agentctl burst\n  agentctl burst --interval 200ms --for 2m\n  agentctl burst --dry-run",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < config.MinInterval || interval > config.MaxInterval {
				return cli.Errorf(cli.ExitUsage, "--interval %s is out of range: 100ms to 60s", interval)
			}
			if dur < config.MinInterval || dur > maxBurst {
				return cli.Errorf(cli.ExitUsage, "--for %s is out of range: 100ms to 10m", dur)
			}
			return c.run(cmd, func(ctx context.Context, cl *control.Client, ch *change) (string, error) {
				ch.Undo = "none needed: it falls back by itself" // the daemon ends it, also if this process is gone
				// For a dry run, by this machine's clock. The daemon answers with its trusted time, which
				// differs where that clock is wrong.
				until := time.Now().Add(dur)
				if !c.dryRun {
					var err error
					if until, err = cl.Burst(ctx, interval, dur); err != nil {
						return "", err
					}
				}
				ch.ExpiresAt = until.UnixMilli()
				text := fmt.Sprintf("burst: every %s for %s, until %s", term.Span(interval), term.Span(dur), until.Format(time.TimeOnly))
				// A burst that has no effect is accepted, so that a script need not know the present state.
				switch base := time.Duration(ch.Before.IntervalMS) * time.Millisecond; {
				case !ch.Before.Running:
					text += "; but sampling is stopped, go on with: agentctl start"
				case interval >= base:
					text += fmt.Sprintf("; the present interval of %s is already as fast", term.Span(base))
				default:
					// Before.IntervalMS is the base interval. A faster burst of another client is not in the
					// status, so that After may promise a slower interval than there will be.
					ch.After.IntervalMS = interval.Milliseconds()
				}
				return text, nil
			})
		},
	}
	cmd.Flags().Var(duration.NewValue(&interval, config.MinInterval), "interval", "sample every `DURATION`, 100ms to 60s")
	cmd.Flags().Var(duration.NewValue(&dur, 30*time.Second), "for", "end the burst after `DURATION`, 100ms to 10m")
	c.addFlags(cmd)
	return cmd
}

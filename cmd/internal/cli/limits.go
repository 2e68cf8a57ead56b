package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"agentctl/duration"
)

// Limits are --count and --for: when a streaming command ends by itself; 0 is never.
//
// They end a command with success: for a stream it is the usual end.
type Limits struct {
	Count int
	Time  time.Duration
}

// AddFlags adds the flags; action is what happens after so many, and items is what --count counts.
func (l *Limits) AddFlags(c *cobra.Command, action, items string) {
	c.Flags().IntVar(&l.Count, "count", 0, action+" after `N` "+items+" (0: never)")
	c.Flags().Var(duration.NewValue(&l.Time, 0), "for", "end after `DURATION` (0: never)")
}

// Check refuses a count below 0, as a usage error.
func (l *Limits) Check() error {
	if l.Count < 0 {
		return Errorf(ExitUsage, "--count is above 0, or 0 for never")
	}
	return nil
}

// Context is cmd's context, ended by --for. Its Err tells the caller why it ended: DeadlineExceeded after
// --for, Canceled after Ctrl-C.
func (l *Limits) Context(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	if l.Time > 0 {
		return context.WithTimeout(cmd.Context(), l.Time)
	}
	return context.WithCancel(cmd.Context())
}

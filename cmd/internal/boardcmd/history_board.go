package boardcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/manifest"
	"agentctl/monitor"
)

// boardFlags name a board behind a relay, whose history is shown instead of this machine's.
type boardFlags struct {
	cli.RelayFlags
	board string
}

func (f *boardFlags) flags(c *cobra.Command) {
	f.RelayFlags.AddFlags(c)
	c.Flags().StringVar(&f.board, "board", "", "show the history of board `NODE`: its id, a unique prefix of it or its name")
}

// isSet reports whether a board is named. Flags of a relay without one are an error: their
// user would take the history of this machine for a board's.
func (f *boardFlags) isSet(cmd *cobra.Command) (bool, error) {
	isRelayNamed := slices.ContainsFunc([]string{"board", "relay", "token-file", "ca-file", "ca-sha256"}, cmd.Flags().Changed)
	if f.board == "" && isRelayNamed {
		return false, cli.Errorf(cli.ExitUsage, "name a board of the relay: --board NODE; see: agentctl ls")
	}
	if f.board != "" && cmd.Flags().Changed("socket") {
		return false, cli.Errorf(cli.ExitUsage, "give either --board, for a board behind a relay, or --socket, for a daemon of this machine")
	}
	return f.board != "", nil
}

// connected makes the board the source of h and calls show with the board's time.
func (f *boardFlags) connected(cmd *cobra.Command, h *monitor.Window, show func(ctx context.Context, now time.Time, isSet bool) error) error {
	ctx := cmd.Context()
	rc, err := f.Client()
	if err != nil {
		return err
	}
	n, err := rc.Node(ctx, f.board)
	switch {
	case err != nil:
		return err
	case len(n.Capabilities) == 0:
		return fmt.Errorf("node %s %w", n.Label(), client.ErrNeverLinked)
	case !n.HasHistory():
		return noHistory(n)
	}
	now, err := boardTime(ctx, rc, n)
	if err != nil {
		return err
	}
	h.Hint = "A longer window may have something: agentctl history --board " + n.Label() + " --since 7d; whether it records, on the board: agentctl status"
	h.Source = monitor.SeriesSource(func(ctx context.Context, from, to, step int64, keys []string, fn func(int64, map[string]float64) error) error {
		return rc.History(ctx, n.NodeID, client.HistoryQuery{FromMS: from, ToMS: to, StepMS: step, Metrics: keys}, fn)
	})
	return show(ctx, now, true)
}

// noHistory is the error for a board without the capability.
func noHistory(n *client.Node) error {
	return fmt.Errorf("board %s %w; on the board see: agentctl status", n.Label(), client.ErrNoHistory)
}

// boardTime asks the board for its time, which its records have: that of a snapshot.
func boardTime(ctx context.Context, rc *client.Client, n *client.Node) (time.Time, error) {
	body, err := rc.Call(ctx, manifest.ToolName{Short: "sys", NodeID: n.NodeID, CapID: "metrics", Verb: manifest.VerbSnapshot}.String(), nil)
	if err != nil {
		return time.Time{}, err
	}
	var frame struct {
		TS int64 `json:"ts_ms"`
	}
	if err := json.Unmarshal(body, &frame); err != nil || frame.TS == 0 {
		return time.Time{}, &client.ProtocolError{What: "the board's snapshot has no time", Err: err}
	}
	return time.UnixMilli(frame.TS), nil
}

// setStep chooses the step of an export from a board, unless it was given, and says so when
// records are left out.
func (f *boardFlags) setStep(cmd *cobra.Command, h *monitor.Window) {
	if f.board == "" || h.StepMS != 0 {
		return
	}
	h.StepMS = monitor.DefaultStep(h.FromMS, h.ToMS)
	if step := time.Duration(h.StepMS) * time.Millisecond; step > time.Second {
		fmt.Fprintf(cmd.ErrOrStderr(), "one record per %s; choose with --step\n", step)
	}
}

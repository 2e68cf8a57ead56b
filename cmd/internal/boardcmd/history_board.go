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

func (f *boardFlags) addFlags(c *cobra.Command) {
	f.RelayFlags.AddFlags(c)
	c.Flags().StringVar(&f.board, "board", "", "show the history of board `NODE`: its id, a unique prefix of it or its name")
}

// isNamed reports whether a board is named. Flags of a relay without one are an error: their
// user would take the history of this machine for a board's.
func (f *boardFlags) isNamed(cmd *cobra.Command) (bool, error) {
	isRelayNamed := slices.ContainsFunc([]string{"board", "relay", "token-file", "ca-file", "ca-sha256"}, cmd.Flags().Changed)
	if f.board == "" && isRelayNamed {
		return false, cli.Errorf(cli.ExitUsage, "name a board of the relay: --board NODE; see: agentctl ls")
	}
	if f.board != "" && cmd.Flags().Changed("socket") {
		return false, cli.Errorf(cli.ExitUsage, "give either --board, for a board behind a relay, or --socket, for a daemon of this machine")
	}
	return f.board != "", nil
}

// open makes the board the source of w, and returns the time by the board's clock. It asks the relay for
// the node, whose last manifest shows whether the board keeps a history, and the board for its time. The
// records are read later, through w.Source.
//
// A board that has never connected has no capabilities; that is exit code 5, like one that is offline.
func (f *boardFlags) open(cmd *cobra.Command, w *monitor.Window) (now time.Time, err error) {
	ctx := cmd.Context()
	rc, err := f.Client()
	if err != nil {
		return now, err
	}
	n, err := rc.Node(ctx, f.board)
	switch {
	case err != nil:
		return now, err
	case len(n.Capabilities) == 0:
		return now, fmt.Errorf("node %s %w", n.Label(), client.ErrNeverLinked)
	case !n.HasHistory():
		return now, fmt.Errorf("board %s %w; on the board see: agentctl status", n.Label(), client.ErrNoHistory)
	}
	// The hint of package monitor names commands for a daemon of this machine.
	w.Hint = "A longer window may have something: agentctl history --board " + n.Label() + " --since 7d; whether it records, on the board: agentctl status"
	w.Source = monitor.SeriesSource(func(ctx context.Context, from, to, step int64, keys []string, fn func(int64, map[string]float64) error) error {
		return rc.History(ctx, n.NodeID, client.HistoryQuery{FromMS: from, ToMS: to, StepMS: step, Metrics: keys}, fn)
	})
	return boardTime(ctx, rc, n)
}

// boardTime asks the board for its time, which its records have: that of a snapshot. The relay's time
// would not do: records have the time that the board stamped, right or wrong.
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

// setStep chooses the step of an export from a board, unless it was given: every record would be too many
// for a slow link. The step is a round one with which about 14,000 records fit the window, and a second at
// least, as boards record. It says on stderr when that leaves out records, so that the export on stdout
// stays clean.
func (f *boardFlags) setStep(cmd *cobra.Command, w *monitor.Window) {
	if f.board == "" || w.StepMS != 0 {
		return
	}
	w.StepMS = monitor.DefaultStep(w.FromMS, w.ToMS)
	if step := time.Duration(w.StepMS) * time.Millisecond; step > time.Second {
		fmt.Fprintf(cmd.ErrOrStderr(), "one record per %s; choose with --step\n", step)
	}
}

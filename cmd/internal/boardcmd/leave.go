//go:build linux

package boardcmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/transport/enroll"
)

// newLeave makes the command leave, which needs no relay: a board must be able to leave one that is gone.
func newLeave() *cobra.Command {
	var o joinOptions
	c := &cobra.Command{
		Use:   "leave",
		Short: "Undo join: this board works alone again",
		Long: `Undo join: the board's key and token are removed, and a daemon that runs works alone again,
without a restart. The history stays. The relay keeps the node until its operator removes it.`,
		Example: "  sudo agentctl leave\n  agentctl leave -o json",
		RunE:    func(cmd *cobra.Command, _ []string) error { return o.leave(cmd) },
	}
	o.addTargetFlags(c)
	o.out.AddFlags(c)
	return c
}

// leave removes the credentials; a daemon that runs then works alone without a restart. A board that has
// none is no error, so that a script may repeat it. Nothing is sent to the relay: it may be gone.
//
// The installation gets a new identity too (enroll.Leave): a copied card that leaves is another board from
// then on. With a daemon, leave returns when that one works alone, and fails after joinTimeout if it does
// not; the credentials are removed by then.
func (o *joinOptions) leave(cmd *cobra.Command) error {
	t, err := o.target(cmd)
	if err != nil {
		return err
	}
	if t.Daemon != nil {
		defer t.Daemon.Close()
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), joinTimeout)
	defer cancel()
	cred, err := t.Leave(ctx)
	answer := struct {
		Left   bool   `json:"left"`
		NodeID string `json:"node_id,omitempty"`
		Relay  string `json:"relay,omitempty"`
	}{Left: err == nil}
	switch {
	// With -o json this prints {"left":false}.
	case errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(cmd.ErrOrStderr(), "This board has not joined a relay by a code (in %s): nothing to do.\n", t.StateDir)
		return o.out.Print(cmd, answer, func() error { return nil })
	case err != nil:
		return explainLeave(err)
	// A damaged credential is removed as well. It is nil if its relay and node could not be read.
	case cred != nil:
		answer.NodeID, answer.Relay = cred.NodeID, cred.Relay
	}
	return o.out.Print(cmd, answer, func() error {
		w := cmd.OutOrStdout()
		fmt.Fprintln(w, "This board works alone again; its history stays.")
		if cred != nil {
			fmt.Fprintf(w, "%s keeps the node. Unless another board uses it (this one may be a copied card), remove it there with: agentctl node remove %s\n", cred.Relay, cred.NodeID)
		}
		fmt.Fprintln(w, "Join again with a new line of: agentctl invite")
		return nil
	})
}

// explainLeave gives an error of leave its exit code and the next step. What is not about the files of the
// state directory is about the daemon or the time: the credentials may be removed by then, and a repeat
// says so.
func explainLeave(err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.As(err, new(*enroll.StorageError)) {
		return explainJoin(err)
	}
	return cli.Errorf(cli.ExitFailure, "%w\ndo the same again, and see: agentctl status", err)
}

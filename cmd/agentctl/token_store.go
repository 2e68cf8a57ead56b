//go:build linux && !agentctl_omit_relay

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"agentctl/relay/auth"
)

// tokenStore opens a relay's state; only token create sets one up.
//
// Several processes may have the store open at a time: a relay that runs sees a new token at
// once, and a revocation within seconds.
func tokenStore(cmd *cobra.Command, dir string, existing bool) (*auth.Store, error) {
	s, err := auth.Open(auth.Options{StateDir: dir, Existing: true})
	if errors.Is(err, auth.ErrNoState) && !existing {
		fmt.Fprintf(cmd.ErrOrStderr(), "a new relay's keys are made in %s; it is started with: agentctl relay%s\n", dir, stateDirHint(cmd))
		s, err = auth.Open(auth.Options{StateDir: dir})
	}
	if errors.Is(err, auth.ErrNoState) {
		err = fmt.Errorf("%w; name the relay's with --state-dir", err)
	}
	return s, explainState(cmd, err)
}

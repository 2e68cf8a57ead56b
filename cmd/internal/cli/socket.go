package cli

import (
	"context"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/control"
)

// SocketFlag names the control socket of the daemon on this machine.
type SocketFlag struct{ Path string }

// AddFlags adds --socket to c.
func (s *SocketFlag) AddFlags(c *cobra.Command) {
	c.Flags().StringVar(&s.Path, "socket", EnvOr("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
}

// WithClient calls fn with a connection to the daemon, and closes the connection afterwards.
// Errors of Dial have their next step already; Explain adds the exit code.
func (s *SocketFlag) WithClient(cmd *cobra.Command, fn func(context.Context, *control.Client) error) error {
	cl, err := control.Dial(cmd.Context(), s.Path)
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }()
	return fn(cmd.Context(), cl)
}

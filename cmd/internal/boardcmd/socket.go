package boardcmd

import (
	"context"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/control"
)

// socketFlag names the control socket of the daemon on this machine.
//
// Its default is the socket of this user's daemon if it exists, else that of the service
// (config.ClientSocket). It is chosen when the commands are made, without a connection.
type socketFlag struct{ Path string }

// addFlags adds --socket to c.
func (s *socketFlag) addFlags(c *cobra.Command) {
	c.Flags().StringVar(&s.Path, "socket", cli.EnvOr("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
}

// withClient calls fn with a connection to the daemon, and closes the connection afterwards. Dial has 5 s
// for the connection and the hello, because a daemon that hangs still accepts connections through the
// kernel's backlog. Errors of Dial have their next step already; cli.Explain adds the exit code: 3 for no
// daemon, 4 for a socket that this user may not open.
func (s *socketFlag) withClient(cmd *cobra.Command, fn func(context.Context, *control.Client) error) error {
	cl, err := control.Dial(cmd.Context(), s.Path)
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }()
	return fn(cmd.Context(), cl)
}

//go:build linux

package plugincmd

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/relay/plugins/process"
)

// newPluginServe returns the command plugin serve, which agentctl-relay-plugin@.service runs. It is
// hidden because it needs the socket of a service manager. As a service a plugin has a separate
// user and the limits of its unit.
//
// It runs until the relay closes the connection or systemd stops the unit; systemd starts it again for the
// next connection. The program writes its stderr to that of the unit, so that the journal has it. Exit code 2
// means that there was no socket, 1 that the program could not be started or failed.
func newPluginServe() *cobra.Command {
	return &cobra.Command{
		Use:    "serve DIR",
		Short:  "Run a plugin as a service, for one connection of the socket that systemd passes",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			// The listening socket is a file descriptor that systemd passes, sd_listen_fds(3).
			ln, err := control.InheritedListener(os.Getenv)
			if err != nil {
				return err
			}
			if ln == nil {
				return cli.Errorf(cli.ExitUsage, "systemd starts this command, with a socket: systemctl enable --now agentctl-relay-plugin@NAME.socket")
			}
			// The program gets it as HOME, since the unit may have no right to write to DIR.
			home := os.Getenv("STATE_DIRECTORY") // systemd.exec(5)
			if home == "" {
				home = args[0]
			}
			if err := process.Serve(cmd.Context(), ln, args[0], home); err != nil {
				return fmt.Errorf("serve the plugin in %s: %w", args[0], err)
			}
			return nil
		},
	}
}

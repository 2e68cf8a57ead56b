package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/config"
	"agentctl/control"
)

// relayFlags name a relay and who calls it.
//
// Precedence: flag, environment, default. The token is named by its file, because arguments
// and most environments are visible to other processes.
type relayFlags struct {
	relay, tokenFile, caFile string
}

func (f *relayFlags) flags(c *cobra.Command) {
	c.Flags().StringVar(&f.relay, "relay", env("AGENTCTL_RELAY", "http://127.0.0.1:8460"), "`URL` of the relay [AGENTCTL_RELAY]")
	c.Flags().StringVar(&f.tokenFile, "token-file", env("AGENTCTL_TOKEN_FILE", ""), "`FILE` with an agent token [AGENTCTL_TOKEN_FILE]")
	c.Flags().StringVar(&f.caFile, "ca-file", env("AGENTCTL_CA_FILE", ""), "PEM `FILE` with the authority that signed the relay's certificate [AGENTCTL_CA_FILE]")
}

// client makes the client of the relay that the flags name.
func (f *relayFlags) client() (c *client.Client, err error) {
	o := client.Options{URL: f.relay}
	if f.tokenFile != "" {
		if o.Token, err = readToken(f.tokenFile); err != nil {
			return nil, err
		}
	}
	if o.TLS, err = config.ClientTLS(f.caFile); err != nil {
		return nil, err
	}
	if c, err = client.New(o); err != nil {
		return nil, fmt.Errorf("--relay %w", err)
	}
	return c, nil
}

// socketFlag names the control socket of the daemon on this machine.
type socketFlag struct{ path string }

func (s *socketFlag) flags(c *cobra.Command) {
	c.Flags().StringVar(&s.path, "socket", env("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
}

// connected calls fn with a connection to the daemon, and closes that afterwards.
// Errors of Dial say what to do already; explain adds their exit code.
func (s *socketFlag) connected(cmd *cobra.Command, fn func(context.Context, *control.Client) error) error {
	cl, err := control.Dial(cmd.Context(), s.path)
	if err != nil {
		return err
	}
	defer func() { _ = cl.Close() }()
	return fn(cmd.Context(), cl)
}

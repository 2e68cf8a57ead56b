package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentctl/client"
	"agentctl/config"
	"agentctl/control"
	"agentctl/login"
)

// defaultRelay is the relay of a command that names none, without a context.
const defaultRelay = "http://127.0.0.1:8460"

// relayFlags name a relay and who calls it.
//
// Precedence: flag, environment, context of 'agentctl login', default. The token is named by
// its file, because arguments and most environments are visible to other processes.
type relayFlags struct {
	relay, tokenFile, caFile, caSHA256 string
	contextName                        string // of --context, which only the commands of mcp have
	forMCP                             bool   // MCP_TOKEN counts as a token too
	set                                *pflag.FlagSet
}

func (f *relayFlags) flags(c *cobra.Command) {
	f.set = c.Flags()
	f.set.StringVar(&f.relay, "relay", env("AGENTCTL_RELAY", defaultRelay), "`URL` of the relay; before the default comes the context of 'agentctl login' [AGENTCTL_RELAY]")
	f.set.StringVar(&f.tokenFile, "token-file", env("AGENTCTL_TOKEN_FILE", ""), "`FILE` with an agent token [AGENTCTL_TOKEN_FILE]")
	f.set.StringVar(&f.caFile, "ca-file", env("AGENTCTL_CA_FILE", ""), "PEM `FILE` with the authority that signed the relay's certificate [AGENTCTL_CA_FILE]")
	f.set.StringVar(&f.caSHA256, "ca-sha256", env("AGENTCTL_CA_SHA256", ""), "SHA-256 of the relay's own authority, as invites have it, in `HEX` [AGENTCTL_CA_SHA256]")
	if f.forMCP {
		f.set.StringVar(&f.contextName, "context", "", "`NAME` of a context of 'agentctl login' (default: the current one) [AGENTCTL_CONTEXT]")
	}
}

// context opens the context that the command uses; nil for none. A relay or a token that is
// named, by a flag or in the environment, rules it out: a token must not be sent to the relay
// of a context that somebody has forgotten about.
func (f *relayFlags) context() (*login.Context, error) {
	for _, name := range []string{"relay", "token-file"} {
		if f.set.Changed(name) && f.contextName != "" {
			return nil, exit(exitUsage, "--context has its own relay and token; leave --%s", name)
		}
		if f.set.Changed(name) {
			return nil, nil
		}
	}
	name := f.contextName
	if name == "" {
		if os.Getenv("AGENTCTL_RELAY")+os.Getenv("AGENTCTL_TOKEN_FILE") != "" || f.forMCP && os.Getenv("MCP_TOKEN") != "" {
			return nil, nil
		}
		name = os.Getenv("AGENTCTL_CONTEXT")
	}
	c, err := contextStore().Open(name)
	switch {
	case name == "" && errors.Is(err, login.ErrNoContext):
		return nil, nil
	case err != nil:
		return nil, err
	case f.set.Changed("ca-file"), f.set.Changed("ca-sha256"):
		return nil, exit(exitUsage, "--ca-file and --ca-sha256 go with --relay; context %s has its own", c.Name())
	}
	return c, nil
}

// contextOf is the name of the context that a command used, "" for none.
func contextOf(cmd *cobra.Command) string {
	if cmd.Flags().Lookup("relay") == nil {
		return ""
	}
	c, err := (&relayFlags{set: cmd.Flags()}).context()
	if err != nil || c == nil {
		return ""
	}
	return c.Name()
}

// contextStore is where this user's contexts are.
func contextStore() login.Store { return login.Store{Dir: config.ContextDir()} }

// client makes the client of the relay that the flags or the context name.
func (f *relayFlags) client() (c *client.Client, err error) {
	o, err := f.options()
	if err != nil {
		return nil, err
	}
	if c, err = client.New(o); err != nil {
		return nil, fmt.Errorf("--relay %w", err)
	}
	return c, nil
}

// options are those of a client.
func (f *relayFlags) options() (o client.Options, err error) {
	saved, err := f.context()
	if err != nil {
		return o, err
	}
	if saved != nil {
		return client.Options{URL: saved.Relay(), TLS: saved.TLS(), NewToken: saved.Token}, nil
	}
	o.URL = f.relay
	if f.tokenFile != "" {
		if o.Token, err = readToken(f.tokenFile); err != nil {
			return o, err
		}
	}
	o.TLS, err = clientTLS(f.caFile, f.caSHA256, f.relay)
	return o, err
}

// clientTLS is config.ClientTLS in terms of flags. A pin without TLS would check nothing.
func clientTLS(caFile, caSHA256, address string) (*tls.Config, error) {
	if caSHA256 != "" && !strings.HasPrefix(address, "https:") {
		return nil, exit(exitUsage, "--ca-sha256 needs https:// in the address, not %s: without TLS there is no authority to check", address)
	}
	cfg, err := config.ClientTLS(caFile, caSHA256)
	switch {
	case err != nil && caSHA256 != "":
		return nil, exit(exitUsage, "--ca-sha256: %w", err)
	case err != nil:
		return nil, err
	}
	return cfg, nil
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

package cli

import (
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentctl/client"
	"agentctl/config"
	"agentctl/login"
)

// defaultRelay is the relay of a command that names none, without a context.
const defaultRelay = "http://127.0.0.1:8460"

// RelayFlags name a relay and who calls it.
//
// Precedence: flag, environment, context of 'agentctl login', default. The token is named by its file:
// all users of a machine can see the arguments of a process, and its children inherit the environment.
//
// The relay, the token and the authority of a context belong together, so no flag replaces one of them: with
// --relay or --token-file no context is used. The token of a context is refreshed while the command runs;
// one from a file is not.
type RelayFlags struct {
	URL, TokenFile, CAFile, CASHA256 string
	contextName                      string         // of --context, which only the commands of mcp have
	ForMCP                           bool           // MCP_TOKEN counts as a token too; set before AddFlags
	set                              *pflag.FlagSet // of the command; shows which flags were typed
}

// AddFlags adds the flags to c, and --context for the commands of mcp.
func (f *RelayFlags) AddFlags(c *cobra.Command) {
	f.set = c.Flags()
	f.set.StringVar(&f.URL, "relay", EnvOr("AGENTCTL_RELAY", defaultRelay), "`URL` of the relay; before the default comes the context of 'agentctl login' [AGENTCTL_RELAY]")
	f.set.StringVar(&f.TokenFile, "token-file", EnvOr("AGENTCTL_TOKEN_FILE", ""), "`FILE` with an agent token [AGENTCTL_TOKEN_FILE]")
	f.set.StringVar(&f.CAFile, "ca-file", EnvOr("AGENTCTL_CA_FILE", ""), "PEM `FILE` with the authority that signed the relay's certificate [AGENTCTL_CA_FILE]")
	f.set.StringVar(&f.CASHA256, "ca-sha256", EnvOr("AGENTCTL_CA_SHA256", ""), "SHA-256 of the relay's own authority, as invites have it, in `HEX` [AGENTCTL_CA_SHA256]")
	if f.ForMCP {
		f.set.StringVar(&f.contextName, "context", "", "`NAME` of a context of 'agentctl login' (default: the current one) [AGENTCTL_CONTEXT]")
	}
}

// IsSet reports whether the command was given the flag with this name.
func (f *RelayFlags) IsSet(name string) bool { return f.set.Changed(name) }

// Context opens the context that the command uses; nil for none. A relay or a token that is
// named, by a flag or in the environment, rules it out: a token must not be sent to the relay
// of a context that somebody has forgotten about.
func (f *RelayFlags) Context() (*login.Context, error) {
	for _, name := range []string{"relay", "token-file"} {
		if f.set.Changed(name) && f.contextName != "" {
			return nil, Errorf(ExitUsage, "--context has its own relay and token; leave --%s", name)
		}
		if f.set.Changed(name) {
			return nil, nil
		}
	}
	name := f.contextName
	if name == "" {
		if os.Getenv("AGENTCTL_RELAY")+os.Getenv("AGENTCTL_TOKEN_FILE") != "" || f.ForMCP && os.Getenv("MCP_TOKEN") != "" {
			return nil, nil
		}
		name = os.Getenv("AGENTCTL_CONTEXT")
	}
	c, err := ContextStore().Open(name)
	switch {
	case name == "" && errors.Is(err, login.ErrNoContext):
		return nil, nil
	case err != nil:
		return nil, err
	case f.set.Changed("ca-file"), f.set.Changed("ca-sha256"):
		return nil, Errorf(ExitUsage, "--ca-file and --ca-sha256 go with --relay; context %s has its own", c.Name())
	}
	return c, nil
}

// contextOf returns the name of the context that a command used, "" for none. It is for an error that
// the relay answered, when the flags themselves are out of reach.
func contextOf(cmd *cobra.Command) string {
	if cmd.Flags().Lookup("relay") == nil {
		return ""
	}
	c, err := (&RelayFlags{set: cmd.Flags()}).Context()
	if err != nil || c == nil {
		return ""
	}
	return c.Name()
}

// ContextStore returns the store of this user's contexts.
func ContextStore() login.Store { return login.Store{Dir: config.ContextDir()} }

// Client makes the client of the relay that the flags or the context name. It sends nothing; the first
// request shows whether the relay answers. No token is no error here, since a relay may need none
// (relay --anonymous).
func (f *RelayFlags) Client() (c *client.Client, err error) {
	o, err := f.options()
	if err != nil {
		return nil, err
	}
	if c, err = client.New(o); err != nil {
		return nil, fmt.Errorf("--relay %w", err)
	}
	return c, nil
}

// options returns the options of Client: those of the context, or those of the flags.
func (f *RelayFlags) options() (o client.Options, err error) {
	saved, err := f.Context()
	if err != nil {
		return o, err
	}
	if saved != nil {
		return client.Options{URL: saved.Relay(), TLS: saved.TLS(), NewToken: saved.Token}, nil
	}
	o.URL = f.URL
	if f.TokenFile != "" {
		if o.Token, err = ReadToken(f.TokenFile); err != nil {
			return o, err
		}
	}
	o.TLS, err = ClientTLS(f.CAFile, f.CASHA256, f.URL)
	return o, err
}

// ClientTLS is config.ClientTLS with errors that name the flags. It refuses --ca-sha256 for an http
// address: a pin without TLS would check nothing.
func ClientTLS(caFile, caSHA256, address string) (*tls.Config, error) {
	if caSHA256 != "" && !strings.HasPrefix(address, "https:") {
		return nil, Errorf(ExitUsage, "--ca-sha256 needs https:// in the address, not %s: without TLS there is no authority to check", address)
	}
	cfg, err := config.ClientTLS(caFile, caSHA256)
	switch {
	case err != nil && caSHA256 != "":
		return nil, Errorf(ExitUsage, "--ca-sha256: %w", err)
	case err != nil:
		return nil, err
	}
	return cfg, nil
}

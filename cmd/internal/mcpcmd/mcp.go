//go:build !agentctl_omit_relay

// Package mcpcmd has the commands 'agentctl mcp': the MCP server on stdin and stdout, which is a bridge to
// a relay or serves this board, and those that add it to the configuration of MCP clients.
//
//	MCP client ── stdin, stdout ──► agentctl mcp ── HTTPS ──────────────► relay, /mcp
//	                                agentctl mcp --local ── in memory ──► kernel with this board (mcplocal)
//
// In both cases the bridge is package relay/mcp/stdio, and only the HTTP client and the URL differ. An MCP
// client starts the program in any directory and with few variables, and its user rarely sees stderr. So
// connect checks what it can while a person is there. A fault that may pass, such as a relay that is away,
// does not end the bridge: the client gets it as the answer to its requests.
//
// # Files
//
//	mcp.go           the bridge, its token and its end
//	agent_id.go      MCP_AGENT_ID against the token
//	local.go         --local; local_other.go refuses it where no daemon can be
//	connect.go       connect, disconnect and config
//	entry.go         what an entry in a client's file has, from the same flags for connect and config
//	client_file.go   shows a change of a client's file, asks, and writes it (package clientconfig)
package mcpcmd

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/relay/mcp/stdio"
)

// New returns the command mcp with its subcommands.
//
// The default toolset is fleet, whose number of tools does not grow with the boards. An empty --toolset
// leaves the choice to the relay.
func New() *cobra.Command {
	b := bridgeFlags{relay: cli.RelayFlags{ForMCP: true}}
	c := &cobra.Command{
		Use:   "mcp",
		Short: "Run an MCP server on stdin and stdout",
		Long: `Run an MCP server on stdin and stdout, for clients that can only start programs.

It is a bridge to the relay's /mcp: the client sees what the relay offers to the token.
The token comes from --token-file, else from the environment variable MCP_TOKEN, else from the
context of 'agentctl login', which is refreshed as long as the bridge runs. It lists the tools of
the toolset fleet, a few for any number of boards, unless --toolset says otherwise.

When the relay restarts, the bridge waits up to 15 s for it and its boards, and sends requests again
that cannot have run, or that only read; other calls fail with their outcome. Calls of streams
last 20 s at most.

With --local it needs no relay and serves this board through the daemon's control socket.

MCP_AGENT_ID names the agent. With --local it is the name in the log. Through a relay the token says
who the agent is: a token of another one is refused.

Tool names have _ in place of dots, because some clients reject dots; --names dotted keeps the
dots.`,
		Example: `  agentctl mcp --relay https://relay.example:8460 --token-file ~/agent.token
  agentctl mcp --local
  agentctl mcp connect claude-code        writes the client's file; after agentctl login`,
		RunE: func(cmd *cobra.Command, _ []string) error { return b.run(cmd) },
	}
	b.relay.AddFlags(c)
	f := c.Flags()
	f.BoolVar(&b.local, "local", false, "serve this board from its control socket, without a relay")
	f.StringVar(&b.socket, "socket", cli.EnvOr("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket, with --local [AGENTCTL_SOCKET]")
	f.StringVar(&b.names, "names", "flat", "spelling of tool names: flat or dotted")
	f.StringVar(&b.toolset, "toolset", client.FleetToolset, toolsetUsage)
	f.StringVar(&b.logLevel, "log-level", cli.EnvOr("AGENTCTL_LOG_LEVEL", "warn"), "log `LEVEL` on stderr: debug, info, warn, error [AGENTCTL_LOG_LEVEL]")
	c.AddCommand(newConnect(), newDisconnect(), newConfig())
	return c
}

// bridgeFlags are the flags of mcp. relay and toolset are ignored with local, and socket without it.
type bridgeFlags struct {
	relay                            cli.RelayFlags
	local                            bool
	socket, names, toolset, logLevel string
}

// run serves MCP on stdin and stdout until stdin or the command's context ends. The log goes to stderr:
// stdout has messages only.
//
// The end of stdin is how a client stops its server (MCP 2025-11-25, lifecycle, shutdown): requests in
// flight are answered first, for a bounded time (stdio.Serve). SIGINT and SIGTERM end it without waiting
// for them. Both are exit code 0.
func (b *bridgeFlags) run(cmd *cobra.Command) error {
	log, err := cli.NewLogger(b.logLevel)
	if err != nil {
		return err
	}
	defer func() { _ = log.Sync() }()
	if b.names != "flat" && b.names != "dotted" {
		return cli.Errorf(cli.ExitUsage, "--names %s is neither flat nor dotted", b.names)
	}
	ctx := cmd.Context()
	// The bridge adds the hint to its answer where the relay refused a request with 401.
	o := stdio.Options{Logger: log, TokenHint: "agentctl mcp reads it from --token-file or MCP_TOKEN"}
	if b.local {
		// The board's tools are read once, at the start: without a daemon the command ends (exit code 3).
		closeServer, err := serveLocal(ctx, b.socket, log, &o)
		if err != nil {
			return err
		}
		defer closeServer()
		o.URL = client.MCPURL(o.URL, "", b.names == "flat")
	} else if err := b.useRelay(ctx, &o); err != nil {
		return err
	}
	// A read of stdin cannot be interrupted: closing it is what ends one.
	defer context.AfterFunc(ctx, func() { _ = os.Stdin.Close() })()
	err = stdio.Serve(ctx, cmd.InOrStdin(), cmd.OutOrStdout(), o)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// useRelay sets the URL, the client and the token of o to those of the relay that the flags name.
//
// A token file that cannot be read, a context whose file is damaged, and the token of another agent end
// the command. The client is shown other errors as answers to its requests, because a relay that is away
// now may be back by then.
func (b *bridgeFlags) useRelay(ctx context.Context, o *stdio.Options) error {
	rc, err := b.relay.Client()
	if err != nil {
		return err
	}
	saved, err := b.relay.Context()
	if err != nil {
		return err
	}
	o.URL, o.Client = client.MCPURL(rc.URL(), b.toolset, b.names == "flat"), rc.HTTP()
	o.Token = tokenSource(b.relay.TokenFile)
	if saved != nil {
		o.Token, o.TokenHint = saved.Token, "log in again with a new invite: agentctl login"
	}
	o.Token = checkAgentID(o.Token)
	// This may refresh the token of a context. Any other error comes again with the first request, and is its
	// answer.
	if _, err := o.Token(ctx, ""); errors.As(err, new(*agentIDError)) {
		return cli.Errorf(cli.ExitUnauthorized, "%w", err)
	}
	return nil
}

// errLocalNeedsLinux reports --local on another system.
func errLocalNeedsLinux() error {
	return cli.Errorf(cli.ExitUsage, "--local needs a daemon on this machine, and daemons run on Linux only; leave --local, to use the relay that you are logged in to")
}

// toolsetUsage describes --toolset.
const toolsetUsage = "list the tools of toolset `NAME`: fleet, boards or all; plugins can be added after commas"

// tokenSource returns the source of the token that each request carries: the file, read anew each time
// because it may be renewed, or MCP_TOKEN if no file is named.
func tokenSource(file string) tokenFunc {
	return func(context.Context, string) (string, error) {
		if file == "" {
			return os.Getenv(tokenEnv), nil
		}
		return cli.ReadToken(file)
	}
}

//go:build linux && !agentctl_omit_relay

package mcpcmd

import (
	"context"
	"errors"
	"os"
	"strings"

	"go.uber.org/zap"

	"agentctl/cmd/internal/cli"
	"agentctl/mcplocal"
	"agentctl/relay/mcp/stdio"
)

// serveLocal serves this board over MCP in this process, and sets the URL and the client of o. The client
// dials in memory: no port is open that other programs of this machine could use.
//
// The daemon must run, and this user must be allowed to open its socket. That permission replaces a token:
// over the control socket all readings of the board are available. The caller calls closeServer after the
// bridge has ended.
func serveLocal(ctx context.Context, socket string, log *zap.Logger, o *stdio.Options) (closeServer func(), err error) {
	b, err := mcplocal.Open(ctx, mcplocal.Options{Socket: socket, AgentID: os.Getenv(agentIDEnv), Version: cli.Version, Log: log})
	if errors.Is(err, mcplocal.ErrAgentID) {
		return nil, cli.Errorf(cli.ExitUsage, "%s: %w", agentIDEnv, err)
	}
	if err != nil {
		return nil, err
	}
	o.URL, o.Client = strings.TrimSuffix(mcplocal.URL, "/mcp"), b.Client()
	return func() { b.Close() }, nil
}

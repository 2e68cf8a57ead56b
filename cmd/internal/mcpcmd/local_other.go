//go:build !linux

package mcpcmd

import (
	"context"

	"go.uber.org/zap"

	"agentctl/relay/mcp/stdio"
)

// serveLocal would serve the daemon of this machine.
func serveLocal(context.Context, string, *zap.Logger, *stdio.Options) (func(), error) {
	return nil, errLocalNeedsLinux()
}

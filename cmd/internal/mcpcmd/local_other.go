//go:build !linux

package mcpcmd

import (
	"context"

	"go.uber.org/zap"

	"agentctl/relay/mcp/stdio"
)

// serveLocal reports that only Linux has daemons.
func serveLocal(context.Context, string, *zap.Logger, *stdio.Options) (func(), error) {
	return nil, errLocalNeedsLinux()
}

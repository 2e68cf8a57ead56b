//go:build linux && !agentctl_omit_relay

package serving

import (
	"github.com/spf13/pflag"

	"agentctl/cmd/internal/cli"
	"agentctl/transport/edge"
)

// AddTrustedProxyFlag adds --trusted-proxy to a server's flags.
func AddTrustedProxyFlag(f *pflag.FlagSet, networks *[]string) {
	f.StringArrayVar(networks, "trusted-proxy", nil, "`CIDR` of proxies whose X-Forwarded-For names the client (repeatable; default: none is believed)")
}

// TrustedProxies parses the networks of --trusted-proxy.
func TrustedProxies(networks []string) (edge.TrustedProxies, error) {
	t, err := edge.ParseTrustedProxies(networks)
	if err != nil {
		return nil, cli.Errorf(cli.ExitUsage, "--trusted-proxy: %w", err)
	}
	return t, nil
}

//go:build linux && !agentctl_omit_relay

package serving

import (
	"github.com/spf13/pflag"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/transport/edge"
)

// AddCertificateFlags adds --tls-cert and --tls-key to a server's flags. Without flag and variable they are
// the credentials tls.crt and tls.key of the unit (LoadCredential=), if it has them: systemd copies these as
// root, so that the service needs no right to read the originals.
func AddCertificateFlags(f *pflag.FlagSet, cert, key *string) {
	f.StringVar(cert, "tls-cert", cli.EnvOr("AGENTCTL_TLS_CERT", config.Credential("tls.crt")), "PEM `FILE` with the certificate chain [AGENTCTL_TLS_CERT]")
	f.StringVar(key, "tls-key", cli.EnvOr("AGENTCTL_TLS_KEY", config.Credential("tls.key")), "PEM `FILE` with the certificate's key [AGENTCTL_TLS_KEY]")
}

// AddOriginFileFlag adds --allow-origin-file to a server's flags.
func AddOriginFileFlag(f *pflag.FlagSet, file *string) {
	f.StringVar(file, "allow-origin-file", cli.EnvOr("AGENTCTL_ALLOW_ORIGIN_FILE", ""), "`FILE` with more of them, one a line; read again on SIGHUP [AGENTCTL_ALLOW_ORIGIN_FILE]")
}

// AddLogLevelFlag adds --log-level to a server's flags.
func AddLogLevelFlag(f *pflag.FlagSet, level *string) {
	f.StringVar(level, "log-level", cli.EnvOr("AGENTCTL_LOG_LEVEL", "info"), "log `LEVEL`: debug, info, warn, error [AGENTCTL_LOG_LEVEL]")
}

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

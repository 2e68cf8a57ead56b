//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/serving"
	"agentctl/daemon"
	"agentctl/relay"
	"agentctl/relay/gateway"
)

// The life of the process:
//
//	SIGHUP is caught         before anything else
//	settings                 the variables MCP_SSE_*, then flags; a mistake is exit code 2
//	relay.ServeGateway       opens the event log (--state-dir), then the listener
//	ready                    one line of JSON on stdout, READY=1 to systemd, and reloads begin
//	SIGINT or SIGTERM        the gateway ends its streams, the log writes what was accepted; exit code 0
//	stop, waitReloads        a reload that is under way ends before the command does
//
// The log goes to stderr; stdout has the line of readiness only, which programs wait for.

// serveFlags are the flags of serve. listen and origins replace what the environment says if they were
// given; the settings without a flag are in the environment only (serving.GatewayEnv).
type serveFlags struct {
	listen, dir, cert, key, originFile, logLevel string
	origins, proxies                             []string
	insecure                                     bool
}

// newServe returns the command serve, which runs a gateway for programs that need no relay. The same gateway
// is a part of 'agentctl relay --sse-listen', with the relay's tokens and events.
func newServe() *cobra.Command {
	var s serveFlags
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the event gateway without a relay",
		Long: `Run the event gateway without a relay: programs publish topic events by POST, and subscribers
receive them over SSE with resume (docs/events.md). When it is ready, it prints one line of JSON
with its URLs on stdout.

Its settings are the variables MCP_SSE_*; flags take precedence. Without MCP_SSE_AUTH_TOKEN it is
open and serves loopback only. With --state-dir, events are on disk before they are accepted, and
subscribers can resume beyond the ring and across restarts; without it, events are kept in memory
only.

On SIGHUP it reads the certificate, --allow-origin-file and the files of its tokens again; what is
bad stays as it was.`,
		Example: `  agentctl events serve
  MCP_SSE_PORT=40000 MCP_SSE_HEARTBEAT_MS=2000 agentctl events serve
  MCP_SSE_AUTH_TOKEN_FILE=events.token agentctl events serve --listen :39300 --tls-cert cert.pem --tls-key key.pem --state-dir events`,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd) },
	}
	f := c.Flags()
	f.StringVar(&s.listen, "listen", "", "`HOST:PORT` to serve (default from MCP_SSE_HOST and MCP_SSE_PORT: port 39300 of loopback, or of every address with a token)")
	f.StringVar(&s.dir, "state-dir", "", "`DIR` for the events, not a relay's state directory (default: memory only)")
	serving.AddCertificateFlags(f, &s.cert, &s.key)
	f.StringArrayVar(&s.origins, "allow-origin", nil, "`ORIGIN` of a web page that may connect (repeatable; default MCP_SSE_ALLOW_ORIGINS)")
	serving.AddOriginFileFlag(f, &s.originFile)
	f.BoolVar(&s.insecure, "insecure", false, "serve beyond loopback without a token; only for networks that nobody else can reach")
	serving.AddTrustedProxyFlag(f, &s.proxies)
	serving.AddLogLevelFlag(f, &s.logLevel)
	return c
}

// run serves until the command's context ends.
func (s *serveFlags) run(cmd *cobra.Command) error {
	// First, because SIGHUP without a receiver would end the process.
	ctx, hup, stopHangups := cli.NotifyReload(cmd.Context())
	defer stopHangups()
	ctx, stop := context.WithCancel(ctx) // ends the reloads after the gateway
	defer stop()
	log, err := cli.NewLogger(s.logLevel)
	if err != nil {
		return err
	}
	defer func() { _ = log.Sync() }()
	e, err := serving.GatewayEnv()
	if err != nil {
		return err
	}
	o := e.Options
	o.Logger, o.Insecure = log, s.insecure
	if o.TrustedProxies, err = serving.TrustedProxies(s.proxies); err != nil {
		return err
	}
	if cmd.Flags().Changed("listen") {
		o.Listen = s.listen
	}
	if o.AllowOrigins, err = s.allowOrigins(cmd, o.AllowOrigins); err != nil {
		return err
	}
	certificate, err := serverCertificate(s.cert, s.key)
	if err != nil {
		return err
	}
	if certificate != nil {
		o.TLS = certificate.ServerTLS()
	}
	// Each subscriber is an open file.
	if err := relay.RaiseMaxFiles(); err != nil {
		log.Warn("the limit of open files stays low", zap.Error(err))
	}
	// When the signal arrives, not when the command ends: systemd then shows a long drain as "deactivating".
	defer context.AfterFunc(ctx, daemon.NotifyStopping)()
	waitReloads := func() {} // until the gateway is ready: there are no reloads before
	err = relay.ServeGateway(ctx, o, s.dir, func(base string, g *gateway.Gateway) {
		fmt.Fprintf(cmd.OutOrStdout(), "{\"ready\":true,\"sse_url\":%q,\"ingest_url\":%q}\n", base+gateway.StreamPath, base+gateway.IngestPath)
		daemon.NotifySystemd("READY=1", "STATUS=serving "+base)
		waitReloads = serving.Reloads(ctx, hup, log, "serving "+base, func() []relay.Reloaded { return s.reload(cmd, g, certificate) })
	})
	stop()
	waitReloads()
	var bad *relay.OptionError
	switch {
	case !errors.As(err, &bad):
		return err
	case errors.Is(err, gateway.ErrOpenToOthers):
		return cli.Errorf(cli.ExitUsage, "%w, or pass --insecure", bad.Err)
	default:
		return cli.Errorf(cli.ExitUsage, "%w", bad.Err)
	}
}

// reload reads again what may change while the gateway serves: the certificate, the tokens and the
// origins. certificate may be nil. If one of both fails, what it had before stays in force, and the other is
// reloaded all the same. serving.Reloads logs the result and puts it into systemctl status.
//
// Tokens and origins change together or not at all. A gateway with a token stays one with a token, because
// where it listens was decided by that (gateway.SetAccess).
func (s *serveFlags) reload(cmd *cobra.Command, g *gateway.Gateway, certificate *relay.Certificate) (list []relay.Reloaded) {
	if certificate != nil {
		list = append(list, relay.Reloaded{Source: s.cert, Err: certificate.Reload()})
	}
	access, err := serving.GatewayAccess()
	if err == nil {
		access.AllowOrigins, err = s.allowOrigins(cmd, access.AllowOrigins)
	}
	if err == nil {
		err = g.SetAccess(access)
	}
	return append(list, relay.Reloaded{Source: "tokens and origins", Err: err})
}

// allowOrigins returns the origins of web pages that may connect. list has those of the environment,
// which --allow-origin replaces; the file adds to either.
func (s *serveFlags) allowOrigins(cmd *cobra.Command, list []string) (_ []string, err error) {
	if cmd.Flags().Changed("allow-origin") {
		if list, err = checkOrigins(s.origins); err != nil {
			return nil, err
		}
	}
	if s.originFile != "" {
		more, err := relay.ReadOrigins(s.originFile)
		if err != nil {
			return nil, cli.Errorf(cli.ExitUsage, "--allow-origin-file: %w", err)
		}
		list = append(list, more...)
	}
	return list, nil
}

// checkOrigins checks --allow-origin as MCP_SSE_ALLOW_ORIGINS is checked, by the same parser with the
// flag's value in the variable's place.
func checkOrigins(origins []string) ([]string, error) {
	e, err := gateway.FromEnv(func(name string) string {
		if name == "MCP_SSE_ALLOW_ORIGINS" {
			return strings.Join(origins, ",")
		}
		return ""
	})
	if err != nil {
		return nil, cli.Errorf(cli.ExitUsage, "--allow-origin: %s", strings.TrimPrefix(err.Error(), "MCP_SSE_ALLOW_ORIGINS "))
	}
	return e.AllowOrigins, nil
}

// serverCertificate reads the certificate of two files; nil without files, which is cleartext.
func serverCertificate(certFile, keyFile string) (*relay.Certificate, error) {
	if certFile == "" && keyFile == "" {
		return nil, nil
	}
	if certFile == "" || keyFile == "" {
		return nil, cli.Errorf(cli.ExitUsage, "--tls-cert and --tls-key go together")
	}
	return relay.LoadCertificate(certFile, keyFile)
}

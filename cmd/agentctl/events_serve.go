//go:build !agentctl_omit_relay

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/daemon"
	"agentctl/relay"
	"agentctl/relay/eventlog"
	"agentctl/relay/gateway"
)

// gatewayEnv is what the environment says of the gateway; the tokens and the secret may
// also be systemd credentials of the variable's name in lower case.
func gatewayEnv() (gateway.Env, error) {
	e, err := gateway.FromEnv(func(name string) string {
		v := os.Getenv(name)
		if base, ok := strings.CutSuffix(name, "_FILE"); ok && v == "" && os.Getenv(base) == "" {
			return config.Credential(strings.ToLower(base))
		}
		return v
	})
	if err != nil {
		return e, exit(exitUsage, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return e, nil
}

func newEventsServe() *cobra.Command {
	var listen, dir, cert, key, logLevel string
	var origins []string
	var insecure bool
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the event gateway alone",
		Long: `Run the event gateway alone, without a relay: topic events in by POST, out over SSE with resume
(docs/events.md). When it serves, one line of JSON with its URLs is on stdout.

Its settings are the variables MCP_SSE_*; a flag goes before a variable. Without
MCP_SSE_AUTH_TOKEN it is open, and serves loopback only. With --state-dir events are on the
disk before they are accepted, and a resume reaches back beyond the ring and over restarts;
without, events are in memory only.`,
		Example: `  agentctl events serve
  MCP_SSE_PORT=40000 MCP_SSE_HEARTBEAT_MS=2000 agentctl events serve
  MCP_SSE_AUTH_TOKEN_FILE=events.token agentctl events serve --listen :39300 --tls-cert cert.pem --tls-key key.pem --state-dir events`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLogger(logLevel)
			if err != nil {
				return err
			}
			defer func() { _ = log.Sync() }()
			e, err := gatewayEnv()
			if err != nil {
				return err
			}
			o := e.Options
			o.Logger, o.Insecure = log, insecure
			if cmd.Flags().Changed("listen") {
				o.Listen = listen
			}
			if cmd.Flags().Changed("allow-origin") {
				if o.AllowOrigins, err = checkOrigins(origins); err != nil {
					return err
				}
			}
			if o.TLS, err = serverTLS(cert, key); err != nil {
				return err
			}
			if err := startMaxFiles(); err != nil {
				log.Warn("the limit of open files stays low", zap.Error(err))
			}
			defer context.AfterFunc(cmd.Context(), daemon.NotifyStopping)()
			return serveEvents(cmd, o, dir)
		},
	}
	f := c.Flags()
	f.StringVar(&listen, "listen", "", "`HOST:PORT` to serve (default from MCP_SSE_HOST and MCP_SSE_PORT: port 39300 of loopback, or of every address with a token)")
	f.StringVar(&dir, "state-dir", "", "`DIR` that keeps the events; not that of a relay (default: memory only)")
	f.StringVar(&cert, "tls-cert", env("AGENTCTL_TLS_CERT", config.Credential("tls.crt")), "PEM `FILE` with the certificate chain [AGENTCTL_TLS_CERT]")
	f.StringVar(&key, "tls-key", env("AGENTCTL_TLS_KEY", config.Credential("tls.key")), "PEM `FILE` with the certificate's key [AGENTCTL_TLS_KEY]")
	f.StringArrayVar(&origins, "allow-origin", nil, "`ORIGIN` of a web page that may connect (repeatable; default MCP_SSE_ALLOW_ORIGINS)")
	f.BoolVar(&insecure, "insecure", false, "open beyond loopback without a token: only where nobody else can reach it")
	f.StringVar(&logLevel, "log-level", env("AGENTCTL_LOG_LEVEL", "info"), "log `LEVEL`: debug, info, warn, error [AGENTCTL_LOG_LEVEL]")
	return c
}

// checkOrigins judges --allow-origin as MCP_SSE_ALLOW_ORIGINS is judged.
func checkOrigins(origins []string) ([]string, error) {
	e, err := gateway.FromEnv(func(name string) string {
		if name == "MCP_SSE_ALLOW_ORIGINS" {
			return strings.Join(origins, ",")
		}
		return ""
	})
	if err != nil {
		return nil, exit(exitUsage, "--allow-origin: %s", strings.TrimPrefix(err.Error(), "MCP_SSE_ALLOW_ORIGINS "))
	}
	return e.AllowOrigins, nil
}

// serveEvents runs a gateway, and its log when there is a directory for one, until ctx
// ends.
func serveEvents(cmd *cobra.Command, o gateway.Options, dir string) (err error) {
	ctx, fail := context.WithCancelCause(cmd.Context())
	defer fail(nil)
	if dir != "" {
		var log *eventlog.Store
		log, err = eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName), Logger: o.Logger.Named("events")})
		if err != nil {
			return exit(exitFailure, "%w", err)
		}
		defer func() { _ = log.Close() }()
		o.Log = relay.NewGatewayLog(log)
		o.MaxData = relay.MaxTopicData
		defer runLog(log, fail)()
	}
	g, err := gateway.New(o)
	if errors.Is(err, gateway.ErrOpenToOthers) {
		return exit(exitUsage, "%w, or pass --insecure", err)
	}
	if err != nil {
		return exit(exitUsage, "%w", err)
	}
	g.OnReady(func(addr string) {
		base := eventsBase(addr, o.TLS != nil)
		fmt.Fprintf(cmd.OutOrStdout(), "{\"ready\":true,\"sse_url\":%q,\"ingest_url\":%q}\n", base+gateway.StreamPath, base+gateway.IngestPath)
		daemon.NotifySystemd("READY=1", "STATUS=serving "+base)
	})
	if err = g.Run(ctx); err == nil && cmd.Context().Err() == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	return nil
}

// runLog runs the log until the function that it returns is called, after the gateway's
// end: what was accepted must still get to the disk.
func runLog(log *eventlog.Store, fail func(error)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	begun := make(chan struct{}) // nobody is told ready before the log takes events
	wg.Go(func() {
		close(begun)
		if err := log.Run(ctx); ctx.Err() == nil {
			fail(fmt.Errorf("the event log stopped: %w", err))
		}
	})
	<-begun
	return func() {
		cancel()
		wg.Wait()
	}
}

// eventsBase is the gateway's URL for a client on this machine.
func eventsBase(addr string, secure bool) string {
	host, port, _ := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	scheme := "http"
	if secure {
		scheme = "https"
	}
	return scheme + "://" + net.JoinHostPort(host, port)
}

// serverTLS serves the certificate of two files, and a renewed one soon after it is there;
// nil without files.
func serverTLS(certFile, keyFile string) (*tls.Config, error) {
	if certFile == "" && keyFile == "" {
		return nil, nil
	}
	if certFile == "" || keyFile == "" {
		return nil, exit(exitUsage, "--tls-cert and --tls-key go together")
	}
	c, err := relay.ServerTLS(certFile, keyFile)
	if err != nil {
		return nil, exit(exitFailure, "%w", err)
	}
	return c, nil
}

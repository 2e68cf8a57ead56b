//go:build linux && !agentctl_omit_relay

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/clientcmd"
	"agentctl/cmd/internal/eventscmd"
	"agentctl/cmd/internal/mcpcmd"
	"agentctl/cmd/internal/plugincmd"
	"agentctl/cmd/internal/relaycmd"
	"agentctl/cmd/internal/serving"
	"agentctl/config"
	"agentctl/daemon"
	"agentctl/duration"
	"agentctl/relay"
	"agentctl/relay/audit"
	"agentctl/relay/eventlog"
)

// relayCommands returns the commands of the full build: those that run or administer a relay, and the
// clients that are not in the board build.
func relayCommands() map[string]func() *cobra.Command {
	return map[string]func() *cobra.Command{
		"relay": newRelay, "token": relaycmd.NewToken, "invite": relaycmd.NewInvite, "node": relaycmd.NewNode, "keys": relaycmd.NewKeys,
		"events": eventscmd.New, "mcp": mcpcmd.New, "plugin": plugincmd.New, "verify": clientcmd.NewVerify, "demo": newDemo,
	}
}

// defaultMetricsListen is where /metrics is served unless a flag says otherwise. It is loopback, because
// /metrics needs no token. A second relay of the machine runs without /metrics (run).
const defaultMetricsListen = "127.0.0.1:8461"

// metricsListenEnv is the variable of --metrics-listen.
const metricsListenEnv = "AGENTCTL_METRICS_LISTEN"

// relayServe are the flags of relay. Most are variables in o; the others need another unit or type, and
// setOptions sets the options from them.
type relayServe struct {
	o                                          relay.Options
	logLevel, scopeless, sseListen             string
	auditMB, eventsMB, tenantMB, tenantCallsMB int64 // MiB; the options are in bytes
	proxies                                    []string
}

// newRelay returns the command relay, with the commands for its state directory below it. Most of its flags
// are options of package relay, which checks them: optionFlags gives its errors the name of the flag.
func newRelay() *cobra.Command {
	var s relayServe
	c := &cobra.Command{
		Use:   "relay",
		Short: "Run the relay: boards connect, clients get MCP tools and metric streams",
		Long: `Run the relay. Boards connect to /v1/device/ws, MCP clients use /mcp, and programs call
POST /mcp/tools/call. When the relay is ready, it prints one line of JSON with its URL on stdout.

Beyond loopback the relay serves TLS. Without a certificate of yours it makes an authority of its
own in the state directory (--tls own): 'agentctl invite' prints a line with its hash, by which
boards and clients know this relay, whatever its name and address are. --insecure serves plain
HTTP, for a relay behind a TLS proxy, whose address --trusted-proxy names: limits by address then
count the proxy's clients.

On SIGHUP (systemctl reload) it reads the certificate, --allow-origin-file and the files of the
event gateway's tokens again, and reloads the plugins whose plugin.json or program has changed; what
is bad stays as it was.

Tickets, the directory of boards and agents, and the control plane are built in. Your own plugins
are folders in --plugin-dir.`,
		Example: `  agentctl relay
  agentctl relay --listen :8460
  agentctl relay --listen :8460 --tls-cert cert.pem --tls-key key.pem --public https://relay.example:8460
  agentctl relay --listen :8460 --insecure --trusted-proxy 10.0.0.7
  agentctl relay --plugin notes`,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd) },
	}
	f := c.Flags()
	// Where it serves, and under which address clients know it.
	f.StringVar(&s.o.Listen, "listen", cli.EnvOr("AGENTCTL_LISTEN", relay.DefaultListen), "`HOST:PORT` to serve [AGENTCTL_LISTEN]")
	f.StringVar(&s.o.Public, "public", cli.EnvOr("AGENTCTL_PUBLIC", ""), "`URL` that clients use, if it differs from the listener's [AGENTCTL_PUBLIC]")
	f.StringVar(&s.o.TLS, "tls", cli.EnvOr("AGENTCTL_TLS", ""), "`MODE`: own (an authority of this relay), files (--tls-cert, --tls-key) or off; default: files if given, else off on loopback or with --insecure, else own [AGENTCTL_TLS]")
	serving.AddCertificateFlags(f, &s.o.TLSCert, &s.o.TLSKey)
	f.BoolVar(&s.o.Insecure, "insecure", false, "serve plain HTTP beyond loopback; only behind a TLS proxy")
	serving.AddTrustedProxyFlag(f, &s.proxies)
	f.StringVar(&s.o.MetricsListen, "metrics-listen", cli.EnvOr(metricsListenEnv, defaultMetricsListen), "`HOST:PORT` of /metrics; empty for none [AGENTCTL_METRICS_LISTEN]")
	f.StringVar(&s.sseListen, "sse-listen", "", "also run the event gateway, on `HOST:PORT` (MCP_INCLUDE_SSE=1 runs it on port MCP_SSE_PORT or 39300)")
	// Whose calls it takes.
	f.StringVar(&s.o.Audience, "audience", cli.EnvOr("AGENTCTL_AUDIENCE", ""), "`NAME` for which tokens are issued; stored in the state directory [AGENTCTL_AUDIENCE]")
	f.StringArrayVar(&s.o.AllowOrigin, "allow-origin", nil, "`ORIGIN` of a web page that may call (repeatable)")
	serving.AddOriginFileFlag(f, &s.o.AllowOriginFile)
	f.BoolVar(&s.o.Anonymous, "anonymous", false, "no token needed; loopback only, for conformance suites")
	f.StringVar(&s.scopeless, "scopeless-until", "", "accept tokens without a scope claim as read-only until `DATE`")
	f.BoolVar(&s.o.RequireProof, "require-proof", false, "refuse boards that have not joined with an invite: their tokens work without a key")
	// Its state, and how much of it is kept.
	f.StringVar(&s.o.StateDir, "state-dir", cli.EnvOr("AGENTCTL_STATE_DIR", config.DefaultStateDir("relay")), "`DIR` for keys, tokens, nodes and the audit log [AGENTCTL_STATE_DIR]")
	f.Int64Var(&s.auditMB, "audit-max-mb", audit.DefaultMaxBytes>>20, "keep the newest `N` MB of the audit log")
	f.Var(duration.NewValue(&s.o.AuditMaxAge, audit.DefaultMaxAge), "audit-max-age", "keep the audit log for `DURATION`, if --audit-max-mb allows it")
	f.Int64Var(&s.eventsMB, "events-max-mb", eventlog.DefaultMaxBytes>>20, "keep the files of the event log within `N` MB")
	f.Var(duration.NewValue(&s.o.Events.MaxAge, eventlog.DefaultMaxAge), "events-max-age", "keep events for `DURATION`, if they fit")
	f.Var(duration.NewValue(&s.o.Events.CallsMaxAge, 0), "events-calls-max-age", "keep events about calls for `DURATION`; default: --events-max-age")
	f.Int64Var(&s.tenantMB, "events-tenant-max-mb", 0, "keep `N` MB of events of each tenant, unless it is the only one; default: half of --events-max-mb")
	f.Int64Var(&s.tenantCallsMB, "events-tenant-calls-max-mb", 0, "keep `N` MB of events about calls of each tenant; default: no separate bound")
	// What it runs.
	f.StringSliceVar(&s.o.Parts, "only", nil, "run only these `PARTS`: mcp (boards, tools, MCP), sse (the event gateway)")
	f.StringArrayVar(&s.o.ExternalPlugins, "plugin", nil, "load the plugin `NAME` from the plugin directory (repeatable)")
	f.StringVar(&s.o.PluginDir, "plugin-dir", cli.EnvOr("AGENTCTL_PLUGIN_DIR", ""), "`DIR` with plugins, one folder each; default: plugins in the state directory [AGENTCTL_PLUGIN_DIR]")
	f.StringVar(&s.o.PluginSockets, "plugin-sockets", cli.EnvOr("AGENTCTL_PLUGIN_SOCKETS", ""), "`DIR` with the sockets of plugins that are separate services, NAME.sock [AGENTCTL_PLUGIN_SOCKETS]")
	f.StringVar(&s.o.PluginSandbox, "plugin-sandbox", cli.EnvOr("AGENTCTL_PLUGIN_SANDBOX", relay.SandboxLandlock), "`KIND`: landlock, or off: plugins that the relay starts can then read its keys [AGENTCTL_PLUGIN_SANDBOX]")
	f.StringArrayVar(&s.o.DisabledPlugins, "without", nil, "do not load the built-in plugin `NAME` (repeatable): tickets, directory, fleet, triage")
	f.StringToStringVar(&s.o.TriagePriorities, "triage-priority", nil, "`KEY=PRIORITY` of tickets that alerts open: KEY is a level (error, warn, info) or a rule; PRIORITY is low, normal, high or urgent (repeatable)")
	f.IntVar(&s.o.StreamQuota, "stream-quota", 0, "count streams above `N` of one tenant (0: no quota)")
	f.BoolVar(&s.o.EnforceQuota, "enforce-stream-quota", false, "close streams above the quota with 4429")
	// What it does when something is wrong.
	f.BoolVar(&s.o.AcceptClock, "accept-clock", false, "let boards link although this machine's clock is before the build or the newest event")
	f.BoolVar(&s.o.StartDegraded, "start-degraded", false, "serve boards without the event log if it is damaged, missing or another relay's; tickets answer with an error")
	f.IntVar(&s.o.MaxRestarts, "max-restarts", 5, "restart a crashed component at most `N` consecutive times, then exit with an error")
	serving.AddLogLevelFlag(f, &s.logLevel)
	c.AddCommand(relaycmd.StateCommands()...)
	return c
}

// run serves until the command's context ends: on SIGTERM, on Ctrl-C, or when its terminal goes away. An
// ordered stop has exit code 0. It is 1 after too many restarts of a component; systemd then starts the
// process again, which repairs what a restart of the component did not.
//
// The order of the steps:
//
//	RelaxTimers     executes the program again, so nothing may be open before it
//	NotifyReload    before relay.Open: SIGHUP without a receiver would end the process
//	setOptions      a wrong flag is reported before a store or a listener is opened
//	OnReady         in the goroutine of Run, so that waitReloads needs no lock
//	stop            ends the reloads, also where the relay ended by itself and the signal never came
//	waitReloads     a reload that still runs ends before the process does
func (s *relayServe) run(cmd *cobra.Command) error {
	daemon.RelaxTimers()
	ctx, hup, stopHangups := cli.NotifyReload(cmd.Context())
	defer stopHangups()
	ctx, stop := context.WithCancel(ctx) // ends the reloads after the relay
	defer stop()
	level, err := cli.ParseLevel(s.logLevel)
	if err != nil {
		return err
	}
	log := cli.NewLoggerAt(level)
	defer func() { _ = log.Sync() }()
	s.o.Logger, s.o.Level, s.o.Version, s.o.BuildTime = log, &level, cli.Version, cli.BuildTime()
	if err := s.setOptions(cmd); err != nil {
		return err
	}
	if err := relay.RaiseMaxFiles(); err != nil {
		log.Warn("the limit of open files stays low", zap.Error(err))
	}
	r, err := relay.Open(s.o)
	isDefault := !cmd.Flags().Changed("metrics-listen") && os.Getenv(metricsListenEnv) == ""
	if errors.Is(err, syscall.EADDRINUSE) && isDefault && strings.Contains(err.Error(), s.o.MetricsListen) {
		// Another relay on this machine has the default port: serve without. An address that somebody chose is
		// not left out, since they expect /metrics there.
		log.Warn("no /metrics here: the default address is taken; choose one with --metrics-listen", zap.String("address", s.o.MetricsListen))
		s.o.MetricsListen = ""
		r, err = relay.Open(s.o)
	}
	if err != nil {
		return relayOpenError(relaycmd.ExplainState(cmd, err))
	}
	waitReloads, line := func() {}, readyLine(r)
	r.OnReady(func() {
		fmt.Fprintf(cmd.OutOrStdout(), "%s\n", line)
		daemon.NotifySystemd("READY=1", "STATUS=serving "+r.URL())
		waitReloads = serving.Reloads(ctx, hup, r.Logger(), "serving "+r.URL(), r.Reload)
	})
	defer context.AfterFunc(ctx, daemon.NotifyStopping)()
	err = r.Run(ctx)
	stop()
	waitReloads()
	if errors.Is(err, relay.ErrGivenUp) {
		return cli.Errorf(cli.ExitFailure, "%w; --max-restarts allows more", err)
	}
	return err
}

// setOptions sets the options that have a flag of another unit or type. The plugin conformance is built in,
// and yet selected by --plugin, since it is for the MCP conformance suite only: its name is removed from the
// external plugins.
func (s *relayServe) setOptions(cmd *cobra.Command) error {
	o := &s.o
	err := setGateway(o, s.sseListen, cmd.Flags().Changed("sse-listen"))
	if err != nil {
		return err
	}
	if o.TrustedProxies, err = serving.TrustedProxies(s.proxies); err != nil {
		return err
	}
	if s.scopeless != "" {
		if o.ScopelessUntil, err = time.Parse(time.DateOnly, s.scopeless); err != nil {
			return cli.Errorf(cli.ExitUsage, "--scopeless-until %s is not a date of the form 2026-12-31", s.scopeless)
		}
	}
	o.AuditMaxBytes = s.auditMB << 20
	o.Events.MaxBytes, o.Events.TenantMaxBytes, o.Events.TenantCallsMaxBytes = s.eventsMB<<20, s.tenantMB<<20, s.tenantCallsMB<<20
	o.Conformance = slices.Contains(o.ExternalPlugins, relay.PluginConformance)
	o.ExternalPlugins = slices.DeleteFunc(o.ExternalPlugins, func(name string) bool { return name == relay.PluginConformance })
	return nil
}

// optionFlags are the flags of the options that relay.Open may refuse, by the name of the option: package
// relay knows no flags. A test compares them with what package relay refuses.
var optionFlags = map[string]string{
	"AllowOrigin": "--allow-origin", "AllowOriginFile": "--allow-origin-file", "AuditMaxBytes": "--audit-max-mb",
	"EventsMaxBytes": "--events-max-mb", "EventsMaxAge": "--events-max-age", "EventsCallsMaxAge": "--events-calls-max-age",
	"EventsTenantMaxBytes": "--events-tenant-max-mb", "EventsTenantCallsMaxBytes": "--events-tenant-calls-max-mb",
	"Anonymous": "--anonymous", "DisabledPlugins": "--without", "ExternalPlugins": "--plugin",
	"Listen": "--listen", "MaxRestarts": "--max-restarts", "PluginSandbox": "--plugin-sandbox", "Parts": "--only", "Public": "--public", "SSE": "--sse-listen", "TLS": "--tls", "TriagePriorities": "--triage-priority", "TLSCert": "--tls-cert, --tls-key",
}

// relayOpenError gives an error of relay.Open its exit code, flag and next step. Errors of the state
// directory stay as they are: relaycmd.ExplainState has explained them.
func relayOpenError(err error) error {
	var bad *relay.OptionError
	switch {
	case errors.Is(err, relay.ErrPlainHTTP):
		return cli.Errorf(cli.ExitUsage, "%w; use --tls own, give --tls-cert and --tls-key, or --insecure behind a TLS proxy", err)
	case errors.As(err, &bad):
		return cli.Errorf(cli.ExitUsage, "%s: %w", optionFlags[bad.Option], bad.Err)
	case errors.Is(err, syscall.EADDRINUSE):
		return cli.Errorf(cli.ExitFailure, "%w; choose another address with --listen or --metrics-listen", err)
	}
	return err
}

// setGateway decides whether the event gateway runs: it does with --sse-listen, with sse in --only, or with
// MCP_INCLUDE_SSE. Its settings are the variables MCP_SSE_*, and --sse-listen takes precedence; given reports
// whether that was typed. Package relay adds the origins of --allow-origin: a page that may call the relay
// may follow its events too.
func setGateway(o *relay.Options, listen string, given bool) error {
	e, err := serving.GatewayEnv()
	if err != nil {
		return err
	}
	if given {
		e.Listen = listen
	}
	if e.Include && len(o.Parts) > 0 && !slices.Contains(o.Parts, relay.PartSSE) {
		o.Parts = append(o.Parts, relay.PartSSE)
	}
	if given || e.Include || slices.Contains(o.Parts, relay.PartSSE) {
		o.SSE, o.ReadSSE = &e.Options, serving.GatewayAccess
	}
	return nil
}

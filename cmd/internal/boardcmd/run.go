//go:build linux

package boardcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/duration"
	"agentctl/statedir"
	"agentctl/transport/enroll"
)

// The life of the process:
//
//	daemon.TuneProcess      may execute the program again, so it comes first
//	cli.NotifyReload        before the files are read: SIGHUP without a receiver would end the process
//	load                    flags, environment and files; a mistake ends the start
//	daemon.New              takes the state directory and the socket
//	Daemon.Run              until SIGINT or SIGTERM (package main), or until a part fails
//
// Exit code 0 is a stop by a signal, 2 a mistake in what was typed or in a variable, 1 anything else. The
// unit starts the daemon again after any of them, unless systemctl stopped it (Restart=always). The log goes
// to stderr, and nothing to stdout.

// runOptions are the flags of agentctl run. The settings among them are in cfg after load.
//
// Flags are kept as texts and parsed by their key of the configuration, so that a flag and a line of the
// file have the same checks and the same errors. every is the exception: --interval is a duration, and its
// key base_interval_ms a number.
type runOptions struct {
	config string
	mock   int
	flags  map[string]*string // by key of the configuration
	every  time.Duration
	cfg    *config.Config
}

// maxMock bounds --mock: each mock board has its own link, sampler and goroutines in this process.
const maxMock = 20000

// newRun returns the command run. Its flags are those settings of the configuration that a first start
// needs; all other settings are in the files and the environment only.
func newRun() *cobra.Command {
	o := runOptions{flags: map[string]*string{}}
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the device daemon",
		Long: `Run the device daemon: it samples this machine, keeps a history, serves the local control socket
and, with --relay, keeps a link to a relay. It only makes outgoing connections and listens on no
TCP port.

Precedence of settings: flag, environment, configuration file, default. The file is reloaded when
it changes and on SIGHUP; see: agentctl config show --origin

The token is read from --token-file, otherwise from the systemd credential "token".`,
		Example: `  agentctl run                                            works alone; see: agentctl status
  agentctl run --relay wss://relay.example --token-file /etc/agentctl/token
  agentctl run --relay ws://127.0.0.1:8460 --mock 5 --token-file tokens.txt`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := c.Flags()
	text := func(key, usage string) { // adds the flag of a key that is kept as text
		k := config.FindKey(key)
		o.flags[key] = f.String(flagName(key), k.Default(), usage+" ["+k.Env()+"]")
	}
	text("relay", "`URL` of the relay, wss:// (ws:// for loopback only)")
	text("state_dir", "`DIR` for identity and history")
	text("socket", "`PATH` of the control socket")
	text("token_file", "`FILE` with the device token; with --mock, one token a line")
	text("ca_file", "PEM `FILE` with the authority that signed the relay's certificate")
	text("ca_sha256", "SHA-256 of the relay's own authority in `HEX`, in place of --ca-file")
	text("name", "`NAME` of this board for the relay to show")
	text("history.flush", "how often samples are written to disk, 1s to 1h; 0: no history")
	text("modules", "`MODULES` to sample in addition to cpu, memory, disk and load")
	text("disk_path", "a `PATH` on the filesystem whose usage is measured")
	text("log_level", "log `LEVEL`: debug, info, warn, error")
	f.StringVar(&o.config, "config", cli.EnvOr("AGENTCTL_CONFIG", ""), "configuration `FILE`; conf.d/*.yaml in its directory is read too (default \""+config.DefaultPath()+"\") [AGENTCTL_CONFIG]")
	f.Var(duration.NewValue(&o.every, time.Second), "interval", "base sampling `INTERVAL`, 100ms to 60s [AGENTCTL_BASE_INTERVAL_MS]")
	f.IntVar(&o.mock, "mock", 0, "run `N` mock boards over N links instead of this machine, for load and demos")
	return c
}

// flagName is the flag of agentctl run that sets a key of the configuration.
func flagName(key string) string {
	if key == "base_interval_ms" {
		return "interval"
	}
	return strings.NewReplacer("_", "-", ".", "-").Replace(key)
}

// source is the configuration source with the flags that were given.
// A flag that is not given is left out and not set to its default: the environment and the
// files come before defaults. An empty text counts as not given, except for the modules, where
// it means none.
//
// --config and --mock are not settings: the first says where settings are read, the second replaces the
// machine.
func (o *runOptions) source(f *pflag.FlagSet) (config.Source, error) {
	s := config.NewSource(o.config)
	s.ForDaemon, s.Flags = true, config.Settings{}
	if f.Changed("interval") {
		s.Flags["base_interval_ms"] = config.Setting{Value: o.every.Milliseconds(), Origin: "--interval"}
		if o.every < config.MinInterval || o.every > config.MaxInterval {
			return s, cli.Errorf(cli.ExitUsage, "--interval %s is out of range: 100ms to 60s", o.every)
		}
	}
	for name, text := range o.flags {
		k := config.FindKey(name)
		if !f.Changed(flagName(name)) || *text == "" && name != "modules" {
			continue
		}
		v, err := k.Parse(*text)
		if err != nil {
			return s, cli.Errorf(cli.ExitUsage, "--%s: %w", flagName(name), err)
		}
		s.Flags[name] = config.Setting{Value: v, Origin: "--" + flagName(name)}
	}
	return s, nil
}

// load reads the configuration into o.cfg, and returns its source, from which a running daemon reads it
// again. A mistake in a file is a failure and one in a flag or variable a usage error, because only the
// latter is corrected in the line that was typed. For this machine's daemon, damaged settings are set
// aside (config.Source.SetAside), since it must start after a power cut.
//
// The returned source does not have SetAside: a reload of a running daemon keeps the settings that are in
// force when a file is damaged.
func (o *runOptions) load(f *pflag.FlagSet) (config.Source, error) {
	if o.mock < 0 || o.mock > maxMock {
		return config.Source{}, cli.Errorf(cli.ExitUsage, "--mock takes 1 to %d boards", maxMock)
	}
	source, err := o.source(f)
	if err != nil {
		return source, err
	}
	first := source
	first.SetAside = o.mock == 0
	if o.cfg, err = daemon.Load(first); config.InFile(err) {
		if errors.Is(err, fs.ErrPermission) {
			return source, cli.Errorf(cli.ExitFailure, "%w\nrun this as its owner, or choose another with --state-dir or --config", err)
		}
		return source, cli.Errorf(cli.ExitFailure, "%w\nfix it, and check it with: agentctl config validate", err)
	} else if errors.Is(err, statedir.ErrHung) {
		return source, cli.Errorf(cli.ExitFailure, "read the configuration: %w; see dmesg", err)
	} else if err != nil {
		return source, cli.Errorf(cli.ExitUsage, "%w", err)
	}
	if o.mock > 0 && o.cfg.Text("relay") == "" {
		return source, cli.Errorf(cli.ExitUsage, "--mock needs --relay")
	}
	return source, nil
}

// run runs the daemon or the mock boards until a signal. SIGHUP reloads a service, and ends a daemon whose
// terminal goes away. Mock boards have no reload, and ignore it as a service.
func (o *runOptions) run(cmd *cobra.Command) error {
	if o.mock == 0 {
		daemon.TuneProcess()
	}
	ctx, hup, stop := cli.NotifyReload(cmd.Context())
	defer stop()
	source, err := o.load(cmd.Flags())
	if err != nil {
		return err
	}
	// A level and not a fixed logger: a reload may change log_level.
	level := zap.NewAtomicLevel()
	if err := level.UnmarshalText([]byte(o.cfg.Text("log_level"))); err != nil {
		return cli.Errorf(cli.ExitUsage, "log_level: %w", err)
	}
	log := cli.NewLoggerAt(level)
	defer func() { _ = log.Sync() }()
	if o.mock > 0 {
		err = o.runMocks(ctx, log)
	} else {
		var d *daemon.Daemon
		if d, err = daemon.New(daemon.Options{Source: source, Config: o.cfg, Build: Build(), Log: log, Level: level, Reload: hup, OwnsProcess: true, Doctor: InsideDoctor()}); err == nil {
			err = d.Run(ctx)
		}
	}
	var pathErr *control.PathError
	var used *enroll.InUseError
	// Package daemon does not know the flags of this command, which the next step names.
	switch {
	case errors.As(err, &used):
		err = fmt.Errorf("%w; ask it with: agentctl status, stop it, or give this one another --state-dir", err)
	case errors.As(err, &pathErr):
		err = fmt.Errorf("%w; or give another path with --socket", err)
	case errors.Is(err, daemon.ErrStateDir):
		err = fmt.Errorf("%w; choose another with --state-dir", err)
	}
	if err != nil {
		return cli.Errorf(cli.ExitFailure, "%w", err)
	}
	return nil
}

// runMocks runs simulated boards, one for each line of the token file. It needs no state directory,
// control socket or history: they are of one machine. A token file that others may read gets a warning, as
// it does from a daemon, while commands refuse it (cli.ReadToken).
func (o *runOptions) runMocks(ctx context.Context, log *zap.Logger) error {
	tokens, err := config.ReadTokens(o.cfg.Text("token_file"), o.mock)
	var exposed *config.ExposedError
	if errors.As(err, &exposed) {
		log.Warn("the tokens are used all the same", zap.Error(err), zap.String("hint", "chmod 600 "+exposed.Path))
		err = nil
	}
	if err != nil {
		return fmt.Errorf("%w; create them with: agentctl token create --class device --count %d", err, o.mock)
	}
	tlsConfig, err := o.cfg.TLS()
	if err != nil {
		return err
	}
	err = daemon.RunMocks(ctx, daemon.MockOptions{
		Relay: o.cfg.Text("relay"), TLS: tlsConfig, Tokens: tokens, Name: cmp.Or(o.cfg.Text("name"), "mock"),
		Version: cli.Version, Interval: o.cfg.Interval(), Log: log,
		OnReady: func() {
			log.Info("ready", zap.Int("mock", o.mock))
			daemon.NotifySystemd("READY=1")
		},
	})
	log.Info("stopped")
	return err
}

// Build is this binary, as the linker described it.
func Build() daemon.Build {
	return daemon.Build{Version: cli.Version, Stamp: cli.Stamp, Time: cli.BuildTime()}
}

package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/duration"
	"agentctl/prober"
	"agentctl/prober/history"
	"agentctl/term"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// runOptions are the flags of agentctl run. What a configuration file has as well is in
// cfg, once it was read.
type runOptions struct {
	config string
	mock   int
	flags  map[string]*string // by key of the configuration
	every  time.Duration
	cfg    *config.Config
}

// maxMock bounds --mock.
const maxMock = 20000

func newRun() *cobra.Command {
	o := runOptions{flags: map[string]*string{}}
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the device daemon",
		Long: `Run the device daemon: sample this machine, keep a history, serve the local control
socket and, with --relay, keep a link to a relay. It dials out only and listens on no TCP
port.

Settings come from flags, else the environment, else the configuration file, which is read
anew when it changes, and on SIGHUP; see: agentctl config show --origin

The token is read from --token-file, else from the systemd credential "token".`,
		Example: `  agentctl run                                            works alone; see: agentctl status
  agentctl run --relay wss://relay.example --token-file /etc/agentctl/token
  agentctl run --relay ws://127.0.0.1:8460 --mock 5 --token-file tokens.txt`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := c.Flags()
	text := func(key, def, usage string) {
		k := config.FindKey(key)
		o.flags[key] = f.String(flagName(key), def, usage+" ["+k.Env()+"]")
	}
	text("relay", "", "`URL` of the relay, wss:// (ws:// for loopback only)")
	text("state_dir", config.DefaultStateDir(""), "`DIR` for identity and history")
	text("socket", config.DefaultSocket(), "`PATH` of the control socket")
	text("token_file", "", "`FILE` with the device token; with --mock, one token a line")
	text("ca_file", "", "PEM `FILE` of the authority that signed the relay's certificate")
	text("name", "", "`NAME` that the relay should show for this board")
	text("history.flush", duration.Format(history.DefaultFlush), "how often samples are written to the disk, 1s to 1h; 0 for no history")
	text("modules", strings.Join(prober.OptionalModuleNames(), ","), "`MODULES` to read beyond cpu, memory, disk and load")
	text("disk_path", "/", "a `PATH` on the filesystem whose fill is measured")
	text("log_level", "info", "log `LEVEL`: debug, info, warn, error")
	f.StringVar(&o.config, "config", env("AGENTCTL_CONFIG", ""), "configuration `FILE`, beside it conf.d/*.yaml (default \""+config.DefaultPath()+"\") [AGENTCTL_CONFIG]")
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

// source is where the configuration of this daemon comes from.
func (o *runOptions) source(f *pflag.FlagSet) (config.Source, error) {
	s := config.NewSource(o.config)
	s.ForDaemon, s.Flags = true, config.Settings{}
	if f.Changed("interval") {
		s.Flags["base_interval_ms"] = config.Setting{Value: o.every.Milliseconds(), Origin: "--interval"}
		if o.every < prober.MinInterval || o.every > prober.MaxInterval {
			return s, exit(exitUsage, "--interval %s is out of range: 100ms to 60s", o.every)
		}
	}
	for name, text := range o.flags {
		k := config.FindKey(name)
		if !f.Changed(flagName(name)) || *text == "" && name != "modules" {
			continue
		}
		v, err := k.Parse(*text)
		if err != nil {
			return s, exit(exitUsage, "--%s: %w", flagName(name), err)
		}
		s.Flags[name] = config.Setting{Value: v, Origin: "--" + flagName(name)}
	}
	return s, nil
}

// Load reads the configuration.
func (o *runOptions) load(f *pflag.FlagSet) (config.Source, error) {
	if o.mock < 0 || o.mock > maxMock {
		return config.Source{}, exit(exitUsage, "--mock takes 1 to %d boards", maxMock)
	}
	source, err := o.source(f)
	if err != nil {
		return source, err
	}
	if o.cfg, err = source.Load(); config.InFile(err) {
		if errors.Is(err, fs.ErrPermission) {
			return source, exit(exitFailure, "%w\nrun this as its owner, or choose another with --state-dir or --config", err)
		}
		return source, exit(exitFailure, "%w\nmend it, and try it with: agentctl config validate", err)
	} else if err != nil {
		return source, exit(exitUsage, "%w", err)
	}
	if o.mock > 0 && o.cfg.Text("relay") == "" {
		return source, exit(exitUsage, "--mock needs --relay")
	}
	return source, nil
}

func (o *runOptions) run(cmd *cobra.Command) error {
	ctx, cancel := context.WithCancel(cmd.Context())
	defer cancel()
	hup := make(chan os.Signal, 1)
	if term.IsTerminal(os.Stderr) { // it goes away with its terminal
		var stop context.CancelFunc
		ctx, stop = signal.NotifyContext(ctx, syscall.SIGHUP)
		defer stop()
	} else {
		signal.Notify(hup, syscall.SIGHUP)
		defer signal.Stop(hup)
	}
	source, err := o.load(cmd.Flags())
	if err != nil {
		return err
	}
	level := zap.NewAtomicLevel()
	if err := level.UnmarshalText([]byte(o.cfg.Text("log_level"))); err != nil {
		return exit(exitUsage, "log_level: %w", err)
	}
	log := newLoggerAt(level)
	defer func() { _ = log.Sync() }()
	if o.mock > 0 {
		return o.runMock(ctx, log)
	}
	id, err := enroll.Load(o.cfg.Text("state_dir"))
	if errors.Is(err, enroll.ErrNotSaved) {
		log.Error("state directory: going on from memory, the disk is tried again", zap.Error(err), zap.String("hint", "agentctl doctor"))
	} else if err != nil {
		return exit(exitFailure, "%w", err)
	}
	b, err := newBox(source, o.cfg, id, log, level)
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	defer b.close()
	if err := b.listen(); err != nil {
		return exit(exitFailure, "%w", err)
	}
	log.Info("ready", zap.String("node_id", id.NodeID()), zap.String("socket", b.srv.Addr()), zap.String("relay", o.cfg.Text("relay")), zap.String("version", version))
	sdNotify("READY=1", "STATUS="+b.ready())
	err = runAll(ctx, cancel, b.dev.runUntil(func(ctx context.Context) error { return b.run(ctx, hup) }), supervised(b.dev.prober, log))
	log.Info("stopped")
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	return nil
}

// clockFloor is the newest moment that has surely passed: the build's and the state
// file's.
func clockFloor(stateFile string) time.Time {
	floor := buildTime()
	if st, err := os.Stat(stateFile); err == nil && st.ModTime().After(floor) {
		floor = st.ModTime()
	}
	return floor
}

// builtAt is the commit's Unix time, set by the linker (make build).
var builtAt = "0"

func buildTime() time.Time {
	s, err := strconv.ParseInt(builtAt, 10, 64)
	if err != nil || s <= 0 {
		return time.Time{}
	}
	return time.Unix(s, 0)
}

// runMock runs N simulated boards over N links.
func (o *runOptions) runMock(ctx context.Context, log *zap.Logger) error {
	tokens, err := readTokens(o.cfg.TokenPath(), o.mock)
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	tlsConfig, err := config.ClientTLS(o.cfg.Text("ca_file"))
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var linked atomic.Int64
	dialing := make(chan struct{}, 64)
	var wg sync.WaitGroup
	for i, token := range tokens {
		var once sync.Once
		name := o.cfg.Text("name")
		if name == "" {
			name = "mock"
		}
		d, err := newDevice(deviceOptions{
			Relay: o.cfg.Text("relay"), TLS: tlsConfig, Dialing: dialing, Logger: mockLogger(log, o.mock),
			Token: func() (string, error) { return token, nil },
			Name:  name + "-" + strconv.Itoa(i+1), InstanceID: mockInstance(token),
			Source: prober.NewMockSource(uint64(i + 1)), Interval: o.mockInterval(),
			OnReady: func(link.AuthOK) {
				once.Do(func() {
					if linked.Add(1) == int64(o.mock) {
						log.Info("ready", zap.Int("mock", o.mock))
						sdNotify("READY=1")
					}
				})
			},
		}, time.Time{})
		if err != nil {
			cancel()
			wg.Wait()
			return exit(exitFailure, "%w", err)
		}
		wg.Go(func() { _ = d.run(ctx) })
	}
	wg.Wait()
	log.Info("stopped")
	return nil
}

// mockInterval keeps a large mock fleet quiet unless somebody watches it.
func (o *runOptions) mockInterval() time.Duration {
	if o.mock > 16 {
		return prober.MaxInterval
	}
	return o.cfg.Interval()
}

// mockLogger silences the single boards of a large fleet.
func mockLogger(log *zap.Logger, n int) *zap.Logger {
	if n > 16 {
		return log.WithOptions(zap.IncreaseLevel(zap.WarnLevel))
	}
	return log
}

// mockInstance is an install id that stays the same for a token.
func mockInstance(token string) string {
	sum := sha256.Sum256([]byte("agentctl mock install\x00" + token))
	return hex.EncodeToString(sum[:16])
}

func readTokens(path string, n int) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the tokens: %w; mint them with: agentctl token create --class device --count %d", err, n)
	}
	defer func() { _ = f.Close() }()
	var tokens []string
	sc := bufio.NewScanner(f)
	for sc.Scan() && len(tokens) < n {
		if t := strings.TrimSpace(sc.Text()); t != "" {
			tokens = append(tokens, t)
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read the tokens: %w", err)
	}
	if len(tokens) < n {
		return nil, errors.New("the token file has " + strconv.Itoa(len(tokens)) + " tokens for " + strconv.Itoa(n) +
			" boards; mint more with: agentctl token create --class device --count N")
	}
	return tokens, nil
}

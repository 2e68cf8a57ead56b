package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"agentctl/control"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

type runOptions struct {
	relay, stateDir, socket, tokenFile, caFile, name, logLevel string
	mock                                                       int
	interval                                                   time.Duration
}

// maxMock bounds --mock.
const maxMock = 20000

func newRun() *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the device daemon",
		Long: `Run the device daemon: sample this machine, serve the local control socket and, with
--relay, keep a link to a relay. It dials out only and listens on no TCP port.

The token is read from --token-file, else from the systemd credential "token".`,
		Example: `  agentctl run                                            works alone; see: agentctl status
  agentctl run --relay wss://relay.example --token-file /etc/agentctl/token
  agentctl run --relay ws://127.0.0.1:8460 --mock 5 --token-file tokens.txt`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	f := c.Flags()
	f.StringVar(&o.relay, "relay", env("AGENTCTL_RELAY", ""), "`URL` of the relay, wss:// (ws:// for loopback only) [AGENTCTL_RELAY]")
	f.StringVar(&o.stateDir, "state-dir", env("AGENTCTL_STATE_DIR", defaultStateDir("")), "`DIR` for identity and history [AGENTCTL_STATE_DIR]")
	f.StringVar(&o.socket, "socket", env("AGENTCTL_SOCKET", defaultSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	f.StringVar(&o.tokenFile, "token-file", env("AGENTCTL_TOKEN_FILE", ""), "`FILE` with the device token; with --mock, one token a line [AGENTCTL_TOKEN_FILE]")
	f.StringVar(&o.caFile, "ca-file", env("AGENTCTL_CA_FILE", ""), "PEM `FILE` of the authority that signed the relay's certificate [AGENTCTL_CA_FILE]")
	f.StringVar(&o.name, "name", env("AGENTCTL_NAME", ""), "`NAME` that the relay should show for this board [AGENTCTL_NAME]")
	f.DurationVar(&o.interval, "interval", time.Second, "base sampling `INTERVAL`, 100ms to 60s")
	f.IntVar(&o.mock, "mock", 0, "run `N` mock boards over N links instead of this machine, for load and demos")
	f.StringVar(&o.logLevel, "log-level", env("AGENTCTL_LOG_LEVEL", "info"), "log `LEVEL`: debug, info, warn, error [AGENTCTL_LOG_LEVEL]")
	return c
}

func (o *runOptions) check() error {
	if o.interval < prober.MinInterval || o.interval > prober.MaxInterval {
		return exit(exitUsage, "--interval %s is out of range: 100ms to 60s", o.interval)
	}
	if o.name != "" && !manifest.ValidNodeName(o.name) {
		return exit(exitUsage, "--name %q must be 1 to 32 lower case letters, digits and hyphens", o.name)
	}
	if o.mock < 0 || o.mock > maxMock {
		return exit(exitUsage, "--mock takes 1 to %d boards", maxMock)
	}
	if o.mock > 0 && o.relay == "" {
		return exit(exitUsage, "--mock needs --relay")
	}
	if o.relay != "" {
		if _, err := link.RelayURL(o.relay); err != nil {
			return exit(exitUsage, "%w", err)
		}
		if o.tokenPath() == "" {
			return exit(exitUsage, "--relay needs --token-file (the service reads /etc/agentctl/token); mint a token on the relay with: agentctl token create --class device")
		}
	}
	return nil
}

// tokenPath is --token-file, or the systemd credential.
func (o *runOptions) tokenPath() string {
	if o.tokenFile == "" {
		return credential("token")
	}
	return o.tokenFile
}

func (o *runOptions) run(ctx context.Context) error {
	if err := o.check(); err != nil {
		return err
	}
	log, err := newLogger(o.logLevel)
	if err != nil {
		return err
	}
	defer func() { _ = log.Sync() }()
	if o.mock > 0 {
		return o.runMock(ctx, log)
	}
	id, err := enroll.Load(o.stateDir)
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	d, err := o.open(id, log)
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	ln, err := serviceSocket()
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	srv, err := d.newControl(control.Options{Path: o.socket, Listener: ln, Logger: log},
		identity{id, o.name, o.relay, o.stateDir, time.Now()})
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	log.Info("ready", zap.String("node_id", id.NodeID()), zap.String("socket", srv.Addr()), zap.String("relay", o.relay), zap.String("version", version))
	sdNotify("READY=1", "STATUS=node "+id.NodeID()+"; ask it with: agentctl status")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err = runAll(ctx, cancel, d.runUntil(srv.Serve), supervised(d.prober, log))
	log.Info("stopped")
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	return nil
}

// open builds this machine's device.
func (o *runOptions) open(id *enroll.Identity, log *zap.Logger) (*device, error) {
	floor := clockFloor(filepath.Join(o.stateDir, enroll.File))
	do := deviceOptions{
		Relay: o.relay, Name: o.name, InstanceID: id.InstanceID(), Interval: o.interval, Logger: log,
		Token: func() (string, error) { return readSecret(o.tokenPath()) },
		OnReady: func(ok link.AuthOK) {
			changed, err := id.Adopt(ok.NodeID, ok.TenantID)
			switch {
			case err != nil:
				log.Warn("the node id could not be kept", zap.Error(err))
			case changed:
				log.Info("node id given by the relay", zap.String("node_id", ok.NodeID))
			}
		},
	}
	if o.relay != "" {
		tlsConfig, err := clientTLS(o.caFile, nil)
		if err != nil {
			return nil, err
		}
		do.TLS = tlsConfig
	}
	return newDevice(do, floor)
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
	tokens, err := readTokens(o.tokenPath(), o.mock)
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	tlsConfig, err := clientTLS(o.caFile, nil)
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
		name := o.name
		if name == "" {
			name = "mock"
		}
		d, err := newDevice(deviceOptions{
			Relay: o.relay, TLS: tlsConfig, Dialing: dialing, Logger: mockLogger(log, o.mock),
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
	return o.interval
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

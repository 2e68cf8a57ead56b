// Package demo runs the whole product in one process: a relay on loopback, this machine's
// daemon and mock boards, each with a real WebSocket link. Its state is in a temporary
// directory, which it removes at the end.
//
//	err := demo.Run(ctx, demo.Options{Listen: "127.0.0.1:0"}, func(ctx context.Context, d *demo.Demo) error {
//		fmt.Println(d.RelayURL, d.Nodes)
//		<-ctx.Done()
//		return nil
//	})
//
// Ownership: Run starts all goroutines and waits for them before it returns. The boards stop
// before the relay, and the directory is removed after both, so that neither writes into a
// directory that is gone.
//
// The links are real, so that a demo shows what a deployment does: tokens are created and verified,
// calls cross the relay, and metrics are streamed. TLS is left out, because everything stays
// on loopback.
package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"agentctl/client"
	"agentctl/config"
	"agentctl/daemon"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/gateway"
	"agentctl/transport/edge"
)

// Size and timing of a demo. Its tokens live for a day, which bounds the damage when one of
// them is pasted into the configuration of a client and forgotten there.
const (
	mockBoards   = 4
	freePort     = "127.0.0.1:0"
	tokenTTL     = 24 * time.Hour
	linkTimeout  = 20 * time.Second // until every board has its link
	pollInterval = 20 * time.Millisecond

	// MachineName is the name of this machine among the boards.
	MachineName = "this-machine"
)

// Errors of Run that depend on where it runs or how it is called.
var (
	ErrTempDir     = errors.New("make a temporary directory")
	ErrRelay       = errors.New("open the relay") // wraps an error of relay.Open
	ErrSocketPath  = errors.New("open the control socket in the temporary directory")
	ErrNotLoopback = errors.New("the demo is for this machine only; choose a port of 127.0.0.1")
	ErrNoLink      = fmt.Errorf("the demo's boards were not linked within %s", linkTimeout)
)

// Options configure a demo.
//
// The relay of a demo accepts the demo's tokens only, and listens on loopback because it
// serves plain HTTP.
type Options struct {
	Listen        string // HOST:PORT of the relay; HOST is loopback, or empty
	AllowFreePort bool   // use a free port when that of Listen is taken
	Build         daemon.Build
	Doctor        daemon.DoctorFunc // of this machine's daemon; nil: none
}

// Node is a board of the demo.
type Node struct {
	NodeID string `json:"node_id"`
	Name   string `json:"name"`
}

// Demo has the addresses and credentials of a running demo.
type Demo struct {
	RelayURL  string         `json:"relay_url"`
	MCPURL    string         `json:"mcp_url"`
	SSEURL    string         `json:"sse_url"` // of the event gateway
	Token     string         `json:"token"`   // of an agent
	Nodes     []Node         `json:"nodes"`   // this machine first
	Socket    string         `json:"socket"`  // control socket of this machine's daemon
	TokenFile string         `json:"-"`       // with Token
	Client    *client.Client `json:"-"`       // of the relay, with Token

	dir    string
	doctor daemon.DoctorFunc
}

// Run starts the relay and the boards, calls use when every board has its link, and stops
// everything when use returns. The context of use ends with ctx and when the relay fails.
func Run(ctx context.Context, o Options, use func(context.Context, *Demo) error) error {
	host, port, err := net.SplitHostPort(o.Listen)
	if err == nil && host == "" {
		o.Listen = net.JoinHostPort("127.0.0.1", port)
	} else if err == nil && !edge.IsLoopback(host) {
		return ErrNotLoopback
	}
	dir, err := os.MkdirTemp("", "agentctl-demo-")
	if err != nil {
		return fmt.Errorf("%w: %w", ErrTempDir, err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	r, err := openRelay(filepath.Join(dir, "relay"), o)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrRelay, err)
	}

	// Deferred calls run in reverse: the boards stop before the relay.
	// The boards and the relay do not stop with ctx directly, but in this order by the calls
	// deferred below. useCtx also ends with the relay, and its cause is the relay's error.
	useCtx, stopUse := context.WithCancelCause(ctx)
	defer stopUse(nil)
	var relayDone, boardsDone sync.WaitGroup
	relayCtx, stopRelay := context.WithCancel(context.WithoutCancel(ctx))
	defer relayDone.Wait()
	defer stopRelay()
	relayDone.Go(func() { stopUse(r.Run(relayCtx)) })
	boardCtx, stopBoards := context.WithCancel(context.WithoutCancel(ctx))
	defer boardsDone.Wait()
	defer stopBoards()

	d := &Demo{RelayURL: r.URL(), MCPURL: client.MCPURL(r.URL(), client.FleetToolset, true), SSEURL: r.SSEURL(), dir: dir, doctor: o.Doctor,
		TokenFile: filepath.Join(dir, "agent.token"), Socket: filepath.Join(dir, "run", "agentctl.sock")}
	tokens, err := d.createTokens(ctx, r.Store())
	if err != nil {
		return err
	}
	machine, err := d.newDaemon(tokens[0], o.Build)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSocketPath, err)
	}
	boardsDone.Go(func() { _ = machine.Run(boardCtx) })
	boardsDone.Go(func() {
		_ = daemon.RunMocks(boardCtx, daemon.MockOptions{Relay: d.RelayURL, Tokens: tokens[1:], Name: "mock",
			Version: o.Build.Version, Interval: time.Second, Log: zap.NewNop()})
	})
	if d.Client, err = client.New(client.Options{URL: d.RelayURL, Token: d.Token}); err != nil {
		return err
	}
	if err := d.waitForLinks(useCtx); err != nil {
		return err
	}
	if err := use(useCtx, d); err != nil {
		return err
	}
	// use may return nil because its context ended. An end by the relay is still an error of Run;
	// an end by the caller is not.
	if err := context.Cause(useCtx); err != nil && !errors.Is(err, context.Canceled) && ctx.Err() == nil {
		return err
	}
	return nil
}

// openRelay opens a relay whose event gateway has a free port.
//
// The gateway never uses its default port, which a gateway of this machine may have.
func openRelay(stateDir string, o Options) (*relay.Relay, error) {
	ro := relay.Options{StateDir: stateDir, Listen: o.Listen, Version: o.Build.Version, Logger: zap.NewNop(),
		SSE: &gateway.Options{Listen: freePort}, MaxRestarts: 5}
	r, err := relay.Open(ro)
	if errors.Is(err, syscall.EADDRINUSE) && o.AllowFreePort {
		ro.Listen = freePort
		r, err = relay.Open(ro)
	}
	return r, err
}

// createTokens creates the agent's token and returns those of the boards.
//
// Node 0 is this machine, and its token the first one; the mock boards follow in the order of
// their names. The agent's token is also written to TokenFile, for commands that take a file.
func (d *Demo) createTokens(ctx context.Context, store *auth.Store) ([]string, error) {
	agent, err := store.Mint(ctx, auth.MintRequest{Class: auth.ClassAgent, Subject: "demo", TTL: tokenTTL})
	if err != nil {
		return nil, err
	}
	d.Token = agent[0].Token
	devices, err := store.Mint(ctx, auth.MintRequest{Class: auth.ClassDevice, Count: 1 + mockBoards, TTL: tokenTTL})
	if err != nil {
		return nil, err
	}
	tokens := make([]string, len(devices))
	for i, m := range devices {
		tokens[i] = m.Token
		d.Nodes = append(d.Nodes, Node{NodeID: m.NodeID, Name: "mock-" + strconv.Itoa(i)})
	}
	d.Nodes[0].Name = MachineName
	return tokens, os.WriteFile(d.TokenFile, []byte(d.Token+"\n"), 0o600)
}

// newDaemon is this machine's daemon, with its files in the demo's directory.
//
// The configuration comes from flags alone: a config.yaml or AGENTCTL_* of the user is about
// a real daemon. History and alerts are off: the demo shows the live metrics of the stream, and
// nothing of it stays.
func (d *Demo) newDaemon(token string, build daemon.Build) (*daemon.Daemon, error) {
	tokenFile := filepath.Join(d.dir, "device.token")
	if err := os.WriteFile(tokenFile, []byte(token+"\n"), 0o600); err != nil {
		return nil, err
	}
	source := config.Source{Path: filepath.Join(d.dir, "config.yaml"), Flags: config.Settings{},
		LookupEnv: func(string) (string, bool) { return "", false }}
	for key, value := range map[string]any{
		"relay": d.RelayURL, "token_file": tokenFile, "name": MachineName, "socket": d.Socket, "state_dir": filepath.Join(d.dir, "device"),
		"history.enabled": false, "alerts.defaults": false, "modules": []string{},
	} {
		source.Flags[key] = config.Setting{Value: value, Origin: "the demo"}
	}
	cfg, err := source.Load()
	if err != nil {
		return nil, err
	}
	return daemon.New(daemon.Options{Source: source, Config: cfg, Build: build, Log: zap.NewNop(), Level: zap.NewAtomicLevel(), Doctor: d.doctor})
}

// waitForLinks waits until the relay shows every board online.
//
// It polls because the relay's API has no event for it that needs less than an MCP session;
// a first answer usually comes after a few intervals.
func (d *Demo) waitForLinks(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, linkTimeout, ErrNoLink)
	defer cancel()
	for {
		online := 0
		nodes, _ := d.Client.Nodes(ctx) // the relay may not serve yet
		for _, n := range nodes {
			if n.Online {
				online++
			}
		}
		if online == len(d.Nodes) {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pollInterval):
		}
	}
}

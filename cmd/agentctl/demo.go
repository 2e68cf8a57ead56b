//go:build !agentctl_omit_relay

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"agentctl/client"
	"agentctl/config"
	"agentctl/daemon"
	"agentctl/duration"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/gateway"
	"agentctl/term"
	"agentctl/transport/edge"
)

// demoMocks is how many mock boards the demo runs beside this machine.
const demoMocks = 4

// demoMachine is the name of this machine among the boards of the demo.
const demoMachine = "this-machine"

func newDemo() *cobra.Command {
	var listen string
	var dur time.Duration
	var out output
	c := &cobra.Command{
		Use:   "demo",
		Short: "The whole loop on this machine: a relay, this machine and four mock boards",
		Long: `Run a relay on loopback, this machine as a device and four mock boards, each over a
real WebSocket link; prove the loop with one echo through MCP; then show live metrics
until Ctrl-C. It keeps its state in a temporary directory and removes it at the end.`,
		Example: "  agentctl demo\n  agentctl demo -o json --listen 127.0.0.1:0",
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Also when its terminal or the reader of its output goes: nothing is left behind.
			ctx, cancel := signal.NotifyContext(cmd.Context(), syscall.SIGHUP, syscall.SIGPIPE)
			defer cancel()
			if dur > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, dur)
				defer cancel()
			}
			d := &demo{out: cmd.OutOrStdout(), asJSON: out.format != "", chosen: cmd.Flags().Changed("listen")}
			err := d.run(ctx, listen)
			if ctx.Err() != nil {
				return nil // Ctrl-C, --for, or nobody looks any more
			}
			return err
		},
	}
	c.Flags().StringVar(&listen, "listen", relay.DefaultListen, "`HOST:PORT` of the relay, loopback; :0 for a free port")
	c.Flags().Var(duration.NewValue(&dur, 0), "for", "end after `DURATION` (0: with Ctrl-C)")
	out.flags(c)
	return c
}

type demo struct {
	out    io.Writer
	asJSON bool
	chosen bool // --listen was given
	dir    string
	relay  *relay.Relay
	token  string
	nodes  []demoNode
	socket string
}

type demoNode struct {
	NodeID string `json:"node_id"`
	Name   string `json:"name"`
}

func (d *demo) run(ctx context.Context, listen string) (err error) {
	if d.dir, err = os.MkdirTemp("", "agentctl-demo-"); err != nil {
		return exit(exitFailure, "make a temporary directory: %w; name another place with TMPDIR", err)
	}
	defer func() { _ = os.RemoveAll(d.dir) }()
	host, port, err := net.SplitHostPort(listen)
	if err == nil && host == "" {
		listen = net.JoinHostPort("127.0.0.1", port)
	} else if err == nil && !edge.IsLoopback(host) {
		return exit(exitUsage, "--listen %s: the demo is for this machine only; choose a port of 127.0.0.1", listen)
	}
	if err := d.open(listen); err != nil {
		return relayOpenError(err)
	}
	// The stream ends first, then the boards, then the relay: each in order.
	relayCtx, stopRelay := context.WithCancel(context.WithoutCancel(ctx))
	boardCtx, stopBoards := context.WithCancel(context.WithoutCancel(ctx))
	var relayDone, boards sync.WaitGroup
	relayErr := make(chan error, 1)
	relayDone.Go(func() { relayErr <- d.relay.Run(relayCtx) })
	defer relayDone.Wait()
	defer stopRelay()
	defer boards.Wait()
	defer stopBoards()
	if err := d.startBoards(boardCtx, &boards); err != nil {
		return err
	}
	rc, err := d.client()
	if err != nil {
		return err
	}
	fleet, err := d.wait(ctx, rc)
	if err != nil {
		return err
	}
	if d.asJSON {
		if err := d.printJSON(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-relayErr:
			return err
		}
	}
	return d.show(ctx, rc, fleet)
}

// open starts nothing; it takes the port and mints the tokens. The default port gives
// way to a free one when it is taken.
func (d *demo) open(listen string) (err error) {
	o := relay.Options{StateDir: filepath.Join(d.dir, "relay"), Listen: listen, Version: version, Logger: zap.NewNop(),
		SSE: &gateway.Options{Listen: "127.0.0.1:0"}, MaxRestarts: 5}
	d.relay, err = relay.Open(o)
	if errors.Is(err, syscall.EADDRINUSE) && !d.chosen {
		o.Listen = "127.0.0.1:0"
		d.relay, err = relay.Open(o)
	}
	return err
}

func (d *demo) startBoards(ctx context.Context, wg *sync.WaitGroup) error {
	store := d.relay.Store()
	agent, err := store.Mint(ctx, auth.MintRequest{Class: auth.ClassAgent, Subject: "demo", TTL: 24 * time.Hour})
	if err != nil {
		return err
	}
	d.token = agent[0].Token
	devices, err := store.Mint(ctx, auth.MintRequest{Class: auth.ClassDevice, Count: 1 + demoMocks, TTL: 24 * time.Hour})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(d.dir, "agent.token"), []byte(d.token+"\n"), 0o600); err != nil {
		return err
	}
	tokens := make([]string, len(devices))
	for i, m := range devices {
		tokens[i] = m.Token
		d.nodes = append(d.nodes, demoNode{NodeID: m.NodeID, Name: "mock-" + strconv.Itoa(i)})
	}
	d.nodes[0].Name = demoMachine
	machine, err := d.newDaemon(tokens[0])
	if err != nil {
		return exit(exitFailure, "%w; for the demo: a shorter TMPDIR", err)
	}
	wg.Go(func() { _ = machine.Run(ctx) })
	wg.Go(func() {
		_ = daemon.RunMocks(ctx, daemon.MockOptions{Relay: d.relay.URL(), Tokens: tokens[1:], Name: "mock", Version: version,
			Interval: time.Second, Log: zap.NewNop()})
	})
	return nil
}

// newDaemon is this machine's daemon, with its files in the demo's directory.
func (d *demo) newDaemon(token string) (*daemon.Daemon, error) {
	tokenFile := filepath.Join(d.dir, "device.token")
	if err := os.WriteFile(tokenFile, []byte(token+"\n"), 0o600); err != nil {
		return nil, err
	}
	d.socket = filepath.Join(d.dir, "run", "agentctl.sock")
	source := config.Source{Path: filepath.Join(d.dir, "config.yaml"), LookupEnv: func(string) (string, bool) { return "", false }, Flags: config.Settings{}}
	for key, value := range map[string]any{"relay": d.relay.URL(), "token_file": tokenFile, "name": demoMachine, "socket": d.socket,
		"state_dir": filepath.Join(d.dir, "device"), "history.enabled": false, "alerts.defaults": false, "modules": []string{}} {
		source.Flags[key] = config.Setting{Value: value, Origin: "the demo"}
	}
	cfg, err := source.Load()
	if err != nil {
		return nil, err
	}
	return daemon.New(daemon.Options{Source: source, Config: cfg, Build: build(), Log: zap.NewNop(), Level: zap.NewAtomicLevel()})
}

func (d *demo) client() (*client.Client, error) {
	f := relayFlags{relay: d.relay.URL(), tokenFile: filepath.Join(d.dir, "agent.token")}
	return f.client()
}

// demoStart bounds the wait for the boards.
const demoStart = 20 * time.Second

func (d *demo) wait(ctx context.Context, rc *client.Client) ([]client.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, demoStart)
	defer cancel()
	for {
		nodes, err := rc.Nodes(ctx)
		if err == nil {
			up := 0
			for _, n := range nodes {
				if n.Online {
					up++
				}
			}
			if up == len(d.nodes) {
				return nodes, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, exit(exitTimeout, "the demo's boards did not get their links within %s", demoStart)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *demo) printJSON() error {
	b, err := json.Marshal(struct {
		RelayURL string     `json:"relay_url"`
		MCPURL   string     `json:"mcp_url"`
		SSEURL   string     `json:"sse_url"`
		Token    string     `json:"token"`
		Nodes    []demoNode `json:"nodes"`
		Socket   string     `json:"socket"`
	}{d.relay.URL(), d.relay.URL() + "/mcp", d.relay.SSEURL(), d.token, d.nodes, d.socket})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(d.out, "%s\n", b)
	return err
}

func (d *demo) show(ctx context.Context, rc *client.Client, fleet []client.Node) error {
	w := d.out
	fmt.Fprintf(w, "agentctl demo: a relay and %d boards on this machine, over real links\n\n", len(fleet))
	for _, dn := range d.nodes {
		kind := "mock board (simulated figures)"
		if dn.Name == demoMachine {
			kind = "this machine (real figures)"
		}
		fmt.Fprintf(w, "  %-13s %s  online   %s\n", dn.Name, dn.NodeID, kind)
	}
	self := d.nodes[0]
	echo := manifest.ToolName{Short: "sysecho", NodeID: self.NodeID, CapID: "echo", Verb: manifest.VerbInvoke}.String()
	took, answer, err := d.mcpEcho(ctx, rc, echo)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nEcho through MCP, relay and link and back: %q in %s\n", answer, took.Round(10*time.Microsecond))
	stream := manifest.ToolName{Short: "sys", NodeID: self.NodeID, CapID: "metrics", Verb: manifest.VerbSubscribe}.String()
	fmt.Fprintf(w, `
Paste into an MCP client (while this demo runs):

  {"mcpServers":{"agentctl":{"type":"http","url":"%[1]s/mcp?names=flat","headers":{"Authorization":"Bearer %[2]s"}}}}

The metric stream with curl:

  curl -N -X POST %[1]s/mcp/tools/call -H "Authorization: Bearer $(cat %[5]s)" \
    -H 'Content-Type: application/json' -H 'Accept: text/event-stream' \
    -d '{"tool":"%[3]s","arguments":{"interval_ms":1000}}'

What happens in the fleet, as events with curl:

  curl -N '%[6]s' -H "Authorization: Bearer $(cat %[5]s)"

In another terminal:

  %[7]s status --socket %[4]s
  %[7]s ls --relay %[1]s --token-file %[5]s

Live from this machine, once a second (Ctrl-C ends the demo):

`, d.relay.URL(), d.token, stream, d.socket, filepath.Join(d.dir, "agent.token"), d.relay.SSEURL(), typed())
	fmt.Fprintf(w, "  %-10s %7s %21s %7s  %s\n", "TIME", "CPU", "MEMORY", "DISK", "LOAD")
	return rc.Metrics(ctx, stream, json.RawMessage(`{"interval_ms":1000}`), func(data []byte) error {
		var f prober.Sample
		if err := json.Unmarshal(data, &f); err != nil {
			return err
		}
		_, err := fmt.Fprintf(w, "  %-10s %5.1f %% %9s of %8s %5.1f %%  %.2f %.2f %.2f\n", time.UnixMilli(f.TSMS).Format("15:04:05"),
			f.CPUPct, term.Bytes(f.MemBytes), term.Bytes(f.MemTotalBytes), f.DiskPct, f.Load1, f.Load5, f.Load15)
		return err
	})
}

// typed is how another terminal starts this program: it may stand on no PATH.
func typed() string {
	if self, err := os.Executable(); err == nil && strings.Contains(os.Args[0], "/") {
		return self
	}
	return "agentctl"
}

// mcpEcho makes one MCP tools/call, as a client of version 2026-07-28 does.
func (d *demo) mcpEcho(ctx context.Context, rc *client.Client, tool string) (time.Duration, string, error) {
	const mcpVersion = "2026-07-28"
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{
		"name": tool, "arguments": map[string]string{"message": "hello, board"},
		"_meta": map[string]any{"io.modelcontextprotocol/protocolVersion": mcpVersion,
			"io.modelcontextprotocol/clientInfo":         map[string]string{"name": "agentctl-demo", "version": version},
			"io.modelcontextprotocol/clientCapabilities": map[string]any{}},
	}})
	if err != nil {
		return 0, "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.relay.URL()+"/mcp", bytes.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
		"Authorization": "Bearer " + d.token, "MCP-Protocol-Version": mcpVersion, "Mcp-Method": "tools/call", "Mcp-Name": tool} {
		req.Header.Set(k, v)
	}
	start := time.Now()
	resp, err := rc.HTTP().Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	took := time.Since(start)
	if err != nil {
		return 0, "", exit(exitFailure, "read the MCP answer: %w", err)
	}
	if i := bytes.Index(b, []byte("data: {")); i >= 0 { // answered as an event stream
		b, _, _ = bytes.Cut(b[i+len("data: "):], []byte("\n"))
	}
	var answer struct {
		Result struct {
			Structured struct {
				Message string `json:"message"`
			} `json:"structuredContent"`
		} `json:"result"`
	}
	if err := json.Unmarshal(b, &answer); err != nil || answer.Result.Structured.Message == "" {
		return 0, "", exit(exitFailure, "the echo through MCP failed: HTTP %d %s", resp.StatusCode, b)
	}
	return took, answer.Result.Structured.Message, nil
}

//go:build linux && !agentctl_omit_relay

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/boardcmd"
	"agentctl/cmd/internal/cli"
	"agentctl/daemon"
	"agentctl/demo"
	"agentctl/duration"
	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/term"
)

// demoFlags are the flags of demo.
type demoFlags struct {
	listen string        // default: that of 'agentctl relay'
	limit  time.Duration // 0: until Ctrl-C
	out    cli.Output
}

// newDemo returns the command demo. It needs no root, no configuration and no network but loopback. If
// the default port is taken it uses a free one; an address that was typed is used or refused. With -o, in
// any format, the only output is one line of JSON with the addresses and the token (JSON is valid YAML
// too): a script reads it, uses the demo, and ends it with a signal.
func newDemo() *cobra.Command {
	var f demoFlags
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run a relay, this machine and four mock boards in one process",
		Long: `Run a relay on loopback, the daemon of this machine and four mock boards, each over a real
WebSocket link. The demo sends one echo through MCP, then shows live metrics until Ctrl-C. It
keeps its state in a temporary directory and removes it at the end.`,
		Example: "  agentctl demo\n  agentctl demo -o json --listen 127.0.0.1:0",
		RunE:    func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	c.Flags().StringVar(&f.listen, "listen", relay.DefaultListen, "`HOST:PORT` of the relay, loopback; :0 for a free port")
	c.Flags().Var(duration.NewValue(&f.limit, 0), "for", "end after `DURATION` (0: at Ctrl-C)")
	f.out.AddFlags(c)
	return c
}

// run runs the demo until Ctrl-C, --for, or the end of its terminal or of the program that reads its
// output. Each of these is a normal end with exit code 0, after which nothing of the demo is left.
//
// SIGPIPE is ignored and not waited for, because the kernel also sends it for a connection that a client
// of the relay has closed.
func (f *demoFlags) run(cmd *cobra.Command) error {
	ctx, cancel := signal.NotifyContext(cmd.Context(), syscall.SIGHUP)
	defer cancel()
	signal.Ignore(syscall.SIGPIPE)
	defer signal.Reset(syscall.SIGPIPE)
	if f.limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.limit)
		defer cancel()
	}
	o := demo.Options{Listen: f.listen, AllowFreePort: !cmd.Flags().Changed("listen"), Build: boardcmd.Build(), Doctor: boardcmd.InsideDoctor()}
	err := demo.Run(ctx, o, func(ctx context.Context, d *demo.Demo) error {
		if f.out.Format == "" {
			return showDemo(ctx, cmd.OutOrStdout(), d)
		}
		e := json.NewEncoder(cmd.OutOrStdout())
		e.SetEscapeHTML(false) // a person may copy the URL, which has &
		err := e.Encode(d)
		if err == nil {
			<-ctx.Done()
		}
		return err
	})
	if ctx.Err() != nil || errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return f.explain(err)
}

// explain gives an error of demo.Run its exit code and the next step. Errors of the relay get those of
// 'agentctl relay', since --listen means the same here.
func (f *demoFlags) explain(err error) error {
	switch {
	case errors.Is(err, demo.ErrNotLoopback):
		return cli.Errorf(cli.ExitUsage, "--listen %s: %w", f.listen, err)
	case errors.Is(err, demo.ErrTempDir):
		return cli.Errorf(cli.ExitFailure, "%w; name another place with TMPDIR", err)
	case errors.Is(err, demo.ErrSocketPath):
		return cli.Errorf(cli.ExitFailure, "%w; for the demo: a shorter TMPDIR", err)
	case errors.Is(err, demo.ErrNoLink):
		return cli.Errorf(cli.ExitTimeout, "%w", err)
	case errors.Is(err, demo.ErrRelay):
		return relayOpenError(err)
	}
	return err
}

// showDemo prints how to reach the demo, then the metrics of this machine until ctx ends. The echo comes
// first: it proves that a call crosses MCP, relay and link. Then comes what a first reader tries next, ready
// to be pasted: an MCP client, the stream, the events and the commands.
func showDemo(ctx context.Context, w io.Writer, d *demo.Demo) error {
	fmt.Fprintf(w, "agentctl demo: a relay and %d boards on this machine, over real links\n\n", len(d.Nodes))
	for _, dn := range d.Nodes {
		kind := "mock board (simulated figures)"
		if dn.Name == demo.MachineName {
			kind = "this machine (real figures)"
		}
		fmt.Fprintf(w, "  %-13s %s  online   %s\n", dn.Name, dn.NodeID, kind)
	}
	echoed, took, err := d.Echo(ctx, "hello, board")
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nEcho through MCP, relay and link and back: %q in %s\n", echoed, took.Round(10*time.Microsecond))
	stream := manifest.ToolName{Short: "sys", NodeID: d.Nodes[0].NodeID, CapID: "metrics", Verb: manifest.VerbSubscribe}.String()
	fmt.Fprint(w, strings.NewReplacer("{relay}", d.RelayURL, "{mcp}", d.MCPURL, "{events}", d.SSEURL, "{token}", d.Token, "{token file}", d.TokenFile,
		"{stream}", stream, "{socket}", d.Socket, "{agentctl}", selfCommand()).Replace(demoText))
	fmt.Fprintf(w, "  %-10s %7s %21s %7s  %s\n", "TIME", "CPU", "MEMORY", "DISK", "LOAD")
	return d.Client.Metrics(ctx, stream, json.RawMessage(`{"interval_ms":1000}`), func(data []byte) error {
		var f daemon.StatusSample
		if err := json.Unmarshal(data, &f); err != nil {
			return err
		}
		// disk_pct is null while the disk cannot be read, which is shown as 0.
		disk := 0.0
		if f.DiskPct != nil {
			disk = *f.DiskPct
		}
		_, err := fmt.Fprintf(w, "  %-10s %5.1f %% %9s of %8s %5.1f %%  %.2f %.2f %.2f\n", time.UnixMilli(f.TSMS).Format("15:04:05"),
			f.CPUPct, term.Bytes(f.MemBytes), term.Bytes(f.MemTotalBytes), disk, f.Load1, f.Load5, f.Load15)
		return err
	})
}

// demoText is what showDemo prints between the list of boards and the live metrics. Words in braces are
// replaced. The commands read the token from its file, so that it is not in a shell's history; the MCP entry
// contains it, because a client cannot do that.
const demoText = `
Paste into an MCP client (while this demo runs):

  {"mcpServers":{"agentctl":{"type":"http","url":"{mcp}","headers":{"Authorization":"Bearer {token}"}}}}

The metric stream with curl:

  curl -N -X POST {relay}/mcp/tools/call -H "Authorization: Bearer $(cat {token file})" \
    -H 'Content-Type: application/json' -H 'Accept: text/event-stream' \
    -d '{"tool":"{stream}","arguments":{"interval_ms":1000}}'

What happens in the fleet, as events with curl:

  curl -N '{events}' -H "Authorization: Bearer $(cat {token file})"

In another terminal:

  {agentctl} status --socket {socket}
  {agentctl} ls --relay {relay} --token-file {token file}

Live from this machine, once a second (Ctrl-C ends the demo):

`

// selfCommand is how another terminal starts this program, which PATH may not have: its full path if it was
// started by a path, since another terminal has another working directory.
func selfCommand() string {
	if self, err := os.Executable(); err == nil && strings.Contains(os.Args[0], "/") {
		return self
	}
	return "agentctl"
}

package eventscmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// client.Gateway.Tail opens an interrupted stream again, with the id of the last event: the gateway then
// sends what came in between, from its ring or its log. The first attempt must succeed, so that a wrong
// address is an error; a refused token ends tail at any time. A slow reader of stdout delays the stream. The
// gateway then drops events and says how many, and tail asks for them again.

// newTail returns the command tail. What is received goes to stdout, and what happens to the connection to
// stderr: a gap in the events is reported there and is no error.
func newTail() *cobra.Command {
	var t tailFlags
	c := &cobra.Command{
		Use:   "tail",
		Short: "Subscribe to topics of the event gateway; reconnects and resumes",
		Long: `Subscribe to topics of an event gateway. On a terminal each event is a readable line, elsewhere one
JSON object per line: {"id":N,"topic":"a/b","data":...}, with "signature" if the gateway signs. A
broken connection is reopened with the last id, so that no event is missed while the gateway still
has it; lost events are reported on stderr.

The gateway is the one at --url, or at port MCP_SSE_PORT or 39300 of the relay's host. The token
comes from --token-file, MCP_SSE_AUTH_TOKEN or AGENTCTL_TOKEN_FILE, in this order.

Exit codes: 0 after --count or --for and on Ctrl-C; 3 if nothing answers at the start; 4 for an
invalid token; 7 if --for ends before --count is reached.`,
		Example: `  agentctl events tail
  agentctl events tail --topics alert,ticket,log/* --since 0
  agentctl events tail --url https://relay.example:39300 --token-file agent.token -o ndjson | jq .data`,
		RunE: func(cmd *cobra.Command, _ []string) error { return t.run(cmd) },
	}
	t.relay.AddFlags(c)
	f := c.Flags()
	f.StringVar(&t.address, "url", cli.EnvOr("AGENTCTL_EVENTS_URL", ""), "`URL` of the gateway, with or without the stream's path [AGENTCTL_EVENTS_URL]")
	f.StringSliceVar(&t.o.Topics, "topics", nil, "only these `TOPICS`; log/* selects all topics below log (default: all)")
	f.StringVar(&t.o.After, "since", "", "start after the event `ID`; 0: with everything that the gateway has (default: new events only)")
	t.limit.AddFlags(c, "end", "events")
	t.out.AddStreamFlags(c)
	return c
}

// tailFlags are the flags of tail.
type tailFlags struct {
	relay   cli.RelayFlags
	out     cli.Output
	limit   cli.Limits
	address string
	o       client.TailOptions
}

// run prints events until --count have come, --for is over or the command is interrupted.
//
// A tail that was ended by --for has done what it was asked to, and exits with 0. It has not if it
// waited for a number of events, or if the gateway has not answered at all.
func (t *tailFlags) run(cmd *cobra.Command) error {
	if err := t.limit.Check(); err != nil {
		return err
	}
	if t.o.After != "" {
		// 63 bits, as ids of the gateway have. It would answer anything else with a reset and all events
		// of its ring.
		if _, err := strconv.ParseUint(t.o.After, 10, 63); err != nil {
			return cli.Errorf(cli.ExitUsage, "--since takes an event's id, or 0 for all that the gateway has")
		}
	}
	g, err := tailGateway(cmd, &t.relay, t.address)
	if err != nil {
		return err
	}
	ctx, cancel := t.limit.Context(cmd)
	defer cancel()
	printed, isText := 0, t.out.IsText(cmd)
	t.o.OnNotice = func(notice string) {
		fmt.Fprintf(cmd.ErrOrStderr(), "agentctl: %s\n", term.SafeLine(notice))
	}
	t.o.OnEvent = func(e client.Event) error {
		if err := printEvent(cmd, e, isText); err != nil {
			return cli.Errorf(cli.ExitFailure, "write: %w", err)
		}
		if printed++; printed == t.limit.Count {
			return client.ErrStop
		}
		return nil
	}
	err = g.Tail(ctx, t.o)
	// Ctrl-C and --for end the same context; only its error distinguishes them, and Tail returns nil for
	// both once it was connected.
	timedOut := errors.Is(ctx.Err(), context.DeadlineExceeded)
	switch {
	// Without --count Count is 0, and this is false.
	case timedOut && printed < t.limit.Count:
		return cli.Errorf(cli.ExitTimeout, "%d of %d events came within the time of --for", printed, t.limit.Count)
	case timedOut && errors.Is(err, context.DeadlineExceeded):
		return cli.Errorf(cli.ExitTimeout, "the gateway at %s did not answer within the time of --for", g.Host())
	case errors.Is(err, context.Canceled): // Ctrl-C
		return nil
	}
	return err
}

// tailGateway makes the client of the gateway that the flags, the environment and the context name.
//
// An explicit flag comes before every variable. Of the rest --url comes before --relay, and the gateway's
// token before the relay's. The context serves the gateway of its relay only.
//
//	address   --url or --relay; AGENTCTL_EVENTS_URL; the host of the relay or context with MCP_SSE_PORT
//	token     --token-file; MCP_SSE_AUTH_TOKEN; AGENTCTL_TOKEN_FILE; the context
//	TLS       of the context, if the gateway has the host of its relay; else --ca-file, --ca-sha256
//
// A token that is refreshed (Options.NewToken) is only that of the context. It must not go to another
// host, since a relay's token is valid for whoever has it.
func tailGateway(cmd *cobra.Command, rf *cli.RelayFlags, address string) (*client.Gateway, error) {
	byRelay := cmd.Flags().Changed("relay")
	if byRelay && cmd.Flags().Changed("url") {
		return nil, cli.Errorf(cli.ExitUsage, "give either --url or --relay")
	}
	saved, err := rf.Context()
	if err != nil {
		return nil, err
	}
	relay := rf.URL
	if saved != nil {
		relay = saved.Relay()
	}
	// flag is what the address came from, for the text of an error.
	flag, host := "--url", ""
	if u, err := url.Parse(relay); err == nil && u.Host != "" {
		host = u.Hostname()
		if address == "" || byRelay {
			address = u.Scheme + "://" + net.JoinHostPort(host, cli.EnvOr("MCP_SSE_PORT", client.GatewayPort))
			flag = "--relay"
		}
	} else if address == "" || byRelay {
		flag, address = "--relay", rf.URL
	}
	// An explicit --token-file rules out MCP_SSE_AUTH_TOKEN, which may be that of a gateway on this
	// machine.
	o := client.Options{URL: address}
	if !cmd.Flags().Changed("token-file") {
		o.Token, err = envToken("MCP_SSE_AUTH_TOKEN")
	}
	if o.Token == "" && err == nil && rf.TokenFile != "" {
		o.Token, err = cli.ReadToken(rf.TokenFile)
	}
	if err != nil {
		return nil, err
	}
	// By host name and not by port: the gateway of a relay has another port.
	if u, err := url.Parse(address); saved != nil && err == nil && u.Hostname() == host {
		if o.TLS = saved.TLS(); o.Token == "" {
			o.NewToken = saved.Token
		}
		return newGateway(flag, o, client.StreamPath)
	}
	if o.TLS, err = cli.ClientTLS(rf.CAFile, rf.CASHA256, address); err != nil {
		return nil, err
	}
	return newGateway(flag, o, client.StreamPath)
}

// printEvent prints an event as text, or as one line of JSON. On a terminal both are escaped: whoever may
// publish to the gateway wrote the data.
//
// The time in the text is that of arrival: an event has none, and after --since they all come at once.
// JSON has the event without it, so that two tails print the same.
func printEvent(cmd *cobra.Command, e client.Event, isText bool) error {
	w := cmd.OutOrStdout()
	if isText {
		_, err := fmt.Fprintf(w, "%s  %s  %s  %s\n", time.Now().Format(time.TimeOnly),
			term.SafeLine(e.ID), term.SafeLine(e.Topic), term.SafeLine(string(e.Data)))
		return err
	}
	return encodeLine(term.JSONWriter(w), e)
}

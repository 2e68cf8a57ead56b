package eventscmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// Scripts and hooks call emit, and must not fail or wait because of it: it has a short timeout, and exit
// code 0 unless --strict says otherwise. It does not repeat a request whose answer is missing: the gateway
// may have taken the event, and subscribers would get it twice.

// emitTimeout is for the request, connection and TLS included. It does not include reading stdin, which is as
// slow as the program that fills the pipe.
const (
	emitTimeout  = time.Second
	maxEmitStdin = 256 << 10 // bytes of stdin; the gateway takes less
)

// newEmit returns the command emit. It is for scripts: without --strict neither a missing gateway nor a
// wrong token fails the script, and emitTimeout bounds how long it waits.
//
// A mistake in the command line itself, such as an unknown flag, fails without --strict too. On success it
// prints the id on a terminal or with -o, and nothing into a pipe: cron mails what a command prints.
func newEmit() *cobra.Command {
	var to emitTarget
	var strict bool
	var out cli.Output
	c := &cobra.Command{
		Use:   "emit TOPIC JSON|-",
		Short: "Publish an event to the gateway, best effort, for scripts",
		Long: `Publish one event to the event gateway; - reads the JSON from stdin, to its end. Publishing is best
effort: after at most 1 s, in which reading stdin does not count, the command gives up, prints the
reason on stderr and exits with 0, so that a script continues. With --strict the exit code reports
the failure.

The gateway is the one at --url or MCP_SSE_INGEST_URL, otherwise the one on this machine at port
MCP_SSE_PORT or 39300. The token comes from --token-file, MCP_SSE_INGEST_TOKEN or
MCP_SSE_AUTH_TOKEN (or from the file named by NAME_FILE), in this order.`,
		Example: `  agentctl events emit build/done '{"ok":true}'
  uptime -s | jq -R '{since:.}' | agentctl events emit box/up - --strict`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := to.emit(cmd, args[0], args[1])
			if err != nil && !strict {
				fmt.Fprintf(cmd.ErrOrStderr(), "agentctl: the event was not taken: %s\n", term.SafeText(cli.Explain(cmd, err).Error()))
				return nil
			}
			if err != nil {
				return err
			}
			return out.Print(cmd, map[string]json.Number{"id": id}, func() error {
				if f := term.AsTerminal(cmd.OutOrStdout()); f != nil {
					fmt.Fprintf(f, "event %s on %s\n", id, args[0])
				}
				return nil
			})
		},
	}
	f := c.Flags()
	f.StringVar(&to.address, "url", cli.EnvOr("MCP_SSE_INGEST_URL", "http://127.0.0.1:"+cli.EnvOr("MCP_SSE_PORT", client.GatewayPort)), "`URL` of the gateway, with or without the path of its ingest endpoint [MCP_SSE_INGEST_URL]")
	f.StringVar(&to.tokenFile, "token-file", "", "`FILE` with the ingest token")
	f.StringVar(&to.caFile, "ca-file", cli.EnvOr("AGENTCTL_CA_FILE", ""), "PEM `FILE` with the authority that signed the gateway's certificate [AGENTCTL_CA_FILE]")
	f.StringVar(&to.caSHA256, "ca-sha256", cli.EnvOr("AGENTCTL_CA_SHA256", ""), "SHA-256 of the relay's own authority, if the gateway is a relay's, in `HEX` [AGENTCTL_CA_SHA256]")
	f.BoolVar(&strict, "strict", false, "exit with an error if the event was not accepted: 1, 2 (JSON, address), 3 (no gateway), 4 (token), 7 (timeout)")
	out.AddFlags(c)
	return c
}

// emitTarget says which gateway an event goes to. Its fields are flags. newGateway adds the path of the
// ingest endpoint to an address without one.
type emitTarget struct{ address, tokenFile, caFile, caSHA256 string }

// emit publishes one event and returns its id, which is that of the gateway's order. data "-" is read from
// stdin. The data is checked to be JSON, so that a word without quotes is a usage error (2) and not a
// refusal of the gateway; the topic is left to the gateway.
func (to *emitTarget) emit(cmd *cobra.Command, topic, data string) (json.Number, error) {
	if data == "-" {
		b, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxEmitStdin+1))
		if err != nil {
			return "", cli.Errorf(cli.ExitFailure, "read the event from stdin: %w", err)
		}
		if len(b) > maxEmitStdin {
			return "", cli.Errorf(cli.ExitUsage, "stdin has more than %d KiB, which no gateway takes as one event", maxEmitStdin>>10)
		}
		data = string(b)
	}
	if !json.Valid([]byte(data)) {
		return "", cli.Errorf(cli.ExitUsage, "the data is not JSON; a string needs its quotes: '\"text\"'")
	}
	token, err := to.token()
	if err != nil {
		return "", err
	}
	if !cmd.Flags().Changed("ca-sha256") && !strings.HasPrefix(to.address, "https:") {
		to.caSHA256 = "" // the variable is for a relay elsewhere; the gateway of this machine is on loopback
	}
	tlsConfig, err := cli.ClientTLS(to.caFile, to.caSHA256, to.address)
	if err != nil {
		return "", err
	}
	g, err := newGateway("--url", client.Options{URL: to.address, Token: token, TLS: tlsConfig}, client.IngestPath)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), emitTimeout)
	defer cancel()
	id, err := g.Publish(ctx, topic, json.RawMessage(data))
	if errors.Is(err, context.DeadlineExceeded) {
		return "", cli.Errorf(cli.ExitTimeout, "%s did not answer within %s", g.Host(), emitTimeout)
	}
	return id, err
}

// token is the ingest token of --token-file or, without that, of the environment: the gateway's ingest
// token, or the token of subscribers, which a gateway accepts for ingest if it has no other. No token is
// no error, since a gateway on loopback may be open. AGENTCTL_TOKEN_FILE is not read, unlike in tail.
func (to *emitTarget) token() (token string, err error) {
	if to.tokenFile != "" {
		return cli.ReadToken(to.tokenFile)
	}
	for _, name := range []string{"MCP_SSE_INGEST_TOKEN", "MCP_SSE_AUTH_TOKEN"} {
		if token, err = envToken(name); token != "" || err != nil {
			break
		}
	}
	return token, err
}

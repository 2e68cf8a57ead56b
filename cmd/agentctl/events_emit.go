package main

import (
	"agentctl/config"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"

	"agentctl/term"
)

// Bounds of an emit.
const (
	emitTime    = time.Second
	emitMaxData = 64 << 10 // bytes
)

func newEventsEmit() *cobra.Command {
	var address, tokenFile, caFile string
	var strict bool
	var out output
	c := &cobra.Command{
		Use:   "emit TOPIC JSON|-",
		Short: "Put an event into the gateway, best effort, for scripts",
		Long: `Put one event into the event gateway; - reads the JSON from stdin. It is best effort: after
1 s at the latest it gives up, says why on stderr and exits 0, so that a script goes on. With
--strict the exit code tells what happened.

The gateway is that of --url or MCP_SSE_INGEST_URL, else the one on this machine: port
MCP_SSE_PORT or 39300. The token is that of --token-file, MCP_SSE_INGEST_TOKEN or
MCP_SSE_AUTH_TOKEN (or of the file that NAME_FILE names), in this order.`,
		Example: `  agentctl events emit build/done '{"ok":true}'
  uptime -s | jq -R '{since:.}' | agentctl events emit box/up - --strict`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := emit(cmd, args[0], args[1], address, tokenFile, caFile)
			if err != nil && !strict {
				fmt.Fprintf(cmd.ErrOrStderr(), "agentctl: the event was not taken: %s\n", err)
				return nil
			}
			if err != nil {
				return err
			}
			return out.print(cmd, map[string]json.Number{"id": id}, func() error {
				if f, ok := cmd.OutOrStdout().(*os.File); ok && term.IsTerminal(f) {
					fmt.Fprintf(f, "event %s on %s\n", id, args[0])
				}
				return nil
			})
		},
	}
	f := c.Flags()
	f.StringVar(&address, "url", env("MCP_SSE_INGEST_URL", "http://127.0.0.1:"+env("MCP_SSE_PORT", eventsPort)), "`URL` of the gateway, with or without the path of ingest [MCP_SSE_INGEST_URL]")
	f.StringVar(&tokenFile, "token-file", "", "`FILE` with the ingest token")
	f.StringVar(&caFile, "ca-file", env("AGENTCTL_CA_FILE", ""), "PEM `FILE` of the authority that signed the gateway's certificate [AGENTCTL_CA_FILE]")
	f.BoolVar(&strict, "strict", false, "fail when the event was not taken: 1, 2 (JSON, address), 3 (no gateway), 4 (token), 7 (time)")
	out.flags(c)
	return c
}

// emit posts one event and returns its id.
func emit(cmd *cobra.Command, topic, data, address, tokenFile, caFile string) (json.Number, error) {
	if data == "-" {
		b, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), 4*emitMaxData))
		if err != nil {
			return "", exit(exitFailure, "read the event from stdin: %w", err)
		}
		data = string(b)
	}
	if !json.Valid([]byte(data)) {
		return "", exit(exitUsage, "the data is no JSON; a string needs its quotes: '\"text\"'")
	}
	u, err := eventsURL(address, eventsIngestPath)
	if err != nil {
		return "", exit(exitUsage, "--url %w", err)
	}
	token, err := emitToken(tokenFile)
	if err != nil {
		return "", exit(exitFailure, "%w", err)
	}
	if inTheClear(u, token) {
		return "", exit(exitUsage, "refusing to send a token to %s in the clear; use https://", u.Host)
	}
	cfg, err := config.ClientTLS(caFile)
	if err != nil {
		return "", exit(exitFailure, "%w", err)
	}
	var body bytes.Buffer
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false) // the data goes as it is
	if err := enc.Encode(map[string]any{"topic": topic, "data": json.RawMessage(data)}); err != nil {
		return "", exit(exitUsage, "the event cannot be sent: %w", err)
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), emitTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), &body)
	if err != nil {
		return "", exit(exitUsage, "%w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = cfg
	client := http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return "", exit(exitTimeout, "%s did not answer within %s", u.Host, emitTime)
		}
		return "", (&tail{url: u}).unreachable(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var later *retryLater
	if resp.StatusCode != http.StatusAccepted {
		if err := eventsAnswer(resp, token != "", "ingest"); errors.As(err, &later) {
			return "", exit(exitFailure, "%s", later.what)
		} else {
			return "", err
		}
	}
	var answer struct {
		ID json.Number `json:"id"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 4096)).Decode(&answer); err != nil || answer.ID == "" {
		return "", exit(exitFailure, "the answer of %s has no id; is this the event gateway?", u.Host)
	}
	return answer.ID, nil
}

func emitToken(file string) (string, error) {
	if file != "" {
		return readToken(file)
	}
	for _, name := range []string{"MCP_SSE_INGEST_TOKEN", "MCP_SSE_AUTH_TOKEN"} {
		if t, err := eventsVar(name); t != "" || err != nil {
			return t, err
		}
	}
	return "", nil
}

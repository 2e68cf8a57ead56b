package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/manifest"
	"agentctl/transport/edge"
)

// relayFlags name a relay and who calls it.
type relayFlags struct {
	relay, tokenFile, caFile string
}

func (f *relayFlags) flags(c *cobra.Command) {
	c.Flags().StringVar(&f.relay, "relay", env("AGENTCTL_RELAY", "http://127.0.0.1:8460"), "`URL` of the relay [AGENTCTL_RELAY]")
	c.Flags().StringVar(&f.tokenFile, "token-file", env("AGENTCTL_TOKEN_FILE", ""), "`FILE` with an agent token [AGENTCTL_TOKEN_FILE]")
	c.Flags().StringVar(&f.caFile, "ca-file", env("AGENTCTL_CA_FILE", ""), "PEM `FILE` of the authority that signed the relay's certificate [AGENTCTL_CA_FILE]")
}

// relayClient calls a relay over HTTP.
type relayClient struct {
	base  string
	token string
	http  *http.Client
}

// maxAnswer bounds what is read of one answer, bytes.
const maxAnswer = 64 << 20

func (f *relayFlags) client() (*relayClient, error) {
	u, err := url.Parse(f.relay)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, exit(exitUsage, "--relay %q is not of the form https://HOST[:PORT]", f.relay)
	}
	c := &relayClient{base: strings.TrimSuffix(f.relay, "/")}
	if f.tokenFile != "" {
		if c.token, err = readToken(f.tokenFile); err != nil {
			return nil, exit(exitFailure, "%w", err)
		}
	}
	if u.Scheme == "http" && c.token != "" && !edge.IsLoopback(u.Hostname()) {
		return nil, exit(exitUsage, "refusing to send a token to %s in the clear; use https://", f.relay)
	}
	tlsConfig, err := config.ClientTLS(f.caFile)
	if err != nil {
		return nil, exit(exitFailure, "%w", err)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = tlsConfig
	tr.ResponseHeaderTimeout = 15 * time.Second
	tr.ForceAttemptHTTP2 = false
	c.http = &http.Client{Transport: tr}
	return c, nil
}

// do sends a request and returns an answer with status 2xx; every other end is an
// exitError. The caller closes the body.
func (c *relayClient) do(ctx context.Context, method, path, accept string, body any) (*http.Response, error) {
	resp, err := c.send(ctx, method, path, accept, body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return nil, answerError(resp)
}

// send sends a request and returns the answer, whatever its status. The caller closes
// the body.
func (c *relayClient) send(ctx context.Context, method, path, accept string, body any) (*http.Response, error) {
	var rd io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		rd = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, rd)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Accept", accept)
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	return resp, nil
}

func (c *relayClient) transportError(ctx context.Context, err error) error {
	var op *net.OpError
	var ue *url.Error
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return exit(exitTimeout, "no answer within the time of --for")
	case ctx.Err() != nil:
		return exit(exitFailure, "interrupted")
	case errors.As(err, &op) && op.Op == "dial":
		return exit(exitNotRunning, "no relay answers at %s (%w); start one with: agentctl relay, or name it with --relay", c.base, op.Err)
	case errors.As(err, &ue) && ue.Timeout():
		return exit(exitTimeout, "the relay at %s did not answer in time", c.base)
	}
	if ue != nil {
		err = ue.Err // without the request's URL
	}
	return exit(exitFailure, "call the relay at %s: %w%s", c.base, err, tlsHint(err))
}

// tlsHint is the next step after a handshake that failed, "" after anything else.
func tlsHint(err error) string {
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	switch {
	case errors.As(err, &authority):
		return "; if the relay's certificate is your own, pass its authority with --ca-file FILE"
	case errors.As(err, &name):
		return "; call the relay by a name of its certificate, with --relay"
	case errors.Is(err, http.ErrSchemeMismatch):
		return "; it does not speak TLS there; use http:// in --relay"
	}
	return ""
}

// answerError turns the relay's error envelope into an exit code and a sentence with
// the next step.
func answerError(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var env struct {
		Error struct {
			Code         manifest.Code `json:"code"`
			Message      string        `json:"message"`
			RetryAfterMS int64         `json:"retry_after_ms"`
			TraceID      string        `json:"trace_id"`
		} `json:"error"`
	}
	if resp.StatusCode == http.StatusBadRequest && bytes.Contains(b, []byte("HTTP request to an HTTPS server")) {
		return exit(exitFailure, "the server speaks TLS; use https:// in --relay")
	}
	if json.Unmarshal(b, &env) != nil || env.Error.Code == "" {
		return exit(exitFailure, "the server answered HTTP %d without an agentctl error; is this an agentctl relay?", resp.StatusCode)
	}
	code, next := exitFailure, ""
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		code, next = exitUnauthorized, tokenHint(env.Error.Message)
	case env.Error.Code == manifest.SafetyDenied && strings.Contains(env.Error.Message, "token") && !strings.Contains(env.Error.Message, "node"):
		code, next = exitUnauthorized, tokenHint(env.Error.Message)
	case env.Error.Code == manifest.SafetyDenied:
		code, next = exitUnauthorized, "; see your nodes with: agentctl ls"
	case env.Error.Code == manifest.NodeOffline:
		code, next = exitOffline, "; see when it was last there with: agentctl ls"
	case env.Error.Code == manifest.DeadlineExceeded:
		code, next = exitTimeout, "; see how the board does, there: agentctl status"
	case (env.Error.Code == manifest.BadRequest || env.Error.Code == manifest.ManifestInvalid) && strings.Contains(env.Error.Message, "tool"):
		next = "; see the tools with: agentctl ls -o json"
	}
	return exit(code, "%s: %s%s (trace %s)", env.Error.Code, env.Error.Message, next, env.Error.TraceID)
}

// tokenHint is the rest of the next step after a token was refused.
func tokenHint(message string) string {
	if strings.Contains(message, "agentctl token create") {
		return "; pass it with --token-file"
	}
	return "; mint one that may with: agentctl token create, and pass it with --token-file"
}

func (c *relayClient) getJSON(ctx context.Context, path string, v any) error {
	resp, err := c.do(ctx, http.MethodGet, path, "application/json", nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(v); err != nil {
		return exit(exitFailure, "the relay's answer to %s is not what it should be: %w", path, err)
	}
	return nil
}

// node is one row of GET /v1/nodes.
type node struct {
	NodeID       string                `json:"node_id"`
	Name         string                `json:"name"`
	Online       bool                  `json:"online"`
	LastSeenMS   int64                 `json:"last_seen_ms"`
	Capabilities []manifest.Capability `json:"capabilities"`
}

// nodes reads the whole fleet, page by page.
func (c *relayClient) nodes(ctx context.Context) ([]node, error) {
	all := []node{}
	for after := ""; ; {
		var page struct {
			Nodes []node `json:"nodes"`
			Next  string `json:"next"`
		}
		if err := c.getJSON(ctx, "/v1/nodes?after="+url.QueryEscape(after), &page); err != nil {
			return nil, err
		}
		all = append(all, page.Nodes...)
		if page.Next == "" || page.Next <= after {
			return all, nil
		}
		after = page.Next
	}
}

// findNode takes a full id, a unique prefix of it, or a name.
func findNode(nodes []node, ref string) (*node, error) {
	var found *node
	for i := range nodes {
		n := &nodes[i]
		if n.NodeID == ref || n.Name == ref {
			return n, nil
		}
		if strings.HasPrefix(n.NodeID, ref) {
			if found != nil {
				return nil, exit(exitUsage, "%q begins more than one node id; give more of it, see: agentctl ls", ref)
			}
			found = n
		}
	}
	if found == nil {
		return nil, exit(exitFailure, "no node has the id, the name or the id prefix %q; see: agentctl ls", ref)
	}
	return found, nil
}

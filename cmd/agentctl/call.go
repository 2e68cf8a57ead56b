package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/manifest"
	"agentctl/term"
	"agentctl/transport/sse"
)

func newCall() *cobra.Command {
	var rf relayFlags
	var out output
	var args string
	var count int
	var dur time.Duration
	c := &cobra.Command{
		Use:   "call TOOL [key=value...]",
		Short: "Call a tool of a board through the relay; subscribe tools stream",
		Long: `Call a tool of a board through the relay.

TOOL is a tool's full name (see 'agentctl ls -o json' or MCP tools/list), or NODE:VERB,
where NODE is a node's id, a unique prefix of it or its name, and VERB is one of echo,
snapshot and subscribe. A value that is JSON is passed as such, anything else as a string.
The result is JSON on stdout; a stream is one JSON frame a line, until its close event (-o yaml:
one document a frame).`,
		Example: `  agentctl call attic:echo message=hello
  agentctl call attic:snapshot
  agentctl call attic:subscribe interval_ms=1000 --count 5
  agentctl call sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke --args '{"message":"hi"}'`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, argv []string) error {
			if err := checkEnd(dur, count); err != nil {
				return err
			}
			arguments, err := toolArguments(args, argv[1:])
			if err != nil {
				return err
			}
			rc, err := rf.client()
			if err != nil {
				return err
			}
			tool, err := rc.resolveTool(cmd.Context(), argv[0])
			if err != nil {
				return err
			}
			ctx, cancel := cmd.Context(), context.CancelFunc(func() {})
			if dur > 0 {
				ctx, cancel = context.WithTimeout(ctx, dur)
			}
			defer cancel()
			if name, ok := manifest.ParseToolName(tool); ok && name.Verb == manifest.VerbSubscribe {
				return rc.stream(ctx, func(frame []byte) error { return out.frame(cmd, frame) }, tool, arguments, count)
			}
			b, err := rc.answer(ctx, tool, arguments)
			if err != nil {
				return err
			}
			return out.print(cmd, json.RawMessage(b), func() error {
				_, err := fmt.Fprintf(term.JSONWriter(cmd.OutOrStdout()), "%s\n", b)
				return err
			})
		},
	}
	rf.flags(c)
	out.flags(c)
	c.Flags().StringVar(&args, "args", "", "the arguments as one `JSON` object")
	c.Flags().IntVar(&count, "count", 0, "end a stream after `N` frames (0: never)")
	c.Flags().DurationVar(&dur, "for", 0, "end after `DURATION` (0: never)")
	return c
}

// toolArguments builds the arguments object from --args or key=value words.
func toolArguments(raw string, words []string) (json.RawMessage, error) {
	if raw != "" {
		var m map[string]json.RawMessage
		if len(words) > 0 {
			return nil, exit(exitUsage, "give either --args or key=value words, not both")
		}
		if err := json.Unmarshal([]byte(raw), &m); err != nil || m == nil {
			return nil, exit(exitUsage, "--args %.40q is no JSON object, such as '{\"message\":\"hi\"}'", raw)
		}
		return json.RawMessage(raw), nil
	}
	m := make(map[string]json.RawMessage, len(words))
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok || k == "" {
			return nil, exit(exitUsage, "argument %q is not of the form key=value", w)
		}
		if _, twice := m[k]; twice {
			return nil, exit(exitUsage, "argument %q is given twice", k)
		}
		if json.Valid([]byte(v)) {
			m[k] = json.RawMessage(v)
		} else if m[k], _ = json.Marshal(v); m[k] == nil { // a string always encodes
			return nil, exit(exitUsage, "argument %q cannot be sent", k)
		}
	}
	return json.Marshal(m)
}

// resolveTool makes a canonical tool name of a full name or NODE:VERB.
func (c *relayClient) resolveTool(ctx context.Context, s string) (string, error) {
	ref, verb, ok := strings.Cut(s, ":")
	if !ok {
		return manifest.Canonical(s), nil
	}
	typed := verb
	if verb == "echo" {
		verb = manifest.VerbInvoke
	}
	nodes, err := c.nodes(ctx)
	if err != nil {
		return "", err
	}
	n, err := findNode(nodes, ref)
	if err != nil {
		return "", err
	}
	for i := range n.Capabilities {
		tools, err := manifest.Project(n.NodeID, &n.Capabilities[i])
		if err != nil {
			continue // a newer relay's capability
		}
		for _, t := range tools {
			if t.Verb.Name == verb {
				return t.Canonical, nil
			}
		}
	}
	if len(n.Capabilities) == 0 {
		return "", exit(exitOffline, "node %s has never been linked; on the board: agentctl run --relay URL --token-file FILE", n.Name)
	}
	return "", exit(exitFailure, "node %s has no verb %q; it has: %s", n.Name, typed, strings.Join(verbs(n.Capabilities), " "))
}

// frame prints one JSON value of many: a line each, or with -o yaml a document each.
func (o *output) frame(cmd *cobra.Command, b []byte) error {
	if o.format == "yaml" {
		fmt.Fprintln(cmd.OutOrStdout(), "---")
		return writeYAML(cmd.OutOrStdout(), json.RawMessage(b))
	}
	_, err := fmt.Fprintf(term.JSONWriter(cmd.OutOrStdout()), "%s\n", b)
	return err
}

// answer calls a tool and reads the whole of its answer.
func (c *relayClient) answer(ctx context.Context, tool string, args any) ([]byte, error) {
	resp, err := c.do(ctx, http.MethodPost, "/mcp/tools/call", "application/json", map[string]any{"tool": tool, "arguments": args})
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, exit(exitFailure, "read the answer: %w", err)
	}
	return b, nil
}

// errEnough ends a stream that gave what was asked for.
var errEnough = errors.New("enough frames")

// stream prints the frames of a metric stream until its close event. An event outside
// RFC-0009 §5's closed set is a protocol error: the client closes.
func (c *relayClient) stream(ctx context.Context, emit func([]byte) error, tool string, args json.RawMessage, count int) error {
	n := 0
	err := c.frames(ctx, tool, args, func(data []byte) error {
		if err := emit(data); err != nil {
			return err
		}
		if n++; n == count {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) || (ctx.Err() != nil && n > 0) {
		return nil
	}
	return err
}

// frames calls fn with each metric frame and returns why the stream ended; nil is a
// normal close.
func (c *relayClient) frames(ctx context.Context, tool string, args json.RawMessage, fn func(data []byte) error) error {
	resp, err := c.do(ctx, http.MethodPost, "/mcp/tools/call", "text/event-stream", map[string]any{"tool": tool, "arguments": args})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if ct := resp.Header.Get("Content-Type"); !strings.HasPrefix(ct, "text/event-stream") {
		return exit(exitFailure, "the server answered with %q, not with an event stream", ct)
	}
	rd := sse.NewReader(resp.Body, sse.ReaderOptions{})
	for {
		ev, err := rd.Next()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return exit(exitFailure, "the stream broke off without a close event: %w", err)
		}
		switch ev.Type {
		case "metric":
			if !json.Valid(ev.Data) {
				return exit(exitFailure, "protocol error: the stream sent a frame that is no JSON; closed")
			}
			if err := fn(ev.Data); err != nil {
				return err
			}
		case "ping":
		case "close":
			return closeError(ev.Data)
		default:
			return exit(exitFailure, "protocol error: the stream sent an event that RFC-0009 does not know; closed")
		}
	}
}

func closeError(data []byte) error {
	var cl struct {
		Code   int    `json:"code"`
		Reason string `json:"reason"`
	}
	if err := json.Unmarshal(data, &cl); err != nil {
		return exit(exitFailure, "protocol error: a malformed close event")
	}
	switch cl.Code {
	case int(sse.Normal):
		return nil
	case int(sse.DeviceOffline):
		return exit(exitOffline, "the device went offline (close %d); see: agentctl ls", cl.Code)
	case int(sse.IdleTimeout), int(sse.Backpressure):
		return exit(exitFailure, "the relay closed the stream (%d %s): this reader was too slow; use a longer interval_ms", cl.Code, cl.Reason)
	case int(sse.RateLimited):
		return exit(exitFailure, "the relay closed the stream (%d %s): your tenant has too many streams open; close one first", cl.Code, cl.Reason)
	}
	return exit(exitFailure, "the relay closed the stream (%d)", cl.Code)
}

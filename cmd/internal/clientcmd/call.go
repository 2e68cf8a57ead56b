package clientcmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/manifest"
	"agentctl/term"
)

// NewCall returns the command call, which calls a tool and prints its result or its stream.
//
// A full tool name goes to the relay as it is, so that the tools of any plugin can be called. NODE:WORD is
// resolved here, for the kinds of capabilities that this version knows.
func NewCall() *cobra.Command {
	var call callFlags
	c := &cobra.Command{
		Use:   "call TOOL [key=value...]",
		Short: "Call a tool of a board through the relay",
		Long: `Call a tool of a board through the relay.

TOOL is a tool's full name (see 'agentctl ls -o json' or MCP tools/list), or NODE:WORD,
where NODE is a node's id, a unique prefix of it or its name, and WORD is echo, snapshot,
subscribe, query (of the history), or another capability of the board: info, modules, processes,
services, journal, disks, network, doctor. A value that is valid JSON is passed as JSON, anything
else as a string. By the tool's schema, a value for a text argument is a string also when it looks
like a number, and a list may be written with commas (metrics=cpu_pct,mem_pct).

The result is JSON on stdout. A tool without structured results prints its text, and the type and
size of an image; -o json prints all of it. What a tool answers as an error goes to stderr, and with
-o json to stdout as well; the exit code is 1.

A stream prints one JSON frame per line (with -o yaml, one document per frame), until Ctrl-C or
the relay closes it normally. Once a frame has arrived, an interrupted stream is opened again; what
was missed is said on stderr. --backfill prints the missed frames from the board's history, in
order, each with "backfilled":true. With --no-reconnect an interrupted stream ends: with exit code
5 when the board went offline, 1 when the connection broke.`,
		Example: `  agentctl call attic:echo message=hello
  agentctl call attic:snapshot
  agentctl call attic:services state=failed
  agentctl call attic:journal unit=ssh priority=err limit=20
  agentctl call attic:subscribe interval_ms=1000 --count 5
  agentctl call attic:subscribe --backfill >> frames.ndjson
  agentctl call attic:query from_ms=1795132800000 to_ms=0 step_ms=60000 metrics=cpu_pct
  agentctl call fleet.query metrics=cpu_pct,mem_pct from=24h
  agentctl call sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke --args '{"message":"hi"}'`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, words []string) error { return call.run(cmd, words[0], words[1:]) },
	}
	call.relay.AddFlags(c)
	call.out.AddFlags(c)
	c.Flags().StringVar(&call.args, "args", "", "the arguments as one `JSON` object")
	call.limit.AddFlags(c, "end a stream", "frames")
	call.stream.addFlags(c)
	return c
}

// callFlags are the flags of call.
type callFlags struct {
	relay  cli.RelayFlags
	out    cli.Output
	limit  cli.Limits
	stream streamFlags
	args   string // JSON; "" if the arguments are words
}

// run calls the tool that ref names, with arguments in the form key=value unless --args has them.
//
// Arguments are parsed twice. Most mistakes in them are found before a request to the relay; but what
// a value means depends on the tool's schema, which the relay may have to be asked for.
//
// A call is not repeated after a failure, because the tool may have run; the error says so as far as the
// relay knows it. A stream is opened again (streamFlags.run). Ctrl-C cancels the request; whether the
// board has run the call by then is not known.
func (f *callFlags) run(cmd *cobra.Command, ref string, words []string) error {
	if err := errors.Join(f.limit.Check(), f.stream.check()); err != nil {
		return err
	}
	if _, err := toolArguments(f.args, words, nil); err != nil {
		return err
	}
	rc, err := f.relay.Client()
	if err != nil {
		return err
	}
	tool, err := rc.ResolveTool(cmd.Context(), ref)
	if err != nil {
		return err
	}
	ctx, cancel := f.limit.Context(cmd) // after the look-up of the name, which --for does not count
	defer cancel()
	types := argumentTypes(ctx, rc, tool, words)
	arguments, err := toolArguments(f.args, words, types)
	if err != nil {
		return err
	}
	// The name shows whether the answer is a stream: over this endpoint only the verb subscribe of a board's
	// metrics is one (RFC-0009 §3).
	if name, ok := manifest.ParseToolName(tool); ok && name.Verb == manifest.VerbSubscribe {
		return f.printStream(ctx, cmd, rc, tool, arguments)
	}
	answer, err := rc.Call(ctx, tool, arguments)
	if err != nil {
		return callFailed(cmd, &f.out, err, &cli.CallError{Tool: tool, Arguments: arguments, Takes: slices.Sorted(maps.Keys(types))})
	}
	return f.out.Print(cmd, answer, func() error { return printResult(cmd, answer) })
}

// printStream prints the frames of a stream until it ends or --count have come. Frames from the board's
// history (--backfill) count as well.
func (f *callFlags) printStream(ctx context.Context, cmd *cobra.Command, rc *client.Client, tool string, arguments json.RawMessage) error {
	printed := 0
	return f.stream.run(ctx, cmd, &f.relay, rc, tool, arguments, func(frame []byte) error {
		if err := printFrame(cmd, &f.out, frame); err != nil {
			return err
		}
		if printed++; printed == f.limit.Count {
			return client.ErrStop
		}
		return nil
	})
}

// argumentTypes returns the types of a tool's arguments by name, nil if they are not known. Those of a
// board's tools are in the binary; for others it asks the relay. An error is ignored because the call
// works without types: the relay then checks the arguments.
//
// Without words it sends no request: the types would only be used in the error of a call that fails.
func argumentTypes(ctx context.Context, rc *client.Client, tool string, words []string) map[string]manifest.ArgumentType {
	if _, ofBoard := manifest.ParseToolName(tool); ofBoard || len(words) == 0 {
		return manifest.ArgumentTypes(tool)
	}
	types, _ := rc.ToolArguments(ctx, tool)
	return types
}

// toolArguments builds the arguments object from --args or key=value words. types applies to words only:
// JSON has types of its own.
func toolArguments(raw string, words []string, types map[string]manifest.ArgumentType) (json.RawMessage, error) {
	if raw == "" {
		arguments, err := client.ParseArguments(words, types)
		if err != nil {
			return nil, cli.Errorf(cli.ExitUsage, "%w", err)
		}
		return arguments, nil
	}
	if len(words) > 0 {
		return nil, cli.Errorf(cli.ExitUsage, "give either --args or key=value words, not both")
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(raw), &m); err != nil || m == nil {
		return nil, cli.Errorf(cli.ExitUsage, "--args %.40q is not a JSON object, such as '{\"message\":\"hi\"}'", raw)
	}
	return json.RawMessage(raw), nil
}

// printFrame prints one JSON value of a stream: a line, or with -o yaml a document, so that a reader can
// use each value when it comes. -o json prints lines too, since a JSON list would end only with the stream.
func printFrame(cmd *cobra.Command, out *cli.Output, frame []byte) error {
	if out.Format == "yaml" {
		fmt.Fprintln(cmd.OutOrStdout(), "---")
		return term.WriteYAML(term.JSONWriter(cmd.OutOrStdout()), json.RawMessage(frame))
	}
	return printLine(cmd, frame)
}

// printLine prints JSON on one line.
func printLine(cmd *cobra.Command, line []byte) error {
	_, err := fmt.Fprintf(term.JSONWriter(cmd.OutOrStdout()), "%s\n", line)
	return err
}

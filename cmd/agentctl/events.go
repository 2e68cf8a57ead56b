//go:build !agentctl_omit_relay

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/term"
)

func newEvents() *cobra.Command {
	c := &cobra.Command{
		Use:   "events",
		Short: "Follow, emit and serve topic events; read the relay's event log",
		Long: `Follow, emit and serve topic events (docs/events.md), and read the relay's event log: what
happened to boards, agents and tickets, in order.`,
	}
	c.AddCommand(newEventsTail(), newEventsEmit(), newEventsServe(), newEventsReplay())
	return c
}

func newEventsReplay() *cobra.Command {
	var dir string
	var from uint64
	var q eventlog.Query
	var out output
	c := &cobra.Command{
		Use:   "replay",
		Short: "Print the event log from the disk, oldest first",
		Long: `Print the event log from a relay's state directory, oldest first, while the relay runs or
not; nothing is written. With -o ndjson the same log gives the same bytes each time.

Old events are removed by age and size; what was known then is in the snapshot.* events.`,
		Example: `  agentctl events replay
  agentctl events replay --type 'ticket.*' --tenant greenhouse -o ndjson`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from > 0 {
				q.After = from - 1
			}
			r, err := eventlog.OpenReader(filepath.Join(dir, eventlog.FileName))
			if errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("%w: name the relay's with --state-dir DIR", err)
			}
			if err != nil {
				return exit(exitFailure, "%w", err)
			}
			defer func() { _ = r.Close() }()
			w := bufio.NewWriter(cmd.OutOrStdout())
			p := eventPrinter{w: w, cmd: cmd, out: out}
			err = r.Select(cmd.Context(), q, p.event)
			if err == nil {
				err = p.end()
			}
			if err == nil {
				err = w.Flush()
			}
			if err != nil {
				return exit(exitFailure, "%w", err)
			}
			return nil
		},
	}
	stateDirFlag(c, &dir)
	f := c.Flags()
	f.Uint64Var(&from, "from", 0, "begin at event `SEQ` (0: the oldest)")
	f.StringArrayVar(&q.Types, "type", nil, "only events of `TYPE`; ticket.* is all that begin like it (repeatable)")
	f.StringVar(&q.Tenant, "tenant", "", "only events of `TENANT`")
	out.flags(c)
	return c
}

// eventPrinter prints events one by one: a log may be larger than memory.
type eventPrinter struct {
	w   io.Writer
	cmd *cobra.Command
	out output
	tab *tabwriter.Writer
	n   int
}

func (p *eventPrinter) event(e kernel.Event) error {
	p.n++
	switch p.out.format {
	case "ndjson":
		enc := json.NewEncoder(p.w)
		enc.SetEscapeHTML(false)
		return enc.Encode(e)
	case "json":
		b, err := json.MarshalIndent(e, "  ", "  ")
		if err != nil {
			return err
		}
		sep := ",\n  "
		if p.n == 1 {
			sep = "[\n  "
		}
		_, err = fmt.Fprintf(p.w, "%s%s", sep, b)
		return err
	case "yaml":
		return writeYAML(p.w, []kernel.Event{e})
	}
	if p.tab == nil {
		p.tab = tabwriter.NewWriter(p.w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(p.tab, "SEQ\tTIME\tTENANT\tTYPE\tABOUT\tPAYLOAD")
	}
	payload := string(e.Payload)
	if len(payload) > 100 {
		payload = payload[:97] + "..."
	}
	_, err := fmt.Fprintf(p.tab, "%d\t%s\t%s\t%s\t%s\t%s\n", e.Seq, time.UnixMilli(e.CreatedMS).UTC().Format(time.RFC3339), term.SafeLine(e.Tenant), e.Type, term.SafeLine(e.Aggregate), term.SafeLine(payload))
	if p.n%1000 == 0 && err == nil { // a table is laid out in memory
		err = p.tab.Flush()
	}
	return err
}

func (p *eventPrinter) end() error {
	switch {
	case p.out.format == "json" && p.n == 0:
		_, err := fmt.Fprintln(p.w, "[]")
		return err
	case p.out.format == "json":
		_, err := fmt.Fprint(p.w, "\n]\n")
		return err
	case p.n == 0 && p.out.format == "":
		_, err := fmt.Fprintln(p.cmd.ErrOrStderr(), "no such events in the log")
		return err
	case p.tab != nil:
		return p.tab.Flush()
	}
	return nil
}

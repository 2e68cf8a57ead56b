//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/eventlog"
	"agentctl/term"
)

// The log is read while the relay may write it: SQLite in WAL mode lets both go on, and what is appended
// after the start is not printed. Retention may remove events during the read; eventlog.ErrRemoved then
// ends it with exit code 1, rather than with a hole in the output.

// newReplay returns the command replay. It opens the file read-only, beside a relay that writes it, and
// needs no token: whoever can read the state directory may read its events.
func newReplay() *cobra.Command {
	var dir string
	var from uint64
	var verify bool
	var q eventlog.Query
	var out cli.Output
	c := &cobra.Command{
		Use:   "replay",
		Short: "Print the event log from disk, oldest event first",
		Long: `Print the event log in a relay's state directory, oldest event first. It works whether the relay
runs or not, and writes nothing. With -o ndjson the same log always gives the same bytes.

Old events are removed by age and size. The state they led to is in ticket.snapshot and
ticket.comments events and in the latest presence events.

--verify rebuilds the state (tickets, and who is online) twice from the log and compares both, and the
state of the relay if it runs there. It checks the hashes of the events that it rebuilds from. The exit
code is 1 if something differs or a hash does not fit, and the output names it.`,
		Example: `  agentctl events replay
  agentctl events replay --type 'ticket.*' --tenant greenhouse -o ndjson
  agentctl events replay --verify`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// --from includes the event, and Query.After excludes it.
			if from > 0 {
				q.After = from - 1
			}
			switch {
			case !verify:
				return printLog(cmd, out.Format, dir, q)
			case from > 0 || len(q.Types) > 0 || q.Tenant != "":
				return cli.Errorf(cli.ExitUsage, "--verify needs all events: leave out --from, --type and --tenant")
			}
			return verifyReplay(cmd, &out, dir)
		},
	}
	cli.AddStateDirFlag(c, &dir)
	f := c.Flags()
	f.Uint64Var(&from, "from", 0, "start at event `SEQ` (0: the oldest)")
	f.StringArrayVar(&q.Types, "type", nil, "only events of `TYPE`; ticket.* selects all types with that prefix (repeatable)")
	f.StringVar(&q.Tenant, "tenant", "", "only events of `TENANT`")
	f.BoolVar(&verify, "verify", false, "print no events: rebuild the state from them and compare it")
	out.AddFlags(c)
	return c
}

// printLog prints the events of a state directory's log that q selects. Where the log is damaged, it
// prints the events before the damage, and ends with exit code 1.
//
// Output is buffered, except on a terminal, where each value passes term.JSONWriter whole. It is flushed
// after an error too.
func printLog(cmd *cobra.Command, format, dir string, q eventlog.Query) error {
	r, err := eventlog.OpenReader(filepath.Join(dir, eventlog.FileName))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: name the relay's with --state-dir DIR", err)
	} else if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	w := bufio.NewWriter(cmd.OutOrStdout())
	p := eventPrinter{w: w, format: format}
	if term.AsTerminal(cmd.OutOrStdout()) != nil { // escape whole values, before they are cut for the buffer
		p.w = term.JSONWriter(cmd.OutOrStdout())
	}
	err = r.Select(cmd.Context(), q, p.event)
	// A JSON list is closed after damage too, so that a program can read the events before it.
	if damaged := errors.Is(err, eventlog.ErrDamaged); err == nil || damaged && (p.n > 0 || p.format == "json") {
		err = errors.Join(err, p.end(cmd.ErrOrStderr()))
	}
	return errors.Join(err, w.Flush())
}

// eventPrinter prints events one by one, because a log may be larger than memory. For the same reason it
// writes a JSON list in pieces, and a table in parts of flushEvery rows: the widths of the columns may
// change from part to part.
type eventPrinter struct {
	w      io.Writer
	format string
	table  term.Table
	n      int // events printed
}

// flushEvery is how many rows of the table are laid out together: a table in parts is easier to read than
// columns of fixed width, and 1,000 rows are little memory.
const flushEvery = 1000

// maxPayload is how much of a payload a row shows, bytes. An event may have 64 KiB (kernel.MaxPayload).
const maxPayload = 100

// event prints one event.
func (p *eventPrinter) event(e eventlog.Event) error {
	p.n++
	switch p.format {
	case "ndjson":
		return encodeLine(p.w, e)
	// A list of indented objects, whose brackets and commas are written here.
	case "json":
		b, err := json.MarshalIndent(e, "  ", "  ")
		if err != nil {
			return err
		}
		separator := ",\n  "
		if p.n == 1 {
			separator = "[\n  "
		}
		_, err = fmt.Fprintf(p.w, "%s%s", separator, b)
		return err
	// A list of one element: such lists, one after the other, are one list in YAML.
	case "yaml":
		return term.WriteYAML(p.w, []eventlog.Event{e})
	}
	if p.n == 1 {
		p.table = term.NewTable(p.w, "SEQ", "TIME", "TENANT", "TYPE", "ABOUT", "PAYLOAD")
	}
	p.table.Row(e.Seq, time.UnixMilli(e.CreatedMS).UTC().Format(time.RFC3339), e.Tenant, e.Type, e.Aggregate, shortPayload(e.Payload))
	if p.n%flushEvery == 0 {
		return p.table.Flush()
	}
	return nil
}

// shortPayload is a payload for a row of the table. It is cut between characters: half of one would be
// shown as escaped bytes. The other formats have all of it.
func shortPayload(payload []byte) string {
	if len(payload) <= maxPayload {
		return string(payload)
	}
	return strings.ToValidUTF8(string(payload[:maxPayload-3]), "") + "..."
}

// end completes the output after the last event. If there was none, people get a sentence on stderr, and
// programs an empty output or list; the exit code is 0.
func (p *eventPrinter) end(stderr io.Writer) (err error) {
	switch {
	case p.format == "json" && p.n == 0:
		_, err = fmt.Fprintln(p.w, "[]")
	case p.format == "json":
		_, err = fmt.Fprint(p.w, "\n]\n")
	case p.format == "" && p.n == 0:
		_, err = fmt.Fprintln(stderr, "no such events in the log")
	case p.format == "":
		err = p.table.Flush()
	}
	return err
}

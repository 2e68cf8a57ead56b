package main

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/duration"
	"agentctl/term"
)

// output is how a command prints what it read: as text for people, or as data.
//
// Data goes to stdout and everything else to stderr, so that a pipe gets data alone. The data
// of -o json is the struct that the command decoded, and is kept compatible for scripts.
type output struct {
	format string // json, yaml, ndjson; "" is text
}

// flags adds -o and --json.
func (o *output) flags(c *cobra.Command) {
	c.Flags().VarP(&term.FormatFlag{Format: &o.format, Allowed: []string{"json", "yaml", "ndjson"}}, "output", "o", "print `FORMAT` instead of text: json, yaml or ndjson")
	addJSONFlag(c, &o.format)
}

// streamFlags adds -o for a command that prints a stream: text, or one JSON value a line.
func (o *output) streamFlags(c *cobra.Command) {
	c.Flags().VarP(&term.FormatFlag{Format: &o.format, Allowed: []string{"ndjson"}}, "output", "o", "print `FORMAT` also on a terminal: ndjson")
}

// isText reports whether a streaming command prints for people: on a terminal, unless -o
// says otherwise.
func (o *output) isText(cmd *cobra.Command) bool {
	return o.format == "" && term.AsTerminal(cmd.OutOrStdout()) != nil
}

// addJSONFlag adds --json, which is short for -o json.
func addJSONFlag(c *cobra.Command, to *string) {
	c.Flags().Var(&term.JSONFlag{Format: to}, "json", "short for -o json")
	c.Flags().Lookup("json").NoOptDefVal = "true"
}

// print writes v in the chosen format, or calls text.
func (o *output) print(cmd *cobra.Command, v any, text func() error) error {
	if o.format == "" {
		return text()
	}
	return term.WriteData(term.JSONWriter(cmd.OutOrStdout()), o.format, v)
}

// printList is print for a list, of which ndjson prints one element a line.
func printList[T any](o *output, cmd *cobra.Command, list []T, text func() error) error {
	if o.format != "ndjson" {
		return o.print(cmd, list, text)
	}
	for i := range list {
		if err := o.print(cmd, &list[i], nil); err != nil {
			return err
		}
	}
	return nil
}

// limits are --count and --for: when a streaming command ends by itself; 0 is never.
//
// They end a command with success: for a stream it is the usual end.
type limits struct {
	count int
	time  time.Duration
}

// flags adds the flags; items is what --count counts.
func (l *limits) flags(c *cobra.Command, action, items string) {
	c.Flags().IntVar(&l.count, "count", 0, action+" after `N` "+items+" (0: never)")
	c.Flags().Var(duration.NewValue(&l.time, 0), "for", "end after `DURATION` (0: never)")
}

func (l *limits) check() error {
	if l.count < 0 {
		return exit(exitUsage, "--count is above 0, or 0 for never")
	}
	return nil
}

// context is cmd's context, ended by --for.
func (l *limits) context(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	if l.time > 0 {
		return context.WithTimeout(cmd.Context(), l.time)
	}
	return context.WithCancel(cmd.Context())
}

// newLoggerAt logs to stderr, JSON for a service and text for a terminal. The level may
// change while it is in use.
// A service's log is read by programs (journald keeps a line as it is), a terminal's by people.
func newLoggerAt(level zapcore.LevelEnabler) *zap.Logger {
	cfg := zap.NewProductionEncoderConfig()
	cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoder := zapcore.NewJSONEncoder
	if term.IsTerminal(os.Stderr) {
		cfg.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		cfg.EncodeLevel = zapcore.CapitalLevelEncoder
		encoder = zapcore.NewConsoleEncoder
	}
	return zap.New(zapcore.NewCore(encoder(cfg), zapcore.Lock(os.Stderr), level))
}

// env is the value of a flag's environment variable, or def when it is unset or empty.
func env(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// flagsAgain is those of some flags that a command was given, as they are typed. The command
// that is printed as the next step needs them too.
func flagsAgain(cmd *cobra.Command, names ...string) string {
	words := ""
	for _, name := range names {
		if fl := cmd.Flags().Lookup(name); fl != nil && fl.Changed {
			words += " --" + name + " " + shellQuote(fl.Value.String())
		}
	}
	return words
}

// shellQuote quotes a word for a POSIX shell.
func shellQuote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:@%+,") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

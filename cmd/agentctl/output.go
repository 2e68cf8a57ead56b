package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/term"
)

// output is how a read command prints: for people, or as data.
type output struct {
	format string // "" is for people
}

func (o *output) flags(c *cobra.Command) {
	c.Flags().VarP((*formatFlag)(&o.format), "output", "o", "print `FORMAT` instead of text: json, yaml or ndjson")
	c.Flags().Var((*jsonFlag)(&o.format), "json", "short for -o json")
	c.Flags().Lookup("json").NoOptDefVal = "true"
}

// formatFlag is the value of -o, checked while flags are parsed.
type formatFlag string

func (f *formatFlag) String() string { return string(*f) }
func (f *formatFlag) Type() string   { return "string" }
func (f *formatFlag) Set(s string) error {
	switch {
	case s != "json" && s != "yaml" && s != "ndjson":
		return errors.New("the formats are json, yaml and ndjson")
	case *f != "" && *f != formatFlag(s):
		return fmt.Errorf("it contradicts %s, which was given before", *f)
	}
	*f = formatFlag(s)
	return nil
}

// jsonFlag is --json.
type jsonFlag formatFlag

func (f *jsonFlag) String() string { return "" }
func (f *jsonFlag) Type() string   { return "bool" }
func (f *jsonFlag) Set(s string) error {
	on, err := strconv.ParseBool(s)
	if err != nil || !on {
		return err
	}
	return (*formatFlag)(f).Set("json")
}

// print writes v in the chosen format, or calls human.
func (o *output) print(cmd *cobra.Command, v any, human func() error) error {
	w := term.JSONWriter(cmd.OutOrStdout())
	switch o.format {
	case "json":
		return writeIndented(w, v)
	case "ndjson":
		return json.NewEncoder(w).Encode(v)
	case "yaml":
		return writeYAML(w, v)
	}
	return human()
}

func writeIndented(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// checkEnd refuses a --for and a --count that no one can have meant: 0 is never.
func checkEnd(dur time.Duration, count int) error {
	if dur < 0 || count < 0 {
		return exit(exitUsage, "--for and --count are above 0, or 0 for never")
	}
	return nil
}

// newLoggerAt logs to stderr, JSON for a service and text for a terminal, from a level on
// that may change.
func newLoggerAt(level zapcore.LevelEnabler) *zap.Logger {
	cfg := zap.NewProductionEncoderConfig()
	cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	var enc zapcore.Encoder
	if term.IsTerminal(os.Stderr) {
		cfg.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		cfg.EncodeLevel = zapcore.CapitalLevelEncoder
		enc = zapcore.NewConsoleEncoder(cfg)
	} else {
		enc = zapcore.NewJSONEncoder(cfg)
	}
	return zap.New(zapcore.NewCore(enc, zapcore.Lock(os.Stderr), level))
}

// env is the value of a flag's environment variable, or def.
func env(name, def string) string {
	if v, ok := os.LookupEnv(name); ok && v != "" {
		return v
	}
	return def
}

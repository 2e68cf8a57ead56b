package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// systemDaemon tells whether the paths of the system service apply.
func systemDaemon() bool { return os.Geteuid() == 0 }

// defaultStateDir is where a service or an ordinary user keeps state: sub is "" for the
// device, "relay" for the relay. The services have a directory each, /var/lib/agentctl
// and /var/lib/agentctl-relay, because each belongs to another user.
func defaultStateDir(sub string) string {
	if d := os.Getenv("STATE_DIRECTORY"); d != "" { // systemd
		return strings.Split(d, ":")[0]
	}
	if systemDaemon() {
		return strings.TrimSuffix("/var/lib/agentctl-"+sub, "-")
	}
	return filepath.Join(env("XDG_STATE_HOME", filepath.Join(os.Getenv("HOME"), ".local", "state")), "agentctl", sub)
}

// serviceSocketPath is where agentctl.socket listens.
const serviceSocketPath = "/run/agentctl/agentctl.sock"

// clientSocket is the control socket a command asks: the user's own daemon's where there
// is one, else the service's where that is installed.
func clientSocket() string {
	own := defaultSocket()
	if _, err := os.Lstat(own); err == nil {
		return own
	}
	if _, err := os.Lstat(filepath.Dir(serviceSocketPath)); err == nil {
		return serviceSocketPath
	}
	return own
}

// defaultSocket is the control socket's path.
func defaultSocket() string {
	if d := os.Getenv("RUNTIME_DIRECTORY"); d != "" {
		return filepath.Join(strings.Split(d, ":")[0], "agentctl.sock")
	}
	if systemDaemon() {
		return serviceSocketPath
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "agentctl", "agentctl.sock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("agentctl-%d", os.Geteuid()), "agentctl.sock")
}

// maxSecret is the longest token of any relay, bytes (docs/protocol.md, Tokens).
const maxSecret = 4096

// readSecret reads a token file: the first line, trimmed.
func readSecret(path string) (string, error) {
	const hint = "; mint one on the relay with: agentctl token create"
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		return "", fmt.Errorf("read the token: %w; run this as the file's owner, or name a file of your own", err)
	}
	if err != nil {
		return "", fmt.Errorf("read the token: %w"+hint, err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, 4*maxSecret))
	if err != nil {
		return "", fmt.Errorf("read the token: %w"+hint, err)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	line = strings.TrimSpace(line)
	if line == "" {
		return "", fmt.Errorf("token file %s is empty"+hint, path)
	}
	for i := range len(line) { // what would not fit a header of HTTP
		if c := line[i]; c <= ' ' || c > '~' || i >= maxSecret {
			return "", fmt.Errorf("token file %s holds no token on its first line"+hint, path)
		}
	}
	return line, nil
}

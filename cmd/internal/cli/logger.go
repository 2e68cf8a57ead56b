package cli

import (
	"os"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/term"
)

// NewLoggerAt returns a logger to stderr: JSON for a service, whose log is read by programs (journald
// keeps a line as it is), and text on a terminal. The level may change while the logger is in use. Each
// entry is one write under a lock, so that lines of several goroutines do not mix. There is no sampling, as
// in zap's production preset: repeated entries are all logged.
func NewLoggerAt(level zapcore.LevelEnabler) *zap.Logger {
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

// NewLogger is NewLoggerAt with a fixed level, the value of --log-level.
func NewLogger(level string) (*zap.Logger, error) {
	l, err := ParseLevel(level)
	if err != nil {
		return nil, err
	}
	return NewLoggerAt(l), nil
}

// ParseLevel parses the value of --log-level. The level may be changed afterwards.
func ParseLevel(level string) (zap.AtomicLevel, error) {
	l, err := zap.ParseAtomicLevel(level)
	if err != nil {
		return l, Errorf(ExitUsage, "--log-level %s: the levels are debug, info, warn and error", level)
	}
	return l, nil
}

//go:build !agentctl_omit_relay

package main

import (
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger is newLoggerAt with a level by its name, for good.
func newLogger(level string) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, exit(exitUsage, "--log-level %s: the levels are debug, info, warn and error", level)
	}
	return newLoggerAt(l), nil
}

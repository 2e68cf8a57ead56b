package main

import "fmt"

// Exit codes, the same for every command.
const (
	exitOK           = 0
	exitFailure      = 1
	exitUsage        = 2
	exitNotRunning   = 3
	exitUnauthorized = 4
	exitOffline      = 5
	exitApproval     = 6
	exitTimeout      = 7
)

// exitError carries an exit code up to main.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func exit(code int, format string, args ...any) error {
	return &exitError{code: code, err: fmt.Errorf(format, args...)}
}

package cli

import "fmt"

// Exit codes, the same for every command (docs/cli.md). Scripts and service units depend on them: a code
// does not change its meaning.
const (
	ExitOK           = 0
	ExitFailure      = 1 // any failure without a code below
	ExitUsage        = 2 // a wrong flag or argument
	ExitNotRunning   = 3 // no daemon, relay or gateway answers
	ExitUnauthorized = 4 // no token, or one that may not do this
	ExitOffline      = 5 // the board is not connected to its relay
	ExitApproval     = 6 // the step waits for the approval of a person; reserved, no command ends with it
	ExitTimeout      = 7 // no answer in time
)

// ExitError is an error that ends the program with Code. Its text needs no further explanation. Where another
// error wraps it, Explain takes the text of that one and this code.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string { return e.Err.Error() }
func (e *ExitError) Unwrap() error { return e.Err }

// Errorf is fmt.Errorf for an error that ends the program with code.
func Errorf(code int, format string, args ...any) error {
	return &ExitError{Code: code, Err: fmt.Errorf(format, args...)}
}

package cli

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"

	"agentctl/enrollment"
	"agentctl/login"
	"agentctl/transport/enroll"
)

// ExplainContext adds the next step to an error of a context.
func ExplainContext(err error) error {
	var file *login.FileError
	var refresh *login.RefreshError
	var e *enroll.Error
	switch {
	case errors.Is(err, login.ErrNoContext):
		return Errorf(ExitFailure, "%w; see: agentctl context ls", err)
	case errors.As(err, &refresh) && errors.As(err, &e):
		return ExplainEnroll(err, e, refresh.Context)
	case errors.As(err, &file):
		return ExplainContextFile(file, "do the same again")
	}
	return err
}

// ExplainEnroll explains that an agent's exchange with a relay failed: a login, or the refresh of a
// token. name is the context. For boards see enroll.Hint, whose words for failures of the network
// are used here too.
func ExplainEnroll(err error, e *enroll.Error, name string) error {
	const newInvite = "get a new line to paste on the relay's machine: agentctl invite --agent NAME"
	again := newInvite + ", then: agentctl login URL CODE --context " + name
	code, next := ExitFailure, enroll.Hint(err)
	switch e.Kind {
	case enroll.Refused:
		code, next = ExitUnauthorized, newInvite
		switch e.Reason {
		case enrollment.ReasonGenerationUsed:
			next = "this context was copied to another machine, or restored from an old backup, and used there; " + again
		case enrollment.ReasonRevoked:
			next = "the relay's operator has revoked it; " + again
		case enrollment.ReasonProof:
			next = "the relay was restored from a backup that is older than this login; " + again
		case enrollment.ReasonCodeUnknown:
			next = "check the code and the relay's address, or " + newInvite
		case enrollment.ReasonNonce:
			code, next = ExitFailure, "do the same again"
		}
	case enroll.NoEnrollment:
		next = "update agentctl on the relay"
	case enroll.Unreachable, enroll.NoDNS:
		code = ExitNotRunning
	case enroll.TimedOut:
		code = ExitTimeout
	case enroll.WrongAuthority:
		return Errorf(code, "%w", err) // its text has the next step
	}
	return Errorf(code, "%w\n%s", err, next)
}

// ExplainContextFile explains that the file of a context cannot be used; again is the next step if
// nothing else helps.
func ExplainContextFile(e *login.FileError, again string) error {
	next := again
	switch {
	case errors.Is(e, login.ErrOpen):
		next = "if nobody else has read it: chmod 600 " + ShellQuote(e.Path) + "; else revoke the agent on the relay and log in again with a new invite"
	case errors.Is(e, login.ErrDamaged):
		next = "remove the context with: agentctl context rm " + strings.TrimSuffix(filepath.Base(e.Path), ".json") + ", and log in again with a new invite"
	case errors.Is(e, syscall.ENOSPC):
		next = "free some space, then " + again
	case errors.Is(e, fs.ErrPermission), errors.Is(e, syscall.EROFS):
		next = "give the directory to this user, or set XDG_CONFIG_HOME to another one, then " + again
	}
	return Errorf(ExitFailure, "%w; %s", e, next)
}

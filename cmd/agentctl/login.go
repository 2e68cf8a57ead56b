package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/enrollment"
	"agentctl/login"
	"agentctl/transport/enroll"
)

// loginTimeout bounds the exchange with the relay, repeats included.
const loginTimeout = time.Minute

func newLogin() *cobra.Command {
	var o login.Options
	var codeFile, caFile string
	var out output
	c := &cobra.Command{
		Use:   "login URL CODE",
		Short: "Log in to a relay as an agent or a person, with an invite",
		Long: `Log in to a relay. Get the line to paste on the relay's machine: agentctl invite --agent NAME

It makes a key, which is your identity at the relay, and stores it as a context with a token that
lasts an hour. Every command that talks to a relay then uses the context and refreshes the token
by itself, 'agentctl mcp' too. --relay or --token-file, and their variables, take precedence.

CODE may be - for standard input, which keeps it out of the list of processes.`,
		Example: `  agentctl login https://relay.example:8460 7K3M-9QTR-2HXW-DB5N --ca-sha256 HEX
  agentctl login https://relay.example:8460 - --context lab < code.txt
  agentctl context ls`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			o.Relay, o.Version = args[0], version
			if _, err := enroll.BaseURL(o.Relay); err != nil {
				return exit(exitUsage, "%w", err)
			}
			if err := login.CheckName(o.Context); err != nil {
				return exit(exitUsage, "--context: %w", err)
			}
			if o.Code, err = readCode(cmd, args[1:], codeFile, "agentctl invite --agent NAME"); err != nil {
				return err
			}
			if o.CASHA256 == "" {
				if o.CAFile, err = absolutePath(caFile); err != nil {
					return err
				}
			} else if _, err := config.ClientTLS(caFile, o.CASHA256); err != nil {
				return exit(exitUsage, "--ca-sha256: %w", err)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), loginTimeout)
			defer cancel()
			i, before, err := contextStore().Login(ctx, o)
			if err != nil {
				return explainLogin(err, o.Context)
			}
			undo := "agentctl context rm " + i.Name
			if before != "" && before != i.Name {
				undo = "agentctl context use " + before
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "Logged in to %s; context %s is now the current one. Undo it with: %s\nNext: agentctl ls\n", i.Relay, i.Name, undo)
			return out.print(cmd, i, func() error { return printContexts(cmd, []login.Info{*i}) })
		},
	}
	f := c.Flags()
	f.StringVar(&o.CASHA256, "ca-sha256", "", "SHA-256 of the relay's own authority in `HEX`, as the invite has it: trust this relay and no other")
	f.StringVar(&caFile, "ca-file", "", "PEM `FILE` with the authority that signed the relay's certificate")
	f.StringVar(&o.Context, "context", env("AGENTCTL_CONTEXT", login.DefaultName), "`NAME` of the context [AGENTCTL_CONTEXT]")
	f.StringVar(&codeFile, "code-file", "", "`FILE` with the code, in place of CODE")
	out.flags(c)
	return c
}

// absolutePath makes a path of a flag absolute: a context is used in other directories too.
func absolutePath(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	v, err := config.FindKey("ca_file").Parse(path)
	if err != nil {
		return "", exit(exitUsage, "--ca-file %w", err)
	}
	return v.(string), nil
}

// explainLogin adds the next step to an error of a login.
func explainLogin(err error, name string) error {
	var other *login.OtherRelayError
	var file *login.FileError
	var e *enroll.Error
	switch {
	case errors.As(err, &other):
		return exit(exitFailure, "%w; log in under another name with --context NAME, or remove it with: agentctl context rm %s", err, other.Name)
	case errors.As(err, &file):
		return explainContextFile(file, "do the same again: the code is not lost")
	case errors.Is(err, login.ErrForBoard):
		return exit(exitUnauthorized, "%w; get another with: agentctl invite --agent NAME", err)
	case errors.Is(err, login.ErrCleartextPin):
		return exit(exitUsage, "--ca-sha256: %w", err)
	case errors.As(err, &e):
		return explainEnroll(err, e, name)
	}
	return err
}

// explainEnroll is what to do after an exchange with a relay failed, for an agent. enroll.Hint
// says it for boards, with the same words for failures of the network.
func explainEnroll(err error, e *enroll.Error, name string) error {
	const newInvite = "get a new line to paste on the relay's machine: agentctl invite --agent NAME"
	again := newInvite + ", then: agentctl login URL CODE --context " + name
	code, next := exitFailure, enroll.Hint(err)
	switch e.Kind {
	case enroll.Refused:
		code, next = exitUnauthorized, newInvite
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
			code, next = exitFailure, "do the same again"
		}
	case enroll.NoEnrollment:
		next = "update agentctl on the relay"
	case enroll.Unreachable, enroll.NoDNS:
		code = exitNotRunning
	case enroll.TimedOut:
		code = exitTimeout
	case enroll.WrongAuthority:
		return exit(code, "%w", err) // its text has the next step
	}
	return exit(code, "%w\n%s", err, next)
}

// explainContextFile is what to do about a file of a context.
func explainContextFile(e *login.FileError, again string) error {
	next := again
	switch {
	case errors.Is(e, login.ErrOpen):
		next = "if nobody else has read it: chmod 600 " + e.Path + "; else revoke the agent on the relay and log in again with a new invite"
	case errors.Is(e, login.ErrDamaged):
		next = "remove the context with: agentctl context rm " + strings.TrimSuffix(filepath.Base(e.Path), ".json") + ", and log in again with a new invite"
	case errors.Is(e, syscall.ENOSPC):
		next = "free some space, then " + again
	case errors.Is(e, fs.ErrPermission), errors.Is(e, syscall.EROFS):
		next = "give the directory to this user, or set XDG_CONFIG_HOME to another one, then " + again
	}
	return exit(exitFailure, "%w; %s", e, next)
}

// explainContext adds the next step to an error of a context.
func explainContext(err error) error {
	var file *login.FileError
	var refresh *login.RefreshError
	var e *enroll.Error
	switch {
	case errors.Is(err, login.ErrNoContext):
		return exit(exitFailure, "%w; see: agentctl context ls", err)
	case errors.As(err, &refresh) && errors.As(err, &e):
		return explainEnroll(err, e, refresh.Context)
	case errors.As(err, &file):
		return explainContextFile(file, "do the same again")
	}
	return err
}

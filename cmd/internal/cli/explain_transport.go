package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"agentctl/client"
)

// explainTransport explains that the relay or the gateway gave no answer: nothing listens there, TLS
// fails, or the time is over.
func explainTransport(cmd *cobra.Command, e *client.TransportError) *ExitError {
	server, start, flag := "relay", "agentctl relay", "--relay"
	if group(cmd) == "events" {
		server, start, flag = "event gateway", "agentctl events serve", "--url"
	}
	explained := func(code int, format string, args ...any) *ExitError {
		return &ExitError{code, fmt.Errorf(format, args...)}
	}
	next := ""
	switch e.Kind {
	case client.Unreachable:
		return explained(ExitNotRunning, "no %s answers at %s (%w); start one with: %s, or name it with %s", server, e.URL, e.Err, start, flag)
	case client.TimedOut:
		code := ExitTimeout
		if group(cmd) == "events" { // 7 means that --for or emit's second was over
			code = ExitFailure
		}
		return explained(code, "the %s at %s did not answer in time", server, e.URL)
	case client.NeedsTLS:
		return explained(ExitFailure, "%w; use https:// in %s", e.Err, flag)
	case client.UntrustedCertificate:
		next = fmt.Sprintf("; if the %s's certificate is your own, pass its authority with --ca-file FILE or --ca-sha256 HEX", server)
	case client.WrongCertificateName:
		next = fmt.Sprintf("; call the %s by a name of its certificate, with %s", server, flag)
	case client.NotTLS:
		next = fmt.Sprintf("; it does not speak TLS there; use http:// in %s", flag)
	}
	return explained(ExitFailure, "call the %s at %s: %w%s", server, e.URL, e.Err, next)
}

// explainClose returns the exit code and the next step after the relay closed a metric stream. A board that
// went offline has a separate exit code, because a script can wait for it and start again.
func explainClose(e *client.StreamClosedError) (code int, next string) {
	switch {
	case errors.Is(e, client.ErrDeviceOffline):
		return ExitOffline, ": the device went offline; see: agentctl ls"
	case errors.Is(e, client.ErrReaderSlow):
		return ExitFailure, ": this reader was too slow; use a longer interval_ms"
	case errors.Is(e, client.ErrTooManyStreams):
		return ExitFailure, ": your tenant has too many streams open; close one first"
	}
	return ExitFailure, ""
}

// explainRef returns the exit code, and the command that lists what a reference could have named. A
// reference with a wrong form is a usage error; one that names nothing is not.
func explainRef(e *client.RefError) (code int, next string) {
	code = ExitUsage
	if errors.Is(e, client.ErrNotFound) {
		code = ExitFailure
	}
	switch e.Thing {
	case "node":
		next = "; see: agentctl ls"
	case "ticket":
		next = "; see: agentctl tickets ls"
	}
	return code, next
}

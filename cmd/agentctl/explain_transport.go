package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"agentctl/client"
)

// explainTransport says what to do when the relay or the gateway gave no answer.
func explainTransport(cmd *cobra.Command, e *client.TransportError) *exitError {
	server, start, flag := "relay", "agentctl relay", "--relay"
	if group(cmd) == "events" {
		server, start, flag = "event gateway", "agentctl events serve", "--url"
	}
	explained := func(code int, format string, args ...any) *exitError {
		return &exitError{code, fmt.Errorf(format, args...)}
	}
	next := ""
	switch e.Kind {
	case client.Unreachable:
		return explained(exitNotRunning, "no %s answers at %s (%w); start one with: %s, or name it with %s", server, e.URL, e.Err, start, flag)
	case client.TimedOut:
		code := exitTimeout
		if group(cmd) == "events" { // 7 means that --for or emit's second was over
			code = exitFailure
		}
		return explained(code, "the %s at %s did not answer in time", server, e.URL)
	case client.NeedsTLS:
		return explained(exitFailure, "%w; use https:// in %s", e.Err, flag)
	case client.UntrustedCertificate:
		next = fmt.Sprintf("; if the %s's certificate is your own, pass its authority with --ca-file FILE or --ca-sha256 HEX", server)
	case client.WrongCertificateName:
		next = fmt.Sprintf("; call the %s by a name of its certificate, with %s", server, flag)
	case client.NotTLS:
		next = fmt.Sprintf("; it does not speak TLS there; use http:// in %s", flag)
	}
	return explained(exitFailure, "call the %s at %s: %w%s", server, e.URL, e.Err, next)
}

// explainClose is what to do after the relay closed a metric stream.
func explainClose(e *client.StreamClosedError) (code int, next string) {
	switch {
	case errors.Is(e, client.ErrDeviceOffline):
		return exitOffline, ": the device went offline; see: agentctl ls"
	case errors.Is(e, client.ErrReaderSlow):
		return exitFailure, ": this reader was too slow; use a longer interval_ms"
	case errors.Is(e, client.ErrTooManyStreams):
		return exitFailure, ": your tenant has too many streams open; close one first"
	}
	return exitFailure, ""
}

// explainRef is where to look up what a reference does not name.
func explainRef(e *client.RefError) (code int, next string) {
	code = exitUsage
	if errors.Is(e, client.ErrNotFound) {
		code = exitFailure
	}
	switch e.Thing {
	case "node":
		next = "; see: agentctl ls"
	case "ticket":
		next = "; see: agentctl tickets ls"
	}
	return code, next
}

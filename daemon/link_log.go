package daemon

import (
	"strings"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// logCalls logs each call with its trace id, never with arguments or results.
//
// The link calls it in the goroutine of the command. The level is checked first, so that a call
// allocates nothing here while debug messages are off.
func logCalls(log *zap.Logger) func(tool, traceID string, took time.Duration, err error) {
	return func(tool, traceID string, took time.Duration, err error) {
		ce := log.Check(zap.DebugLevel, "call")
		if ce == nil {
			return
		}
		fields := make([]zap.Field, 0, 4)
		if _, ok := manifest.ParseToolName(tool); ok { // the relay may send any text
			fields = append(fields, zap.String("tool", tool))
		}
		if len(traceID) == 32 {
			fields = append(fields, zap.String("trace_id", traceID))
		}
		fields = append(fields, zap.Duration("took", took))
		if err != nil {
			fields = append(fields, zap.String("code", string(manifest.AsError(err).Code)))
		}
		ce.Write(fields...)
	}
}

// logStates logs each new state of a link once, with the next step if the link is down.
//
// last needs no lock: a client calls OnState in its own goroutine only, and each client
// gets a separate function.
func logStates(log *zap.Logger, joined bool) func(link.Status) {
	var last link.State
	return func(s link.Status) {
		if s.State == last {
			return
		}
		last = s.State
		fields := []zap.Field{zap.String("state", string(s.State))}
		if s.State != link.StateReady && s.State != link.StateConnecting {
			fields = append(fields, zap.String("error", s.LastErr), zap.Int("close", s.LastCode), zap.String("hint", linkHint(s, joined)))
		}
		log.Info("link", fields...)
	}
}

// linkHint returns the next step for a link that is down, in terms of configuration keys.
//
// The errors of a link have no codes for a missing token or a wrong server, so that their
// texts are compared. A text that changes costs the hint and nothing else.
//
// A board that joined has a key and a pin in place of a token file and a ca_file.
func linkHint(s link.Status, joined bool) string {
	switch {
	case joined && s.CloneSuspected:
		return "another installation runs with a copy of this state directory: on one of the two type agentctl leave, then join with a new invite"
	case joined && s.State == link.StateTLSUntrusted:
		return "this is not the relay that was joined, or it has a new authority: ask its operator; if it is right: agentctl leave, then join with a new invite"
	case joined && (s.LastCode == link.CloseAuthFailed || s.LastCode == link.CloseForbidden):
		return "the relay does not accept the token, and a new one is asked for with the board's key; if this lasts: agentctl leave, then join with a new invite"
	case s.State == link.StateTLSUntrusted:
		return "the relay's certificate is not trusted: set ca_file to the certificate of its authority, or ca_sha256 to the hash that the relay and its invites print"
	case s.LastCode == link.CloseAuthFailed, s.LastCode == link.CloseForbidden:
		return "the relay does not accept the token: create one with `agentctl token create --class device` and put it into token_file"
	case strings.HasPrefix(s.LastErr, "read the token"), strings.HasPrefix(s.LastErr, "token file"):
		return "put the board's token there; it is read again before each attempt"
	case strings.Contains(s.LastErr, "answered HTTP 4"), strings.Contains(s.LastErr, "does not look like a TLS handshake"):
		return "the server at this address is not an agentctl relay, or only one side uses TLS: check the relay's URL, wss:// or ws://"
	case s.LastCode == link.CloseDraining && strings.HasSuffix(s.LastErr, " clock"):
		return "the relay's clock is wrong: set it there, best by NTP; its log says more, and this board retries by itself"
	case s.LastCode == link.CloseManifestInvalid, s.LastCode == link.CloseUpgradeRequired:
		return "the relay speaks another version: update agentctl on both sides"
	case s.CloneSuspected:
		return "another installation uses the same token: give each board its own"
	}
	return "the daemon retries by itself; check the relay's URL and the network if this lasts"
}

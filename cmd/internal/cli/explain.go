package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/control"
	"agentctl/login"
	"agentctl/manifest"
	"agentctl/monitor"
)

// Explain gives an error of a command its exit code, and adds the next step to its text. An error that
// wraps an *ExitError keeps its text and gets that code; nil stays nil. The text may have words of a server:
// whoever prints it replaces what could control a terminal (term.SafeText).
//
// The packages below cmd know no flags and no commands, so they return typed errors, and the
// functions explain* of this package say for each type what a person can type next. The order of the
// cases matters where an error wraps others: a *CallError comes before the answer that it wraps, and a
// *login.RefreshError before the error of the network that the refresh met.
func Explain(cmd *cobra.Command, err error) *ExitError {
	if err == nil {
		return nil
	}
	var known *ExitError
	var call *CallError
	var answer *client.Error
	var transport *client.TransportError
	var closed *client.StreamClosedError
	var ref *client.RefError
	var protocol *client.ProtocolError
	var module *monitor.ModuleError
	var column *monitor.ColumnError
	code, next := ExitFailure, ""
	switch {
	case errors.As(err, &known):
		return &ExitError{known.Code, err}
	case errors.As(err, new(*login.RefreshError)), errors.As(err, new(*login.FileError)), errors.Is(err, login.ErrNoContext):
		errors.As(ExplainContext(err), &known)
		return known
	case errors.As(err, &call) && call.plugin() != "" && errors.As(err, &answer) && answer.Code != "":
		code, next = explainPluginAnswer(call, answer)
	case errors.As(err, &answer):
		code, next = explainAnswer(cmd, answer)
	case errors.As(err, &transport):
		return explainTransport(cmd, transport)
	case errors.As(err, &closed):
		code, next = explainClose(closed)
	case errors.As(err, &ref):
		code, next = explainRef(ref)
	case errors.As(err, &protocol) && group(cmd) == "events":
		next = "; is this the event gateway?"
	case errors.Is(err, client.ErrURL), errors.Is(err, client.ErrCleartext):
		code = ExitUsage
	case errors.Is(err, client.ErrNeverLinked):
		code, next = ExitOffline, "; on the board: agentctl status, or if nothing runs there: agentctl run --relay URL --token-file FILE"
	case errors.Is(err, control.ErrNotRunning):
		code = ExitNotRunning
	case errors.Is(err, control.ErrPermission):
		code = ExitUnauthorized
	case errors.Is(err, monitor.ErrModules):
		code = ExitUsage
	case errors.Is(err, monitor.ErrNoHistory):
		next = "; see whether it records with: agentctl status"
	case errors.As(err, &module):
		return &ExitError{ExitUsage, fmt.Errorf("--modules %w", err)}
	case errors.As(err, &column):
		next = "; ask for its module: --modules " + column.Module
	case errors.Is(err, context.DeadlineExceeded) && !callsRelay(cmd):
		code, next = ExitTimeout, ": the daemon does not answer; see its log, as with: journalctl -u agentctl -n 20"
	case errors.Is(err, context.DeadlineExceeded):
		code, err = ExitTimeout, errors.New("no answer within the time of --for")
	case errors.Is(err, context.Canceled):
		err = errors.New("interrupted")
	}
	return &ExitError{code, fmt.Errorf("%w%s", err, next)}
}

// callsRelay reports whether a command calls a relay: it has --relay. history has it too, and calls a
// relay only with --board. By it Explain knows which deadline has passed: that of --for, or that of the
// control socket.
func callsRelay(cmd *cobra.Command) bool {
	board := cmd.Flags().Lookup("board")
	return cmd.Flags().Lookup("relay") != nil && (board == nil || board.Changed)
}

// group is the first word after agentctl of a command: "tickets" of "agentctl tickets ls".
func group(cmd *cobra.Command) string {
	for cmd.HasParent() && cmd.Parent().HasParent() {
		cmd = cmd.Parent()
	}
	return cmd.Name()
}

// explainAnswer returns the exit code and the next step for an error that the relay or the event
// gateway has answered.
//
// The group of the command decides first, because the same code means different things: an
// unknown tool is a wrong name for call, and a relay without the plugin for tickets.
func explainAnswer(cmd *cobra.Command, e *client.Error) (code int, next string) {
	switch {
	case group(cmd) == "events":
		code, next = explainGatewayAnswer(cmd, e)
	case e.Code == "":
		code, next = ExitFailure, "; is this an agentctl relay?"
	case group(cmd) == "tickets":
		code, next = explainTicketAnswer(e)
	default:
		code, next = explainRelayAnswer(e)
		if group(cmd) == "plugin" && e.Code == manifest.BadRequest { // it may name a tool of plugin.json
			next = ""
		}
		if name := contextOf(cmd); name != "" && e.Code == manifest.SafetyDenied && strings.Contains(e.Message, "token was revoked") {
			next = "; that is the token of context " + name + ": get a new line to paste on the relay's machine: agentctl invite --agent NAME, then: agentctl login URL CODE --context " + name
		}
		if e.Code == manifest.BadRequest && isAdministration(cmd) && !strings.HasPrefix(e.Reason, "unknown_") && e.Reason != "name_taken" {
			code = ExitUsage // as where the same command works on a state directory
		}
	}
	if e.TraceID != "" {
		next += fmt.Sprintf(" (trace %s)", e.TraceID)
	}
	return code, next
}

// lackingScope returns the flag of 'agentctl token create' for the scope that a refusal names, with a
// space before it, or "". The message comes from a server: only known scopes get into a command, because
// people paste it into a shell.
func lackingScope(message string) string {
	_, after, _ := strings.Cut(message, "lacks the scope ")
	scope, _, _ := strings.Cut(after, " ")
	if _, _, ok := manifest.PluginScope(scope); ok || slices.Contains(manifest.Scopes, scope) {
		return " --add-scope " + scope
	}
	return ""
}

// isAdministration reports whether a command changes what a relay has of boards, invites or tokens.
func isAdministration(cmd *cobra.Command) bool {
	g := group(cmd)
	return g == "node" || g == "invite" || g == "token"
}

// explainRelayAnswer explains errors of the relay's API. The relay has one code for every refusal
// (safety_denied); only the message shows whether the token or the node is refused.
func explainRelayAnswer(e *client.Error) (code int, next string) {
	ofToken := strings.Contains(e.Message, "token") && !strings.Contains(e.Message, "node")
	switch {
	case e.Code == manifest.SafetyDenied && isAdminScope(e.Message):
		return ExitUnauthorized, "; create one that has it with: agentctl token create --class tenant-admin, and pass it with --token-file"
	case e.Status == http.StatusUnauthorized, e.Code == manifest.SafetyDenied && ofToken:
		if strings.Contains(e.Message, "agentctl token create") { // the relay says how to get one
			return ExitUnauthorized, "; pass it with --token-file, or log in with a line of: agentctl invite --agent NAME"
		}
		return ExitUnauthorized, "; create one that may with: agentctl token create" + lackingScope(e.Message) + ", and pass it with --token-file"
	case e.Code == manifest.SafetyDenied && strings.Contains(e.Message, "ask its operator"): // a rule of the stage acl
		return ExitUnauthorized, ""
	case e.Code == manifest.SafetyDenied:
		return ExitUnauthorized, "; see your nodes with: agentctl ls"
	case e.Code == manifest.NodeOffline:
		return ExitOffline, explainOutcome(e) + "; see when it was last there with: agentctl ls"
	case e.Code == manifest.DeadlineExceeded:
		return ExitTimeout, explainOutcome(e) + "; see how the board does, there: agentctl status"
	case (e.Code == manifest.BadRequest || e.Code == manifest.ManifestInvalid) && strings.Contains(e.Message, "tool"):
		return ExitFailure, "; see the tools with: agentctl ls -o json"
	}
	return ExitFailure, explainOutcome(e)
}

// isAdminScope reports whether a refusal is for lack of a scope of tenant administrators. The next
// step then names a class in place of a scope: tenant-admin has all three.
func isAdminScope(message string) bool {
	_, scope, _ := strings.Cut(message, "lacks the scope ")
	return scope == manifest.ScopeNodesWrite || scope == manifest.ScopeTokensWrite || scope == manifest.ScopeInvitesWrite
}

// explainOutcome says whether a failed call may have run; nothing if the relay does not say. Only the relay
// knows the safety class of the tool, so Retryable decides whether a repeat is called safe.
func explainOutcome(e *client.Error) string {
	switch {
	case e.Outcome == manifest.NotSent:
		return "; it did not run"
	case e.Outcome == manifest.OutcomeUnknown && e.Retryable:
		return "; it may have run, and calling again is safe"
	case e.Outcome == manifest.OutcomeUnknown:
		return "; it may have run"
	}
	return ""
}

// explainTicketAnswer leaves an error of the tickets plugin, which has a Reason, as it is:
// its message says what to do. A deadline is the relay's.
func explainTicketAnswer(e *client.Error) (code int, next string) {
	switch {
	case e.Status == http.StatusUnauthorized:
		return ExitUnauthorized, "; create a token with: agentctl token create, and pass it with --token-file"
	case e.Code == manifest.DeadlineExceeded:
		return ExitTimeout, explainOutcome(e) + "; see whether it was done with: agentctl tickets ls"
	case e.Reason != "" && e.Code == manifest.SafetyDenied:
		return ExitUnauthorized, ""
	case e.Reason != "":
		return ExitFailure, ""
	case e.Code == manifest.SafetyDenied:
		return ExitUnauthorized, "; create one with: agentctl token create --scope tickets:read --scope tickets:write"
	case e.Code == manifest.BadRequest && strings.HasPrefix(e.Message, "no tool"):
		return ExitFailure, "; this relay has no tickets: it runs with --without tickets, or the plugin was unloaded"
	case e.Code == manifest.BadRequest:
		return ExitFailure, "; see: agentctl tickets ls"
	}
	return ExitFailure, ""
}

// explainGatewayAnswer explains errors of the event gateway. It accepts its own token and tokens of the
// relay; which scope those need depends on the direction of the command.
func explainGatewayAnswer(cmd *cobra.Command, e *client.Error) (code int, next string) {
	scope := "subscribe"
	if cmd.Name() == "emit" {
		scope = "ingest"
	}
	switch {
	case e.Status == http.StatusUnauthorized && !e.HadToken:
		return ExitUnauthorized, "; pass a token with --token-file, or set MCP_SSE_AUTH_TOKEN"
	case e.Status == http.StatusUnauthorized:
		return ExitUnauthorized, "; use the gateway's token, or create one on the relay with: agentctl token create --scope events:" + scope
	case e.Status == http.StatusForbidden:
		return ExitUnauthorized, ""
	case e.Code == "":
		return ExitFailure, "; is this the event gateway?"
	}
	return ExitFailure, ""
}

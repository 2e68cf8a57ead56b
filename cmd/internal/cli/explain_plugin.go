package cli

import (
	"fmt"
	"strings"

	"agentctl/client"
	"agentctl/manifest"
)

// isPluginTool reports whether a tool belongs to a plugin and not to a board. The name shows it: a
// board's tool has a node id in it (manifest.ParseToolName).
func isPluginTool(tool string) bool {
	_, ofBoard := manifest.ParseToolName(tool)
	return !ofBoard && strings.Contains(tool, ".")
}

// explainPluginAnswer returns the exit code and the next step for an error of a plugin's tool. Its
// plugin may be the cause, so most next steps show the state of the plugin. Not so for the reason "storage":
// that is a fault of the relay's disk.
func explainPluginAnswer(call *CallError, e *client.Error) (code int, next string) {
	plugin := call.plugin()
	state := fmt.Sprintf("; see plugin %s with: agentctl plugin ls", plugin)
	switch {
	case e.Reason == "unary_on_stream":
		code, next = ExitFailure, fmt.Sprintf("; see one board live with: agentctl call %s:subscribe, or give the tool to an MCP client: agentctl mcp connect", call.board())
	case e.Code == manifest.BadRequest && strings.HasPrefix(e.Message, "no tool"):
		code, next = ExitFailure, fmt.Sprintf("; is plugin %s loaded? agentctl plugin ls, then: agentctl plugin load %s", plugin, plugin)
	case e.Code == manifest.ManifestInvalid && len(call.Takes) > 0:
		code, next = ExitFailure, "; it takes: "+strings.Join(call.Takes, ", ")
	case e.Code == manifest.Internal && e.Reason != "storage":
		code, next = ExitFailure, explainOutcome(e)+state+", and its lines in the relay's log"
	case e.Code == manifest.DeadlineExceeded:
		code, next = ExitTimeout, explainOutcome(e)+state
	case e.Code == manifest.BadRequest, e.Code == manifest.ManifestInvalid:
		code = ExitFailure // the message says what is wrong with the arguments
	default:
		code, next = explainRelayAnswer(e)
	}
	if e.TraceID != "" {
		next += fmt.Sprintf(" (trace %s)", e.TraceID)
	}
	return code, next
}

package client

import (
	"net/url"
	"strings"
)

// FleetToolset is the toolset for language models: few tools for any number of boards
// (docs/fleet.md).
const FleetToolset = "fleet"

// Toolsets are the words of a toolset that every relay knows; the others are names of plugins.
var Toolsets = []string{FleetToolset, "boards", "all"}

// MCPURL returns the URL of a relay's MCP endpoint. base is the relay's URL; toolset selects the
// listed tools, "" leaves the choice to the relay; flat asks for tool names without dots, which
// some clients reject. Whatever is printed or written for an MCP client uses FleetToolset and
// flat names.
func MCPURL(base, toolset string, flat bool) string {
	var query []string
	if toolset != "" {
		query = append(query, "toolset="+strings.ReplaceAll(url.QueryEscape(toolset), "%2C", ","))
	}
	if flat {
		query = append(query, "names=flat")
	}
	s := strings.TrimRight(base, "/") + "/mcp"
	if len(query) > 0 {
		s += "?" + strings.Join(query, "&")
	}
	return s
}

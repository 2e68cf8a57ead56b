package manifest

import (
	"slices"
	"strings"
)

// Scopes of the relay. Besides them there are those that plugins declare (PluginScope). Another
// word is refused when a token is minted and grants nothing in a token that has it.
const (
	ScopeCallReadOnly    = "tools:call:read_only"
	ScopeToolsList       = "tools:list"
	ScopeDeviceConnect   = "device:connect"
	ScopeDeviceEnroll    = "device:enroll"
	ScopeEventsSubscribe = "events:subscribe"
	ScopeEventsIngest    = "events:ingest"
	ScopeTicketsRead     = "tickets:read"
	ScopeTicketsWrite    = "tickets:write"
	ScopeKernelAdmin     = "kernel:admin"
	ScopeNodesWrite      = "nodes:write"   // names, tags, descriptions, removal and revocation of nodes
	ScopeTokensWrite     = "tokens:write"  // minting, listing and revoking tokens over HTTP
	ScopeInvitesWrite    = "invites:write" // making, listing and revoking invites over HTTP
	// ScopeBoardsInspect is needed, beside the scope of the safety class, for the kinds that show
	// what runs on a board and what it is connected to.
	ScopeBoardsInspect = "boards:inspect"
)

// Scopes lists the scopes of the relay, a closed set.
var Scopes = []string{
	ScopeCallReadOnly, ScopeToolsList, ScopeDeviceConnect, ScopeDeviceEnroll,
	ScopeEventsSubscribe, ScopeEventsIngest, ScopeTicketsRead, ScopeTicketsWrite, ScopeKernelAdmin,
	ScopeNodesWrite, ScopeTokensWrite, ScopeInvitesWrite, ScopeBoardsInspect,
}

// ScopeForClass returns the scope that a call of a tool of class c needs.
func ScopeForClass(c SafetyClass) string {
	if c == ReadOnly {
		return ScopeCallReadOnly // one string, not one for each tool of each device
	}
	return "tools:call:" + string(c)
}

// MaxScopeLen bounds a scope of a plugin, bytes: two words of 32 and the colon.
const MaxScopeLen = 65

// relayScopeNames are names that no plugin has scopes under: the first words of the relay's own
// scopes, and names that its own plugins and endpoints have or may get. A scope that a later
// relay adds under one of them must not be in tokens of today as the scope of a plugin.
var relayScopeNames = []string{
	"tools", "device", "events", "tickets", "kernel", "nodes", "tokens", "invites", "boards",
	"agents", "audit", "conformance", "control", "devices", "directory", "fleet", "keys", "mcp", "metrics",
	"plugin", "plugins", "relay", "schemas", "sys", "sysecho", "system", "tenants", "triage",
}

// PluginScope splits the scope of a plugin: NAME:ACTION, where NAME is the name of the plugin that
// declares it and both are a letter and then a-z, 0-9 and _, at most 32. ok is false for every
// other word, and for words under a name that is the relay's own, such as tickets:read.
func PluginScope(scope string) (plugin, action string, ok bool) {
	plugin, action, ok = strings.Cut(scope, ":")
	return plugin, action, ok && isScopeWord(plugin) && isScopeWord(action) && !slices.Contains(relayScopeNames, plugin)
}

// isScopeWord matches [a-z][a-z0-9_]{0,31}, the form of a plugin's name.
func isScopeWord(s string) bool {
	return len(s) >= 1 && len(s) <= 32 && 'a' <= s[0] && s[0] <= 'z' && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}

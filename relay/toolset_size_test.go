package relay

import (
	"testing"

	"agentctl/relay/kernel"
)

// Bounds of the toolset fleet: a model has these texts in every conversation.
const (
	maxFleetTools  = 12
	maxFleetTokens = 2000 // a token is about 4 bytes of name, description and input schema
)

// TestToolsetSize: the toolset fleet is small, whatever plugin a tool of it belongs to.
func TestToolsetSize(t *testing.T) {
	r := newAdminTest(t).r
	list, more := r.kernel.ListToolset(&kernel.Caller{Tenant: "default", Scopes: allScopes{}}, "", kernel.FleetToolset, "", 100)
	bytes := 0
	for _, tool := range list {
		n := len(tool.Name) + len(tool.Description) + len(tool.InputSchema)
		t.Logf("%s: %d bytes", tool.Name, n)
		bytes += n
	}
	if len(list) < 9 || len(list) > maxFleetTools || more || bytes/4 > maxFleetTokens {
		t.Errorf("%d tools with %d tokens, want at most %d with %d", len(list), bytes/4, maxFleetTools, maxFleetTokens)
	}
}

package client

import "testing"

func TestMCPURL(t *testing.T) {
	for _, tt := range []struct {
		base, toolset string
		flat          bool
		want          string
	}{
		{"https://relay.example:8460", FleetToolset, true, "https://relay.example:8460/mcp?toolset=fleet&names=flat"},
		{"https://relay.example/base/", "fleet,notes", false, "https://relay.example/base/mcp?toolset=fleet,notes"},
		{"http://127.0.0.1:8460", "", true, "http://127.0.0.1:8460/mcp?names=flat"},
		{"http://127.0.0.1:8460", "", false, "http://127.0.0.1:8460/mcp"},
		{"http://127.0.0.1:8460", "a&b=c", false, "http://127.0.0.1:8460/mcp?toolset=a%26b%3Dc"},
	} {
		if got := MCPURL(tt.base, tt.toolset, tt.flat); got != tt.want {
			t.Errorf("MCPURL(%q, %q, %v) = %q, want %q", tt.base, tt.toolset, tt.flat, got, tt.want)
		}
	}
}

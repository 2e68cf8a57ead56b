package clientconfig

import (
	"bytes"
	"strings"
	"testing"
)

// TestVariablesOfUserStay: variables and headers that a person added to the entry are not lost when Connect
// sets ours beside them.
func TestVariablesOfUserStay(t *testing.T) {
	withEnv := testStdio
	withEnv.Env = []EnvVar{{"XDG_CONFIG_HOME", "/srv/ann/config"}}
	for _, tt := range []struct {
		name, client string
		server       Server
		before       string
		want         []string // in the connected file
	}{
		{"JSON", "cursor", withEnv, "{\n  \"mcpServers\": {\n    \"agentctl\": {\n      \"env\": {\n        \"HTTPS_PROXY\": \"http://p\", // ours\n        \"XDG_CONFIG_HOME\": \"/old\"\n      }\n    }\n  }\n}\n",
			[]string{"        \"HTTPS_PROXY\": \"http://p\", // ours\n        \"XDG_CONFIG_HOME\": \"/srv/ann/config\"\n"}},
		{"JSON, added", "cursor", withEnv, "{\n  \"mcpServers\": {\n    \"agentctl\": {\n      \"env\": {\n        \"A\": \"b\"\n      }\n    }\n  }\n}\n",
			[]string{"        \"A\": \"b\",\n        \"XDG_CONFIG_HOME\": \"/srv/ann/config\"\n      }"}},
		{"JSON headers", "cursor", testHTTP, `{"mcpServers":{"agentctl":{"headers":{"X-Site":"lab"}}}}`, []string{`"X-Site":"lab"`, "Bearer ${env:MCP_TOKEN}"}},
		{"TOML", "codex", withEnv, "[mcp_servers.agentctl]\nenv = { HTTPS_PROXY = \"http://p\", XDG_CONFIG_HOME = \"/old\" }\n",
			[]string{`env = { HTTPS_PROXY = "http://p", XDG_CONFIG_HOME = "/srv/ann/config" }`}},
		{"TOML, a subtable", "codex", withEnv, "[mcp_servers.agentctl]\n\n[mcp_servers.agentctl.env]\n\"A b\" = 'c'\n\n[z]\n", []string{`env = { "A b" = "c", XDG_CONFIG_HOME = "/srv/ann/config" }`, "\n[z]\n"}},
	} {
		c, err := Find(tt.client)
		if err != nil {
			t.Fatal(err)
		}
		connected, err := c.Connect([]byte(tt.before), tt.server)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		for _, want := range tt.want {
			if !strings.Contains(string(connected), want) {
				t.Errorf("%s: connected:\n%s\nwithout %q", tt.name, connected, want)
			}
		}
		if again, err := c.Connect(connected, tt.server); err != nil || !bytes.Equal(again, connected) {
			t.Errorf("%s: connected again: %v\n%s\nwant\n%s", tt.name, err, again, connected)
		}
	}
}

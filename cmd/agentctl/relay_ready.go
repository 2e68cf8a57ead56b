//go:build linux && !agentctl_omit_relay

package main

import (
	"bytes"
	"encoding/json"

	"agentctl/client"
	"agentctl/relay"
)

// readyLine returns the line that a program waits for; what is not served is null. mcp_url is that of the
// fleet toolset, whose number of tools does not grow with the boards.
//
// It is one line of JSON, written when the listeners accept connections, and the only thing
// that the relay writes to stdout. Tests and supervisors read the URL from it, which with
// --listen :0 is not known before. Scripts depend on its keys: they are added and not renamed. It holds no
// secret: ca_sha256 is the pin, which invites have too.
func readyLine(r *relay.Relay) []byte {
	or := func(s string) any {
		if s == "" {
			return nil
		}
		return s
	}
	mcpURL := ""
	if r.URL() != "" {
		mcpURL = client.MCPURL(r.URL(), client.FleetToolset, true)
	}
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false) // a person may copy the URL, which has &
	_ = e.Encode(map[string]any{"ready": true, "url": or(r.URL()), "mcp_url": or(mcpURL), "sse_url": or(r.SSEURL()), "metrics_url": or(r.MetricsURL()), "ca_sha256": or(r.CASHA256())})
	return bytes.TrimSpace(line.Bytes())
}

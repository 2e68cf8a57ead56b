package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"agentctl/manifest"
)

const (
	mcpVersion = "2026-07-28"
	maxAnswer  = 1 << 20 // bytes of an MCP answer that are read
)

// Echo calls the echo tool of this machine through MCP, as a client of mcpVersion does. It
// returns the echoed message and the round-trip time.
//
// The request is written by hand, without the MCP SDK, in the stateless form of mcpVersion:
// one POST that carries the client's description in _meta, and no session. The answer is
// plain JSON or the first event of an SSE stream, as the server prefers.
func (d *Demo) Echo(ctx context.Context, message string) (echoed string, took time.Duration, err error) {
	tool := manifest.ToolName{Short: "sysecho", NodeID: d.Nodes[0].NodeID, CapID: "echo", Verb: manifest.VerbInvoke}.String()
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{
		"name": tool, "arguments": map[string]string{"message": message},
		"_meta": map[string]any{"io.modelcontextprotocol/protocolVersion": mcpVersion,
			"io.modelcontextprotocol/clientInfo":         map[string]string{"name": "agentctl-demo", "version": "1"},
			"io.modelcontextprotocol/clientCapabilities": map[string]any{}},
	}})
	if err != nil {
		return "", 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.MCPURL, bytes.NewReader(body))
	if err != nil {
		return "", 0, err
	}
	for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
		"Authorization": "Bearer " + d.Token, "MCP-Protocol-Version": mcpVersion, "Mcp-Method": "tools/call", "Mcp-Name": tool} {
		req.Header.Set(k, v)
	}
	start := time.Now()
	resp, err := d.Client.HTTP().Do(req)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	took = time.Since(start)
	if err != nil {
		return "", 0, fmt.Errorf("read the MCP answer: %w", err)
	}
	// In an event stream the answer is the first line that begins with "data: {".
	if _, data, isStream := bytes.Cut(answer, []byte("data: {")); isStream {
		answer, _, _ = bytes.Cut(append([]byte("{"), data...), []byte("\n"))
	}
	var result struct {
		Result struct {
			Structured struct {
				Message string `json:"message"`
			} `json:"structuredContent"`
		} `json:"result"`
	}
	if err := json.Unmarshal(answer, &result); err != nil || result.Result.Structured.Message == "" {
		return "", 0, fmt.Errorf("the echo through MCP failed: HTTP %d %s", resp.StatusCode, answer)
	}
	return result.Result.Structured.Message, took, nil
}

//go:build !agentctl_omit_relay

package mcpcmd

import (
	"context"
	"encoding/base64"
	"errors"
	"testing"
)

// A token of another agent than MCP_AGENT_ID names is refused before it is sent; what is not a token of a
// relay is left to the relay.
func TestCheckAgentID(t *testing.T) {
	token := func(claims string) string {
		return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".sig"
	}
	down := errors.New("the relay is down")
	for _, tt := range []struct {
		name, agent, token string
		err                error
		refused            bool
	}{
		{"no variable", "", token(`{"sub":"eve"}`), nil, false},
		{"the same agent", "ann", token(`{"sub":"ann"}`), nil, false},
		{"another agent", "ann", token(`{"sub":"eve"}`), nil, true},
		{"no subject", "ann", token(`{}`), nil, false},
		{"not a token", "ann", "opaque", nil, false},
		{"not base64", "ann", "a.!.c", nil, false},
		{"no token", "ann", "", down, false},
	} {
		t.Setenv(agentIDEnv, tt.agent)
		source := checkAgentID(func(context.Context, string) (string, error) { return tt.token, tt.err })
		got, err := source(t.Context(), "")
		refused := errors.As(err, new(*agentIDError))
		if refused != tt.refused || !refused && (got != tt.token || !errors.Is(err, tt.err)) || refused && got != "" {
			t.Errorf("%s: got %q, %v", tt.name, got, err)
		}
	}
}

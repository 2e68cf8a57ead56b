//go:build !agentctl_omit_relay

package mcpcmd

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// agentIDEnv is the variable that says which agent an MCP client starts the bridge for.
const agentIDEnv = "MCP_AGENT_ID"

// agentIDError reports a token of another agent than the environment names. The relay knows an
// agent by its token only: a bridge that went on would act, and be audited, under the other name.
type agentIDError struct{ want, got string }

func (e *agentIDError) Error() string {
	return fmt.Sprintf("%s is %.64q, but the token is that of agent %.64q, and the relay goes by the token; give the token of that agent (--token-file, MCP_TOKEN or --context), or unset %s",
		agentIDEnv, e.want, e.got, agentIDEnv)
}

// tokenFunc returns what the next request carries; see stdio.Options.Token.
type tokenFunc func(ctx context.Context, refused string) (string, error)

// checkAgentID makes token fail where MCP_AGENT_ID contradicts the token. It is checked with each
// request, because a token file can be replaced while the bridge runs.
func checkAgentID(token tokenFunc) tokenFunc {
	want := os.Getenv(agentIDEnv)
	if want == "" {
		return token
	}
	return func(ctx context.Context, refused string) (string, error) {
		t, err := token(ctx, refused)
		if got := tokenSubject(t); err == nil && got != "" && got != want {
			return "", &agentIDError{want, got}
		}
		return t, err
	}
}

// tokenSubject reads claim sub of a token, without a check of its signature, which is the relay's;
// "" for what is not a token of a relay, which the relay refuses.
//
// A token is a JWT (RFC 7519): three parts in base64url, of which the second is the claims.
func tokenSubject(token string) string {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return ""
	}
	claims, err := base64.RawURLEncoding.DecodeString(parts[1])
	var c struct {
		Sub string `json:"sub"`
	}
	if err != nil || json.Unmarshal(claims, &c) != nil {
		return ""
	}
	return c.Sub
}

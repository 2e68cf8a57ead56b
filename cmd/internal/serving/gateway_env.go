//go:build linux && !agentctl_omit_relay

package serving

import (
	"os"
	"strings"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/relay/gateway"
)

// GatewayEnv returns the settings of the event gateway in the environment (docs/events.md). A token or
// the secret may also be a systemd credential with the variable's name in lower case, which counts as
// its _FILE variable; both variables take precedence. gateway.FromEnv reports each problem on a line; they
// are joined to one, like other usage errors.
func GatewayEnv() (gateway.Env, error) {
	e, err := gateway.FromEnv(func(name string) string {
		v := os.Getenv(name)
		if base, ok := strings.CutSuffix(name, "_FILE"); ok && v == "" && os.Getenv(base) == "" {
			return config.Credential(strings.ToLower(base))
		}
		return v
	})
	if err != nil {
		return e, cli.Errorf(cli.ExitUsage, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return e, nil
}

// GatewayAccess reads the gateway's tokens and origins again, from the environment and the files that it
// names: a reload changes those without a restart.
func GatewayAccess() (gateway.Access, error) {
	e, err := GatewayEnv()
	return gateway.Access{SubscribeToken: e.SubscribeToken, IngestToken: e.IngestToken, AllowOrigins: e.AllowOrigins}, err
}

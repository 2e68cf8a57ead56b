package client

import "context"

// PluginBus is what a plugin asks for beyond answering calls, and whether it is allowed.
type PluginBus struct {
	Name      string   `json:"name"`
	Version   string   `json:"version"`
	Digest    string   `json:"digest"` // of its manifest
	Call      []string `json:"call"`
	Read      []string `json:"read"`
	Subscribe []string `json:"subscribe"`
	Append    []string `json:"append"`
	Allowed   bool     `json:"allowed"`
	Tenants   []string `json:"tenants"` // "*": every one
	By        string   `json:"by,omitempty"`
	AtMS      int64    `json:"at_ms,omitempty"` // Unix ms
}

// PluginBus shows what a plugin asks for. It needs the scope kernel:admin, as AllowPlugin and
// DisallowPlugin do.
func (c *Client) PluginBus(ctx context.Context, name string) (*PluginBus, error) {
	b := new(PluginBus)
	return b, c.call(ctx, "kernel.plugin.show", map[string]any{"name": name}, b)
}

// AllowPlugin allows a plugin what its manifest asks for in some tenants, or in that of the token. With
// a digest, the manifest must have it.
func (c *Client) AllowPlugin(ctx context.Context, name, digest string, tenants []string) (*PluginBus, error) {
	args := map[string]any{"name": name}
	if digest != "" {
		args["digest"] = digest
	}
	if len(tenants) > 0 {
		args["tenants"] = tenants
	}
	b := new(PluginBus)
	return b, c.call(ctx, "kernel.plugin.allow", args, b)
}

// DisallowPlugin takes back what AllowPlugin gave.
func (c *Client) DisallowPlugin(ctx context.Context, name string) error {
	return c.call(ctx, "kernel.plugin.disallow", map[string]any{"name": name}, nil)
}

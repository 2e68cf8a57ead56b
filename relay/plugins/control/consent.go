package control

import (
	"context"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// PluginBus is what a plugin asks for beyond answering calls, and what an operator decided on it.
type PluginBus struct {
	Name      string   `json:"name"`
	Version   string   `json:"version"`
	Digest    string   `json:"digest"` // of its manifest, hex
	Call      []string `json:"call"`
	Read      []string `json:"read"`
	Subscribe []string `json:"subscribe"`
	Append    []string `json:"append"`
	// Allowed reports whether a consent for this digest is in force, in these tenants ("*": all).
	Allowed bool     `json:"allowed"`
	Tenants []string `json:"tenants"`
	By      string   `json:"by,omitempty"`
	AtMS    int64    `json:"at_ms,omitempty"`
}

// Consents keeps what operators decided on plugins. Errors are as for Middleware.
type Consents interface {
	Show(name string) (*PluginBus, error)
	// Set allows a plugin what its manifest asks for, in some tenants; without tenants it takes the
	// consent back, also of a plugin whose manifest cannot be read. The manifest must have the digest,
	// unless that is "".
	Set(ctx context.Context, name, digest string, tenants []string, actor string) (*PluginBus, error)
}

const pluginBusOutput = `"name":{"type":"string"},"version":{"type":"string"},"digest":{"type":"string"},` +
	`"call":` + namesSchema + `,"read":` + namesSchema + `,"subscribe":` + namesSchema + `,"append":` + namesSchema + `,` +
	`"allowed":{"type":"boolean"},"tenants":` + namesSchema + `,"by":{"type":"string"},"at_ms":{"type":"integer"}`

// consentTools are the tools about what plugins may use of the relay.
func consentTools() []tool {
	name := required(text("name", pluginPattern, "the plugin"))
	return []tool{
		newTool("kernel.plugin.show", "Show a plugin", "What a plugin asks for beyond answering calls, and whether an operator allows it.", readOnly,
			arguments.Object{name}, "", pluginBusOutput, func(_ context.Context, p *Plugin, _ *kernel.Request, a *args) (any, error) {
				if p.opt.Consents == nil {
					return nil, errNoConsents
				}
				return p.opt.Consents.Show(a.Name)
			}),
		newTool("kernel.plugin.allow", "Allow a plugin", "Lets a plugin call, read, subscribe and append what its manifest asks for now; a changed manifest needs this again.", reversible,
			arguments.Object{name,
				{Name: "tenants", Type: arguments.Array, Pattern: tenantPattern, Form: forms[tenantPattern], Min: 1, Max: 32, Description: "where it may act for itself and for callers: tenants, or * for all; yours unless given"},
				text("digest", digestPattern, "refuse if the manifest has another digest than kernel.plugin.show said"),
			}, "", pluginBusOutput, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				if len(a.Tenants) == 0 {
					a.Tenants = []string{r.Caller.Tenant}
				}
				return p.setConsent(ctx, r, a, "allow")
			}),
		newTool("kernel.plugin.disallow", "Disallow a plugin", "Takes back what kernel.plugin.allow gave; requests in flight and subscriptions of the plugin end.", irreversible,
			arguments.Object{name}, "", pluginBusOutput, func(ctx context.Context, p *Plugin, r *kernel.Request, a *args) (any, error) {
				return p.setConsent(ctx, r, a, "disallow")
			}),
	}
}

var errNoConsents = manifest.E(manifest.BadRequest, "this relay has no plugins that could be allowed anything")

// setConsent answers kernel.plugin.allow and disallow.
func (p *Plugin) setConsent(ctx context.Context, r *kernel.Request, a *args, action string) (any, error) {
	if p.opt.Consents == nil {
		return nil, errNoConsents
	}
	// Only allow needs the manifest. A consent must be revocable when it cannot be read any more.
	now, err := p.opt.Consents.Show(a.Name)
	switch {
	case err != nil && action == "allow":
		return nil, err
	case err == nil && a.Digest == "":
		a.Digest = now.Digest // the one that the event names
	}
	err = p.change(ctx, r, EventPlugin, PluginsURI, Change{Action: action, Name: a.Name, Digest: a.Digest, Tenants: a.Tenants}, func() (err error) {
		now, err = p.opt.Consents.Set(ctx, a.Name, a.Digest, a.Tenants, r.Caller.Actor)
		return err
	})
	return now, err
}

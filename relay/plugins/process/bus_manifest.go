package process

import "strings"

// DeclaredBus is what a plugin asks for beyond answering calls (docs/kernel.md, "On the bus"). Each
// entry is a name, or a prefix of names that ends in *. It is in force once an operator has
// allowed it.
type DeclaredBus struct {
	Call      []string `json:"call,omitempty"`      // tools
	Read      []string `json:"read,omitempty"`      // URIs of resources
	Subscribe []string `json:"subscribe,omitempty"` // topics of events, and URIs of resources
	Append    []string `json:"append,omitempty"`    // types of events, below the plugin's name
}

// isEmpty reports whether the plugin asks for nothing.
func (d *DeclaredBus) isEmpty() bool {
	return len(d.Call)+len(d.Read)+len(d.Subscribe)+len(d.Append) == 0
}

// controlPrefixes begin what no plugin may use: a plugin that could call the control plane could
// allow itself more.
var controlPrefixes = []string{"kernel.", "mcp://kernel/"}

// bus checks the rules for the bus that the schema cannot express.
func (c *manifestChecker) bus(plugin string) {
	for _, key := range []string{"call", "read", "subscribe", "append"} {
		seen := make(map[string]bool)
		list, _ := valueAt(c.doc, location{"bus", key}).([]any)
		for i := range list {
			at := location{"bus", key}.element(i)
			s, ok := c.text(at)
			if !ok {
				continue
			}
			for _, prefix := range controlPrefixes {
				if strings.HasPrefix(s, prefix) {
					c.add(at, "%s is the control plane, which no plugin may use", quoted(s))
				}
			}
			if key == "append" && !c.reported(location{"name"}) && !strings.HasPrefix(s, plugin+".") {
				c.add(at, "%s must begin with the plugin's name: %s.", quoted(s), plugin)
				continue
			}
			c.unique(seen, s, s, at)
		}
	}
}

// Consentable is what an operator decides on: what the manifest of a plugin asks for now.
type Consentable struct {
	Name    string
	Version string
	Digest  string // of the manifest, see Digest
	Bus     DeclaredBus
}

// Consentable reads the manifest of a plugin, loaded or not. Digest and Bus are of the same bytes, so that
// a consent for what a person has read does not extend to a manifest that was changed meanwhile.
func (h *Host) Consentable(name string) (*Consentable, error) {
	s, err := h.open(name, tempFolders[0])
	if err != nil {
		return nil, err
	}
	return &Consentable{s.manifest.Name, s.manifest.Version, s.digest, s.declared.Bus}, nil
}

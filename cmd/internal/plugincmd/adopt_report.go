//go:build linux

package plugincmd

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/plugins/process"
	"agentctl/term"
)

// adoptReport is what 'plugin adopt' found and did. Its JSON is for scripts and stays compatible. Diff is in
// the unified format. Written and Loaded say how far the command got.
type adoptReport struct {
	Name      string                  `json:"name"`
	Version   string                  `json:"version"`
	Server    string                  `json:"server"`
	Protocol  string                  `json:"protocol"`
	Path      string                  `json:"path"` // of plugin.json
	Command   []string                `json:"command"`
	Tools     []adoptedTool           `json:"tools"`
	Resources int                     `json:"resources"`
	Templates int                     `json:"resource_templates"`
	Prompts   []string                `json:"prompts"`
	LeftOut   []process.LeftOut       `json:"left_out"`
	Scopes    []string                `json:"scopes"`
	Sandbox   process.DeclaredSandbox `json:"sandbox"`
	Diff      string                  `json:"diff,omitempty"` // from what was adopted before
	Written   bool                    `json:"written"`
	Loaded    bool                    `json:"loaded"`

	isPackaged bool   // the plugin is one of the packaged relay
	relayFlags string // of the next commands, with a space before them
}

// adoptedTool is a tool of an adopted server.
type adoptedTool struct {
	Name   string `json:"name"`
	Scope  string `json:"scope"`
	Digest string `json:"digest"`
}

// newAdoptReport describes what was found. Its lists are empty and not nil: JSON has [] for them.
func newAdoptReport(a *adoption, found *process.Adoption) *adoptReport {
	m := found.Manifest
	r := &adoptReport{Name: m.Name, Version: m.Version, Server: found.Server, Protocol: found.Protocol, Path: filepath.Join(a.folder, "plugin.json"),
		Command: m.Command, Tools: []adoptedTool{}, Resources: len(m.Resources), Templates: len(m.ResourceTemplates), Prompts: []string{},
		LeftOut: append([]process.LeftOut{}, found.LeftOut...), Scopes: []string{}, Sandbox: m.Sandbox, relayFlags: " --token-file " + cli.ShellQuote(cmp.Or(a.relay.TokenFile, "operator.token")), isPackaged: a.pluginDir == packagedPlugins}
	for _, t := range m.Tools {
		r.Tools = append(r.Tools, adoptedTool{t.Name, scopeOf(t.Capability), t.Digest})
	}
	for _, p := range m.Prompts {
		r.Prompts = append(r.Prompts, p.Name)
	}
	for _, c := range m.Capabilities {
		r.Scopes = append(r.Scopes, scopeOf(c))
	}
	return r
}

// scopeOf is a capability as tokens have it. An adopted manifest has NAME.read and NAME.write only.
func scopeOf(capability string) string { return strings.Replace(capability, ".", ":", 1) }

// print prints the report for people, with the next commands. Its text has names that the server
// chose, which is not trusted yet: SafeText keeps them from controlling the terminal.
func (r *adoptReport) print(cmd *cobra.Command) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s, MCP %s\n", r.Name, r.Server, r.Protocol)
	for _, scope := range r.Scopes {
		var names []string
		for _, t := range r.Tools {
			if t.Scope == scope {
				names = append(names, t.Name)
			}
		}
		if len(names) > 0 {
			fmt.Fprintf(&b, "  tools with the scope %s: %s\n", scope, strings.Join(names, ", "))
		}
	}
	// Prompts and resources declare no capability; the relay requires the plugin's first one, NAME.read.
	if len(r.Prompts) > 0 {
		fmt.Fprintf(&b, "  prompts with the scope %s: %s\n", r.Scopes[0], strings.Join(r.Prompts, ", "))
	}
	if r.Resources+r.Templates > 0 {
		fmt.Fprintf(&b, "  resources with the scope %s: %d, and %d templates; those that the server lists later are offered too\n", r.Scopes[0], r.Resources, r.Templates)
	}
	for _, l := range r.LeftOut {
		fmt.Fprintf(&b, "  left out: %s: %s\n", l.Name, l.Reason)
	}
	r.printSandbox(&b)
	// The diff comes right before the next steps: of a long report a terminal shows the end.
	if r.Diff != "" {
		b.WriteString("\n" + r.Diff + "\n")
	}
	if r.Written {
		fmt.Fprintf(&b, "Wrote %s. Review it: models read its descriptions.\n", r.Path)
		if r.Loaded {
			fmt.Fprintf(&b, "Loaded it; undo it with: agentctl plugin unload %s%s\n", r.Name, r.relayFlags)
		} else {
			if r.isPackaged {
				fmt.Fprintf(&b, "The packaged relay starts no interpreters itself. Make it a service with: systemctl enable --now agentctl-relay-plugin@%s.socket\n", r.Name)
			}
			fmt.Fprintf(&b, "Load it with: agentctl plugin load %s%s\n", r.Name, r.relayFlags)
		}
		fmt.Fprintf(&b, "Who may use it needs its scopes: agentctl token create --class agent --add-scope %s\n", strings.Join(r.Scopes, " --add-scope "))
	}
	_, err := io.WriteString(cmd.OutOrStdout(), term.SafeText(b.String()))
	return err
}

// printSandbox prints what the server may use of this machine: what an operator has to review besides
// the tools.
func (r *adoptReport) printSandbox(b *strings.Builder) {
	fmt.Fprintf(b, "  starts as: %s\n", strings.Join(r.Command, " "))
	for _, l := range []struct {
		verb  string
		paths []string
	}{{"reads", r.Sandbox.Read}, {"writes", r.Sandbox.Write}} {
		if len(l.paths) > 0 {
			fmt.Fprintf(b, "  %s: %s\n", l.verb, strings.Join(l.paths, ", "))
		}
	}
	network := "yes (--no-network takes it away)"
	if r.Sandbox.Network != nil && !*r.Sandbox.Network {
		network = "no"
	}
	fmt.Fprintf(b, "  network: %s\n", network)
}

package process

import (
	"path/filepath"

	"agentctl/relay/kernel"
)

var _ kernel.Declarer = (*Plugin)(nil)

// Declaration implements kernel.Declarer: the PluginManifest and the digest of its file.
func (p *Plugin) Declaration() (document any, digest string) { return p.declared, p.digest }

// SocketPath is where a plugin that somebody else starts has its socket (SandboxExternal), in a
// plugin directory.
func SocketPath(dir, name string) string { return filepath.Join(dir, name, socketFile) }

package daemon

import (
	"go.uber.org/zap"

	"agentctl/config"
	"agentctl/handlers"
)

// inspection returns the handlers of the kinds that read something of this machine. Which of them are
// announced depends on enabledCapabilities.
func (d *Daemon) inspection() []handlers.Handler {
	return []handlers.Handler{
		handlers.NewServices(),
		handlers.NewJournal(d.cfg.Text("journal.socket")),
	}
}

// enabledCapabilities returns which capabilities to announce with a configuration: those that it
// enables and that this machine can serve.
func (d *Daemon) enabledCapabilities(c *config.Config) func(capID string) bool {
	return func(capID string) bool {
		if !c.CapabilityEnabled(capID) {
			return false
		}
		switch capID {
		case "services":
			return handlers.HasServices()
		case "journal":
			if handlers.HasSocket(c.Text("journal.socket")) {
				return true
			}
			d.log.Warn("the journal cannot be read: its helper's socket is not there", zap.String("socket", c.Text("journal.socket")),
				zap.String("hint", "systemctl start agentctl-journal.socket, then: systemctl reload agentctl"))
			return false
		}
		return true
	}
}

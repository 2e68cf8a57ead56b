package relay

import (
	"context"
	"time"

	"agentctl/relay/hub"
)

func sessionsOf(h *hub.Hub) linkedSessions {
	if s, ok := any(h).(linkedSessions); ok {
		return s
	}
	return noSessions{}
}

type noSessions struct{}

func (noSessions) LiveSession(context.Context, string) (string, bool) { return "", false }
func (noSessions) ExtendGrant(string, string, time.Time)              {}
func (noSessions) SuspectClone(string)                                {}

package tickets

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
)

// Digests calls fn with a digest of each ticket, with its comments, tenant by tenant. It holds the
// change slot of the tenant meanwhile: its tickets are those of the events that the log has then, and
// of no others. The error is that of a slot that is not free in time.
func (p *Plugin) Digests(ctx context.Context, fn func(tenant, id, digest string)) error {
	for _, t := range p.tenantList() {
		if err := p.acquire(ctx, t); err != nil {
			return err
		}
		t.digests(fn)
		t.release()
	}
	return nil
}

func (t *tenant) digests(fn func(tenant, id, digest string)) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, id := range t.order {
		e := t.tickets[id]
		data, _ := json.Marshal(struct {
			*Ticket
			Key string `json:"key"`
		}{&e.Ticket, e.key}) // strings, numbers: cannot fail
		sum := sha256.Sum256(data)
		fn(t.name, id, hex.EncodeToString(sum[:8]))
	}
}

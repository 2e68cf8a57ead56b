package auth

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
)

// Consent is an operator's decision on what a plugin may use of the relay. It is for a manifest of
// one digest: the plugin with another one needs another consent.
type Consent struct {
	Plugin  string
	Digest  string   // of plugin.json
	Tenants []string // in which the plugin may act; none: it may not; "*": all
	Actor   string   // the operator
	AtMS    int64    // Unix ms
}

// maxConsents bounds the rows: one for each name of a plugin.
const maxConsents = 1024

// SetConsent records a decision in place of the earlier one on the same plugin, and returns it. Consent
// has the decision from its commit on, also if the caller has given up on the disk by then: onCommit, which
// may be nil, is therefore called at the commit and not by the caller. It runs in the goroutine of the
// writer and must not block.
func (s *Store) SetConsent(ctx context.Context, c Consent, onCommit func()) (Consent, error) {
	c.AtMS = s.now().UnixMilli()
	err := s.db.write(ctx, func(tx *sql.Tx) error {
		var others int
		if err := tx.QueryRow("SELECT count(*) FROM consents WHERE plugin <> ?", c.Plugin).Scan(&others); err != nil {
			return err
		}
		if others >= maxConsents {
			return badRequest("the relay keeps decisions on at most 1024 plugins")
		}
		_, err := tx.Exec("INSERT INTO consents (plugin, digest, tenants, actor, at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (plugin) DO UPDATE SET digest = excluded.digest, tenants = excluded.tenants, actor = excluded.actor, at = excluded.at",
			c.Plugin, c.Digest, strings.Join(c.Tenants, " "), c.Actor, c.AtMS)
		return err
	}, func() {
		s.consentsMu.Lock()
		s.consents[c.Plugin] = c
		s.consentsMu.Unlock()
		if onCommit != nil {
			onCommit()
		}
	})
	if err != nil {
		return Consent{}, fmt.Errorf("record the consent: %w", err)
	}
	return c, nil
}

// Consent returns the decision on a plugin, of whatever digest. It reads memory.
func (s *Store) Consent(plugin string) (c Consent, ok bool) {
	s.consentsMu.RLock()
	defer s.consentsMu.RUnlock()
	c, ok = s.consents[plugin]
	return c, ok
}

// loadConsents reads the decisions. Open calls it; no other process changes them.
func (s *Store) loadConsents(ctx context.Context) error {
	s.consents = make(map[string]Consent)
	return forEachRow(ctx, s.db.readDB, func(scan func(...any) error) error {
		var c Consent
		var tenants string
		err := scan(&c.Plugin, &c.Digest, &tenants, &c.Actor, &c.AtMS)
		c.Tenants = strings.Fields(tenants)
		s.consents[c.Plugin] = c
		return err
	}, "SELECT plugin, digest, tenants, actor, at FROM consents")
}

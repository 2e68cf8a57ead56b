package auth

import (
	"cmp"
	"context"
	"time"

	"agentctl/relay/topic"
)

// TokenInfo is one row of `agentctl token ls`. The token itself is not stored.
type TokenInfo struct {
	JTI     string         `json:"jti"`
	Class   string         `json:"class"`
	Tenant  string         `json:"tenant"`
	Subject string         `json:"subject"`
	NodeID  string         `json:"node_id,omitempty"`
	Scopes  string         `json:"scopes"`
	Topics  topic.Patterns `json:"topics,omitempty"` // that the scopes for events are limited to; nil: all
	Issued  time.Time      `json:"issued"`
	Expires time.Time      `json:"expires"`
	Expired bool           `json:"expired"`
	Revoked bool           `json:"revoked"`
}

// Tokens lists the minted tokens, newest first. Tokens that expired more than 30 days
// ago may be missing.
func (s *Store) Tokens(ctx context.Context) ([]TokenInfo, error) {
	return s.listTokens(ctx, "true ORDER BY iat DESC, jti DESC")
}

// TenantTokens lists the tokens of one tenant, by jti and so roughly the newest first: at most
// limit of them, those whose jti comes before the given one, or all for "".
func (s *Store) TenantTokens(ctx context.Context, tenant, before string, limit int) (list []TokenInfo, more bool, err error) {
	list, err = s.listTokens(ctx, "t.tenant = ? AND t.jti < ? ORDER BY t.jti DESC LIMIT ?", tenant, cmp.Or(before, "~"), limit+1)
	if more = len(list) > limit; more {
		list = list[:limit]
	}
	return list, more, err
}

// TokenTenant returns the tenant of a token; "" if none is recorded here with this jti.
func (s *Store) TokenTenant(ctx context.Context, jti string) (string, error) {
	list, err := s.listTokens(ctx, "t.jti = ?", jti)
	if err != nil || len(list) == 0 {
		return "", err
	}
	return list[0].Tenant, nil
}

// listTokens lists the tokens that a condition selects.
func (s *Store) listTokens(ctx context.Context, where string, args ...any) ([]TokenInfo, error) {
	now := s.now()
	list := []TokenInfo{} // in JSON an empty list is [] and not null
	err := s.query(ctx, func(scan func(...any) error) error {
		var t TokenInfo
		var iat, exp int64
		var topics string
		err := scan(&t.JTI, &t.Class, &t.Tenant, &t.Subject, &t.NodeID, &t.Scopes, &topics, &iat, &exp, &t.Revoked)
		if t.Topics, err = readTopics(topics, err); err != nil {
			return err
		}
		t.Issued, t.Expires = time.Unix(iat, 0).UTC(), time.Unix(exp, 0).UTC()
		t.Expired = !now.Before(t.Expires.Add(Leeway))
		list = append(list, t)
		return nil
	}, "SELECT jti, class, tenant, sub, node, scopes, topics, iat, exp, "+isRevokedSQL+" FROM tokens t WHERE "+where, args...)
	return list, err
}

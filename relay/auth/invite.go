package auth

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/relay/topic"
)

// Classes of invites, a closed set.
const (
	InviteBoard = "board"
	InviteAgent = "agent"
)

// Bounds of invites.
const (
	DefaultInviteTTL = 24 * time.Hour
	MaxInviteTTL     = 365 * day
	MaxInviteUses    = 10_000

	maxInvites       = 20_000   // rows
	maxTenantInvites = 1000     // rows of one tenant
	inviteRetention  = 30 * day // an invite that has ended is refused with its reason this long
	maxAgentName     = 57       // leaves 7 of 64 characters (subjectRE) for a suffix
)

// InviteRequest describes an invite to make.
type InviteRequest struct {
	Class  string   // default InviteBoard
	Tenant string   // default: the creator's, or DefaultTenant
	Name   string   // boards: node name, for a single use only; agents: the agent's id
	Tags   []string // boards: set on the node
	Scopes []string // agents: default those of an agent token, as far as the creator has them
	// AddScopes, PluginScopes and Topics are those of MintRequest.
	AddScopes, PluginScopes, Topics []string
	Uses                            int           // how many keys may join; default 1, at most MaxInviteUses
	TTL                             time.Duration // default DefaultInviteTTL, at most MaxInviteTTL
	// Creator is who asks; nil is the operator, who has access to the state directory. An
	// invite gives nothing away that its creator lacks, except device:connect in the
	// creator's own tenant. It is void once the creator's token is revoked.
	Creator *Identity
	DryRun  bool // check only: nothing is recorded, and there is no code
}

// Invite is a code that boards or agents join with, without the code: the relay stores only
// its hash and its first group.
//
// Its State is computed when it is read (setState). Of several that apply, the first counts:
//
//	revoked   RevokeInvite, or a revocation that stops the token of its creator
//	used      as many keys have joined as it has uses
//	expired   its time is over
//	open      else
type Invite struct {
	Prefix      string         `json:"prefix"` // first group of the code, which names the invite
	Class       string         `json:"class"`
	Tenant      string         `json:"tenant_id"`
	Name        string         `json:"name,omitempty"`
	Tags        []string       `json:"tags"`
	Scopes      Scopes         `json:"scopes"`
	Topics      topic.Patterns `json:"topics,omitempty"` // that the scopes for events are limited to
	Uses        int            `json:"uses"`
	Used        int            `json:"used"`
	Creator     string         `json:"creator,omitempty"` // subject of the token that made it; "": the operator
	CreatedAtMS int64          `json:"created_at_ms"`
	ExpiresAtMS int64          `json:"expires_at_ms"`
	State       string         `json:"state"` // open, used, expired or revoked

	rowID      int64
	creatorJTI string
	revoked    bool
}

// attributes are what the invite sets on the node of a board. Its name is the operator's
// choice, as its tags are; if another node was given the name since, it gets a suffix.
func (i *Invite) attributes() *Attributes {
	a := &Attributes{AddTags: i.Tags, SuffixName: true}
	if i.Name != "" {
		a.Name = &i.Name
	}
	return a
}

// issuer is the identity whose revocation also stops the invite.
func (i *Invite) issuer() *Identity {
	return &Identity{Tenant: i.Tenant, Subject: i.Creator, JTI: i.creatorJTI, issuedAt: i.CreatedAtMS / 1000}
}

// setState computes State. stopped reports that the invite's issuer is revoked.
func (i *Invite) setState(now time.Time, stopped bool) {
	switch {
	case i.revoked || stopped:
		i.State = "revoked"
	case i.Used >= i.Uses:
		i.State = "used"
	case now.UnixMilli() >= i.ExpiresAtMS:
		i.State = "expired"
	default:
		i.State = "open"
	}
}

// CreateInvite makes an invite and its code. The code is a secret: print it once, do not log
// it. The error is an *Error of kind ErrRequest or ErrGrant for a request that cannot be
// served.
func (s *Store) CreateInvite(ctx context.Context, req InviteRequest) (inv *Invite, code string, err error) {
	if inv, err = s.planInvite(req); err != nil || req.DryRun {
		return inv, "", err
	}
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		if err := pruneInvites(tx, inv.Tenant, s.now()); err != nil {
			return err
		}
		if code, err = newInviteCode(tx); err != nil {
			return err
		}
		inv.Prefix = code[:strings.IndexByte(code, '-')]
		_, err := tx.Exec(`INSERT INTO invites (code, prefix, class, tenant, name, tags, scopes, topics, uses, used, creator, creator_jti, created, expires, revoked)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, 0)`, enrollment.HashCode(code), inv.Prefix, inv.Class, inv.Tenant, inv.Name,
			strings.Join(inv.Tags, " "), inv.Scopes.String(), topicsText(inv.Topics), inv.Uses, inv.Creator, inv.creatorJTI, inv.CreatedAtMS/1000, inv.ExpiresAtMS/1000)
		return err
	}, nil)
	if err != nil {
		return nil, "", fmt.Errorf("make an invite: %w", err)
	}
	s.log.Info("invite made", zap.String("prefix", inv.Prefix), zap.String("class", inv.Class), zap.String("tenant", inv.Tenant), zap.Int("uses", inv.Uses))
	return inv, code, nil
}

// planInvite checks a request and fills in everything that needs no transaction.
func (s *Store) planInvite(req InviteRequest) (*Invite, error) {
	own := DefaultTenant
	if req.Creator != nil {
		own = req.Creator.Tenant
	}
	ttl := cmp.Or(req.TTL, DefaultInviteTTL)
	inv := &Invite{
		Class: cmp.Or(req.Class, InviteBoard), Tenant: cmp.Or(req.Tenant, own), Name: req.Name,
		Tags: slices.Compact(slices.Sorted(slices.Values(req.Tags))), Uses: cmp.Or(req.Uses, 1),
	}
	if inv.Tags == nil {
		inv.Tags = []string{} // in JSON an empty list is [] and not null
	}
	switch {
	case inv.Class != InviteBoard && inv.Class != InviteAgent:
		return nil, badRequest("an invite is for a board or for an agent")
	case !manifest.ValidTenant(inv.Tenant):
		return nil, badRequest("a tenant is 1 to 32 of a-z, 0-9 and -, not starting with -")
	case inv.Uses < 1 || inv.Uses > MaxInviteUses:
		return nil, badRequest(fmt.Sprintf("an invite has 1 to %d uses", MaxInviteUses))
	case ttl < time.Minute || ttl > MaxInviteTTL:
		return nil, badRequest("an invite is good for 1 minute to 365 days")
	case inv.Class == InviteBoard && inv.attributes().Check() != nil:
		return nil, badRequest(inv.attributes().Check().Error())
	case inv.Class == InviteBoard && inv.Name != "" && inv.Uses > 1:
		return nil, badRequest("a name is for one board; leave it out, or make an invite for a single use")
	case inv.Class == InviteAgent && inv.Name != "" && (!subjectRE.MatchString(inv.Name) || len(inv.Name) > maxAgentName):
		return nil, badRequest("an agent's name is 1 to 57 letters, digits and ._:@-, starting with a letter or digit")
	case inv.Class == InviteAgent && strings.HasPrefix(inv.Name, pluginSubject):
		return nil, badRequest("an agent's name does not begin with plugin:, as the identities of plugins do")
	case inv.Class == InviteAgent && len(inv.Tags) > 0:
		return nil, badRequest("only boards have tags")
	case inv.Class == InviteBoard && len(req.Scopes)+len(req.AddScopes)+len(req.Topics) > 0:
		return nil, badRequest("a board has the scope device:connect and no other")
	}
	if err := inv.setGrant(req); err != nil {
		return nil, err
	}
	if req.Creator != nil {
		inv.Creator, inv.creatorJTI = req.Creator.Subject, req.Creator.JTI
	}
	now := s.now()
	// As with tokens: an invite that is made after a revocation of its tenant must work.
	inv.CreatedAtMS = s.deny.Load().earliestIssue(inv.Tenant, inv.Creator, "", now.Unix()) * 1000
	inv.ExpiresAtMS = now.Add(ttl).Truncate(time.Second).UnixMilli()
	inv.setState(now, false)
	return inv, nil
}

// setGrant decides what the holders of an invite get.
func (i *Invite) setGrant(req InviteRequest) error {
	if req.Creator != nil && i.Tenant != req.Creator.Tenant {
		return &Error{ErrGrant, "tenant", "an invite is for the tenant of the token that makes it"}
	}
	ask := grantRequest{class: ClassDevice, creator: req.Creator, cannot: "an invite cannot grant"}
	if i.Class == InviteAgent {
		ask = grantRequest{ClassAgent, req.Scopes, req.AddScopes, req.Topics, req.PluginScopes, req.Creator, "an invite cannot grant"}
	}
	g, err := ask.resolve()
	i.Scopes, i.Topics = g.scopes, g.topics
	return err
}

// pruneInvites deletes invites that ended long ago and, for a tenant at its limit, all
// that have ended. It fails if the tables would still become too large.
func pruneInvites(tx *sql.Tx, tenant string, now time.Time) error {
	old := now.Add(-inviteRetention).Unix()
	if _, err := tx.Exec("DELETE FROM invites WHERE expires < ?1 OR (revoked > 0 AND revoked < ?1)", old); err != nil {
		return err
	}
	var all, own int
	count := func() error {
		return tx.QueryRow("SELECT count(*), count(*) FILTER (WHERE tenant = ?) FROM invites", tenant).Scan(&all, &own)
	}
	if err := count(); err != nil {
		return err
	}
	if own >= maxTenantInvites {
		if _, err := tx.Exec("DELETE FROM invites WHERE tenant = ? AND (used >= uses OR expires <= ? OR revoked > 0)", tenant, now.Unix()); err != nil {
			return err
		}
		if err := count(); err != nil {
			return err
		}
	}
	if own >= maxTenantInvites || all >= maxInvites {
		return fmt.Errorf("%w: %d invites of this tenant are open; revoke some, or make one with more uses", ErrFull, own)
	}
	return nil
}

// newInviteCode makes a code whose first group no other invite has: the group names the invite
// in lists and for a revocation. The other three groups keep 60 secret bits.
func newInviteCode(tx *sql.Tx) (string, error) {
	for range 20 { // a group is free with a probability above 98 % (maxInvites of 32^4)
		code := enrollment.NewCode()
		var taken bool
		err := tx.QueryRow("SELECT EXISTS (SELECT 1 FROM invites WHERE prefix = ?)", code[:strings.IndexByte(code, '-')]).Scan(&taken)
		if err != nil || !taken {
			return code, err
		}
	}
	return "", errors.New("no free invite code; try again")
}

const inviteColumns = "id, prefix, class, tenant, name, tags, scopes, topics, uses, used, creator, creator_jti, created, expires, revoked > 0"

func scanInvite(scan func(...any) error) (*Invite, error) {
	i := new(Invite)
	var tags, scopes, topics string
	var created, expires int64
	err := scan(&i.rowID, &i.Prefix, &i.Class, &i.Tenant, &i.Name, &tags, &scopes, &topics, &i.Uses, &i.Used, &i.Creator, &i.creatorJTI, &created, &expires, &i.revoked)
	i.Tags, i.Scopes = append([]string{}, strings.Fields(tags)...), knownScopes(scopes)
	i.Topics, err = readTopics(topics, err)
	i.CreatedAtMS, i.ExpiresAtMS = created*1000, expires*1000
	return i, err
}

// Invites lists the invites of a tenant, those of all tenants for "", newest first. Invites
// that ended more than 30 days ago may be missing.
func (s *Store) Invites(ctx context.Context, tenant string) ([]Invite, error) {
	list := []Invite{}
	now, deny := s.now(), s.deny.Load()
	err := s.query(ctx, func(scan func(...any) error) error {
		i, err := scanInvite(scan)
		if err != nil {
			return err
		}
		i.setState(now, deny.revokes(i.issuer()))
		list = append(list, *i)
		return nil
	}, "SELECT "+inviteColumns+" FROM invites WHERE ?1 = '' OR tenant = ?1 ORDER BY id DESC", tenant)
	return list, err
}

// RevokeInvite stops an invite of a tenant, or of any for "", by its prefix
// (enrollment.CodePrefix): nothing joins with it any more. What has joined stays. Revoking
// twice is no error; ErrNoInvite is.
func (s *Store) RevokeInvite(ctx context.Context, tenant, prefix string, dryRun bool) (inv *Invite, err error) {
	err = s.db.write(ctx, func(tx *sql.Tx) error {
		inv, err = scanInvite(tx.QueryRow("SELECT "+inviteColumns+" FROM invites WHERE prefix = ?1 AND (?2 = '' OR tenant = ?2)", prefix, tenant).Scan)
		if errors.Is(err, sql.ErrNoRows) {
			return &Error{ErrNoInvite, "unknown_invite", "no invite begins with this; see: agentctl invite ls"}
		}
		if err != nil || inv.revoked {
			return err
		}
		inv.revoked = true
		at := max(s.now().Unix(), 1) // 0 stands for not revoked
		if _, err := tx.Exec("UPDATE invites SET revoked = ? WHERE id = ?", at, inv.rowID); err != nil {
			return err
		}
		// The invite may be deleted before its enrollments are; a repeat must be refused then, too.
		_, err := tx.Exec("UPDATE enrollments SET code_revoked = 1 WHERE code = (SELECT code FROM invites WHERE id = ?)", inv.rowID)
		if err == nil && dryRun {
			err = errDryRun
		}
		return err
	}, nil)
	if err != nil && !errors.Is(err, errDryRun) {
		return nil, fmt.Errorf("revoke an invite: %w", err)
	}
	inv.setState(s.now(), false)
	if dryRun {
		return inv, nil
	}
	s.log.Info("invite revoked", zap.String("prefix", inv.Prefix), zap.String("tenant", inv.Tenant), zap.Int("used", inv.Used))
	return inv, nil
}

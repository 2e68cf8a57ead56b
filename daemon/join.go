package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"agentctl/config"
	"agentctl/statedir"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// membership is how this board belongs to a relay by a credential. It is replaced as a whole
// when the relay changes.
type membership struct {
	cred     *enroll.Credential // nil: the board has not joined
	keeper   *enroll.Keeper     // of cred; nil: no credential is in use
	conflict string             // where the configuration names another relay; "": nowhere
	err      error              // why the credential cannot be read
	file     string             // identifies the version of the file that cred was read from

	stop context.CancelFunc // ends what runMembership runs; nil before it
	join JoinStatus         // of a join by file; zero: none was tried
}

// newMembership derives a membership from the credential on the disk. It fails when the
// configuration's authority cannot be read.
//
// A credential that is damaged is not an error: the board still answers on its socket.
func (d *Daemon) newMembership(c *config.Config) (m membership, err error) {
	stateDir := c.Text("state_dir")
	// The version comes before the read: a change in between is seen later.
	m.file, _ = statedir.Do(d.disk, func() (string, error) { return credentialVersion(stateDir), nil })
	m.cred, err = statedir.Do(d.disk, func() (*enroll.Credential, error) { return enroll.LoadCredential(stateDir) })
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.err = err
		}
		return m, nil
	}
	if m.conflict = otherRelay(c, m.cred); m.conflict != "" {
		return m, nil
	}
	o := enroll.KeeperOptions{
		StateDir: stateDir, Credential: m.cred, InstanceID: d.id.InstanceID(),
		SessionID: func() string {
			if l := d.device.link(); l != nil {
				return l.SessionID()
			}
			return ""
		},
		OnToken: func() {
			d.log.Debug("the token was refreshed")
			if l := d.device.link(); l != nil {
				l.Wake()
			}
		},
		OnError: func(err error) {
			d.log.Warn("the token was not refreshed or not stored", zap.Error(err), zap.String("hint", retryHint(err)))
		},
	}
	if o.TLS, err = c.TLS(); err != nil {
		return m, err
	}
	o.TLS.Time = d.tlsTime
	if m.keeper, err = enroll.NewKeeper(o); err != nil {
		m.err = err
	}
	return m, nil
}

// tlsTime is the time at which certificates are checked: a board whose clock starts in 1970
// must check them too.
func (d *Daemon) tlsTime() time.Time { return d.device.clock.TLSTime() }

// otherRelay returns where the configuration names another relay than a credential, "" where
// it does not. What a person configured takes precedence over what the board stored.
func otherRelay(c *config.Config, cred *enroll.Credential) string {
	relay := c.Text("relay")
	if relay == "" {
		return ""
	}
	if base, err := enroll.BaseURL(relay); err == nil && base == cred.Relay {
		return ""
	}
	return c.Settings["relay"].Origin
}

// setMembership makes m the membership in force and ends what was done for the one before.
func (d *Daemon) setMembership(m membership) {
	d.mu.Lock()
	stop := d.member.stop
	m.join = d.member.join
	if m.cred != nil {
		m.join = JoinStatus{}
	}
	d.member = m
	d.mu.Unlock()
	if stop != nil {
		stop()
	}
}

func (d *Daemon) membership() membership {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.member
}

// credentialVersion changes when the credential's file is replaced, made or removed.
func credentialVersion(stateDir string) string {
	var st unix.Stat_t
	err := unix.Stat(filepath.Join(stateDir, enroll.CredentialFile), &st)
	return fmt.Sprintln(err, st.Ino, st.Size, st.Mtim, st.Ctim)
}

// updateMembership reads the credential again: `agentctl join` or `leave` may have changed it,
// or the keeper stored a new token, for which there is nothing to do.
//
// A credential that cannot be read leaves the one before in force, because the link may be
// the only way to repair the board.
func (d *Daemon) updateMembership() error {
	d.reloadMu.Lock()
	defer d.reloadMu.Unlock()
	c, old := d.config(), d.membership()
	m, err := d.newMembership(c)
	if err = cmp.Or(err, m.err); err != nil {
		d.log.Error("the credential cannot be used", zap.Error(err), zap.String("hint", JoinHint(err)))
		d.mu.Lock()
		d.member.err, d.member.file = err, m.file
		d.mu.Unlock()
		return err
	}
	if old.cred == nil && m.cred == nil && old.err == nil || old.cred != nil && m.cred != nil && old.cred.NodeID == m.cred.NodeID &&
		old.cred.Relay == m.cred.Relay && old.cred.CASHA256 == m.cred.CASHA256 && old.cred.Key.Equal(m.cred.Key) {
		d.mu.Lock()
		d.member.err, d.member.file = nil, m.file
		d.mu.Unlock()
		return nil
	}
	o, err := d.deviceOptions(c, m)
	if err != nil {
		return err
	}
	d.replaceMembership(m, o)
	if m.cred == nil {
		relay := "unknown, its credential was damaged"
		if old.cred != nil {
			relay = old.cred.Relay
		}
		d.log.Info("this board has left its relay", zap.String("relay", relay), zap.String("node_id", d.id.NodeID()))
	} else {
		d.log.Info("this board has joined a relay", zap.String("relay", m.cred.Relay), zap.String("node_id", m.cred.NodeID))
	}
	return nil
}

// replaceMembership makes m the membership in force, and replaces the link by one with the
// options o. The caller holds reloadMu.
//
// With a credential, and after a leave, the identity is read from the disk: the one in memory is
// another where the disk could not be written when the daemon started, and the relay knows the
// one with which the board has joined.
func (d *Daemon) replaceMembership(m membership, o deviceOptions) {
	if old := d.membership(); m.cred != nil || old.cred != nil || old.err != nil {
		if _, err := statedir.Do(d.disk, func() (struct{}, error) { return struct{}{}, d.id.Reload() }); err != nil {
			d.log.Warn("the identity could not be read again", zap.Error(err))
		} else {
			d.forgetUnused(enroll.FileName)
		}
		o.InstanceID = d.id.InstanceID()
		if m.keeper != nil {
			o.InstanceID = cmp.Or(m.cred.InstanceID, o.InstanceID)
		}
	}
	d.adoptNode(m)
	d.setMembership(m)
	d.device.replaceLink(o)
}

// adoptNode makes the node of a credential that is in use the one of this board.
func (d *Daemon) adoptNode(m membership) {
	if m.keeper != nil {
		d.setNode(m.cred.NodeID, m.cred.TenantID)
	}
}

// warnOfConflict logs that a credential is not used, since a person may wonder why.
func (d *Daemon) warnOfConflict(m membership) {
	if m.conflict != "" {
		d.log.Warn("this board has joined a relay, and the configuration names another one, which is used",
			zap.String("joined", m.cred.Relay), zap.String("configured", m.conflict),
			zap.String("hint", "remove relay there to use the one that was joined, or undo the join: agentctl leave"))
	}
}

// runMembership runs what the present membership needs, until ctx ends: the keeper of its
// token, or the join by a file that an image brought.
func (d *Daemon) runMembership(ctx context.Context) error {
	for ctx.Err() == nil {
		memberCtx, stop := context.WithCancel(ctx)
		d.mu.Lock()
		m := d.member
		d.member.stop = stop
		d.mu.Unlock()
		switch {
		case m.keeper != nil:
			_ = m.keeper.Run(memberCtx) // ends with its context only
		case m.cred == nil && (m.err == nil || errors.As(m.err, new(*enroll.DamagedError))):
			d.joinByFile(memberCtx)
		}
		<-memberCtx.Done()
		stop()
	}
	return ctx.Err()
}

// restartMembership makes runMembership start anew: a join that waits is tried at once.
func (d *Daemon) restartMembership() {
	if stop := d.membership().stop; stop != nil {
		stop()
	}
}

// States of JoinStatus.
const (
	JoinJoined     = "joined"
	JoinJoining    = "joining"    // by a file, and it will be tried again soon
	JoinRefused    = "refused"    // only a person can change it
	JoinOverridden = "overridden" // the configuration names another relay, which is used
	JoinDamaged    = "damaged"    // the credential cannot be read
	JoinLost       = "lost"       // the board was a relay's, and has neither a credential nor a configured relay
)

// JoinStatus is how this board belongs to a relay that it joined. Absent for a board that did
// not join, and has no file that asks it to.
type JoinStatus struct {
	State            string `json:"state"`
	Relay            string `json:"relay,omitempty"`
	CASHA256         string `json:"ca_sha256,omitempty"` // pin of the relay's own authority
	TenantID         string `json:"tenant_id,omitempty"`
	TokenExpiresAtMS int64  `json:"token_expires_at_ms,omitempty"` // by the relay's clock
	Error            string `json:"error,omitempty"`
	Hint             string `json:"hint,omitempty"`        // what to do
	File             string `json:"file,omitempty"`        // of a join by file
	NextTryMS        int64  `json:"next_try_ms,omitempty"` // of the join, or of the refresh after an error
}

// joinStatus returns the state of the membership, nil when there is none.
func (d *Daemon) joinStatus() *JoinStatus {
	m := d.membership()
	if m.cred == nil {
		switch {
		case m.err != nil:
			return &JoinStatus{State: JoinDamaged, Error: m.err.Error(), Hint: JoinHint(m.err)}
		case m.join.State != "":
			return &m.join
		case d.id.TenantID() != "" && d.config().Text("relay") == "":
			// A leave makes a new identity, which has no tenant.
			return &JoinStatus{State: JoinLost, TenantID: d.id.TenantID(), Hint: "to link it again, " + enroll.HintInvite,
				Error: "this board was node " + d.id.NodeID() + ", and has neither its key (" + enroll.CredentialFile + ") nor a configured relay"}
		}
		return nil
	}
	s := &JoinStatus{State: JoinJoined, Relay: m.cred.Relay, CASHA256: m.cred.CASHA256, TenantID: m.cred.TenantID, TokenExpiresAtMS: m.cred.ExpiresAtMS}
	err := m.err
	if m.keeper != nil {
		k := m.keeper.Status()
		s.TokenExpiresAtMS = k.ExpiresAtMS
		if err == nil && k.LastErr != nil {
			err, s.NextTryMS = k.LastErr, wallMS(k.NextTry)
		}
		err = cmp.Or(err, k.NotStored)
		if enroll.IsFinal(k.LastErr) {
			s.State = JoinRefused
		}
	}
	if err != nil {
		s.Error, s.Hint = err.Error(), retryHint(err)
	}
	if m.conflict != "" {
		s.State, s.Hint = JoinOverridden, "the configuration names another relay ("+m.conflict+"), which is used: remove it there, or undo the join: agentctl leave"
	}
	return s
}

// onLinkState passes a refused token to the keeper, which gets another one.
func onLinkState(k *enroll.Keeper) func(link.Status) {
	return func(s link.Status) {
		if s.State == link.StateRefused && (s.LastCode == link.CloseAuthFailed || s.LastCode == link.CloseForbidden) {
			k.Refused()
		}
	}
}

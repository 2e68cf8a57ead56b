package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"agentctl/config"
	"agentctl/daemon"
	"agentctl/transport/enroll"
)

// isJoined reports whether the board links with the credential of a join. known is nil when
// the daemon did not answer; the file counts then.
func (t *target) isJoined(known *daemon.Status) bool {
	if known != nil && known.Join != nil {
		return known.Join.State == daemon.JoinJoined || known.Join.State == daemon.JoinRefused && known.Join.File == ""
	}
	return known == nil && t.credential() != nil && t.relay == ""
}

// credential returns the credential of the board as far as this user may read it, else nil.
func (t *target) credential() *enroll.Credential {
	c, _ := enroll.LoadCredential(t.stateDir)
	return c
}

// authorityPin returns the pin of the relay's own authority, "" for none. The daemon knows it
// also where this user may not read the credential.
func (t *target) authorityPin(known *daemon.Status) string {
	if !t.isJoined(known) {
		return ""
	}
	if known != nil {
		return known.Join.CASHA256
	}
	return t.credential().CASHA256
}

// checkJoin examines the credential of a board that joined a relay, and the file that made it
// join. What the daemon says comes first: it knows whether the relay accepts the key.
func (t *target) checkJoin(known *daemon.Status) Finding {
	const name = "join"
	stateDir := t.dirInUse(known)
	path := filepath.Join(stateDir, enroll.CredentialFile)
	if known != nil && !known.StateDir.IsOK() {
		return skip(name, "the disk of "+stateDir+" is "+string(known.StateDir.State), "see the line state_dir")
	}
	st, err := os.Lstat(path)
	if known != nil && known.Join != nil && known.Join.Hint != "" {
		j := known.Join
		text := j.State
		if j.Error != "" {
			text += ": " + j.Error
		}
		if j.State == daemon.JoinRefused || j.State == daemon.JoinDamaged {
			return fail(name, text, j.Hint)
		}
		return warn(name, text, j.Hint)
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		return skip(name, path+" is not readable by this user", "sudo agentctl doctor")
	case errors.Is(err, fs.ErrNotExist):
		return skip(name, "this board has not joined a relay by a code", "")
	case err != nil:
		return fail(name, err.Error(), "repair the disk, or join again with a new invite")
	}
	cred, err := enroll.LoadCredential(stateDir)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return skip(name, path+" is not readable by this user", "sudo agentctl doctor")
	case err != nil:
		return fail(name, err.Error(), daemon.JoinHint(err))
	}
	text := fmt.Sprintf("node %s of %s; its token is refreshed by itself", cred.NodeID, cred.Relay)
	if dir, err := os.Stat(stateDir); err == nil && owner(dir) != owner(st) {
		return fail(name, path+" belongs to another user than its directory, so that the daemon cannot read or replace it",
			"sudo chown --reference="+stateDir+" "+path)
	}
	if st.Mode().Perm()&groupOtherBits != 0 {
		return warn(name, fmt.Sprintf("%s; %s has mode %04o: others may read the board's key", text, path, st.Mode().Perm()), "chmod 0600 "+path)
	}
	left := filepath.Join(filepath.Dir(cmp.Or(t.configPath, config.DefaultPath())), daemon.JoinFile)
	if _, err := os.Lstat(left); err == nil {
		return warn(name, text+"; "+left+" is left behind, with a code that others could use", "sudo rm "+left)
	}
	return ok(name, text)
}

func owner(info fs.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }

package daemon

import (
	"errors"
	"io/fs"
	"path/filepath"

	"agentctl/enrollment"
	"agentctl/transport/enroll"
)

// newInvite is the next step of most refusals.
const newInvite = "get a new line on the relay's machine, and paste it here: agentctl invite"

// sameAgain is the next step after a failure that passes.
const sameAgain = "do the same again: the code is not lost"

// retryHint is JoinHint for what the daemon does, which it repeats by itself.
func retryHint(err error) string {
	const byItself = "the daemon tries again by itself"
	var e *enroll.Error
	var storage *enroll.StorageError
	switch {
	case errors.As(err, &storage):
		return "free or repair the disk, or give the state directory to the daemon's user; " + byItself
	case errors.As(err, &e) && (e.Kind == enroll.RateLimited || e.Reason == enrollment.ReasonNonce), JoinHint(err) == sameAgain:
		return byItself
	}
	return JoinHint(err)
}

// JoinHint returns the next step for an error of package enroll, or of a join by file. The
// commands `join` and `doctor` and the daemon's status and log share it.
func JoinHint(err error) string {
	var e *enroll.Error
	var storage *enroll.StorageError
	var joined *enroll.JoinedError
	var damaged *enroll.DamagedError
	var file *fs.PathError
	var configured *ConfiguredRelayError
	switch {
	case errors.As(err, &storage):
		return "free or repair the disk, or give the state directory to this user, then do the same again: nothing is lost"
	case errors.As(err, &joined):
		return "leave it first: agentctl leave, then do the same again"
	case errors.As(err, &file) && errors.Is(err, fs.ErrPermission):
		return "give it to the daemon's user: sudo chown --reference=" + filepath.Dir(file.Path) + " " + file.Path
	case errors.As(err, &file):
		return "repair the disk: see dmesg; the daemon reads the file again when the disk works"
	case errors.As(err, &damaged):
		return "restore the file, or join again, which keeps the damaged one under another name: " + newInvite
	case errors.As(err, &configured):
		return "remove relay there, then do the same again"
	case errors.As(err, &e):
		return refusalHint(e)
	}
	return newInvite
}

// refusalHint returns the next step after an exchange with a relay failed.
func refusalHint(e *enroll.Error) string {
	switch e.Kind {
	case enroll.Refused:
		switch e.Reason {
		case enrollment.ReasonGenerationUsed:
			return "this board's identity was used elsewhere, or restored from an old backup: agentctl leave, then join with a new invite"
		case enrollment.ReasonRevoked:
			return "join with a new invite; a board that joined before leaves first: agentctl leave"
		case enrollment.ReasonProof:
			return "the node was removed there, or the relay was restored from a backup that is older: agentctl leave, then join with a new invite"
		case enrollment.ReasonTokenInvalid:
			return "the token of --token-file is not valid at this relay, or of another tenant than the invite: leave the flag out to become a new node"
		case enrollment.ReasonCodeUnknown:
			return "check the code and the relay's address, or " + newInvite
		case enrollment.ReasonSession:
			return "another installation with this identity is linked; on one of the two: agentctl leave, then join with a new invite"
		case enrollment.ReasonNonce:
			return "do the same again"
		}
		return newInvite
	case enroll.RateLimited:
		return "too many attempts from this address: wait a minute, then do the same again"
	case enroll.NoDNS:
		return "check the name in the URL, and this machine's network and name server"
	case enroll.Unreachable, enroll.TimedOut:
		return "check the address and the port, that the relay runs there, and that no firewall is between"
	case enroll.Untrusted:
		return "if the relay has its own authority, paste the whole line of its invite, with --ca-sha256; else set ca_file; a captive portal causes this too"
	case enroll.WrongAuthority: // the error says why that matters
		return "on a board that joined before: agentctl leave, then join with the new line"
	case enroll.WrongName:
		return "call the relay by a name of its certificate, or paste the whole line of its invite, with --ca-sha256"
	case enroll.CertificateDate:
		return "is this machine's clock wrong? see: date; else renew the relay's certificate"
	case enroll.NotTLS:
		return "write http:// if the relay is on this machine; elsewhere a relay needs TLS, as with: agentctl relay --tls own"
	case enroll.NeedsTLS:
		return "write https:// in the URL"
	case enroll.Portal:
		return "a web page answered in the relay's place: log in to this network first, or check the address"
	case enroll.NotRelay, enroll.Malformed:
		return "check the address and the port: this is not an agentctl relay, or a proxy changes its answers"
	case enroll.NoEnrollment:
		return "update the relay, or use a token: agentctl token create --class device"
	case enroll.ForAgent:
		return newInvite + "; for an agent: agentctl invite --agent NAME, and agentctl login"
	}
	return sameAgain
}

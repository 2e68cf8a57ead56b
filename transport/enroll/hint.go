package enroll

import (
	"errors"

	"agentctl/enrollment"
)

// HintInvite is the next step of most refusals.
const HintInvite = "get a new line on the relay's machine, and paste it here: agentctl invite"

// HintAgain is the next step after a failure that passes.
const HintAgain = "do the same again: the code is not lost"

// Hint returns the next step for an error of this package, for a person.
func Hint(err error) string {
	var e *Error
	switch {
	case errors.As(err, new(*StorageError)):
		return "free or repair the disk, or give the state directory to this user, then do the same again: nothing is lost"
	case errors.As(err, new(*JoinedError)):
		return "leave it first: agentctl leave, then do the same again"
	case errors.As(err, new(*DamagedError)):
		return "restore the file, or join again, which keeps the damaged one under another name: " + HintInvite
	case errors.As(err, &e):
		return refusalHint(e)
	}
	return HintInvite
}

// refusalHint returns the next step after an exchange with a relay failed.
func refusalHint(e *Error) string {
	switch e.Kind {
	case Refused:
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
			return "check the code and the relay's address, or " + HintInvite
		case enrollment.ReasonSession:
			return "another installation with this identity is linked; on one of the two: agentctl leave, then join with a new invite"
		case enrollment.ReasonNonce:
			return "do the same again"
		}
		return HintInvite
	case RateLimited:
		return "too many attempts from this address: wait a minute, then do the same again"
	case NoDNS:
		return "check the name in the URL, and this machine's network and name server"
	case Unreachable, TimedOut:
		return "check the address and the port, that the relay runs there, and that no firewall is between"
	case Untrusted:
		return "if the relay has its own authority, paste the whole line of its invite, with --ca-sha256; else set ca_file; a captive portal causes this too"
	case WrongAuthority: // the error says why that matters
		return "on a board that joined before: agentctl leave, then join with the new line"
	case WrongName:
		return "call the relay by a name of its certificate, or paste the whole line of its invite, with --ca-sha256"
	case CertificateDate:
		return "is this machine's clock wrong? see: date; else renew the relay's certificate"
	case NotTLS:
		return "write http:// if the relay is on this machine; elsewhere a relay needs TLS, as with: agentctl relay --tls own"
	case NeedsTLS:
		return "write https:// in the URL"
	case Portal:
		return "a web page answered in the relay's place: log in to this network first, or check the address"
	case NotRelay, Malformed:
		return "check the address and the port: this is not an agentctl relay, or a proxy changes its answers"
	case NoEnrollment:
		return "update the relay, or use a token: agentctl token create --class device"
	case ForAgent:
		return HintInvite + "; for an agent: agentctl invite --agent NAME, and agentctl login"
	}
	return HintAgain
}

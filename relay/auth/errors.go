package auth

import (
	"errors"

	"agentctl/enrollment"
	"agentctl/manifest"
)

// The kinds of refusal. Every error of Verify and Active is an *Error that wraps one
// of them. On the wire all are E_SAFETY_DENIED; the comment gives the HTTP status.
var (
	ErrMissing = errors.New("auth: no token")             // 401
	ErrInvalid = errors.New("auth: invalid token")        // 401: form, signature, key, aud, iss, exp, nbf
	ErrRevoked = errors.New("auth: revoked token")        // 403
	ErrClass   = errors.New("auth: wrong class")          // 403: a device token on the agents' API, or the reverse
	ErrScope   = errors.New("auth: token grants nothing") // 403: no scope claim, or no scope that its class may hold
)

// The kinds of errors of invites, enrollments and refreshes.
var (
	// ErrJoin refuses an enrollment or a refresh. Error.Reason is one of enrollment.Reason*.
	ErrJoin = errors.New("auth: enrollment refused")
	// ErrRequest is a request that cannot be served as it is: a field is malformed.
	ErrRequest = errors.New("auth: malformed request")
	// ErrGrant refuses to give away what the creator of an invite or a token does not have.
	ErrGrant = errors.New("auth: more than the creator has")
	// ErrNoInvite is an invite that does not exist in this tenant.
	ErrNoInvite = errors.New("auth: no such invite")
)

// Errors of Open, the registry and minting that callers test with errors.Is.
var (
	ErrNoNode      = errors.New("auth: no such node in this tenant")
	ErrAmbiguous   = errors.New("auth: more than one node matches")
	ErrNoToken     = errors.New("auth: no such token in this tenant")
	ErrForeignNode = errors.New("auth: the node belongs to another tenant")
	ErrRemoved     = errors.New("auth: an operator removed the node; create a token for it to register it again")
	ErrNameTaken   = errors.New("auth: an operator has given this name to another node")
	ErrFull        = errors.New("auth: too many records")
	ErrNoState     = errors.New("no relay has its state there") // with Options.Existing
)

// Error is why a token or a request of joining is refused. Nothing of the token is in it: errors are logged and
// sent to clients. Its three parts have three readers: code tests Kind, operators search
// the audit log for Reason, and people read Message.
type Error struct {
	Kind    error  // one of the kinds above
	Reason  string // one word for the audit log
	Message string // for the caller: printable ASCII, what to do next included
}

func (e *Error) Error() string { return "auth: " + e.Message }

// Unwrap makes errors.Is(err, ErrInvalid) and its siblings work.
func (e *Error) Unwrap() error { return e.Kind }

// As lets manifest.AsError turn any refusal into E_SAFETY_DENIED, so that a handler that
// does not look at Kind still denies. Only a malformed request is E_BAD_REQUEST.
func (e *Error) As(target any) bool {
	t, ok := target.(**manifest.Error)
	if ok {
		code := manifest.SafetyDenied
		if e.Kind == ErrRequest || e.Kind == ErrNoInvite {
			code = manifest.BadRequest
		}
		*t = &manifest.Error{Code: code, Message: e.Message, Reason: e.Reason, ShowReason: e.Kind == ErrJoin || code == manifest.BadRequest,
			Repeat: e == errNonce || e == errLinkedElsewhere}
	}
	return ok
}

// mintHint is the next step of whoever holds a token that will never work.
const mintHint = "ask the relay's operator for one made by: agentctl token create"

// The refusals are package variables: refusing a token does not allocate an error.
var (
	errMissing        = &Error{ErrMissing, "no_token", "no token; send Authorization: Bearer TOKEN; " + mintHint}
	errMalformed      = &Error{ErrInvalid, "malformed", "the token is malformed; " + mintHint}
	errHeader         = &Error{ErrInvalid, "header", "the token's header is not one that this relay writes (EdDSA, at+jwt, kid); " + mintHint}
	errKey            = &Error{ErrInvalid, "key", "the token was signed by a key this relay does not know; " + mintHint}
	errSignature      = &Error{ErrInvalid, "signature", "the token's signature is wrong; check that it was copied whole"}
	errClaims         = &Error{ErrInvalid, "claims", "the token's claims are not what this relay issues; " + mintHint}
	errIssuer         = &Error{ErrInvalid, "issuer", "the token was made by another relay; " + mintHint}
	errAudience       = &Error{ErrInvalid, "audience", "the token is for another relay or audience; " + mintHint}
	errExpired        = &Error{ErrInvalid, "expired", "the token has expired; " + mintHint}
	errNotYet         = &Error{ErrInvalid, "not_yet_valid", "the token is not valid yet; check the clock of the relay"}
	errRevoked        = &Error{ErrRevoked, "revoked", "the token was revoked; " + mintHint}
	errClass          = &Error{ErrClass, "class", "a token of this class is not accepted here; agents and devices have different tokens"}
	errNoScope        = &Error{ErrScope, "no_scope", "the token carries no scope that its class may use; " + mintHint}
	errScopelessEnded = &Error{ErrScope, "scopeless", "tokens without a scope are no longer accepted; " + mintHint}
)

// inviteHint is the next step of whoever has to join again.
const inviteHint = "ask the relay's operator for a new one, made by: agentctl invite"

// The refusals of enrollment and refresh. Each has its own reason, on which the client
// decides; see package enrollment.
var (
	errCodeUnknown     = joinError(enrollment.ReasonCodeUnknown, "this relay has no such invite code; check the code and the relay's address, or "+inviteHint)
	errCodeUsed        = joinError(enrollment.ReasonUsed, "the invite code has no uses left; "+inviteHint)
	errCodeExpired     = joinError(enrollment.ReasonExpired, "the invite code has expired; "+inviteHint)
	errCodeRevoked     = joinError(enrollment.ReasonRevoked, "the invite code was revoked; "+inviteHint)
	errJoinRevoked     = joinError(enrollment.ReasonRevoked, "the identity of this key was revoked; to join again, "+inviteHint)
	errKeyInUse        = joinError(enrollment.ReasonKeyInUse, "this key has joined with another code; join with a new key")
	errGenerationUsed  = joinError(enrollment.ReasonGenerationUsed, "this credential was refreshed by another holder: it was copied, or restored from an old backup; to join again, "+inviteHint)
	errNonce           = joinError(enrollment.ReasonNonce, "the nonce is too old or of another relay; get a new one: GET "+enrollment.EnrollPath)
	errProof           = joinError(enrollment.ReasonProof, "the proof does not fit a key that this relay knows; to join again, "+inviteHint)
	errTokenToMigrate  = joinError(enrollment.ReasonTokenInvalid, "the token whose node should be kept is not a valid device token of the invite's tenant; join without it for a new node")
	errLinkedElsewhere = joinError(enrollment.ReasonSession, "the node is linked with another session, which answers; two installs may share this identity")
)

func joinError(reason, message string) *Error { return &Error{ErrJoin, reason, message} }

func badRequest(message string) *Error { return &Error{ErrRequest, "request", message} }

package relay

import (
	"errors"
	"net/http"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/transport/edge"
)

// denial returns the error and the status for a caller without a good token.
func denial(err error) (e *manifest.Error, status int) {
	e = manifest.AsError(err)
	status = http.StatusForbidden
	if errors.Is(err, auth.ErrMissing) || errors.Is(err, auth.ErrInvalid) {
		status = http.StatusUnauthorized
	}
	return e, status
}

func (r *Relay) writeError(w http.ResponseWriter, status int, e *manifest.Error, traceID string) {
	if status == http.StatusUnauthorized {
		edge.SetChallenge(w.Header(), "agentctl", e.Reason != "no_token", r.base()+metadataPath+"/mcp")
	}
	edge.WriteError(w, status, e, traceID)
}

package journal

import (
	"context"
	"encoding/json"

	"agentctl/unixrpc"
)

// Query asks the helper behind a socket for a page and returns it as JSON. The caller validates it: during
// an upgrade the helper may be of another version than the daemon. The errors are ctx's,
// unixrpc.ErrNoHelper, unixrpc.ErrNoAnswer, and an *Error of the helper.
func Query(ctx context.Context, socket string, r *Request) ([]byte, error) {
	answer, err := unixrpc.Call(ctx, socket, r, maxAnswer)
	if err != nil {
		return nil, err
	}
	return parseAnswer(answer)
}

// parseAnswer returns the page of an answer, or the *Error that the helper sent in its place.
func parseAnswer(body []byte) ([]byte, error) {
	var a struct {
		Error *Error `json:"error"`
	}
	if json.Unmarshal(body, &a) != nil {
		return nil, &Error{CodeFailed, "the answer is not one JSON object"}
	}
	if a.Error != nil {
		return nil, a.Error
	}
	return body, nil
}

package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// Query asks the helper behind a socket for a page, which it returns as JSON. Its errors are ctx's,
// ErrNoHelper, ErrNoAnswer, and an *Error of the helper.
func Query(ctx context.Context, socket string, r *Request) ([]byte, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoHelper, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer func() {
		stop()
		_ = conn.Close() // the helper stops reading
	}()
	if err = encode(conn, r); err == nil || errors.Is(err, syscall.EPIPE) { // it may have answered already
		var body []byte
		body, err = io.ReadAll(io.LimitReader(conn, maxAnswer+1))
		if len(body) > 0 && err == nil {
			return parseAnswer(body)
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, context.DeadlineExceeded
	}
	return nil, ErrNoAnswer // systemd closes connections beyond MaxConnections=
}

// parseAnswer returns the page of an answer.
func parseAnswer(body []byte) ([]byte, error) {
	var a struct {
		Error *Error `json:"error"`
	}
	if len(body) > maxAnswer || json.Unmarshal(body, &a) != nil {
		return nil, &Error{CodeFailed, "the answer is not one JSON object"}
	}
	if a.Error != nil {
		return nil, a.Error
	}
	return bytes.TrimSpace(body), nil
}

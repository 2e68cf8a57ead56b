// Package unixrpc carries one request and one answer over a connection to a Unix socket, each a line
// of JSON. The daemon asks programs with other rights this way: systemd starts one of them for each
// connection (Accept=yes), so that a hostile request harms that program and no other.
//
//	daemon: Call ── request ──► helper: Serve
//	             ◄── answer ───
//
// Neither side trusts the other: sizes and times are bounded on both. The helper's work ends when the
// daemon closes its side, because an answer that nobody reads is not worth the time of a board.
package unixrpc

import (
	"bufio"
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

// ioTimeout bounds the read of a request, and the write of an answer.
const ioTimeout = 5 * time.Second

// maxDiscarded bounds how much of a request that is too long is read, bytes. The caller of a longer one may
// get ErrNoAnswer in place of the answer: the connection is reset.
const maxDiscarded = 64 << 10

// Errors of Call.
var (
	ErrNoHelper = errors.New("unixrpc: the helper's socket does not answer")
	ErrNoAnswer = errors.New("unixrpc: the helper gave no answer") // systemd closes connections beyond MaxConnections=
)

// Handler returns the answer to a request. ctx ends when the caller has closed the connection. A nil
// answer closes the connection without one. The error is for the helper's log; the caller does not see
// it.
type Handler func(ctx context.Context, request []byte) (answer any, err error)

// Serve reads the request of a connection, of at most maxRequest bytes, answers it and closes the
// connection. handle gets an empty request, which is no JSON, for one that is longer or more than a
// line. The error is handle's or that of the connection.
func Serve(ctx context.Context, conn net.Conn, maxRequest int, handle Handler) error {
	defer func() { _ = conn.Close() }()
	request, err := readLine(conn, maxRequest)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	_ = conn.SetReadDeadline(time.Time{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		_, _ = conn.Read(make([]byte, 1)) // returns when the daemon closes its side
		cancel()
	}()
	answer, err := handle(ctx, request)
	if answer != nil && ctx.Err() == nil {
		_ = conn.SetWriteDeadline(time.Now().Add(ioTimeout))
		err = errors.Join(err, Encode(conn, answer))
	}
	_ = conn.Close()
	<-watched
	return err
}

// readLine reads one line of at most size bytes and returns it without its end; nil if it is longer or
// more follows. Of a longer one it reads the rest: closing a socket with unread bytes would reset the
// connection, and the caller would not see why it was refused.
func readLine(conn net.Conn, size int) ([]byte, error) {
	_ = conn.SetReadDeadline(time.Now().Add(ioTimeout))
	r := bufio.NewReaderSize(conn, size)
	line, err := r.ReadSlice('\n')
	isTooLong := errors.Is(err, bufio.ErrBufferFull)
	for n := 0; errors.Is(err, bufio.ErrBufferFull) && n < maxDiscarded; n += len(line) {
		line, err = r.ReadSlice('\n')
	}
	switch {
	case err != nil && !isTooLong:
		return nil, fmt.Errorf("unixrpc: no request: %w", err)
	case isTooLong || r.Buffered() > 0:
		return nil, nil
	}
	return line[:len(line)-1], nil
}

// Call sends a request to the helper behind a socket and returns its answer, of which it reads at most
// maxAnswer bytes: a longer one is not valid JSON then. Its errors are ctx's, ErrNoHelper and
// ErrNoAnswer.
func Call(ctx context.Context, socket string, request any, maxAnswer int64) ([]byte, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoHelper, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer func() {
		stop()
		_ = conn.Close() // the helper stops its work
	}()
	if err = Encode(conn, request); err == nil || errors.Is(err, syscall.EPIPE) { // it may have answered already
		var answer []byte
		if answer, err = io.ReadAll(io.LimitReader(conn, maxAnswer)); err == nil && len(answer) > 0 {
			return bytes.TrimSpace(answer), nil
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, context.DeadlineExceeded
	}
	return nil, ErrNoAnswer
}

// Encode writes a line of JSON without escapes for HTML, which would make it longer.
func Encode(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

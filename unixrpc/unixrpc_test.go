package unixrpc

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/unixrpc/unixrpctest"
)

const maxTestRequest, maxTestAnswer = 64, 128

// echo answers with the request, and with nothing to "none".
func echo(_ context.Context, request []byte) (any, error) {
	switch string(request) {
	case `"none"`:
		return nil, errors.New("for the log")
	case "":
		return "not a line", nil
	}
	return string(request), nil
}

func TestCall(t *testing.T) {
	socket := unixrpctest.Listen(t, func(conn net.Conn) { _ = Serve(t.Context(), conn, maxTestRequest, echo) })
	tests := []struct {
		name    string
		request any
		answer  string
		err     error
	}{
		{"a request", "<a>", `"\"<a>\""`, nil},
		{"one as long as allowed", strings.Repeat("x", maxTestRequest-3), `"\"` + strings.Repeat("x", maxTestRequest-3) + `\""`, nil},
		{"one that is longer", strings.Repeat("x", maxTestRequest), `"not a line"`, nil},
		{"no answer", "none", "", ErrNoAnswer},
	}
	for _, tt := range tests {
		answer, err := Call(t.Context(), socket, tt.request, maxTestAnswer)
		if string(answer) != tt.answer || !errors.Is(err, tt.err) {
			t.Errorf("%s: %s, %v", tt.name, answer, err)
		}
	}
	if answer, err := Call(t.Context(), socket, "<a>", 3); string(answer) != `"\"` || err != nil {
		t.Errorf("an answer that is too long: %s, %v", answer, err)
	}
	if _, err := Call(t.Context(), filepath.Join(t.TempDir(), "gone"), "x", maxTestAnswer); !errors.Is(err, ErrNoHelper) {
		t.Errorf("no socket: %v", err)
	}
}

// TestCallEnds: a helper that is silent does not hold its caller longer than ctx.
func TestCallEnds(t *testing.T) {
	release := make(chan struct{})
	socket := unixrpctest.Listen(t, func(conn net.Conn) { <-release; _ = conn.Close() })
	t.Cleanup(func() { close(release) })
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := Call(ctx, socket, "x", maxTestAnswer); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	late, cancelLate := context.WithDeadline(t.Context(), time.Now())
	defer cancelLate()
	if _, err := Call(late, socket, "x", maxTestAnswer); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrNoHelper) {
		t.Errorf("too late: %v", err)
	}
}

// TestServeEnds: the work ends when the caller closes its side, and no answer is written then.
func TestServeEnds(t *testing.T) {
	daemon, helper := net.Pipe()
	started, done := make(chan struct{}), make(chan error)
	go func() {
		done <- Serve(t.Context(), helper, maxTestRequest, func(ctx context.Context, _ []byte) (any, error) {
			close(started)
			<-ctx.Done()
			return "late", ctx.Err()
		})
	}()
	if err := Encode(daemon, "x"); err != nil {
		t.Fatal(err)
	}
	<-started
	_ = daemon.Close()
	if err := <-done; !errors.Is(err, context.Canceled) || errors.Is(err, os.ErrClosed) {
		t.Errorf("%v", err)
	}
}

// TestServeWithoutRequest: a caller that closes before it has asked is an error of the connection.
func TestServeWithoutRequest(t *testing.T) {
	daemon, helper := net.Pipe()
	go func() { _, _ = daemon.Write([]byte("half a line")); _ = daemon.Close() }()
	err := Serve(t.Context(), helper, maxTestRequest, func(context.Context, []byte) (any, error) {
		t.Error("it was handled")
		return nil, nil
	})
	if err == nil {
		t.Error("no error")
	}
}

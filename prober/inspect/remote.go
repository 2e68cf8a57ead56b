package inspect

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"agentctl/strictjson"
)

// A daemon whose sandbox hides the processes of other users asks a helper for them, as package
// journal does for the journal: AskProcesses in the daemon, ServeProcesses in
// agentctl-processes@.service, one request and one answer on a connection, each a line of JSON.

// Bounds of the helper.
const (
	maxRequest        = 4 << 10   // bytes
	maxAnswer         = 256 << 10 // bytes
	requestTime       = 5 * time.Second
	maxRemoteTime     = 5 * time.Second
	maxRemoteLimit    = 1000
	remoteReserve     = 150 * time.Millisecond // for starting the helper and carrying its answer
	maxRemoteNameSize = 1024
)

// processRequest is a ProcessQuery on its way to the helper.
type processRequest struct {
	SortBy    string `json:"sort_by"`
	Limit     int    `json:"limit"`
	WindowMS  int64  `json:"window_ms"`
	Name      string `json:"name"`
	Args      bool   `json:"args"`
	TimeoutMS int64  `json:"timeout_ms"`
}

// check reports whether a request is in the bounds of the helper.
func (r *processRequest) check() error {
	if (r.SortBy != "cpu" && r.SortBy != "memory") || r.Limit < 1 || r.Limit > maxRemoteLimit || len(r.Name) > maxRemoteNameSize ||
		r.WindowMS < 0 || r.WindowMS > maxRemoteTime.Milliseconds() || r.TimeoutMS < 1 || r.TimeoutMS > maxRemoteTime.Milliseconds() {
		return errors.New("inspect: the request is out of bounds")
	}
	return nil
}

// ServeProcesses answers the one request of a connection, and closes it.
func ServeProcesses(ctx context.Context, conn net.Conn, m *Machine) error {
	defer func() { _ = conn.Close() }()
	_ = conn.SetReadDeadline(time.Now().Add(requestTime))
	reader := bufio.NewReaderSize(conn, maxRequest)
	line, err := reader.ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("inspect: no request: %w", err)
	}
	var r processRequest
	if err := errors.Join(strictjson.Unmarshal(line[:len(line)-1], &r), r.check()); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(r.TimeoutMS)*time.Millisecond)
	defer cancel()
	_ = conn.SetReadDeadline(time.Time{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		_, _ = conn.Read(make([]byte, 1)) // returns when the daemon hangs up
		cancel()
	}()
	p := m.Processes(ctx, ProcessQuery{SortBy: r.SortBy, Limit: r.Limit, Window: time.Duration(r.WindowMS) * time.Millisecond, Name: r.Name, Args: r.Args})
	_ = conn.SetWriteDeadline(time.Now().Add(requestTime))
	err = json.NewEncoder(conn).Encode(p)
	_ = conn.Close()
	<-watched
	return err
}

// AskProcesses is Machine.Processes of the helper behind a socket. If it does not answer, the processes
// are unfinished.
func AskProcesses(ctx context.Context, socket string, q ProcessQuery) Processes {
	p, err := askProcesses(ctx, socket, q)
	if err != nil {
		return Processes{Processes: []Process{}, Unfinished: []string{"processes"}}
	}
	return p
}

func askProcesses(ctx context.Context, socket string, q ProcessQuery) (p Processes, err error) {
	timeout := maxRemoteTime
	if deadline, ok := ctx.Deadline(); ok {
		timeout = min(timeout, max(time.Until(deadline)-remoteReserve, time.Millisecond))
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return p, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer func() {
		stop()
		_ = conn.Close()
	}()
	r := processRequest{q.SortBy, q.Limit, q.Window.Milliseconds(), q.Name, q.Args, timeout.Milliseconds()}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return p, err
	}
	raw, err := io.ReadAll(io.LimitReader(conn, maxAnswer))
	if err != nil {
		return p, err
	}
	p.Processes = []Process{}
	return p, json.Unmarshal(raw, &p)
}

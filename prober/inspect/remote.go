package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"time"

	"agentctl/strictjson"
	"agentctl/unixrpc"
)

// A daemon whose sandbox hides the processes of other users asks a helper for them (package unixrpc), as
// package journal does for the journal: AskProcesses in the daemon, ServeProcesses in
// agentctl-processes@.service.

// Bounds of the helper.
const (
	maxRequest        = 4 << 10   // bytes
	maxAnswer         = 256 << 10 // bytes
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

// ServeProcesses answers the one request of a connection, and closes it. One that is out of bounds gets
// no answer.
func ServeProcesses(ctx context.Context, conn net.Conn, m *Machine) error {
	return unixrpc.Serve(ctx, conn, maxRequest, func(ctx context.Context, request []byte) (any, error) {
		var r processRequest
		if err := errors.Join(strictjson.Unmarshal(request, &r), r.check()); err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, time.Duration(r.TimeoutMS)*time.Millisecond)
		defer cancel()
		return m.Processes(ctx, ProcessQuery{SortBy: r.SortBy, Limit: r.Limit, Window: time.Duration(r.WindowMS) * time.Millisecond, Name: r.Name, Args: r.Args}), nil
	})
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
	raw, err := unixrpc.Call(ctx, socket, processRequest{q.SortBy, q.Limit, q.Window.Milliseconds(), q.Name, q.Args, timeout.Milliseconds()}, maxAnswer)
	if err != nil {
		return p, err
	}
	p.Processes = []Process{}
	return p, json.Unmarshal(raw, &p)
}

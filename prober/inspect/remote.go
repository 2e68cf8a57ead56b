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

// The process reader. A daemon whose sandbox hides the processes of other users asks a helper program
// for them, which systemd starts for one request (package unixrpc):
//
//	daemon: AskProcesses ── socket ──► agentctl-processes@.service: ServeProcesses

// Bounds of the process reader. They are wider than those of the schema of system.processes (50
// processes, 1 s), which the daemon checks before it asks: the helper only has to stay within its
// own memory and time.
const (
	maxRequest        = 4 << 10   // bytes
	maxAnswer         = 256 << 10 // bytes
	maxRemoteTime     = 5 * time.Second
	maxRemoteLimit    = 1000                   // of processRequest.Limit
	maxRemoteNameSize = 1024                   // of processRequest.Name, bytes
	remoteReserve     = 150 * time.Millisecond // for starting the helper and transferring its answer
)

// processRequest is a ProcessQuery as JSON, with the time that the daemon has left. TimeoutMS is a
// duration and no time of day, so that the helper needs no clock that agrees with the daemon's.
type processRequest struct {
	SortBy    string `json:"sort_by"`
	Limit     int    `json:"limit"`
	WindowMS  int64  `json:"window_ms"`
	Name      string `json:"name"`
	Args      bool   `json:"args"`
	TimeoutMS int64  `json:"timeout_ms"`
}

// check checks the bounds. The helper does not trust the daemon, because it may see the processes of
// all users and the daemon may not.
func (r *processRequest) check() error {
	if (r.SortBy != "cpu" && r.SortBy != "memory") || r.Limit < 1 || r.Limit > maxRemoteLimit || len(r.Name) > maxRemoteNameSize ||
		r.WindowMS < 0 || r.WindowMS > maxRemoteTime.Milliseconds() || r.TimeoutMS < 1 || r.TimeoutMS > maxRemoteTime.Milliseconds() {
		return errors.New("inspect: the request is out of bounds")
	}
	return nil
}

// ServeProcesses answers the one request of a connection and closes the connection. A request out of
// bounds gets no answer. The error, of the request or of the connection, is for the helper's log. What
// m could not read is in the answer's Unfinished.
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

// AskProcesses returns the answer of the process reader behind a socket. "processes" is in Unfinished
// if there is no helper, if it does not answer in time, or if its answer exceeds maxAnswer.
func AskProcesses(ctx context.Context, socket string, q ProcessQuery) Processes {
	p, err := askProcesses(ctx, socket, q)
	if err != nil {
		return Processes{Processes: []Process{}, Unfinished: []string{"processes"}}
	}
	return p
}

// askProcesses gives the helper the time that ctx has left, less remoteReserve, so that the
// helper's answer with its Unfinished arrives before ctx ends. Unknown keys of the answer are
// ignored: after an upgrade of the package, a daemon that was not restarted asks the new helper.
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

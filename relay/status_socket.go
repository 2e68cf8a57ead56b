package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
)

// The relay answers `agentctl relay status` on a unix socket in its state directory: whoever may
// read the directory may ask, no token is needed, and it answers while the stores hang. A
// connection sends a line with what it asks for, or nothing, gets one JSON document, Status or
// LiveState, and is closed.

// statusSocket is the socket's name in the state directory, with mode 0600.
const statusSocket = "relay.sock"

// Bounds of the socket.
const (
	maxStatusConns = 8       // at once; more wait in the kernel
	maxStatusBytes = 4 << 20 // of a document that ReadStatus takes
	statusTimeout  = 5 * time.Second
)

// Requests on the status socket, a line each. A connection that sends nothing within
// requestTimeout, as clients of earlier releases do, gets the status.
const (
	requestStatus  = "status"
	requestState   = "state"
	requestTimeout = 250 * time.Millisecond
	maxRequest     = 64 // bytes of a line
)

// ErrNotRunning is returned by ReadStatus when no relay serves the state directory.
var ErrNotRunning = errors.New("no relay is running on this state directory")

// maxSocketPath is the length of a path that every unix takes in an address.
const maxSocketPath = 103

// socketPath returns a path of the status socket that fits an address. A longer one is reached
// through an open directory, on Linux; release closes it after use.
func socketPath(stateDir string) (path string, release func(), err error) {
	path = filepath.Join(stateDir, statusSocket)
	if len(path) <= maxSocketPath || runtime.GOOS != "linux" {
		return path, func() {}, nil
	}
	dir, err := os.Open(stateDir)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), statusSocket), func() { _ = dir.Close() }, nil
}

// listenStatus makes the socket, in place of one that a relay has left behind.
func listenStatus(stateDir string) (net.Listener, error) {
	path, release, err := socketPath(stateDir)
	if err != nil {
		return nil, err
	}
	defer release()
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("%s is not a socket; move it away", path)
		}
		// The socket of a relay that was killed stays as a file on which nobody accepts.
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("another relay serves %s", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false) // the path may be of a directory that is closed by then
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return ln, nil
}

// serveStatus answers on the socket until ctx ends, and then removes it. A state directory that
// takes no socket costs the command only. A relay whose listener is in memory has none: it is part
// of a simulation, in whose virtual time nothing may wait for a file.
func (r *Relay) serveStatus(ctx context.Context) {
	if _, ok := r.listener.(*net.TCPListener); !ok && r.listener != nil {
		return
	}
	ln, err := listenStatus(r.opt.StateDir)
	if err != nil {
		r.log.Warn("agentctl relay status will not find this relay", zap.Error(err))
		return
	}
	r.metrics.statusServed.Store(true)
	defer r.metrics.statusServed.Store(false)
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	slots := make(chan struct{}, maxStatusConns)
	var conns sync.WaitGroup
	for {
		slots <- struct{}{}
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			<-slots
			select { // no more open files, say
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		conns.Go(func() {
			defer func() { <-slots }()
			defer c.Close()
			r.metrics.statusOpen.Add(1)
			defer r.metrics.statusOpen.Add(-1)
			r.metrics.status.requests.Add(1)
			if r.answerStatus(ctx, c) != nil {
				r.metrics.status.errors.Add(1)
			}
		})
	}
	conns.Wait()
	_ = os.Remove(filepath.Join(r.opt.StateDir, statusSocket))
}

// answerStatus reads the request of one connection and answers it.
func (r *Relay) answerStatus(ctx context.Context, c net.Conn) error {
	if readRequest(c) == requestState {
		_ = c.SetDeadline(time.Now().Add(stateTimeout + statusTimeout))
		return json.NewEncoder(c).Encode(r.liveState(ctx))
	}
	_ = c.SetDeadline(time.Now().Add(statusTimeout))
	return json.NewEncoder(c).Encode(r.Status())
}

// readRequest returns the line that a client of the status socket sends, "" for none.
func readRequest(c net.Conn) string {
	_ = c.SetReadDeadline(time.Now().Add(requestTimeout))
	line := make([]byte, 0, maxRequest)
	for len(line) < maxRequest {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err != nil || b[0] == '\n' {
			break
		}
		line = append(line, b[0])
	}
	return string(line)
}

// measure keeps the sizes of the stores and the space of the disk up to date, until ctx ends. On a disk that hangs it
// hangs too, and the last sizes stay.
func (r *Relay) measure(ctx context.Context) {
	measure := func() {
		sizes := r.measureStores()
		r.sizes.Store(&sizes)
		r.checkSpace()
	}
	measure()
	every(ctx, sizesInterval, measure)
}

// ReadStatus asks the relay that runs on a state directory. ErrNotRunning if there is none;
// context.DeadlineExceeded also if the directory itself does not answer.
func ReadStatus(ctx context.Context, stateDir string) (*Status, error) {
	type result struct {
		status *Status
		err    error
	}
	done := make(chan result, 1)
	go func() { // the lookup of the path may hang with the disk, whatever ctx says
		s, err := readStatus(ctx, stateDir)
		done <- result{s, err}
	}()
	select {
	case r := <-done:
		return r.status, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func readStatus(ctx context.Context, stateDir string) (*Status, error) {
	var s Status
	if err := askRelay(ctx, stateDir, requestStatus, maxStatusBytes, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// askRelay sends a request to the relay that runs on a state directory and decodes its answer. An
// earlier relay answers each with its status.
func askRelay(ctx context.Context, stateDir, request string, maxBytes int64, answer any) error {
	path, release, err := socketPath(stateDir)
	if err != nil {
		return err
	}
	defer release()
	c, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		if _, err := os.Stat(stateDir); err != nil { // not before: it may hang where the socket does not
			return err
		}
		return ErrNotRunning
	}
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	_, _ = io.WriteString(c, request+"\n") // an earlier relay may have answered and closed already
	if err := json.NewDecoder(io.LimitReader(c, maxBytes)).Decode(answer); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("read the status of the relay: %w", err)
	}
	return nil
}

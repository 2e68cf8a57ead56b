package netpoll

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Epoll is an edge-triggered epoll instance: it reports a socket once when its readiness
// changes, so that an idle socket costs nothing.
//
// The epoll descriptor is itself registered with the Go runtime's poller. Run therefore
// waits as a goroutine waits for a pipe and occupies no operating system thread.
type Epoll struct {
	file    *os.File
	raw     syscall.RawConn
	once    sync.Once
	started chan struct{} // closed by the first Add: until then Run does not wait in the kernel
}

// New makes an Epoll. Run must be called; it closes the Epoll.
func New() (*Epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("netpoll: epoll: %w", err)
	}
	_ = unix.SetNonblock(fd, true) // os.NewFile then registers it with the runtime's poller
	f := os.NewFile(uintptr(fd), "epoll")
	raw, err := f.SyscallConn()
	return &Epoll{file: f, raw: raw, started: make(chan struct{})}, err
}

// Add watches a socket under a key. The kernel stops watching it when it is closed. The
// first event may be reported before Add returns.
func (e *Epoll) Add(s *Socket, key uint64, want Events) error {
	// The kernel returns 64 bits of user data with each event; x/sys names them Fd and Pad.
	ev := unix.EpollEvent{Events: uint32(want) | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(uint32(key)), Pad: int32(uint32(key >> 32))}
	var sockErr, addErr error
	err := e.raw.Control(func(epfd uintptr) {
		sockErr = s.raw.Control(func(fd uintptr) { addErr = unix.EpollCtl(int(epfd), unix.EPOLL_CTL_ADD, int(fd), &ev) })
	})
	if err = errors.Join(err, sockErr, addErr); err != nil {
		return fmt.Errorf("netpoll: epoll: %w", err)
	}
	e.once.Do(func() { close(e.started) })
	return nil
}

// Run calls onEvent for each event, from its own goroutine, until ctx ends; onEvent must
// be quick. An event may still be reported after its socket was closed.
func (e *Epoll) Run(ctx context.Context, onEvent func(key uint64, ev Events)) error {
	defer e.file.Close()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-e.started:
	}
	stop := context.AfterFunc(ctx, func() { _ = e.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var events [128]unix.EpollEvent
	var n int
	var waitErr error
	poll := func(fd uintptr) (done bool) {
		for {
			if n, waitErr = unix.EpollWait(int(fd), events[:], 0); waitErr != unix.EINTR {
				return n != 0 // 0: the runtime parks this goroutine until the descriptor is readable
			}
		}
	}
	for {
		err := errors.Join(e.raw.Read(poll), waitErr)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return fmt.Errorf("netpoll: epoll: %w", err)
		}
		for _, ev := range events[:n] {
			onEvent(uint64(uint32(ev.Fd))|uint64(uint32(ev.Pad))<<32, Events(ev.Events))
		}
	}
}

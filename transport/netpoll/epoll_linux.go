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

// Epoll is an epoll instance beside that of Go's runtime, which waits for it as for any
// descriptor. Edges only: a socket costs nothing while nothing changes.
type Epoll struct {
	file  *os.File
	raw   syscall.RawConn
	once  sync.Once
	first chan struct{} // closed by the first Add: until then nothing waits in the kernel
}

// New makes an Epoll; Run must be called, which closes it.
func New() (*Epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("netpoll: epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // for os.NewFile: hand it to the runtime's poller
		unix.Close(fd)
		return nil, fmt.Errorf("netpoll: epoll: %w", err)
	}
	f := os.NewFile(uintptr(fd), "epoll")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("netpoll: epoll: %w", err)
	}
	return &Epoll{file: f, raw: raw, first: make(chan struct{})}, nil
}

// Add watches a socket under a key; the kernel forgets it when it is closed. It may be
// told about before Add returns.
func (e *Epoll) Add(s *Socket, key uint64, want Events) error {
	ev := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(uint32(key)), Pad: int32(uint32(key >> 32))}
	if want&Readable != 0 {
		ev.Events |= unix.EPOLLIN
	}
	if want&Writable != 0 {
		ev.Events |= unix.EPOLLOUT
	}
	var added error
	err := e.raw.Control(func(ep uintptr) {
		if err := s.raw.Control(func(fd uintptr) { added = unix.EpollCtl(int(ep), unix.EPOLL_CTL_ADD, int(fd), &ev) }); err != nil {
			added = err
		}
	})
	if err = errors.Join(err, added); err != nil {
		return fmt.Errorf("netpoll: epoll: %w", err)
	}
	e.once.Do(func() { close(e.first) })
	return nil
}

// Run tells what happens, from its goroutine, until ctx ends; tell must be quick. A key
// may be told about once more after its socket was closed.
func (e *Epoll) Run(ctx context.Context, tell func(key uint64, what Events)) error {
	defer e.file.Close()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-e.first:
	}
	unhook := context.AfterFunc(ctx, func() { e.file.SetReadDeadline(time.Unix(1, 0)) })
	defer unhook()
	var events [128]unix.EpollEvent
	n := 0
	var failed error
	wait := func(fd uintptr) bool {
		for {
			if n, failed = unix.EpollWait(int(fd), events[:], 0); failed != unix.EINTR {
				return n != 0
			}
		}
	}
	for {
		err := e.raw.Read(wait)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil || failed != nil:
			return fmt.Errorf("netpoll: epoll: %w", errors.Join(err, failed))
		}
		for _, ev := range events[:n] {
			var what Events
			if ev.Events&unix.EPOLLIN != 0 {
				what |= Readable
			}
			if ev.Events&unix.EPOLLOUT != 0 {
				what |= Writable
			}
			if ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
				what |= PeerClosed
			}
			tell(uint64(uint32(ev.Fd))|uint64(uint32(ev.Pad))<<32, what)
		}
	}
}

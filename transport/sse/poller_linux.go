package sse

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// epoll is an epoll instance beside that of Go's runtime, which waits for it as for any
// descriptor. Edges only: a socket costs nothing while it takes what it is given.
type epoll struct {
	file *os.File
	raw  syscall.RawConn
}

func newEpoll() (*epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("sse: epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // for os.NewFile: hand it to the runtime's poller
		unix.Close(fd)
		return nil, fmt.Errorf("sse: epoll: %w", err)
	}
	f := os.NewFile(uintptr(fd), "epoll")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("sse: epoll: %w", err)
	}
	return &epoll{file: f, raw: raw}, nil
}

// add watches a socket; the kernel forgets it when it is closed.
func (e *epoll) add(s *sock, key uint64) error {
	ev := unix.EpollEvent{Events: unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(uint32(key)), Pad: int32(uint32(key >> 32))}
	var added error
	err := e.raw.Control(func(ep uintptr) {
		if err := s.raw.Control(func(fd uintptr) { added = unix.EpollCtl(int(ep), unix.EPOLL_CTL_ADD, int(fd), &ev) }); err != nil {
			added = err
		}
	})
	if err = errors.Join(err, added); err != nil {
		return fmt.Errorf("sse: epoll: %w", err)
	}
	return nil
}

func (e *epoll) close() { e.file.Close() }

func (e *epoll) run(ctx context.Context, tell func(key uint64, writable, gone bool)) error {
	unhook := context.AfterFunc(ctx, func() { e.file.SetReadDeadline(time.Unix(1, 0)) })
	defer unhook()
	var events [128]unix.EpollEvent
	for {
		n := 0
		var werr error
		err := e.raw.Read(func(fd uintptr) bool {
			for {
				if n, werr = unix.EpollWait(int(fd), events[:], 0); werr != unix.EINTR {
					return n != 0
				}
			}
		})
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil || werr != nil:
			return fmt.Errorf("sse: epoll: %w", errors.Join(err, werr))
		}
		for _, ev := range events[:n] {
			key := uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32
			tell(key, ev.Events&unix.EPOLLOUT != 0, ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0)
		}
	}
}

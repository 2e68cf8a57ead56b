package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxServed bounds the connections of Serve: that of the running version and that of the next one.
const maxServed = 2

// Serve runs the program of the plugin in dir for each connection of a Unix socket, which
// becomes its stdin and stdout. It is the main process of a plugin that is a service: a service
// manager owns the socket, and starts the service again when the relay connects again. home
// is where the plugin can write.
//
// Serve returns when the last program has ended, with its error. A reload of the plugin makes a second
// connection before it closes the first one, and so starts a second program. stopGrace after the
// end of a connection or of ctx Serve kills its program, so that the next one finds a new one.
func Serve(ctx context.Context, ln net.Listener, dir, home string) error {
	ul, ok := ln.(*net.UnixListener)
	if !ok {
		return fmt.Errorf("not a Unix socket: %s", ln.Addr())
	}
	closeListener := context.AfterFunc(ctx, func() { _ = ul.Close() })
	defer closeListener()
	type accepted struct {
		conn *net.UnixConn
		err  error
	}
	conns, ends := make(chan accepted), make(chan error, maxServed)
	running, isAccepting, isOpen := 0, false, true
	var last error
	for {
		// One Accept at a time, and none while maxServed programs run: further connections wait.
		if isOpen && !isAccepting && running < maxServed {
			isAccepting = true
			go func() {
				conn, err := ul.AcceptUnix()
				conns <- accepted{conn, err}
			}()
		}
		select {
		case a := <-conns:
			isAccepting = false
			if a.err == nil {
				_ = ul.SetDeadline(time.Time{}) // it may have come just as the last one ended
				running++
				go func() { ends <- serveConn(ctx, a.conn, dir, home) }()
				continue
			}
			isOpen = false
			if !errors.Is(a.err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
				last = a.err
			}
		case last = <-ends:
			running--
			if running == 0 && isAccepting { // the service manager accepts the next one
				_ = ul.SetDeadline(time.Unix(1, 0))
			}
		}
		if running == 0 && !isAccepting {
			_ = ul.SetDeadline(time.Time{})
			return last
		}
	}
}

// serveConn runs the program for one connection.
func serveConn(ctx context.Context, uc *net.UnixConn, dir, home string) error {
	p, err := readProgram(dir, home)
	if err != nil { // after Accept: the service manager would start it again at once for a waiting connection
		_ = uc.Close()
		return err
	}
	f, err := uc.File() // blocking, as a program expects of its stdin
	_ = uc.Close()
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	cmd := exec.Command(p.path, p.args...)
	cmd.Dir, cmd.Env = dir, append(pluginEnv(filepath.Base(dir), home), p.env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = f, f, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	killWithParent(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}

	fd := int(f.Fd())
	hangup := make(chan struct{})
	go func() {
		defer close(hangup)
		waitHangup(fd)
	}()
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	isStopping := false
	select {
	case err = <-exited:
	case <-hangup:
		isStopping = true
	case <-ctx.Done():
		isStopping = true
	}
	if isStopping {
		kill := time.AfterFunc(stopGrace, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		<-exited
		kill.Stop()
		err = nil
	}
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // processes that it left behind
	_ = unix.Shutdown(fd, unix.SHUT_RDWR)               // ends waitHangup
	<-hangup
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Errorf("the plugin ended: %s", exit)
	}
	return err
}

// waitHangup waits until the connection of a socket has ended in both directions. It reads
// nothing.
func waitHangup(fd int) {
	for {
		fds := []unix.PollFd{{Fd: int32(fd)}} // POLLHUP needs no request
		if _, err := unix.Poll(fds, -1); err == nil || !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}

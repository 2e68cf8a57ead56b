//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// protocol is how the callers of a server speak. A request is written by hand and an answer is
// only scanned for its end, in one thread for all callers: the load must be cheaper than any
// server, or no server would ever be busy.
type protocol struct {
	// open makes the i-th caller's connection and what it writes in each request, such as the
	// head of its session.
	open func(i int) (fd int, head string, err error)
	// request appends the n-th request of all callers.
	request func(b []byte, head string, n int) []byte
	// answered reports whether an answer is complete; the error is for one that is not a success.
	answered func(in []byte) (bool, error)
}

// callers are the connections of a round.
type callers struct {
	protocol
	poll  int
	byFD  map[int32]*caller
	spare []*caller // that wait for no answer
	next  *int      // numbers the requests of all sides, so that all boards are called in rotation

	done, failed int
	latency      []float64 // ms
	err          error     // the first of the failed calls
}

// caller is one connection, with at most one request in flight.
type caller struct {
	fd   int
	head string
	out  []byte
	in   []byte
	sent time.Time
}

// round is what a side did in one round.
type round struct {
	cpu     float64 // µs of the server for each operation
	busy    float64 // share of its core that the server used
	waited  float64 // share of the time in which it waited for others to leave its core
	rate    float64 // operations a second
	p99     float64 // ms
	callers int
}

// openCallers connects n callers.
func openCallers(p protocol, n int, next *int) (*callers, error) {
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	c := &callers{protocol: p, poll: poll, byFD: make(map[int32]*caller, n), next: next}
	for range n {
		if err := c.add(); err != nil {
			c.close()
			return nil, err
		}
	}
	return c, nil
}

// add connects one more caller.
func (c *callers) add() error {
	fd, head, err := c.open(len(c.byFD))
	if err != nil {
		return fmt.Errorf("caller %d: %w", len(c.byFD), err)
	}
	one := &caller{fd: fd, head: head}
	c.byFD[int32(fd)], c.spare = one, append(c.spare, one)
	return unix.EpollCtl(c.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

func (c *callers) close() {
	for fd := range c.byFD {
		closeFD(int(fd))
	}
	closeFD(c.poll)
}

// send writes the next request. It fits into the socket's buffer.
func (c *callers) send(one *caller) error {
	*c.next++
	one.out, one.in = c.request(one.out[:0], one.head, *c.next), one.in[:0]
	one.sent = time.Now()
	return write(one.fd, one.out)
}

// receive reads what there is, and takes the caller back when its answer is complete.
func (c *callers) receive(one *caller, buf []byte) error {
	n, err := read(one.fd, buf)
	if err != nil || n == 0 {
		if i := slices.Index(c.spare, one); i >= 0 { // a server may close what nothing is asked over
			c.spare = slices.Delete(c.spare, i, i+1)
			delete(c.byFD, int32(one.fd))
			closeFD(one.fd)
			return nil
		}
		return errors.Join(err, fmt.Errorf("the server closed a connection after %q", one.in))
	}
	one.in = append(one.in, buf[:n]...)
	done, err := c.answered(one.in)
	if err != nil {
		c.failed++
		if c.err == nil {
			c.err = err
		}
	}
	if done {
		c.done++
		c.latency = append(c.latency, time.Since(one.sent).Seconds()*1000)
		c.spare = append(c.spare, one)
	}
	return nil
}

// run keeps the callers busy until end: each sends its next request when it has an answer, or,
// with a pace (requests a second), when it is time for the next one.
func (c *callers) run(end time.Time, pace int) error { return c.runAt(end, pace, math.MaxInt) }

// runTimes is run without a pace, and with at most n requests.
func (c *callers) runTimes(end time.Time, n int) error { return c.runAt(end, 0, n) }

func (c *callers) runAt(end time.Time, pace, most int) error {
	events, buf := make([]unix.EpollEvent, max(len(c.byFD), 1)), make([]byte, 64<<10)
	begin, sent := time.Now(), 0
	for {
		now := time.Now()
		if (now.After(end) || sent == most) && len(c.spare) == len(c.byFD) {
			return nil
		}
		if now.After(end.Add(5 * time.Second)) {
			return fmt.Errorf("%d callers got no answer in five seconds", len(c.byFD)-len(c.spare))
		}
		for len(c.spare) > 0 && now.Before(end) && sent < most && (pace == 0 || sent < int(now.Sub(begin).Seconds()*float64(pace))+1) {
			one := c.spare[len(c.spare)-1]
			c.spare = c.spare[:len(c.spare)-1]
			if err := c.send(one); err != nil {
				return err
			}
			sent++
		}
		wait := time.Until(end.Add(time.Second))
		if pace > 0 && len(c.spare) > 0 && now.Before(end) {
			wait = time.Until(begin.Add(time.Duration(float64(sent) / float64(pace) * float64(time.Second))))
		}
		n, err := c.wait(events, wait)
		if err != nil {
			return err
		}
		for _, e := range events[:n] {
			if err := c.receive(c.byFD[e.Fd], buf); err != nil {
				return err
			}
		}
	}
}

// wait is epoll_wait with a timeout in nanoseconds, which a pace needs.
func (c *callers) wait(events []unix.EpollEvent, d time.Duration) (int, error) {
	ts := unix.NsecToTimespec(max(d, 0).Nanoseconds())
	if _, err := unix.Ppoll([]unix.PollFd{{Fd: int32(c.poll), Events: unix.POLLIN}}, &ts, nil); err != nil && err != unix.EINTR {
		return 0, err
	}
	n, err := unix.EpollWait(c.poll, events, 0)
	if err == unix.EINTR {
		return 0, nil
	}
	return n, err
}

// measure runs the callers for d after a warm-up.
func (c *callers) measure(server *process, d time.Duration, pace int) (round, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := c.run(time.Now().Add(max(d/4, 200*time.Millisecond)), pace); err != nil {
		return round{}, err
	}
	c.done, c.failed, c.latency = 0, 0, c.latency[:0]
	cpu, waited, at := server.cpu(), server.waited(), time.Now()
	if err := c.run(at.Add(d), pace); err != nil {
		return round{}, err
	}
	cpu, waited, wall := server.cpu()-cpu, server.waited()-waited, time.Since(at)
	if c.done < 100 || c.failed > c.done/1000 {
		return round{}, fmt.Errorf("%d calls, %d failed: %w", c.done, c.failed, c.err)
	}
	return round{cpu: float64(cpu.Nanoseconds()) / 1000 / float64(c.done), busy: float64(cpu) / float64(wall), waited: float64(waited) / float64(wall),
		rate: float64(c.done) / wall.Seconds(), p99: quantile(c.latency, 0.99), callers: len(c.byFD)}, nil
}

// dialFD connects a blocking socket, with a bound on how long a read or write may take.
func dialFD(addr string) (int, error) {
	a, err := net.ResolveTCPAddr("tcp4", addr)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	bound := unix.NsecToTimeval((5 * time.Second).Nanoseconds())
	// The bounds come after connect: on a socket that has them, a signal of the runtime ends a call with
	// EINTR (signal(7)), and a connect cannot be repeated as a read can.
	err = errors.Join(unix.Connect(fd, &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(a.IP.To4())}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &bound), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &bound),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	if err != nil {
		closeFD(fd)
		return -1, err
	}
	return fd, nil
}

// read is read(2), again when a signal of the runtime interrupts it.
func read(fd int, b []byte) (int, error) {
	for {
		if n, err := unix.Read(fd, b); err != unix.EINTR {
			return n, err
		}
	}
}

// write is write(2), again when a signal of the runtime interrupts it before a byte is written.
func write(fd int, b []byte) error {
	for {
		if _, err := unix.Write(fd, b); err != unix.EINTR {
			return err
		}
	}
}

func closeFD(fd int) { _ = unix.Close(fd) }

// exchange writes a request and reads until its answer is complete.
func exchange(fd int, request []byte, answered func([]byte) (bool, error)) ([]byte, error) {
	if err := write(fd, request); err != nil {
		return nil, err
	}
	var in []byte
	for buf := make([]byte, 64<<10); ; {
		n, err := read(fd, buf)
		if err != nil || n == 0 {
			return nil, errors.Join(err, fmt.Errorf("the answer ends after %q", in))
		}
		in = append(in, buf[:n]...)
		if done, err := answered(in); done || err != nil {
			return in, err
		}
	}
}

var (
	headEnd       = []byte("\r\n\r\n")
	contentLength = []byte("\r\nContent-Length: ")
	chunked       = []byte("\r\nTransfer-Encoding: chunked")
	lastChunk     = []byte("\r\n0\r\n\r\n")
	toolFailed    = []byte(`"isError"`)
	rpcFailed     = []byte(`"error":{`)
)

// answeredHTTP is protocol.answered of HTTP/1.1 as net/http servers write it.
func answeredHTTP(in []byte) (bool, error) {
	end := bytes.Index(in, headEnd)
	if end < 0 {
		return false, nil
	}
	head, body := in[:end], in[end+len(headEnd):]
	if _, length, ok := bytes.Cut(head, contentLength); ok {
		line, _, _ := bytes.Cut(length, []byte("\r\n"))
		n, err := strconv.Atoi(string(line))
		if err != nil {
			return false, err
		}
		if len(body) < n {
			return false, nil
		}
	} else if bytes.Contains(head, chunked) {
		if !bytes.HasSuffix(body, lastChunk) {
			return false, nil
		}
	}
	if !bytes.HasPrefix(in, []byte("HTTP/1.1 2")) || bytes.Contains(body, toolFailed) || bytes.Contains(body, rpcFailed) {
		return true, fmt.Errorf("%.300q", in)
	}
	return true, nil
}

// answeredMessage is protocol.answered of one WebSocket message, which a server does not mask.
func answeredMessage(in []byte) (bool, error) {
	if len(in) < 2 {
		return false, nil
	}
	head, n := 2, int(in[1])
	if n == 126 && len(in) >= 4 {
		head, n = 4, int(in[2])<<8|int(in[3])
	}
	if in[0] != 0x81 || n > 126 && head == 2 {
		return true, fmt.Errorf("not a short text message: % x", in[:2])
	}
	return len(in) >= head+n, nil
}

// maskedMessage is a client's WebSocket text message of 126 bytes or more, with a mask of zeros.
func maskedMessage(text []byte) []byte {
	b := append([]byte{0x81, 0x80 | 126, byte(len(text) >> 8), byte(len(text))}, 0, 0, 0, 0)
	return append(b, text...)
}

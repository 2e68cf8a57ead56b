package control

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// errFraming means that the next message cannot be found in the stream.
var errFraming = errors.New("wrong framing")

// errStreamLength means that the producer of a streamed message gave another number of
// bytes than the header announced, so the connection cannot be used any more.
var errStreamLength = errors.New("a streamed message is not as long as announced")

// frameReader reads messages, each behind header lines that end with CRLF:
//
//	Content-Length: 17\r\n
//	\r\n
//	{"jsonrpc":"2.0"}
//
// Content-Length must be given once, in decimal digits. Other header lines are skipped. The
// length of a line and their number are bounded, so a client cannot make the daemon read a
// header without end. jrpc2's own framing has no such bounds and accepts bare LFs.
type frameReader struct {
	in  *bufio.Reader
	max int // bytes of a body
}

// newFrameReader returns a reader whose buffer holds one header line.
func newFrameReader(r io.Reader, maxBody int) frameReader {
	return frameReader{bufio.NewReaderSize(r, maxHeader), maxBody}
}

// waitMessage returns when a message has begun, and io.EOF at the end between two messages.
func (r *frameReader) waitMessage() error {
	_, err := r.in.Peek(1)
	return err
}

// header reads the header lines and returns the length of the body, at most r.max.
func (r *frameReader) header() (int, error) {
	length := -1
	for range maxLines {
		line, err := r.line()
		if err != nil {
			return 0, err
		}
		if len(line) == 0 {
			if length < 0 {
				return 0, fmt.Errorf("%w: no Content-Length", errFraming)
			}
			return length, nil
		}
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || !isToken(name) {
			return 0, fmt.Errorf("%w: a header line is not \"Name: value\"", errFraming)
		}
		if !strings.EqualFold(string(name), "Content-Length") {
			continue
		}
		if length >= 0 {
			return 0, fmt.Errorf("%w: Content-Length twice", errFraming)
		}
		if length, err = r.length(bytes.Trim(value, " \t")); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("%w: more than %d header lines", errFraming, maxLines)
}

// isToken reports whether a header's name consists of letters, digits and dashes.
func isToken(name []byte) bool {
	const chars = "-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	return len(name) > 0 && len(bytes.Trim(name, chars)) == 0
}

// line reads one header line without its CRLF. It is valid until the next read.
func (r *frameReader) line() ([]byte, error) {
	line, err := r.in.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, fmt.Errorf("%w: a header line is longer than %d bytes", errFraming, maxHeader)
	case errors.Is(err, io.EOF):
		return nil, io.ErrUnexpectedEOF
	case err != nil:
		return nil, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok {
		return nil, fmt.Errorf("%w: a header line does not end with CRLF", errFraming)
	}
	return line, nil
}

// length parses the value of Content-Length, which has no sign.
func (r *frameReader) length(digits []byte) (int, error) {
	n, err := strconv.ParseUint(string(digits), 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange) || err == nil && n > uint64(r.max):
		return 0, fmt.Errorf("%w: the message is longer than %d bytes", errFraming, r.max)
	case err != nil:
		return 0, fmt.Errorf("%w: Content-Length is not a number", errFraming)
	}
	return int(n), nil
}

// body reads the body into b, which is as long as the header says.
func (r *frameReader) body(b []byte) error {
	_, err := io.ReadFull(r.in, b)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// frame returns a message with its header.
func frame(body []byte) []byte {
	f := make([]byte, 0, len("Content-Length: \r\n\r\n")+10+len(body))
	return append(appendHeader(f, len(body)), body...)
}

// appendHeader appends the header of a body of n bytes.
func appendHeader(b []byte, n int) []byte {
	b = append(b, "Content-Length: "...)
	b = strconv.AppendInt(b, int64(n), 10)
	return append(b, "\r\n\r\n"...)
}

// wire is one end of a connection. It writes whole frames, one at a time, and closes a
// connection whose peer does not read.
type wire struct {
	nc     net.Conn
	reader frameReader
	closed chan struct{} // closed by Close

	// writing holds a value while a frame is written. It is a channel rather than a mutex,
	// so that waiting for it ends when the connection is closed.
	writing   chan struct{}
	closeOnce sync.Once
}

func newWire(nc net.Conn, maxBody int) *wire {
	return &wire{nc: nc, reader: newFrameReader(nc, maxBody), closed: make(chan struct{}), writing: make(chan struct{}, 1)}
}

// lockWrite waits until no other frame is written.
func (w *wire) lockWrite() error {
	select {
	case w.writing <- struct{}{}:
		return nil
	case <-w.closed:
		return net.ErrClosed
	}
}

// write sends a frame. After a partial or timed-out write the connection is closed; after
// another error the peer's last message may still be readable.
func (w *wire) write(f []byte) error {
	if err := w.lockWrite(); err != nil {
		return err
	}
	defer func() { <-w.writing }()
	n, err := w.writePart(f)
	if n > 0 && n < len(f) || errors.Is(err, os.ErrDeadlineExceeded) {
		w.nc.Close()
	}
	return err
}

// writePart writes with a new deadline. The caller holds the write lock.
func (w *wire) writePart(part []byte) (int, error) {
	w.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	return w.nc.Write(part)
}

// stream sends a frame whose body of n bytes fn produces while it is written. When fn fails
// or writes another number of bytes, the connection is closed: the header with the length was
// sent, so the peer could not find the next message. Each part has its own write deadline;
// the whole is bounded by the context that fn checks.
func (w *wire) stream(n int, fn func(write func(part []byte) error) error) error {
	if err := w.lockWrite(); err != nil {
		return err
	}
	defer func() { <-w.writing }()
	sent, isWhole := 0, false
	defer func() {
		if !isWhole { // also after a panic
			w.nc.Close()
		}
	}()
	_, err := w.writePart(appendHeader(nil, n))
	if err == nil {
		err = fn(func(part []byte) error {
			if sent += len(part); sent > n {
				return errStreamLength
			}
			_, err := w.writePart(part)
			return err
		})
	}
	if err == nil && sent < n {
		err = errStreamLength
	}
	isWhole = err == nil
	return err
}

// isHungUp reports whether the other end is closed, without reading from it: a request may be
// waiting there. A long query checks it, whose first write may be a minute away. In tests nc
// may be a net.Pipe, which has no descriptor and never reports a hang-up.
func (w *wire) isHungUp() (gone bool) {
	sc, ok := w.nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Control(func(fd uintptr) { gone = isHungUp(fd) })
	return gone || err != nil
}

// Close closes the connection; the second time it does nothing.
func (w *wire) Close() error {
	err := net.ErrClosed
	w.closeOnce.Do(func() {
		close(w.closed)
		err = w.nc.Close()
	})
	return err
}

package process

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of a lineChannel.
const (
	maxLine = 4 << 20 // bytes of a plugin's message; a longer one ends the connection
	// sendTimeout is how long a plugin may leave a message unread: as long as one that works
	// may answer nothing (liveness).
	sendTimeout = maxUnansweredBusy * pingInterval
	// maxReadAhead bounds the bytes that are read while a message is unread. Each message
	// counts messageOverhead in addition to its size.
	maxReadAhead    = 32 << 20
	messageOverhead = 16 << 10
)

// lineChannel is a jrpc2 channel of one JSON value a line, with bounds in both directions.
// jrpc2 calls Send under a lock and Recv from one goroutine.
//
// Both bounds protect the relay from a plugin that stops reading: sendTimeout ends the
// connection, and until then maxReadAhead stops the reading of further messages.
type lineChannel struct {
	in    *bufio.Scanner
	out   deadlineWriter
	abort func() // ends both directions at once, whatever the plugin does
	stop  func() error

	// onNotification handles notifications in their order; nil: jrpc2 gets them. Only Recv uses it.
	onNotification func(method string, params json.RawMessage)
	// onNoise gets lines that cannot be messages; nil: such a line ends the connection. Only Recv
	// uses it.
	onNoise func(line []byte)

	sendErr   error         // of an earlier Send: part of a message may be out. Only Send uses it
	isBroken  atomic.Bool   // there is a sendErr
	isClosing atomic.Bool   // Send does not wait any more
	sendSlot  chan struct{} // capacity 1: held by a Send
	readAhead atomic.Int64  // bytes that were read since the last Send ended
	messages  atomic.Int64  // that were read
	isStopped func() bool   // the server's process is stopped by a signal
}

// deadlineWriter is a writer with a write deadline: a pipe or a socket.
type deadlineWriter interface {
	io.Writer
	SetWriteDeadline(t time.Time) error
}

// newLineChannel makes a channel. abort must end a Write and a Read that are blocked; stop
// ends both directions and waits for a process. stop is called once.
func newLineChannel(r io.Reader, w deadlineWriter, abort func(), stop func() error) *lineChannel {
	l := &lineChannel{in: bufio.NewScanner(r), out: w, abort: abort, stop: sync.OnceValue(stop), sendSlot: make(chan struct{}, 1), isStopped: func() bool { return false }}
	l.in.Buffer(make([]byte, 0, 16<<10), maxLine)
	return l
}

// Send writes one message, which jrpc2 encodes without newlines. Meanwhile all other calls
// and the end of the connection wait, so it aborts the connection to a plugin that reads
// nothing for sendTimeout.
//
// A Send that failed may have written a part of its message. Later ones return the same
// error, because the plugin would read their bytes as the rest of that message.
func (l *lineChannel) Send(b []byte) error {
	if l.sendErr != nil {
		return l.sendErr
	}
	l.sendSlot <- struct{}{}
	defer func() { l.readAhead.Store(0); <-l.sendSlot }()
	_ = l.out.SetWriteDeadline(time.Now().Add(sendTimeout))
	if l.isClosing.Load() { // checked after the deadline was set: abortSend may have been called before
		l.abortSend()
	}
	if n, err := l.out.Write(append(b, '\n')); err != nil {
		l.sendErr = fmt.Errorf("it reads no messages: %w", err)
		l.isBroken.Store(true)
		l.abort()
		if n > 0 {
			return partlySentError{l.sendErr}
		}
		return l.sendErr
	}
	return nil
}

// partlySentError is the error of the Send that has written a part of its message.
type partlySentError struct{ error }

// notSentError is the error of a request of which nothing was sent, since the connection had ended.
type notSentError struct{ error }

// abortSend ends a Send that is waiting, and makes further ones fail at once.
func (l *lineChannel) abortSend() {
	l.isClosing.Store(true)
	_ = l.out.SetWriteDeadline(time.Unix(1, 0))
}

// notify passes a notification on and reports whether b was one. jrpc2 handles each message in a
// separate goroutine, so it would report the progress of a call after its result, or in
// another order.
func (l *lineChannel) notify(b []byte) bool {
	if l.onNotification == nil || !bytes.Contains(b, []byte(`"method"`)) {
		return false
	}
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params json.RawMessage `json:"params"`
	}
	if json.Unmarshal(b, &m) != nil || m.Method == "" || len(m.ID) > 0 {
		return false // jrpc2 refuses what is malformed
	}
	l.onNotification(m.Method, m.Params)
	return true
}

// Recv reads one message. While a Send waits, jrpc2 queues incoming messages without bound, so
// after maxReadAhead Recv waits for the Send to end.
//
// Empty lines are skipped, and so is what an adopted server prints between its messages, as clients
// of MCP do. It is no sign of life. A line longer than maxLine is an error, which ends the
// connection. The result is a copy, since the scanner overwrites its buffer.
func (l *lineChannel) Recv() ([]byte, error) {
	for l.in.Scan() {
		if b := bytes.TrimSpace(l.in.Bytes()); len(b) > 0 {
			if l.onNoise != nil && b[0] != '{' && b[0] != '[' {
				l.onNoise(b)
				continue
			}
			l.messages.Add(1)
			if l.readAhead.Add(int64(len(b))+messageOverhead) > maxReadAhead {
				l.sendSlot <- struct{}{}
				l.readAhead.Store(0)
				<-l.sendSlot
			}
			if l.notify(b) {
				continue
			}
			return bytes.Clone(b), nil
		}
	}
	if errors.Is(l.in.Err(), bufio.ErrTooLong) {
		return nil, errTooLong
	}
	return nil, cmp.Or(l.in.Err(), io.EOF)
}

// What a server sent that ends its connection.
var (
	errTooLong    = fmt.Errorf("it sent a message of more than %d MiB", maxLine>>20)
	errNotMessage = errors.New("it wrote a line to stdout that is not a JSON-RPC message")
)

// Close ends both directions.
func (l *lineChannel) Close() error { return l.stop() }

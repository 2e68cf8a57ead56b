// Package sse is one event-stream writer and reader. The writer knows what the
// peer's TCP has not acknowledged yet, so a reader that stalls is seen within a
// few frames although its frames still fit into kernel buffers.
//
// Server, in the request's own goroutine:
//
//	listener  sse.NewListener(tcp), with tls.NewListener above it or not
//	handler   wr, err := streams.Open(w, r, sse.Options{})
//	          code := sse.CodeOf(sse.Run(ctx, wr, sub, frame))
//	          wr.Close(code)
//
// Wire (RFC-0009 §3, §5, §7):
//
//	HTTP/1.1 200 OK, Content-Type: text/event-stream; charset=utf-8, Connection: close
//	event: metric    data: {...}                      a frame, always one write
//	event: ping      data: {}                         every 25 s from the opening on
//	event: close     data: {"code":N,"reason":"..."}  the last event, then FIN
//
// A stream takes its connection over from net/http (Hijack), because that
// halves what an event costs above the write itself. net/http then neither
// cancels the request's context when the client goes, which is Run's to notice,
// nor waits for the stream on Shutdown, which is Drain's.
//
// What nobody can see from here: a program that stops reading while its kernel still
// has room and goes on acknowledging; and what lies behind a proxy, whose
// acknowledgements are the proxy's.
//
// On a connection that is not TCP, and on other systems than Linux, nobody can say
// what the peer has acknowledged; there "acknowledged" means taken by the
// connection, and a write that blocks is kept and tried again.
package sse

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Code is a close code of RFC-0009 §7. The enum is closed; it lives in the close
// event's JSON and has nothing to do with HTTP.
type Code int

const (
	Normal        Code = 1000 // the client closed, or the server shuts down
	IdleTimeout   Code = 4408 // no read progress for 90 s
	Backpressure  Code = 4413 // more than 3 frames behind
	RateLimited   Code = 4429 // too many streams of one tenant
	DeviceOffline Code = 4503 // the device's link was lost
)

var codes = [...]struct {
	code   Code
	reason string
}{
	{Normal, "normal"},
	{IdleTimeout, "idle_timeout"},
	{Backpressure, "backpressure"},
	{RateLimited, "rate_limited"},
	{DeviceOffline, "device_offline"},
}

// index is c's place in codes, -1 for a number that is no close code.
func (c Code) index() int {
	for i := range codes {
		if codes[i].code == c {
			return i
		}
	}
	return -1
}

// Reason is the word that goes with the code; empty for a number that is none.
func (c Code) Reason() string {
	if i := c.index(); i >= 0 {
		return codes[i].reason
	}
	return ""
}

// Why a stream ends, or a call is refused.
var (
	ErrBackpressure = errors.New("sse: reader is more than 3 frames behind")
	ErrIdle         = errors.New("sse: no read progress")
	ErrPeerClosed   = errors.New("sse: client closed")
	ErrClosed       = errors.New("sse: stream closed")
	ErrDraining     = errors.New("sse: shutting down")
	ErrField        = errors.New("sse: CR, LF or NUL in a field")
	ErrFrame        = errors.New("sse: frame is not one whole event")
)

// CodeOf is the close code for the error that ended a stream: ErrBackpressure and
// ErrIdle have their own, everything else this package or a context says is Normal.
func CodeOf(err error) Code {
	switch {
	case errors.Is(err, ErrBackpressure):
		return Backpressure
	case errors.Is(err, ErrIdle):
		return IdleTimeout
	}
	return Normal
}

// AppendEvent appends one whole event: its type, a data line for each of lines,
// and the blank line. An empty event is left out (the type is then "message").
// CR and LF are refused with ErrField, so a value can never become a field; dst
// is returned as it was.
func AppendEvent(dst []byte, event string, lines ...[]byte) ([]byte, error) {
	if strings.ContainsAny(event, "\r\n") {
		return dst, ErrField
	}
	for _, l := range lines {
		if bytes.ContainsAny(l, "\r\n") {
			return dst, ErrField
		}
	}
	if event != "" {
		dst = appendField(dst, "event: ", event)
	}
	for _, l := range lines {
		dst = appendField(dst, "data: ", l)
	}
	return append(dst, '\n'), nil
}

// AppendEventID is AppendEvent with an id line in front. An id may not hold NUL
// either, since readers ignore such an id.
func AppendEventID(dst []byte, id, event string, lines ...[]byte) ([]byte, error) {
	if strings.ContainsAny(id, "\r\n\x00") {
		return dst, ErrField
	}
	n := len(dst)
	out, err := AppendEvent(appendField(dst, "id: ", id), event, lines...)
	if err != nil {
		return out[:n], err
	}
	return out, nil
}

func appendField[T string | []byte](dst []byte, name string, value T) []byte {
	dst = append(dst, name...)
	dst = append(dst, value...)
	return append(dst, '\n')
}

// AppendClose appends the close event of a code, and refuses a number that is none.
func AppendClose(dst []byte, c Code) ([]byte, error) {
	if c.Reason() == "" {
		return dst, fmt.Errorf("sse: %d is not a close code", int(c))
	}
	dst = append(dst, "event: close\ndata: {\"code\":"...)
	dst = strconv.AppendInt(dst, int64(c), 10)
	dst = append(dst, ",\"reason\":\""...)
	dst = append(dst, c.Reason()...)
	return append(dst, "\"}\n\n"...), nil
}

package sse

import (
	"errors"
	"fmt"
)

// Code is a close code of RFC-0009 §7. The set is closed. It appears in the JSON of the
// close event and is not an HTTP status.
type Code int

// The close codes.
const (
	Normal        Code = 1000 // the client closed, or the server shuts down
	IdleTimeout   Code = 4408 // no read progress for 90 s
	Backpressure  Code = 4413 // more than 3 frames behind
	RateLimited   Code = 4429 // too many streams of one tenant
	DeviceOffline Code = 4503 // the device's link was lost
)

var reasons = map[Code]string{
	Normal:        "normal",
	IdleTimeout:   "idle_timeout",
	Backpressure:  "backpressure",
	RateLimited:   "rate_limited",
	DeviceOffline: "device_offline",
}

// Reason returns the word that is sent with the code; "" for a number that is not a close
// code.
func (c Code) Reason() string { return reasons[c] }

// CodeOf maps the error that ended a stream to its close code. ErrBackpressure and
// ErrIdle have their own; every other error of this package or of a context is Normal.
func CodeOf(err error) Code {
	switch {
	case errors.Is(err, ErrBackpressure):
		return Backpressure
	case errors.Is(err, ErrIdle):
		return IdleTimeout
	}
	return Normal
}

// AppendClose appends the close event for a code. It refuses a number that is not a
// close code.
func AppendClose(dst []byte, c Code) ([]byte, error) {
	if c.Reason() == "" {
		return dst, fmt.Errorf("sse: %d is not a close code", int(c))
	}
	return AppendEvent(dst, "close", fmt.Appendf(nil, `{"code":%d,"reason":"%s"}`, int(c), c.Reason()))
}

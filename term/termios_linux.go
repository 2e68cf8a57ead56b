package term

import "golang.org/x/sys/unix"

// Requests of termios(3): get, set at once, and set after the input was discarded.
const (
	getTermios      = unix.TCGETS
	setTermios      = unix.TCSETS
	setTermiosFlush = unix.TCSETSF
)

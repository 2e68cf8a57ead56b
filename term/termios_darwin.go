package term

import "golang.org/x/sys/unix"

// Requests of termios(4): get, set at once, and set after the input was discarded.
const (
	getTermios      = unix.TIOCGETA
	setTermios      = unix.TIOCSETA
	setTermiosFlush = unix.TIOCSETAF
)

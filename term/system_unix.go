//go:build !windows

package term

import (
	"os"

	"golang.org/x/sys/unix"
)

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), getTermios)
	return err == nil
}

// sizeOf returns the size of a terminal, 0 if it does not know it.
func sizeOf(f *os.File) (width, height int, isTerminal bool) {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	return int(size.Col), int(size.Row), true
}

// enableEscapes makes a terminal understand escape sequences, which all of these do.
func enableEscapes(*os.File) bool { return true }

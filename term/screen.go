//go:build !windows

package term

import (
	"context"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// The escape sequences are those of xterm (ctlseqs, "Functions using CSI"), which today's
// terminal emulators and the Linux console support:
//
//	ESC [ ? 1049 h / l   to the alternate screen buffer and back
//	ESC [ ? 25 l / h     hide and show the cursor
//	ESC [ H              cursor to the top left
//	ESC [ K              erase to the end of the line
//	ESC [ J, ESC [ 2 J   erase to the end of the screen, and all of it
//	ESC [ 0 m            no color and no attribute

// Screen is a terminal in the mode of a live view: the alternate screen buffer, no cursor, no
// echo. Leave restores it; the caller must ensure that it runs, even after a panic.
// Its methods may be called concurrently.
type Screen struct {
	out *os.File

	mu     sync.Mutex // protects the fields below
	active bool
	saved  *unix.Termios // settings of standard input; nil: it is not a terminal
}

// NewScreen returns a screen on out, which must be a terminal.
func NewScreen(out *os.File) *Screen { return &Screen{out: out} }

// Enter switches the terminal to the live view.
func (s *Screen) Enter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active {
		return
	}
	s.active = true
	stdin := int(os.Stdin.Fd())
	if t, err := unix.IoctlGetTermios(stdin, getTermios); err == nil {
		saved := *t
		s.saved = &saved
		t.Lflag &^= unix.ECHO | unix.ICANON // ISIG stays: Ctrl-C and Ctrl-Z send signals
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 0, 0
		_ = unix.IoctlSetTermios(stdin, setTermios, t)
	}
	_, _ = io.WriteString(s.out, "\x1b[?1049h\x1b[?25l\x1b[2J")
}

// Leave restores the terminal to its state before Enter. It does nothing if Enter was not
// called.
func (s *Screen) Leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.active {
		return
	}
	s.active = false
	_, _ = io.WriteString(s.out, "\x1b[0m\x1b[?25h\x1b[?1049l")
	if s.saved != nil {
		_ = unix.IoctlSetTermios(int(os.Stdin.Fd()), setTermiosFlush, s.saved)
	}
}

// Draw shows lines from the top, cut to the size of the terminal. It overwrites what is
// there instead of clearing the screen first, in one write, so that nothing flickers.
func (s *Screen) Draw(lines []string) error {
	width, height, _ := Size(s.out)
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range lines[:min(len(lines), height)] {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(Truncate(line, width))
		b.WriteString("\x1b[K")
	}
	b.WriteString("\x1b[J")
	_, err := io.WriteString(s.out, b.String())
	return err
}

// Suspend handles Ctrl-Z: it restores the terminal, stops this process, and enters the live
// view again when the process is continued.
func (s *Screen) Suspend() {
	s.Leave()
	_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
	s.Enter()
}

// WatchKeys calls quit when q is typed. It returns at most 200 ms after ctx ends, or at
// once when standard input is not a terminal. It polls because a read of a terminal cannot
// be interrupted: a goroutine in one would outlive the view and take the shell's input.
func WatchKeys(ctx context.Context, quit func()) {
	if !IsTerminal(os.Stdin) {
		return
	}
	fds := []unix.PollFd{{Fd: int32(os.Stdin.Fd()), Events: unix.POLLIN}}
	var buf [16]byte
	for ctx.Err() == nil {
		if n, err := unix.Poll(fds, 200); n <= 0 || err != nil {
			continue
		}
		n, err := unix.Read(int(os.Stdin.Fd()), buf[:])
		if err != nil || n == 0 { // the terminal hung up
			return
		}
		if strings.ContainsAny(string(buf[:n]), "qQ") {
			quit()
		}
	}
}

package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// terminalSize is the size of the terminal that w is, else that of COLUMNS and LINES, else
// 80 by 24. tell says whether it is a terminal.
func terminalSize(w io.Writer) (width, height int, tell bool) {
	if f, ok := w.(*os.File); ok {
		ws, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
		if err == nil && ws.Col > 0 && ws.Row > 0 {
			return int(ws.Col), int(ws.Row), true
		}
		tell = err == nil // a terminal that does not know its size, such as a serial line
	}
	number := func(name string, def int) int {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n >= 10 && n <= 1000 {
			return n
		}
		return def
	}
	return number("COLUMNS", 80), number("LINES", 24), tell
}

// asciiOnly tells whether the locale or the terminal knows no more than ASCII.
func asciiOnly() bool {
	if t := os.Getenv("TERM"); t == "linux" || t == "dumb" { // the console's font has no braille
		return true
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := os.Getenv(name); v != "" {
			v = strings.ToUpper(strings.ReplaceAll(v, "-", ""))
			return !strings.Contains(v, "UTF8")
		}
	}
	return true
}

// colours tells whether w may be written in colours.
func colours(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isTerminal(f) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// paint is text in a colour (SGR), when on.
func paint(on bool, sgr, text string) string {
	if !on || text == "" {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

// SGR codes.
const (
	bold   = "1"
	faint  = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "36"
)

// screen is a terminal taken over for a live view: the other screen buffer, no cursor, no
// echo. leave puts everything back.
type screen struct {
	out    *os.File
	mu     sync.Mutex // protects the fields below
	taken  bool
	before *unix.Termios // of standard input; nil: it is no terminal
}

func (s *screen) enter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken {
		return
	}
	s.taken = true
	if t, err := unix.IoctlGetTermios(int(os.Stdin.Fd()), unix.TCGETS); err == nil {
		before := *t
		s.before = &before
		t.Lflag &^= unix.ECHO | unix.ICANON // signals stay: Ctrl-C and Ctrl-Z work
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 0, 0
		_ = unix.IoctlSetTermios(int(os.Stdin.Fd()), unix.TCSETS, t)
	}
	_, _ = io.WriteString(s.out, "\x1b[?1049h\x1b[?25l\x1b[2J")
}

func (s *screen) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.taken {
		return
	}
	s.taken = false
	_, _ = io.WriteString(s.out, "\x1b[0m\x1b[?25h\x1b[?1049l")
	if s.before != nil {
		_ = unix.IoctlSetTermios(int(os.Stdin.Fd()), unix.TCSETSF, s.before)
	}
}

// draw shows lines from the top, cut to the size of the terminal, in one write.
func (s *screen) draw(lines []string) error {
	width, height, _ := terminalSize(s.out)
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, l := range lines[:min(len(lines), height)] {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(cutLine(l, width))
		b.WriteString("\x1b[K")
	}
	b.WriteString("\x1b[J")
	_, err := io.WriteString(s.out, b.String())
	return err
}

// stopped handles Ctrl-Z: the terminal is given back for as long as the program stands
// still. It returns when the program was told to go on.
func (s *screen) stopped() {
	s.leave()
	_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
	s.enter()
}

// keys calls quit when q is typed. It returns when ctx ends, a fifth of a second later at
// most, or when standard input is no terminal.
func (s *screen) keys(ctx context.Context, quit func()) {
	if !isTerminal(os.Stdin) {
		return
	}
	fds := []unix.PollFd{{Fd: int32(os.Stdin.Fd()), Events: unix.POLLIN}}
	var buf [16]byte
	for ctx.Err() == nil {
		if n, err := unix.Poll(fds, 200); n <= 0 || err != nil {
			continue
		}
		n, err := unix.Read(int(os.Stdin.Fd()), buf[:])
		if err != nil || n == 0 { // hung up
			return
		}
		if strings.ContainsAny(string(buf[:n]), "qQ") {
			quit()
		}
	}
}

// notify is signal.Notify with a channel that keeps one signal.
func notify(sig ...os.Signal) chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, sig...)
	return c
}

package term

import (
	"io"
	"os"
	"strconv"
	"strings"
)

// IsTerminal reports whether f is a terminal: it has terminal settings (termios(3)), or is a
// console of Windows. A pipe, a file and /dev/null have none.
func IsTerminal(f *os.File) bool { return isTerminal(f) }

// AsTerminal returns w as a file when it is a terminal, else nil. Any other writer, such as the buffer of a
// test, is like a pipe.
func AsTerminal(w any) *os.File {
	if f, ok := w.(*os.File); ok && IsTerminal(f) {
		return f
	}
	return nil
}

// Size returns the size of the terminal w, else that of the environment's COLUMNS and LINES,
// else 80 by 24. isTerminal reports whether w is a terminal; one that does not know its
// size, such as a serial line, is one too.
func Size(w io.Writer) (width, height int, isTerminal bool) {
	if f, ok := w.(*os.File); ok {
		if width, height, isTerminal = sizeOf(f); width > 0 && height > 0 {
			return width, height, true
		}
	}
	number := func(name string, def int) int {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n >= 10 && n <= 1000 {
			return n
		}
		return def
	}
	return number("COLUMNS", 80), number("LINES", 24), isTerminal
}

// ASCIIOnly reports whether the locale or the terminal shows ASCII only. The Linux
// console counts as such: its font has no braille.
func ASCIIOnly() bool {
	if t := os.Getenv("TERM"); t == "linux" || t == "dumb" {
		return true
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := os.Getenv(name); v != "" {
			return !strings.Contains(strings.ToUpper(strings.ReplaceAll(v, "-", "")), "UTF8")
		}
	}
	return true
}

// ColorEnabled reports whether w may be written in color (https://no-color.org).
func ColorEnabled(w io.Writer) bool {
	f := AsTerminal(w)
	return f != nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && enableEscapes(f)
}

// Colors and attributes, as the parameter of an SGR sequence (ECMA-48 §8.3.117).
const (
	Bold   = "1"
	Faint  = "2"
	Red    = "31"
	Green  = "32"
	Yellow = "33"
	Cyan   = "36"
)

// Paint returns text in a color or attribute, or text itself when that is not enabled or
// sgr is empty.
func Paint(enabled bool, sgr, text string) string {
	if !enabled || sgr == "" || text == "" {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

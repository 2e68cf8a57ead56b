package term

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// SafeLine returns text from another machine as one line that cannot control a terminal. A
// board, an agent or a relay chooses names, messages and error texts; printed as they are
// they could move the cursor, rename the window, or reverse what a person reads. A
// character that is not graphic (a control character of C0 or C1, a bidirectional override,
// a line break) becomes '?'.
func SafeLine(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) {
			return r
		}
		return '?'
	}, s)
}

// SafeText is SafeLine for text of several lines: line breaks stay, a tab becomes spaces.
func SafeText(s string) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = SafeLine(strings.ReplaceAll(line, "\t", "    "))
	}
	return strings.Join(lines, "\n")
}

// Indent is SafeText with each line indented by two spaces.
func Indent(s string) string {
	s = strings.ReplaceAll(strings.TrimRight(s, "\r\n"), "\r\n", "\n")
	return "  " + strings.ReplaceAll(SafeText(s), "\n", "\n  ")
}

// Truncate cuts a line to width columns. Color sequences (SGR) take no column and are kept,
// those beyond width too: they end the colors that began before it.
func Truncate(s string, width int) string {
	var b strings.Builder
	columns, inEscape := 0, false
	for _, r := range s {
		switch {
		case inEscape:
			inEscape = r != 'm'
		case r == '\x1b':
			inEscape = true
		default:
			if columns++; columns > width {
				continue
			}
		}
		b.WriteRune(r)
	}
	return b.String()
}

// Wrap breaks text between words into lines of at most width bytes; a longer word stays
// whole, so that commands and paths can be copied. It returns at least one line. Text beyond ASCII has more
// bytes than columns, and is broken earlier than it needs to be.
func Wrap(s string, width int) []string {
	lines := []string{""}
	for _, word := range strings.Fields(s) {
		last := &lines[len(lines)-1]
		switch {
		case *last == "":
			*last = word
		case len(*last)+1+len(word) <= width:
			*last += " " + word
		default:
			lines = append(lines, word)
		}
	}
	return lines
}

// JSONWriter returns a writer for JSON text: w itself, or, when w is a terminal, one that
// escapes what could control it. Encoders leave C1 controls and bidirectional overrides as
// they are; escaped (\u009b) they mean the same to a JSON parser. Each Write must hold
// whole UTF-8 characters.
func JSONWriter(w io.Writer) io.Writer {
	if f, ok := w.(*os.File); ok && IsTerminal(f) {
		return jsonEscaper{w}
	}
	return w
}

type jsonEscaper struct{ w io.Writer }

func (e jsonEscaper) Write(b []byte) (int, error) {
	_, err := e.w.Write(appendEscaped(nil, b, unicode.MaxRune))
	return len(b), err
}

// appendEscaped appends JSON to out with those characters escaped that are not graphic, up to last.
func appendEscaped(out, b []byte, last rune) []byte {
	for _, r := range string(b) {
		switch {
		case r < 0x7f || unicode.IsGraphic(r) || r > last: // a raw C0 control is white space between values
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, "\\u%04x\\u%04x", high, low)
		default:
			out = fmt.Appendf(out, "\\u%04x", r)
		}
	}
	return out
}

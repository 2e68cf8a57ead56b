package process

import (
	"strings"
	"sync"
	"unicode"
)

// Texts of servers, made safe for a terminal, a log, a manifest and the person who reads those. Invisible
// characters could hide words or change what is around them.

// printable replaces characters that could control a terminal: control characters, and those
// that change the direction of writing.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) {
			return r
		}
		return '?'
	}, s)
}

// oneLine makes a text of a server one printable line of at most n characters.
func oneLine(s string, n int) string {
	r := []rune(strings.TrimSpace(printable(strings.Join(strings.Fields(s), " "))))
	return string(r[:min(len(r), n)])
}

// plainText makes a description of a server one that a manifest may have: printable characters, tabs
// and line breaks, at most 8192. Invisible characters, which could hide words from the person who
// reviews it, become question marks. A text without any is replaced by fallback.
func plainText(s, fallback string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r == '\r':
			return -1
		case r == '\n' || r == '\t' || unicode.IsGraphic(r) && !unicode.Is(unicode.Variation_Selector, r):
			return r
		}
		return '?'
	}, s)
	r := []rune(strings.TrimSpace(s))
	if len(r) == 0 {
		return oneLine(fallback, 200)
	}
	return string(r[:min(len(r), 8192)])
}

// tailBuffer keeps the end of what a server writes to stderr.
type tailBuffer struct {
	mu sync.Mutex // protects b
	b  []byte
}

// maxTail bounds a tailBuffer, bytes.
const maxTail = 2 << 10

// Write implements io.Writer.
func (t *tailBuffer) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	// Moved to the front of the same array, which does not grow beyond maxTail and the longest write.
	if n := len(t.b) - maxTail; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(b), nil
}

// String returns the last lines in printable characters.
func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var lines []string
	for line := range strings.Lines(strings.ToValidUTF8(string(t.b), "?")) {
		if line = oneLine(line, 200); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}

package journal

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// lineReader reads lines of any length with bounded memory.
type lineReader struct {
	r   *bufio.Reader
	buf []byte // reused
}

func newLineReader(r io.Reader) *lineReader {
	return &lineReader{r: bufio.NewReaderSize(r, 64<<10)}
}

// next returns the next line without its newline, which the last line need not have. isCut reports
// that the line is longer: the first maxLine bytes are returned. The line is valid until the next
// call. The error is the reader's.
func (l *lineReader) next() (line []byte, isCut bool, err error) {
	l.buf = l.buf[:0]
	for {
		part, err := l.r.ReadSlice('\n')
		if free := maxLine - len(l.buf); len(part) > free {
			part, isCut = part[:free], true
		}
		l.buf = append(l.buf, part...)
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil && (len(l.buf) == 0 || !errors.Is(err, io.EOF)):
			return nil, false, err
		}
		return bytes.TrimSuffix(l.buf, []byte("\n")), isCut, nil
	}
}

// entry is an entry of the journal, before redaction.
type entry struct {
	Line
	cursor string
}

// parseEntry parses a line of `journalctl -o json`: an object whose values are
//
//	"text"                 a field
//	[104, 105, 255]        a field that is not UTF-8, as bytes
//	["one", [104, 105]]    a field that the entry has several times
//	null                   a field that is too large
//
// If the object is cut or damaged, parseEntry keeps the fields before that place.
func parseEntry(line []byte) (e entry) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(line), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	fields := map[string]string{}
	if begin, err := dec.ReadToken(); err != nil || begin.Kind() != '{' {
		return entry{}
	}
	for dec.PeekKind() == '"' {
		token, err := dec.ReadToken()
		if err != nil {
			break
		}
		name := token.String()
		start := dec.InputOffset() // of the value, for partialText
		value, err := dec.ReadValue()
		if err != nil {
			fields[name] = partialText(line[start:])
			e.Cut = true
			break
		}
		fields[name] = fieldText(value)
	}
	e.cursor = fields["__CURSOR"]
	us, _ := strconv.ParseInt(fields["__REALTIME_TIMESTAMP"], 10, 64)
	e.TSMS = min(max(us/1000, 0), maxTime)
	e.PID, _ = strconv.Atoi(fields["_PID"])
	e.PID = max(e.PID, 0)
	e.Unit = fields["_SYSTEMD_UNIT"]
	if e.PID == 1 && fields["UNIT"] != "" { // systemd reports about a unit
		e.Unit = fields["UNIT"]
	}
	e.Unit, _ = cutText(e.Unit, 256)
	e.Source = fields["SYSLOG_IDENTIFIER"]
	if e.Source == "" {
		e.Source = fields["_COMM"]
	}
	e.Source, _ = cutText(e.Source, 64)
	if p, err := strconv.Atoi(fields["PRIORITY"]); err == nil && p >= 0 && p < len(priorities) {
		e.Priority = priorities[p]
	}
	e.Message = fields["MESSAGE"]
	return e
}

// fieldText returns the text of a field, in which U+FFFD replaces what is not UTF-8. If there are
// several values, each is a line.
func fieldText(v jsontext.Value) string {
	switch v.Kind() {
	case '"':
		text, _ := jsontext.AppendUnquote(nil, v)
		return strings.ToValidUTF8(string(text), "\uFFFD")
	case '[':
		return arrayText(v)
	}
	return ""
}

// arrayText is fieldText of an array: of numbers, which are the bytes of one value that is not UTF-8, or
// of the values of a field that the entry has several times.
func arrayText(v jsontext.Value) string {
	dec := jsontext.NewDecoder(bytes.NewBuffer(v), jsontext.AllowInvalidUTF8(true))
	_, _ = dec.ReadToken()
	var raw []byte
	var texts []string
	for dec.PeekKind() != ']' {
		item, err := dec.ReadValue()
		if err != nil {
			break
		}
		if item.Kind() == '0' {
			b, _ := strconv.ParseUint(string(item), 10, 8)
			raw = append(raw, byte(b))
		} else {
			texts = append(texts, fieldText(item.Clone()))
		}
	}
	if raw != nil {
		texts = append(texts, strings.ToValidUTF8(string(raw), "\uFFFD"))
	}
	return strings.Join(texts, "\n")
}

// partialText returns the text of a field whose JSON is cut.
func partialText(rest []byte) string {
	rest = bytes.TrimLeft(rest, ": \t")
	switch {
	case len(rest) > 0 && rest[0] == '[':
		return arrayText(rest)
	case len(rest) == 0 || rest[0] != '"':
		return ""
	}
	rest = rest[:min(len(rest), 8*maxMessage)]
	// The cut may be inside an escape, such as \ud83d\ude42, or inside a character: drop bytes until
	// the text is valid.
	for drop := 0; drop < 12 && drop < len(rest); drop++ {
		quoted := append(bytes.Clone(rest[:len(rest)-drop]), '"')
		if text, err := jsontext.AppendUnquote(nil, quoted); err == nil {
			return string(text)
		}
	}
	return ""
}

// cutText shortens a text to maxChars characters, and reports whether it did.
func cutText(s string, maxChars int) (string, bool) {
	if len(s) <= maxChars {
		return s, false
	}
	n := 0
	for i := range s {
		if n == maxChars {
			return s[:i], true
		}
		n++
	}
	return s, false
}

// cutMessage shortens a message to maxMessage characters and to half of a page as JSON, so that at
// least one line fits into a page. It reports whether it did.
func cutMessage(s string) (string, bool) {
	const perChar = 6 // bytes of the longest escape
	if len(s)*perChar <= MaxPage/2 && len(s) <= maxMessage {
		return s, false
	}
	chars, size := 0, 0
	for i, r := range s {
		cost := max(utf8.RuneLen(r), 1)
		if r < ' ' || r == '"' || r == '\\' || r == 0x7f || r == '\u2028' || r == '\u2029' {
			cost = perChar
		}
		if size += cost; chars == maxMessage || size > MaxPage/2 {
			return s[:i], true
		}
		chars++
	}
	return s, false
}

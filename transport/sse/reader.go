package sse

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"io"
)

// ErrTooLong is a line or an event beyond the Reader's bound.
var ErrTooLong = errors.New("sse: line or event is too long")

// Event is one event as a Reader dispatches it.
type Event struct {
	Type        string // "message" when the stream names none
	Data        []byte // data fields joined by LF
	LastEventID string // of the stream: this event's id, or that of an earlier one
}

// ReaderOptions are the bounds of a Reader.
type ReaderOptions struct {
	MaxLine  int // bytes of a line; default 128 KiB
	MaxEvent int // bytes of all data of one event; default 256 KiB
}

// Reader parses an event stream as the HTML standard says (§9.2.6, "Interpreting an event
// stream"), except that it does not decode UTF-8: invalid bytes are passed on. It ignores
// retry: the readers here have their own back-off. It is for one goroutine.
type Reader struct {
	lines    *bufio.Scanner
	maxLine  int
	maxEvent int
	err      error // final

	// Of splitLine.
	scanned     int  // bytes of the current line that have no line end
	skipLF      bool // the last line ended with CR: an LF after it belongs to it
	isTruncated bool // the stream ended within a line

	// The buffers of the standard, of the block that is being read.
	isFirstLine bool
	inBlock     bool // a field came since the last blank line
	hasData     bool // a data field came, possibly empty
	eventType   string
	data        []byte
	newID       string // becomes lastEventID with the next blank line

	lastEventID string
}

// NewReader reads events from r.
func NewReader(r io.Reader, o ReaderOptions) *Reader {
	o.MaxLine, o.MaxEvent = cmp.Or(o.MaxLine, 128<<10), cmp.Or(o.MaxEvent, 256<<10)
	rd := &Reader{lines: bufio.NewScanner(r), maxLine: o.MaxLine, maxEvent: o.MaxEvent, isFirstLine: true}
	rd.lines.Split(rd.splitLine)
	rd.lines.Buffer(nil, o.MaxLine+len(byteOrderMark)+len("\n\r\n")) // Next checks MaxLine itself
	return rd
}

// LastEventID returns the id to resume after: that of the last block that was received whole,
// whether or not it was an event.
func (r *Reader) LastEventID() string { return r.lastEventID }

const byteOrderMark = "\xef\xbb\xbf"

// Next returns the next event; the caller may keep its Data. At the end of the stream it
// returns io.EOF, or io.ErrUnexpectedEOF when the stream ended within an event, which is
// then dropped. Beyond a bound it returns ErrTooLong. Errors are final.
func (r *Reader) Next() (Event, error) {
	for r.err == nil {
		if !r.lines.Scan() {
			r.err = r.endError()
			break
		}
		line := r.lines.Bytes()
		if r.isFirstLine {
			line, r.isFirstLine = bytes.TrimPrefix(line, []byte(byteOrderMark)), false
		}
		switch {
		case len(line) > r.maxLine:
			r.err = ErrTooLong
		case len(line) > 0:
			r.err = r.processLine(line)
		default:
			if ev, ok := r.dispatch(); ok {
				return ev, nil
			}
		}
	}
	return Event{}, r.err
}

func (r *Reader) endError() error {
	switch err := r.lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return ErrTooLong
	case err != nil:
		return err
	case r.inBlock || r.isTruncated:
		return io.ErrUnexpectedEOF
	}
	return io.EOF
}

// dispatch ends a block; ok is false when the block had no data and so is no event.
func (r *Reader) dispatch() (ev Event, ok bool) {
	r.lastEventID = r.newID
	if r.hasData {
		ev, ok = Event{Type: r.eventType, Data: r.data, LastEventID: r.lastEventID}, true
		if ev.Type == "" {
			ev.Type = "message"
		}
	}
	r.eventType, r.data, r.hasData, r.inBlock = "", nil, false, false
	return ev, ok
}

// processLine handles a comment or a field.
func (r *Reader) processLine(line []byte) error {
	name, value, _ := bytes.Cut(line, []byte{':'})
	if len(name) == 0 {
		return nil // a comment
	}
	r.inBlock = true
	value = bytes.TrimPrefix(value, []byte{' '})
	switch string(name) {
	case "data":
		if len(r.data)+len(value)+1 > r.maxEvent {
			return ErrTooLong
		}
		if r.hasData {
			r.data = append(r.data, '\n')
		}
		r.data, r.hasData = append(r.data, value...), true
	case "event":
		r.eventType = string(value)
	case "id":
		if bytes.IndexByte(value, 0) < 0 {
			r.newID = string(value)
		}
	}
	return nil
}

// splitLine is the bufio.SplitFunc of lines. CR, LF and CRLF end a line; after a CR it does
// not wait to see whether an LF follows, so an event is dispatched as soon as it is whole.
func (r *Reader) splitLine(data []byte, atEOF bool) (advance int, line []byte, err error) {
	start := 0
	if r.skipLF && len(data) > 0 {
		r.skipLF = false
		if data[0] == '\n' {
			start = 1
		}
	}
	if i := bytes.IndexAny(data[start+r.scanned:], "\r\n"); i >= 0 {
		end := start + r.scanned + i
		r.scanned, r.skipLF = 0, data[end] == '\r'
		return end + 1, data[start:end], nil
	}
	r.scanned = len(data) - start
	if atEOF {
		r.isTruncated = r.scanned > 0
	}
	return start, nil, nil
}

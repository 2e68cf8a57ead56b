package sse

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
	"time"
)

// ErrTooLong is a line or an event beyond the reader's bound.
var ErrTooLong = errors.New("sse: line or event is too long")

// Event is one event as a reader dispatches it.
type Event struct {
	Type        string // "message" when the stream names none
	Data        []byte // data lines joined by LF
	LastEventID string // the last id seen on the stream, this event's or an earlier one's
}

// ReaderOptions are the bounds of a Reader.
type ReaderOptions struct {
	MaxLine  int // bytes of a line; default 128 KiB
	MaxEvent int // bytes of all data of one event; default 256 KiB
}

// Reader parses an event stream as the HTML standard says (section 9.2.6), except
// that bytes which are no UTF-8 are passed on as they are. It is for one goroutine.
type Reader struct {
	r        *bufio.Reader
	maxEvent int
	maxLine  int

	started           bool // the byte order mark has been looked for
	skipLF            bool // the last line ended with CR: an LF right after it belongs to it
	line              []byte
	lastEventIDBuffer string // the id field read last; it becomes id with the next blank line
	lastEventID       string
	retry             time.Duration
	err               error
}

// NewReader reads events from r.
func NewReader(r io.Reader, o ReaderOptions) *Reader {
	if o.MaxLine <= 0 {
		o.MaxLine = 128 << 10
	}
	if o.MaxEvent <= 0 {
		o.MaxEvent = 256 << 10
	}
	return &Reader{r: bufio.NewReader(r), maxLine: o.MaxLine, maxEvent: o.MaxEvent}
}

// Next returns the next event; its Data is the caller's to keep. At the end of the
// stream it returns io.EOF, or io.ErrUnexpectedEOF when the stream broke off within
// an event, which is then dropped. Beyond a bound it returns ErrTooLong. Errors are
// for good.
func (r *Reader) Next() (Event, error) {
	if r.err != nil {
		return Event{}, r.err
	}
	ev, err := r.next()
	if err != nil {
		r.err, r.line = err, nil
		return Event{}, err
	}
	return ev, nil
}

// LastEventID is the id to resume after: that of the last block received whole, whether
// or not an event came of it.
func (r *Reader) LastEventID() string { return r.lastEventID }

// Retry is the reconnection time the stream asked for last, 0 for none.
func (r *Reader) Retry() time.Duration { return r.retry }

func (r *Reader) next() (Event, error) {
	var ev Event
	hasData := false // a data field came, be it empty
	begun := false   // any field came since the last blank line
	for {
		line, err := r.readLine()
		if err != nil {
			if err == io.EOF && (begun || len(line) > 0) {
				err = io.ErrUnexpectedEOF
			}
			return Event{}, err
		}
		if len(line) == 0 {
			r.lastEventID = r.lastEventIDBuffer
			if hasData {
				if ev.Type == "" {
					ev.Type = "message"
				}
				ev.LastEventID = r.lastEventID
				return ev, nil
			}
			ev, begun = Event{}, false // a type without data is forgotten
			continue
		}
		name, value, _ := bytes.Cut(line, []byte{':'})
		if len(name) == 0 {
			continue // a comment
		}
		begun = true
		if len(value) > 0 && value[0] == ' ' {
			value = value[1:]
		}
		switch string(name) {
		case "data":
			if len(ev.Data)+len(value)+1 > r.maxEvent {
				return Event{}, ErrTooLong
			}
			if hasData {
				ev.Data = append(ev.Data, '\n')
			}
			ev.Data, hasData = append(ev.Data, value...), true
		case "event":
			ev.Type = string(value)
		case "id":
			if bytes.IndexByte(value, 0) < 0 {
				r.lastEventIDBuffer = string(value)
			}
		case "retry":
			if ms, ok := digits(value); ok {
				r.retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
}

// digits accepts ASCII digits only, nine at most: in milliseconds that is 11 days.
func digits(b []byte) (uint64, bool) {
	if len(b) == 0 || len(b) > 9 {
		return 0, false
	}
	n, err := strconv.ParseUint(string(b), 10, 32)
	return n, err == nil
}

// readLine returns the next line without its end, valid until the next call. CR,
// LF and CRLF end a line; after a CR it does not wait to see whether an LF follows.
// With io.EOF it returns what there was of a last line.
func (r *Reader) readLine() ([]byte, error) {
	r.line = r.line[:0]
	if !r.started {
		r.started = true
		if bom, _ := r.r.Peek(3); string(bom) == "\xef\xbb\xbf" {
			r.r.Discard(3)
		}
	}
	for {
		if r.r.Buffered() == 0 {
			if _, err := r.r.Peek(1); err != nil {
				return r.line, err
			}
		}
		chunk, _ := r.r.Peek(r.r.Buffered())
		if r.skipLF {
			r.skipLF = false
			if chunk[0] == '\n' {
				r.r.Discard(1)
				continue
			}
		}
		end := bytes.IndexAny(chunk, "\r\n")
		if end < 0 {
			end = len(chunk)
		}
		if len(r.line)+end > r.maxLine {
			return nil, ErrTooLong
		}
		r.line = append(r.line, chunk[:end]...)
		if end == len(chunk) {
			r.r.Discard(end)
			continue
		}
		r.skipLF = chunk[end] == '\r'
		r.r.Discard(end + 1)
		return r.line, nil
	}
}

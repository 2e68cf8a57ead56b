package sse

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
)

func readAll(r *Reader) ([]Event, error) {
	var out []Event
	for {
		ev, err := r.Next()
		if err != nil {
			return out, err
		}
		out = append(out, ev)
	}
}

func equalEvents(a, b []Event) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Type != b[i].Type || a[i].LastEventID != b[i].LastEventID || !bytes.Equal(a[i].Data, b[i].Data) {
			return false
		}
	}
	return true
}

func TestReader(t *testing.T) {
	msg := func(data string) []Event { return []Event{{Type: "message", Data: []byte(data)}} }
	tests := []struct {
		name, in string
		want     []Event
		err      error // io.EOF when nil
	}{
		{"metric", "event: metric\ndata: {\"a\":1}\n\n", []Event{{Type: "metric", Data: []byte(`{"a":1}`)}}, nil},
		{"CRLF", "event: metric\r\ndata: 1\r\n\r\n", []Event{{Type: "metric", Data: []byte("1")}}, nil},
		{"CR", "event: metric\rdata: 1\r\r", []Event{{Type: "metric", Data: []byte("1")}}, nil},
		{"ends mixed", "data: 1\r\ndata: 2\rdata: 3\n\r\n", msg("1\n2\n3"), nil},
		{"CR LF LF is two line ends", "data: 1\r\n\ndata: 2\n\n", append(msg("1"), msg("2")...), nil},
		{"byte order mark", "\xef\xbb\xbfdata: 1\n\n", msg("1"), nil},
		{"one mark only", "\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\n", nil, nil},
		{"comments", ": stream start id=5\n:\ndata: 1\n: in between\n\n", msg("1"), nil},
		{"many data lines", "data: a\ndata\ndata:\ndata:  b\n\n", msg("a\n\n\n b"), nil},
		{"one space only is taken off", "data:  x\n\ndata:y\n\n", append(msg(" x"), msg("y")...), nil},
		{"a colon in the value", "data: a: b\n\n", msg("a: b"), nil},
		{"empty data is an event", "data:\n\n", msg(""), nil},
		{"a type without data is none", "event: x\n\ndata: 1\n\n", msg("1"), nil},
		{"the last type wins", "event: a\nevent: b\ndata: 1\n\n", []Event{{Type: "b", Data: []byte("1")}}, nil},
		{"unknown fields", "foo: 1\ndata: 1\n data: 2\nDATA: 3\n\n", msg("1"), nil},
		{"ids stay", "id: 7\ndata: 1\n\ndata: 2\n\nid\ndata: 3\n\n", []Event{
			{Type: "message", Data: []byte("1"), LastEventID: "7"}, {Type: "message", Data: []byte("2"), LastEventID: "7"}, {Type: "message", Data: []byte("3")}}, nil},
		{"id with NUL is ignored", "id: 7\nid: 8\x00\ndata: 1\n\n", []Event{{Type: "message", Data: []byte("1"), LastEventID: "7"}}, nil},
		{"blank lines only", "\n\r\n\r\n\n", nil, nil},
		{"nothing", "", nil, nil},
		{"broken off in an event", "data: 1\n\ndata: 2\n", msg("1"), io.ErrUnexpectedEOF},
		{"broken off in a line", "data: 1\n\nda", msg("1"), io.ErrUnexpectedEOF},
		{"broken off in an end", "data: 1\n\nevent: close\ndata: 2\n", msg("1"), io.ErrUnexpectedEOF},
		{"a comment at the end", "data: 1\n\n: bye\n", msg("1"), nil},
		{"line at the bound", "data: " + strings.Repeat("x", 94) + "\n\n", msg(strings.Repeat("x", 94)), nil},
		{"line beyond", "data: 1\n\ndata: " + strings.Repeat("x", 95) + "\n\n", msg("1"), ErrTooLong},
		{"endless comment", ":" + strings.Repeat("x", 1000), nil, ErrTooLong},
		{"event beyond", strings.Repeat("data: "+strings.Repeat("x", 60)+"\n", 4), nil, ErrTooLong},
		{"endless empty data", strings.Repeat("data\n", 300), nil, ErrTooLong},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.err == nil {
				tt.err = io.EOF
			}
			for name, in := range map[string]io.Reader{
				"whole":       strings.NewReader(tt.in),
				"by the byte": iotest.OneByteReader(strings.NewReader(tt.in)),
			} {
				r := NewReader(in, ReaderOptions{MaxLine: 100, MaxEvent: 200})
				got, err := readAll(r)
				if !equalEvents(got, tt.want) || !errors.Is(err, tt.err) {
					t.Errorf("%s: got %q, %v; want %q, %v", name, got, err, tt.want, tt.err)
				}
				if _, again := r.Next(); again != err {
					t.Errorf("%s: after the end %v, want %v again", name, again, err)
				}
			}
		})
	}
}

// An event is there with its blank line, also when that is a CR that an LF may follow.
func TestReaderDoesNotWait(t *testing.T) {
	for _, in := range []string{"data: 1\n\n", "data: 1\r\n\r\n", "data: 1\r\r"} {
		pr, pw := io.Pipe()
		go io.WriteString(pw, in) // and no more
		ev, err := NewReader(pr, ReaderOptions{}).Next()
		if err != nil || string(ev.Data) != "1" {
			t.Errorf("%q: got %q, %v", in, ev.Data, err)
		}
		pw.Close()
	}
}

func TestReaderState(t *testing.T) {
	r := NewReader(strings.NewReader("retry: 1500\nretry: x\nretry: 12x\nretry: 99999999999\nid: 3\n\nid: 4\ndata: lost\n"), ReaderOptions{})
	if _, err := r.Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
	if r.LastEventID() != "3" { // the event of 4 never came whole: resuming after 4 would lose it
		t.Errorf("last id %q, want 3", r.LastEventID())
	}
}

// appendParsed writes events so that they are read back as they are.
func appendParsed(dst []byte, events []Event) []byte {
	id := ""
	for _, ev := range events {
		if ev.LastEventID != id {
			id = ev.LastEventID
			dst = append(dst, "id: "+id+"\n"...)
		}
		dst = append(dst, "event: "+ev.Type+"\n"...)
		for l := range bytes.SplitSeq(ev.Data, []byte{'\n'}) {
			dst = append(append(append(dst, "data: "...), l...), '\n')
		}
		dst = append(dst, '\n')
	}
	return dst
}

// slowReader is the standard's algorithm written down plainly, as an oracle: the
// whole input at once, split into lines, no bounds.
func slowReader(in string) (events []Event, id string) {
	in = strings.TrimPrefix(in, "\xef\xbb\xbf")
	in = strings.ReplaceAll(strings.ReplaceAll(in, "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(in, "\n")
	var data, typ, newID string
	for _, l := range lines[:len(lines)-1] { // the last has no end
		if l == "" {
			id = newID
			if data != "" {
				if typ == "" {
					typ = "message"
				}
				events = append(events, Event{Type: typ, Data: []byte(strings.TrimSuffix(data, "\n")), LastEventID: id})
			}
			data, typ = "", ""
			continue
		}
		name, value, _ := strings.Cut(l, ":")
		value = strings.TrimPrefix(value, " ")
		switch name {
		case "data":
			data += value + "\n"
		case "event":
			typ = value
		case "id":
			if !strings.Contains(value, "\x00") {
				newID = value
			}
		}
	}
	return events, id
}

func FuzzReader(f *testing.F) {
	for _, s := range []string{
		"event: metric\ndata: {\"cpu_pct\":1}\n\nevent: ping\ndata: {}\n\nevent: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n",
		"\xef\xbb\xbf: c\r\nid: 1\r\nretry: 10\r\ndata: a\r\ndata: b\r\r\n", "data\n\ndata:\n\nid\n\n", "id: \x00\ndata:  \xff\n\n", "\r\n\r", "event\ndata: 1\r",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		bounds := ReaderOptions{MaxLine: len(in) + 1, MaxEvent: 2*len(in) + 2}
		r := NewReader(strings.NewReader(in), bounds)
		got, err := readAll(r)
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%q: %v", in, err)
		}
		want, id := slowReader(in)
		if !equalEvents(got, want) || r.LastEventID() != id {
			t.Fatalf("%q: got %q id %q, want %q id %q", in, got, r.LastEventID(), want, id)
		}
		wire := appendParsed(nil, got)
		again, err := readAll(NewReader(bytes.NewReader(wire), ReaderOptions{MaxLine: len(wire) + 1, MaxEvent: len(wire) + 1}))
		if !equalEvents(again, got) || !errors.Is(err, io.EOF) {
			t.Fatalf("%q: read back as %q, %v, want %q", in, again, err, got)
		}
		// What the encoder takes, the reader gives back.
		if b, err := AppendEventID(nil, strconv.AppendInt(nil, int64(len(in)), 10), "e", []byte(in)); err == nil {
			ev, err := NewReader(bytes.NewReader(b), ReaderOptions{MaxLine: len(b), MaxEvent: len(b)}).Next()
			if err != nil || string(ev.Data) != in || ev.LastEventID != strconv.Itoa(len(in)) {
				t.Fatalf("%q: encoded and read as %q, %v", in, ev.Data, err)
			}
		} else if !strings.ContainsAny(in, "\r\n") {
			t.Fatalf("%q: %v", in, err)
		}
	})
}

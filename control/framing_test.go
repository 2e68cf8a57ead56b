//go:build linux

package control

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func readFrames(r io.Reader, maxBody int) (bodies []string, err error) {
	fr := newFrameReader(r, maxBody)
	for {
		if err := fr.waitMessage(); err != nil {
			return bodies, err
		}
		n, err := fr.header()
		if err != nil {
			return bodies, err
		}
		body := make([]byte, n)
		if err := fr.body(body); err != nil {
			return bodies, err
		}
		bodies = append(bodies, string(body))
	}
}

func TestFrames(t *testing.T) {
	long := strings.Repeat("x", maxHeader)
	tests := []struct {
		name, in string
		want     []string
		err      error
	}{
		{"none", "", nil, io.EOF},
		{"one", "Content-Length: 2\r\n\r\n{}", []string{"{}"}, io.EOF},
		{"two merged", "Content-Length: 2\r\n\r\n{}Content-Length: 3\r\n\r\n[1]", []string{"{}", "[1]"}, io.EOF},
		{"no body", "Content-Length: 0\r\n\r\n", []string{""}, io.EOF},
		{"other case, no blank", "content-LENGTH:2\r\n\r\n{}", []string{"{}"}, io.EOF},
		{"blanks", "Content-Length: \t2 \r\n\r\n{}", []string{"{}"}, io.EOF},
		{"other lines", "A: b\r\nContent-Length: 2\r\nContent-Type: application/vscode-jsonrpc; charset=utf-8\r\n\r\n{}", []string{"{}"}, io.EOF},
		{"longest body", "Content-Length: 16\r\n\r\n0123456789abcdef", []string{"0123456789abcdef"}, io.EOF},
		{"body too long", "Content-Length: 17\r\n\r\n", nil, errFraming},
		{"far too long", "Content-Length: 67108864\r\n\r\n", nil, errFraming},
		{"beyond an int", "Content-Length: 99999999999999999999\r\n\r\n", nil, errFraming},
		{"no length", "Content-Type: x\r\n\r\n{}", nil, errFraming},
		{"no header", "\r\n{}", nil, errFraming},
		{"bare json", "{\"jsonrpc\":\"2.0\"}\r\n", nil, errFraming},
		{"empty length", "Content-Length:\r\n\r\n", nil, errFraming},
		{"negative", "Content-Length: -1\r\n\r\n", nil, errFraming},
		{"plus", "Content-Length: +2\r\n\r\n{}", nil, errFraming},
		{"hex", "Content-Length: 0x2\r\n\r\n{}", nil, errFraming},
		{"twice", "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", nil, errFraming},
		{"blank before the colon", "Content-Length : 2\r\n\r\n{}", nil, errFraming},
		{"bare LF", "Content-Length: 2\n\n{}", nil, errFraming},
		{"line too long", "A: " + long + "\r\nContent-Length: 2\r\n\r\n{}", nil, errFraming},
		{"line without end", long + long, nil, errFraming},
		{"too many lines", strings.Repeat("A: b\r\n", maxLines) + "\r\n", nil, errFraming},
		{"torn header", "Content-Len", nil, io.ErrUnexpectedEOF},
		{"torn body", "Content-Length: 3\r\n\r\n{}", nil, io.ErrUnexpectedEOF},
		{"torn before the body", "Content-Length: 3\r\n\r\n", nil, io.ErrUnexpectedEOF},
	}
	readers := []struct {
		name string
		wrap func(io.Reader) io.Reader
	}{
		{"whole", func(r io.Reader) io.Reader { return r }},
		{"a byte a time", iotest.OneByteReader},
		{"end with the data", iotest.DataErrReader},
	}
	for _, tt := range tests {
		for _, r := range readers {
			t.Run(tt.name+"/"+r.name, func(t *testing.T) {
				got, err := readFrames(r.wrap(strings.NewReader(tt.in)), 16)
				if fmt.Sprint(got) != fmt.Sprint(tt.want) || !errors.Is(err, tt.err) {
					t.Errorf("got %q, %v, want %q, %v", got, err, tt.want, tt.err)
				}
			})
		}
	}
}

// FuzzFrame reads anything, prints what was read, and reads the same again.
func FuzzFrame(f *testing.F) {
	f.Add([]byte("Content-Length: 2\r\n\r\n{}"))
	f.Add([]byte("A: b\r\ncontent-length:002\r\n\r\n[]Content-Length: 0\r\n\r\n"))
	f.Add([]byte("Content-Length: 1048577\r\n\r\n"))
	f.Add([]byte("Content-Length: 5\r\n\r\n{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := readFrames(bytes.NewReader(data), 1<<10)
		if err == nil {
			t.Fatal("reading ended without a reason")
		}
		var printed []byte
		for _, body := range got {
			if len(body) > 1<<10 {
				t.Fatalf("a body of %d bytes passed", len(body))
			}
			printed = append(printed, frame([]byte(body))...)
		}
		again, err := readFrames(iotest.OneByteReader(bytes.NewReader(printed)), 1<<10)
		if err != io.EOF || fmt.Sprint(again) != fmt.Sprint(got) {
			t.Fatalf("read %q, printed and read again %q, %v", got, again, err)
		}
	})
}

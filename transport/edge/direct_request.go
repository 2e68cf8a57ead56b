package edge

import (
	"bytes"
	"net/http"
	"net/url"
	"strings"
)

// parseDirect parses the request at the start of b into r: a POST of HTTP/1.1 with a Content-Length and
// nothing that needs net/http, in a strict form of which FuzzDirect checks that net/http reads it the
// same. size is the length of the request; ok is false if it has not arrived whole. size is 0 for
// everything else. Of a head that is not complete it is len(b)+1, since at least one byte is missing. The
// values of the header share one copy of the head, because net/http uses the buffer b again.
func parseDirect(r *http.Request, b []byte) (ok bool, size int) {
	const method, version, end = "POST ", " HTTP/1.1", "\r\n\r\n"
	if !strings.HasPrefix(string(b[:min(len(b), len(method))]), method[:min(len(b), len(method))]) {
		return false, 0
	}
	headLen := bytes.Index(b, []byte(end))
	if headLen < 0 {
		return false, len(b) + 1
	}
	head := string(b[:headLen])
	line, rest, _ := strings.Cut(head, "\r\n")
	path, ok := strings.CutSuffix(line[len(method):], version)
	if !ok || path == "" || path[0] != '/' || !consistsOf(path, pathByte) {
		return false, 0
	}
	h, values := make(http.Header, 8), make([]string, 0, 8) // of all fields, in one block
	length, host := 0, ""
	for more := rest != ""; more; {
		line, rest, more = strings.Cut(rest, "\r\n")
		name, value, ok := strings.Cut(line, ":")
		if !ok || name == "" || !consistsOf(name, tokenByte) || !consistsOf(value, valueByte) {
			return false, 0
		}
		value = strings.Trim(value, " \t")
		switch name = http.CanonicalHeaderKey(name); name {
		case "Host":
			if host != "" || value == "" || !consistsOf(value, hostByte) {
				return false, 0
			}
			host = value
			continue // as net/http
		case "Content-Length":
			if length, ok = parseLength(value); !ok || h[name] != nil {
				return false, 0
			}
		case "Connection":
			if !strings.EqualFold(value, "keep-alive") {
				return false, 0
			}
		case "Transfer-Encoding", "Trailer", "Te", "Expect", "Upgrade", "Pragma":
			return false, 0
		}
		if values = append(values, value); h[name] == nil {
			h[name] = values[len(values)-1 : len(values) : len(values)]
		} else {
			h[name] = append(h[name], value)
		}
	}
	if host == "" || length == 0 {
		return false, 0
	}
	bodyAt := headLen + len(end)
	if size = bodyAt + length; size > len(b) {
		return false, size
	}
	*r = http.Request{
		Method: http.MethodPost, URL: &url.URL{Path: path}, RequestURI: path, Proto: version[1:], ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Host: host, ContentLength: int64(length), Body: newDirectBody(b[bodyAt:size]),
	}
	return true, size
}

// directBody is the body of a direct request, which has arrived.
type directBody struct {
	bytes.Reader
	whole []byte
}

func newDirectBody(b []byte) *directBody {
	d := &directBody{whole: bytes.Clone(b)}
	d.Reset(d.whole)
	return d
}

// take reads the rest without a copy.
func (d *directBody) take() []byte {
	rest := d.whole[len(d.whole)-d.Len():]
	d.Reset(nil)
	d.whole = nil
	return rest
}

// Close implements io.Closer.
func (*directBody) Close() error { return nil }

// parseLength parses the length of a body that fits the buffer of a direct request.
func parseLength(s string) (n int, ok bool) {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		n = n*10 + int(s[i]-'0')
	}
	return n, len(s) >= 1 && len(s) <= 4
}

// Classes of bytes in a direct request.
const (
	tokenByte = 1 << iota // of a header's name (RFC 9110 §5.6.2)
	valueByte             // of a header's value: printable ASCII, space and tab
	pathByte              // of a path that needs no decoding
	hostByte              // of a host with a port
)

var byteClasses = func() (t [256]uint8) {
	for ch := range t {
		isAlnum := ch >= '0' && ch <= '9' || ch >= 'A' && ch <= 'Z' || ch >= 'a' && ch <= 'z'
		for class, others := range map[uint8]string{tokenByte: "!#$%&'*+-.^_`|~", pathByte: "/-._", hostByte: "-._:[]"} {
			if isAlnum || strings.IndexByte(others, byte(ch)) >= 0 {
				t[ch] |= class
			}
		}
		if ch >= ' ' && ch <= '~' || ch == '\t' {
			t[ch] |= valueByte
		}
	}
	return t
}()

// consistsOf reports whether all bytes of s are of a class.
func consistsOf(s string, class uint8) bool {
	for i := range len(s) {
		if byteClasses[s[i]]&class == 0 {
			return false
		}
	}
	return true
}

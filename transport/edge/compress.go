package edge

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// MinCompress is the size in bytes from which a body is compressed: a smaller one fits into
// one TCP segment or two anyway.
const MinCompress = 2 << 10

var (
	// gzipSlots bounds how many bodies are compressed at a time, because a gzip.Writer holds
	// 0.8 MB and works for a few milliseconds per MB of body.
	gzipSlots = make(chan struct{}, min(runtime.GOMAXPROCS(0), 4))
	// gzipWriters are reused.
	gzipWriters sync.Pool // of *gzip.Writer
)

// CompressLarge is Compress for a body that no cache keeps: one below MinCompress is returned at once,
// without a Vary header.
func CompressLarge(h http.Header, r *http.Request, body []byte) []byte {
	if len(body) < MinCompress {
		return body
	}
	return Compress(h, r, body)
}

// Compress prepares a response body for the client of r: it returns the body with gzip, and says so
// in the headers h, if the client accepts that and the body is 2 KiB or larger. Otherwise it returns
// body itself. It always adds the Vary header. Call it before WriteHeader, and set no
// Content-Length before.
//
// A strong ETag in h gets a suffix, since it must differ from that of the plain body
// (RFC 9110 §8.8.3.3); NotModified knows both.
//
// Do not pass it a body with a token or another secret: whoever can put text into such a body
// and see its length can guess the secret (the BREACH attack).
func Compress(h http.Header, r *http.Request, body []byte) []byte {
	h.Add("Vary", "Accept-Encoding")
	if len(body) < MinCompress || !AcceptsGzip(strings.Join(r.Header["Accept-Encoding"], ",")) {
		return body
	}
	select {
	case gzipSlots <- struct{}{}:
	case <-r.Context().Done(): // nobody reads the response
		return body
	}
	defer func() { <-gzipSlots }()
	out := bytes.NewBuffer(make([]byte, 0, len(body)/8))
	zw, ok := gzipWriters.Get().(*gzip.Writer)
	if ok {
		zw.Reset(out)
	} else {
		zw, _ = gzip.NewWriterLevel(out, gzip.BestSpeed) // its only error is for a wrong level
	}
	defer gzipWriters.Put(zw)
	_, _ = zw.Write(body) // a bytes.Buffer takes everything
	_ = zw.Close()
	h.Set("Content-Encoding", "gzip")
	if tag, ok := strings.CutSuffix(h.Get("ETag"), `"`); ok {
		h.Set("ETag", tag+gzipTag)
	}
	return out.Bytes()
}

// gzipTag replaces the closing quote in the ETag of a compressed body.
const gzipTag = `-gzip"`

// AcceptsGzip reports whether a list like that of the Accept-Encoding header names gzip, and does not
// prefer identity by a higher weight (RFC 9110 §12.5.3). It ignores "*", which the RFC allows: a client
// that sends it may not expect gzip.
func AcceptsGzip(list string) bool {
	gzip, identity := 0.0, 0.0
	for item := range strings.SplitSeq(list, ",") {
		coding, parameter, _ := strings.Cut(item, ";")
		switch coding = strings.TrimSpace(coding); {
		case strings.EqualFold(coding, "gzip"), strings.EqualFold(coding, "x-gzip"):
			gzip = max(gzip, weight(parameter))
		case strings.EqualFold(coding, "identity"):
			identity = weight(parameter)
		}
	}
	return gzip > 0 && gzip >= identity
}

// weight returns the value of a q parameter: 1 for none, 0 for one that is malformed.
func weight(parameter string) float64 {
	parameter = strings.TrimSpace(parameter)
	if parameter == "" {
		return 1
	}
	if len(parameter) < 3 || !strings.EqualFold(parameter[:2], "q=") {
		return 0
	}
	q, err := strconv.ParseFloat(parameter[2:], 64)
	if err != nil || !(q >= 0 && q <= 1) {
		return 0
	}
	return q
}

// NotModified sets the ETag header to etag, a strong entity tag with its quotes. If the client of r
// has that version already, plain or compressed (If-None-Match, RFC 9110 §13.1.2), NotModified
// answers with 304 and returns true. r is a GET or HEAD request; set Cache-Control before.
func NotModified(w http.ResponseWriter, r *http.Request, etag string) bool {
	h := w.Header()
	h.Set("ETag", etag)
	for item := range strings.SplitSeq(strings.Join(r.Header["If-None-Match"], ","), ",") {
		switch tag := strings.TrimPrefix(strings.TrimSpace(item), "W/"); tag {
		case etag, strings.TrimSuffix(etag, `"`) + gzipTag:
			h.Set("ETag", tag)
		case "*":
		default:
			continue
		}
		h.Add("Vary", "Accept-Encoding")
		w.WriteHeader(http.StatusNotModified)
		return true
	}
	return false
}

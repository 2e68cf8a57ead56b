package edge

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

func TestAcceptsGzip(t *testing.T) {
	for list, want := range map[string]bool{
		"": false, "gzip": true, "GZip": true, "br, gzip": true, "gzip;q=0.5": true, "deflate,gzip; q=1": true,
		"gzip;q=0": false, "gzip; q=0.000": false, "identity": false, "*": false, "x-gzipped": false,
		"x-gzip": true, "gzip;Q=0": false, "gzip;q=0.1, identity;q=0.5": false, "identity;q=0.5, gzip;q=0.5": true, "gzip, identity": true,
		"gzip;q=1, identity;q=0": true, "gzip;q=2": false, "gzip;q=nan": false, "gzip;q=-1": false, "gzip;q": false, "gzip;level=1": false, "gzip;q=0, x-gzip": true,
		"gzip ; q=0.001": true,
	} {
		if AcceptsGzip(list) != want {
			t.Errorf("AcceptsGzip(%q) = %t", list, !want)
		}
	}
}

// compressed calls Compress as a handler does.
func compressed(t *testing.T, accept string, body []byte) (http.Header, []byte) {
	t.Helper()
	r := httptest.NewRequest("GET", "/", nil)
	if accept != "" {
		r.Header.Set("Accept-Encoding", accept)
	}
	h := http.Header{"Etag": {`"r1"`}}
	return h, Compress(h, r, body)
}

func TestCompress(t *testing.T) {
	small, large := []byte(strings.Repeat("x", MinCompress-1)), []byte(strings.Repeat(`{"a":1},`, 10_000))
	for _, plain := range []struct {
		accept string
		body   []byte
	}{{"", large}, {"br", large}, {"gzip;q=0", large}, {"gzip", small}} {
		h, out := compressed(t, plain.accept, plain.body)
		if !bytes.Equal(out, plain.body) || h.Get("Content-Encoding") != "" || h.Get("ETag") != `"r1"` || h.Get("Vary") != "Accept-Encoding" {
			t.Errorf("accept %q, %d bytes: %d bytes with %v", plain.accept, len(plain.body), len(out), h)
		}
	}
	// What no cache keeps has Vary only if it may have been compressed.
	for _, body := range [][]byte{small, large} {
		h := http.Header{}
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set("Accept-Encoding", "gzip")
		if out := CompressLarge(h, r, body); (len(out) < len(body)) != (len(body) >= MinCompress) || (h.Get("Vary") != "") != (len(body) >= MinCompress) {
			t.Errorf("CompressLarge: %d bytes of %d, %v", len(out), len(body), h)
		}
	}
	// More at a time than there are slots and pooled writers.
	var wg sync.WaitGroup
	for range 4 * cap(gzipSlots) {
		wg.Go(func() {
			h, out := compressed(t, "gzip", large)
			zr, err := gzip.NewReader(bytes.NewReader(out))
			if err != nil {
				t.Error(err)
				return
			}
			got, err := io.ReadAll(zr)
			if err != nil || !bytes.Equal(got, large) || len(out) > len(large)/20 {
				t.Errorf("%d bytes of %d came back, %d compressed: %v", len(got), len(large), len(out), err)
			}
			if h.Get("Content-Encoding") != "gzip" || h.Get("ETag") != `"r1-gzip"` || h.Get("Vary") != "Accept-Encoding" {
				t.Errorf("headers %v", h)
			}
		})
	}
	wg.Wait()
	if len(gzipSlots) != 0 {
		t.Errorf("%d slots are still held", len(gzipSlots))
	}
}

// A client that went away does not wait for a slot.
func TestCompressCanceled(t *testing.T) {
	for range cap(gzipSlots) {
		gzipSlots <- struct{}{}
		defer func() { <-gzipSlots }()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := httptest.NewRequestWithContext(ctx, "GET", "/", nil)
	r.Header.Set("Accept-Encoding", "gzip")
	h, body := http.Header{}, make([]byte, MinCompress)
	if out := Compress(h, r, body); !bytes.Equal(out, body) || h.Get("Content-Encoding") != "" {
		t.Errorf("%d bytes with %v", len(out), h)
	}
}

func TestNotModified(t *testing.T) {
	for match, want := range map[string]string{ // If-None-Match: the ETag of a 304, "" for no 304
		"": "", `"r0"`: "", `r1`: "", `"r1`: "", `"r1-br"`: "",
		`"r1"`: `"r1"`, `W/"r1"`: `"r1"`, `"r1-gzip"`: `"r1-gzip"`, `"r0", "r1-gzip"`: `"r1-gzip"`, "*": `"r1"`,
	} {
		r := httptest.NewRequest("GET", "/", nil)
		if match != "" {
			r.Header.Set("If-None-Match", match)
		}
		w := httptest.NewRecorder()
		if got := NotModified(w, r, `"r1"`); got != (want != "") {
			t.Errorf("If-None-Match %s: %t", match, got)
		} else if got && (w.Code != http.StatusNotModified || w.Header().Get("ETag") != want || w.Header().Get("Vary") == "" || w.Body.Len() > 0) {
			t.Errorf("If-None-Match %s: %d with %v", match, w.Code, w.Header())
		} else if !got && w.Header().Get("ETag") != `"r1"` {
			t.Errorf("If-None-Match %s: headers %v", match, w.Header())
		}
	}
}

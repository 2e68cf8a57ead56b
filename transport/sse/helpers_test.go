package sse

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/transport/fanout"
)

// testTimeout is how long a test waits for something that must happen.
const testTimeout = 10 * time.Second

var testCert = sync.OnceValue(func() tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"relay.test"},
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<33, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
})

func clientTLS() *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(testCert().Leaf)
	return &tls.Config{RootCAs: roots, ServerName: "relay.test"}
}

// eventually waits for what the operating system does asynchronously.
func eventually(within time.Duration, ok func() bool) bool {
	return eventuallyEvery(time.Millisecond, within, ok)
}

// eventuallyEvery is eventually for a condition that is expensive to check.
func eventuallyEvery(interval, within time.Duration, ok func() bool) bool {
	for end := time.Now().Add(within); time.Now().Before(end); {
		if ok() {
			return true
		}
		time.Sleep(interval)
	}
	return ok()
}

func metricFrame(n int) []byte {
	b, err := AppendEvent(nil, "metric", fmt.Appendf(nil, `{"n":%d,"pad":"%s"}`, n, strings.Repeat("x", 200)))
	if err != nil {
		panic(err)
	}
	return b
}

// wantStream checks n metric frames in order and the close event as the last.
func wantStream(t *testing.T, got []Event, err error, n int, c Code) {
	t.Helper()
	if !errors.Is(err, io.EOF) {
		t.Errorf("stream ended with %v, want EOF", err)
	}
	metrics := 0
	for i, ev := range got {
		switch ev.Type {
		case "metric":
			if metrics++; !bytes.HasPrefix(ev.Data, fmt.Appendf(nil, `{"n":%d,`, metrics)) {
				t.Fatalf("event %d is %.20q, want metric %d", i, ev.Data, metrics)
			}
		case "ping":
		case "close":
			if i != len(got)-1 {
				t.Errorf("close is event %d of %d", i+1, len(got))
			}
		default:
			t.Errorf("event type %q", ev.Type)
		}
	}
	if metrics != n {
		t.Errorf("%d metric events, want %d", metrics, n)
	}
	want := fmt.Sprintf(`{"code":%d,"reason":"%s"}`, c, c.Reason())
	if len(got) == 0 || got[len(got)-1].Type != "close" || string(got[len(got)-1].Data) != want {
		t.Errorf("last event of %d is not close %s", len(got), want)
	}
}

// plainAndTLS runs a test plain and with TLS, both at the same time.
func plainAndTLS(t *testing.T, f func(t *testing.T, secure bool)) {
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, secure)
		})
	}
}

// sourceHandler writes the values of a fanout.Subscriber to its stream.
type sourceHandler struct {
	Stream
	src *fanout.Subscriber[[]byte]
	end chan error
}

func (h *sourceHandler) OnReady(uint64) error {
	for b, ok := h.src.Next(); ok; b, ok = h.src.Next() {
		if _, err := h.Send(b, 1); err != nil {
			return err
		}
	}
	return h.src.Err()
}

func (h *sourceHandler) OnEnd(err error) { h.end <- err }

// runStream serves w from a new Engine until the stream ends, and returns why. It does
// not close w.
func runStream(ctx context.Context, w *Writer, src *fanout.Subscriber[[]byte]) error {
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	e, ended := NewEngine(), make(chan error)
	h := &sourceHandler{Stream: Stream{Writer: w}, src: src, end: make(chan error, 1)}
	h.Handler = h
	_ = e.AddShard(nil).Add(&h.Stream)
	src.Notify(h.Wake)
	go func() { ended <- e.Run(serving) }()
	var err error
	select {
	case err = <-h.end:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	stop()
	return errors.Join(err, <-ended)
}

var errOffline = errors.New("device offline")

// send writes one event.
func send(w *Writer, b []byte) error {
	_, err := w.Send(b, 1)
	return err
}

//go:build linux

package netpoll

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// pair is both ends of a TCP connection on loopback.
func pair(t *testing.T) (here, there *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); d.Close() })
	return d.(*net.TCPConn), c.(*net.TCPConn)
}

// waitFor polls ok until it holds, at most 20 s: the kernel acts in real time.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("timed out: " + what)
		}
	}
}

func TestSocket(t *testing.T) {
	here, there := pair(t)
	s := NewSocket(here)
	b := make([]byte, 8)
	if n, err := s.Read(b); n != 0 || err != ErrWouldBlock {
		t.Errorf("nothing there: %d, %v", n, err)
	}
	there.Write([]byte("abc"))
	n, err := 0, error(nil)
	waitFor(t, "read", func() bool { n, err = s.Read(b); return err != ErrWouldBlock })
	if err != nil || string(b[:n]) != "abc" {
		t.Errorf("read %q, %v", b[:n], err)
	}
	lots, sent := make([]byte, 1<<20), 0
	for n := 1; n > 0; sent += n {
		if n, err = s.Write(lots); err != nil {
			t.Fatal(err)
		}
	}
	if q, err := s.Unacked(); q == 0 || err != nil {
		t.Errorf("%d bytes written, %d unacknowledged, %v", sent, q, err)
	}
	go io.Copy(io.Discard, there)
	waitFor(t, "acknowledged", func() bool { q, err := s.Unacked(); return q == 0 && err == nil })
	there.CloseWrite()
	waitFor(t, "end", func() bool { _, err = s.Read(b); return err != ErrWouldBlock })
	if err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	here.Close()
	if _, err := s.Read(b); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if _, err := s.Write(b); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// TestEpollReader: a Reader calls the kernel once per event and misses nothing, neither
// input that arrives at the same moment nor the end.
func TestEpollReader(t *testing.T) {
	e, err := New()
	if err != nil {
		t.Fatal(err)
	}
	type report struct {
		key    uint64
		events Events
	}
	reports := make(chan report, 64)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- e.Run(ctx, func(key uint64, ev Events) { reports <- report{key, ev} }) }()

	here, there := pair(t)
	const key = 7<<32 | 9
	if err := e.Add(NewSocket(here), key, Readable); err != nil {
		t.Fatal(err)
	}
	r := NewReader(here)
	var got []byte
	read := func() error {
		for b := make([]byte, 16); ; {
			n, err := r.Read(b)
			if got = append(got, b[:n]...); err != nil {
				return err
			}
		}
	}
	next := func() Events {
		t.Helper()
		select {
		case r := <-reports:
			if r.key != key {
				t.Fatalf("key %x, want %x", r.key, uint64(key))
			}
			return r.events
		case <-time.After(5 * time.Second):
			t.Fatal("no event")
		}
		return 0
	}
	there.Write([]byte("one"))
	if ev := next(); ev != Readable {
		t.Errorf("events %#x, want Readable", ev)
	}
	if err := read(); err != ErrWouldBlock || string(got) != "one" {
		t.Errorf("read %q, %v", got, err)
	}
	if !r.drained {
		t.Error("the reader would call the kernel again")
	}
	there.Write([]byte("two"))
	next()
	if err := read(); err != ErrWouldBlock || string(got) != "one" {
		t.Errorf("read %q, %v, want nothing new before OnReadable", got, err)
	}
	there.Write([]byte(" and three"))
	there.CloseWrite()
	for ev := next(); ev&PeerClosed == 0; ev = next() {
	}
	r.OnReadable(true)
	if err := read(); err != io.EOF || string(got) != "onetwo and three" {
		t.Errorf("read %q, %v", got, err)
	}
	here.Close()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v", err)
	}
	other, _ := pair(t)
	if err := e.Add(NewSocket(other), 1, Readable); err == nil {
		t.Error("Add after the end")
	}
}

// TestEpollIdle: before the first Add, Run does not wait in the kernel, so that synctest
// can advance its clock.
func TestEpollIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, err := New()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := e.Run(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run returned %v", err)
		}
	})
}

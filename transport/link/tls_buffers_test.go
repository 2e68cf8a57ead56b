package link

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"reflect"
	"testing"
)

// TestReleaseTLSBuffers: after the handshake the relay's end of a TLS connection keeps no buffer,
// and input that has arrived is not lost.
func TestReleaseTLSBuffers(t *testing.T) {
	srv, roots := socketServer(t, true, func(c Conn) { _ = c.Close(CloseNormal, "") })
	roots.ServerName = "example.com"
	here, there := net.Pipe()
	server, client := tls.Server(here, srv.TLS), tls.Client(there, roots)
	ended := make(chan error)
	go func() {
		err := client.Handshake()
		if err == nil {
			_, err = client.Write([]byte("one and two"))
		}
		ended <- err
		_, err = client.Write([]byte("three"))
		ended <- err
	}()
	read := func(n int) string {
		b := make([]byte, n)
		if _, err := io.ReadFull(server, b); err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	raw := field[bytes.Buffer](reflect.ValueOf(server).Elem(), "rawInput")
	if raw == nil {
		t.Fatal("crypto/tls has no buffer rawInput any more: look where its memory is")
	}
	if got := read(3); got != "one" {
		t.Errorf("read %q", got)
	}
	if raw.Cap() < 1024 {
		t.Errorf("crypto/tls keeps a buffer of %d bytes only: releaseTLSBuffers may be superfluous", raw.Cap())
	}
	if releaseTLSBuffers(server) {
		t.Error("buffers with input in them are released")
	}
	if got := read(8); got != " and two" {
		t.Errorf("read %q", got)
	}
	if !releaseTLSBuffers(server) {
		t.Error("empty buffers are not released")
	}
	for _, name := range []string{"rawInput", "hand"} {
		if b := field[bytes.Buffer](reflect.ValueOf(server).Elem(), name); b == nil || b.Cap() > 0 {
			t.Errorf("%s is not released", name)
		}
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if got := read(5); got != "three" {
		t.Errorf("read %q", got)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	_ = here.Close()
	_ = there.Close()
}

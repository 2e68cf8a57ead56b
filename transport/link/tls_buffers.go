package link

import (
	"bytes"
	"crypto/tls"
	"reflect"
	"unsafe"
)

// releaseTLSBuffers frees the buffers of a connection after its handshake: crypto/tls keeps them
// at the size of the client's first message, 3.5 KiB, which is a quarter of what an idle device
// costs, and has no function for it. It makes smaller ones when it reads again. done is false
// while input waits in a buffer. Only the goroutine that reads the connection may call it.
//
// If a later Go has other fields, nothing is freed; TestReleaseTLSBuffers finds that.
func releaseTLSBuffers(c *tls.Conn) (done bool) {
	v := reflect.ValueOf(c).Elem()
	raw, input, handshake := field[bytes.Buffer](v, "rawInput"), field[bytes.Reader](v, "input"), field[bytes.Buffer](v, "hand")
	if raw == nil || input == nil || handshake == nil {
		return true
	}
	if raw.Len() > 0 || input.Len() > 0 || handshake.Len() > 0 {
		return false
	}
	*raw, *input, *handshake = bytes.Buffer{}, bytes.Reader{}, bytes.Buffer{}
	return true
}

// field returns an unexported field of a struct; nil if it has no such field of that type.
func field[T any](v reflect.Value, name string) *T {
	f := v.FieldByName(name)
	if !f.IsValid() || f.Type() != reflect.TypeFor[T]() {
		return nil
	}
	return (*T)(unsafe.Pointer(f.UnsafeAddr()))
}

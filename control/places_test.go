//go:build linux

package control

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
)

// anyUser makes a rig on a socket whose peers are the user that uid holds.
func anyUser(t *testing.T, uid *atomic.Uint32) *rig {
	return onSocket(t, Options{
		Allow:  func(uid, gid uint32) error { return nil },
		peerOf: func(net.Conn) (uint32, uint32, error) { return uid.Load(), 0, nil },
	})
}

// stranger is a user that is neither root nor the daemon's own.
var stranger = uint32(os.Geteuid()) + 1000

// TestSilentClients: connections that never say hello keep nobody out, however many there are,
// and only the last of them are kept.
func TestSilentClients(t *testing.T) {
	var uid atomic.Uint32
	uid.Store(stranger)
	r := anyUser(t, &uid)
	for range 5 * maxNewConns {
		nc := r.dial()
		defer nc.Close()
	}
	for r.srv.Stats().Busy < 4*maxNewConns {
		runtime.Gosched()
	}
	for _, who := range []uint32{stranger, stranger + 1, 0} {
		uid.Store(who)
		c, err := Dial(t.Context(), r.srv.Addr())
		if err != nil {
			t.Fatalf("user %d: %v", who, err)
		}
		if _, err := c.Snapshot(t.Context()); err != nil {
			t.Errorf("user %d: %v", who, err)
		}
		c.Close()
	}
	if n := r.srv.Stats().Clients; n > maxNewConns+1 {
		t.Errorf("%d connections are kept", n)
	}
}

// TestPlaces: a user leaves places to others of the group, and they leave some to the operator.
func TestPlaces(t *testing.T) {
	var uid atomic.Uint32
	r := anyUser(t, &uid)
	fill := func(who uint32) (n int) {
		uid.Store(who)
		for {
			c, err := Dial(t.Context(), r.srv.Addr())
			var busy *Error
			if errors.As(err, &busy) && busy.Code == CodeRateLimited {
				return n
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			n++
			if n > MaxClients {
				return n
			}
		}
	}
	for _, tt := range []struct {
		who  uint32
		want int
	}{{stranger, maxUserClients}, {stranger + 1, maxOtherClients - maxUserClients}, {stranger + 2, 0}, {0, MaxClients - maxOtherClients}} {
		if n := fill(tt.who); n != tt.want {
			t.Errorf("user %d got %d places, want %d", tt.who, n, tt.want)
		}
	}
}

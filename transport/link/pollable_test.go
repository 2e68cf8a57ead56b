package link

import (
	"io"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/transport/netpoll"
)

// CheckLiveness never waits, since one goroutine calls it for all links: not for a pong either that
// its peer does not take. The ping then goes out behind it.
func TestLivenessBehindBlockedPong(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		l := startLinks(t, secure)()
		waitFor(t, func() bool { return isIdle(l.s) })
		c := l.s.conn.(*relayConn)
		waitFor(t, func() bool { n, err := c.poll.Socket().Unacked(); return n == 0 && err == nil })
		c.writeMu.Lock() // as the reader that writes the pong
		ticked := make(chan struct{})
		go func() { l.s.CheckLiveness(); close(ticked) }()
		select {
		case <-ticked:
		case <-time.After(2 * time.Second):
			t.Error("Tick waits")
		}
		c.writeMu.Unlock()
		if op, _ := readFrame(t, l.conn); op != opPing {
			t.Errorf("opcode %d instead of a ping", op)
		}
		l.s.Close(CloseNormal, "normal")
		_ = l.tcp.Close()
		<-l.owner.closedWith
	})
}

// slowPingConn is a connection whose ping takes a moment, in which something happens.
type slowPingConn struct {
	Conn
	duringPing func()
}

func (c *slowPingConn) socket() *netpoll.Socket { return nil }
func (c *slowPingConn) setNonblocking()         {}
func (c *slowPingConn) onReadable(bool)         {}
func (c *slowPingConn) tryPing() (bool, error)  { c.duringPing(); return true, nil }

// A link that ends while the sweep pings it gets no writer any more: whoever waits for its
// goroutines has been told that there are none.
func TestCloseWhilePinging(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, rel := Pipe()
		s := &Session{}
		s.conn = &slowPingConn{Conn: rel, duringPing: func() {
			if err := s.Send([]byte(goldenCmd)); err != nil {
				t.Error(err)
			}
			_ = s.shutdown(io.EOF)
		}}
		var writers atomic.Int32
		s.runWriter = func() { writers.Add(1); s.wg.Done() }
		s.lastReadAt.Store(monotonicNow())
		s.readerState.Store(polled | reading)
		s.CheckLiveness()
		s.wg.Wait()
		if n := writers.Load(); n != 0 {
			t.Errorf("%d writers after the end", n)
		}
	})
}

// What a reader appends to a message is not written over the next one.
func TestHandlerAppendsToMessage(t *testing.T) {
	c := newRelayConn(&inputConn{in: append(maskedFrame(0x81, "one"), maskedFrame(0x81, "two")...), piece: 1 << 10})
	var msgs []string
	for range 2 {
		if err := c.Read(func(msg []byte) error {
			msgs = append(msgs, string(msg))
			_ = append(msg, "and what a reader adds"...)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(msgs, []string{"one", "two"}) {
		t.Errorf("read %q", msgs)
	}
}

// deadlineTape remembers a tape's write deadline.
type deadlineTape struct {
	inputConn
	deadline, within time.Time // now, and while something was written
}

func (c *deadlineTape) SetWriteDeadline(t time.Time) error { c.deadline = t; return nil }
func (c *deadlineTape) Write(b []byte) (int, error) {
	c.within = c.deadline
	return c.inputConn.Write(b)
}

// No deadline stays behind: TLS answers a KeyUpdate while the link rests, and would break
// for good at one that has passed.
func TestWriteDeadlineIsRemoved(t *testing.T) {
	conn := &deadlineTape{}
	if err := newRelayConn(conn).Write([]byte("{}")); err != nil {
		t.Fatal(err)
	}
	if !conn.deadline.IsZero() || conn.within.IsZero() {
		t.Errorf("written until %v; afterwards the deadline is %v", conn.within, conn.deadline)
	}
}

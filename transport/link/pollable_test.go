package link

import (
	"io"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/transport/netpoll"
)

// TestLivenessBehindBlockedPong: CheckLiveness does not block, since one goroutine calls it
// for all links, not even while a pong is blocked by a peer that does not read. The ping is
// written after the pong.
func TestLivenessBehindBlockedPong(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		l := startLinks(t, secure)()
		waitFor(t, func() bool { return isIdle(l.s) })
		c := l.s.conn.(*relayConn)
		waitFor(t, func() bool { n, err := c.poll.Socket().Unacked(); return n == 0 && err == nil })
		c.writeMu.Lock() // as the reader that writes the pong
		checked := make(chan struct{})
		go func() { l.s.CheckLiveness(); close(checked) }()
		select {
		case <-checked:
		case <-time.After(20 * time.Second):
			t.Error("CheckLiveness blocks")
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

// slowPingConn is a connection that calls duringPing while it pings.
type slowPingConn struct {
	Conn
	duringPing func()
}

func (c *slowPingConn) socket() *netpoll.Socket { return nil }
func (c *slowPingConn) setNonblocking()         {}
func (c *slowPingConn) onReadable(bool)         {}
func (c *slowPingConn) tryPing([]byte) (bool, bool, error) {
	c.duringPing()
	return true, true, nil
}
func (c *slowPingConn) tryWrite([]byte) (bool, bool, error) { return false, true, nil }
func (c *slowPingConn) writeRest() error                    { return nil }

// TestCloseWhilePinging: a link that ends while CheckLiveness pings it gets no writer,
// because shutdown has already waited for the session's goroutines.
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

// TestHandlerAppendsToMessage: a handler that appends to a message does not overwrite the
// next one.
func TestHandlerAppendsToMessage(t *testing.T) {
	c := newRelayConn(&inputConn{in: append(maskedFrame(0x81, "one"), maskedFrame(0x81, "two")...), piece: 1 << 10})
	var msgs []string
	for range 2 {
		if err := c.Read(func(msg []byte) error {
			msgs = append(msgs, string(msg))
			_ = append(msg, "appended by the handler"...)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(msgs, []string{"one", "two"}) {
		t.Errorf("read %q", msgs)
	}
}

// deadlineTape is an inputConn that records the write deadline.
type deadlineTape struct {
	inputConn
	deadline, within time.Time // the current one, and the one during the last Write
}

func (c *deadlineTape) SetWriteDeadline(t time.Time) error { c.deadline = t; return nil }
func (c *deadlineTape) Write(b []byte) (int, error) {
	c.within = c.deadline
	return c.inputConn.Write(b)
}

// TestWriteDeadlineIsRemoved: TLS answers a KeyUpdate while the link is idle; a deadline
// left by an earlier write would break the connection for good.
func TestWriteDeadlineIsRemoved(t *testing.T) {
	conn := &deadlineTape{}
	if err := newRelayConn(conn).Write([]byte("{}")); err != nil {
		t.Fatal(err)
	}
	if !conn.deadline.IsZero() || conn.within.IsZero() {
		t.Errorf("written until %v; afterwards the deadline is %v", conn.within, conn.deadline)
	}
}

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
func TestTickBehindPong(t *testing.T) {
	bothWays(t, func(t *testing.T, secure bool) {
		l := startLinks(t, secure)()
		wait(t, func() bool { return atRest(l.s) })
		c := l.s.conn.(*relayConn)
		wait(t, func() bool { n, err := c.poll.Socket().Unacked(); return n == 0 && err == nil })
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
		<-l.k.over
	})
}

// pinging is a connection whose ping takes a moment, in which something happens.
type pinging struct {
	Conn
	meanwhile func()
}

func (c *pinging) socket() *netpoll.Socket { return nil }
func (c *pinging) setNonblocking()         {}
func (c *pinging) onReadable(bool)         {}
func (c *pinging) tryPing() (bool, error)  { c.meanwhile(); return true, nil }

// A link that ends while the sweep pings it gets no writer any more: whoever waits for its
// goroutines has been told that there are none.
func TestEndWithinTick(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, rel := Pipe()
		s := &Session{}
		s.conn = &pinging{Conn: rel, meanwhile: func() {
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
func TestServedAppend(t *testing.T) {
	c := newRelayConn(&tape{in: append(maskedFrame(0x81, "one"), maskedFrame(0x81, "two")...), piece: 1 << 10})
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

// bounded remembers a tape's write deadline.
type bounded struct {
	tape
	deadline, within time.Time // now, and while something was written
}

func (c *bounded) SetWriteDeadline(t time.Time) error { c.deadline = t; return nil }
func (c *bounded) Write(b []byte) (int, error)        { c.within = c.deadline; return c.tape.Write(b) }

// No deadline stays behind: TLS answers a KeyUpdate while the link rests, and would break
// for good at one that has passed.
func TestServedDeadline(t *testing.T) {
	conn := &bounded{}
	if err := newRelayConn(conn).Write([]byte("{}")); err != nil {
		t.Fatal(err)
	}
	if !conn.deadline.IsZero() || conn.within.IsZero() {
		t.Errorf("written until %v; afterwards the deadline is %v", conn.within, conn.deadline)
	}
}

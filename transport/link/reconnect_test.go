package link

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestClientHandshakeFails(t *testing.T) {
	ok := testAuthOK()
	ok.NodeID = strings.ToUpper(testNode)
	tests := []struct {
		name  string
		do    func(d *device)
		code  int // that the relay gets; 0: the relay closed
		state State
		back  time.Duration // the next dial comes after at most this
	}{
		{"silent relay", func(d *device) { <-d.dialled }, -1, StateWaiting, 10*time.Second + 5*time.Second},
		{"a relay that only pings", func(d *device) {
			c := <-d.dialled
			for range 15 {
				_ = c.Ping(nil)
				time.Sleep(time.Second)
			}
		}, -1, StateWaiting, 15 * time.Second},
		{"another protocol", func(d *device) {
			(&peer{d.t, <-d.dialled}).sendAs(TypeHello, "", Hello{Protocol: "v3\x1b"})
		}, -1, StateRefused, time.Hour + 5*time.Minute},
		{"a word too early", func(d *device) {
			p := &peer{d.t, <-d.dialled}
			p.send(goldenCmd)
			if code, _ := p.readUntilClose(); code != CloseBadFrame {
				d.t.Errorf("closed with %d", code)
			}
		}, CloseBadFrame, StateWaiting, 5 * time.Second},
		{"a node id in upper case", func(d *device) {
			p := d.greet()
			p.sendAs(TypeAuthOK, "", ok)
			if code, _ := p.readUntilClose(); code != CloseBadFrame {
				d.t.Errorf("closed with %d", code)
			}
		}, CloseBadFrame, StateWaiting, 5 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, echoArgs)
				start := time.Now()
				tt.do(d)
				<-d.dialled // the next dial
				if after := time.Since(start); after > tt.back {
					t.Errorf("back after %v, want %v at most", after, tt.back)
				}
				d.mu.Lock()
				if s := d.states[1]; s.State != tt.state || strings.Contains(s.LastErr, "\x1b") {
					t.Errorf("status %+v, want %s", s, tt.state)
				}
				d.mu.Unlock()
				d.end()
			})
		})
	}
}

// slowConn takes a second to close, like a WebSocket whose peer is dead.
type slowConn struct {
	Conn
	closing *atomic.Int64
}

func (c slowConn) Close(code int, reason string) error {
	c.closing.Add(1)
	defer c.closing.Add(-1)
	time.Sleep(time.Second)
	return c.Conn.Close(code, reason)
}

// TestRunWaits: Run waits for all that it started, the closing of a link included.
func TestRunWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var closing atomic.Int64
		// In the handshake, when ready, while a link that the relay closed is closing.
		for _, after := range []time.Duration{0, 3 * time.Second, 1500 * time.Millisecond} {
			dialled := make(chan Conn, 1)
			c := NewClient(ClientOptions{Handler: &testHandler{}, Token: func() (string, error) { return "good", nil },
				Dial: func(context.Context) (Conn, error) {
					dev, rel := Pipe()
					dialled <- rel
					return slowConn{dev, &closing}, nil
				}})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			p := &peer{t, <-dialled}
			if after > 0 {
				p.sendAs(TypeHello, "", Hello{Protocol: Protocol})
				ok := testAuthOK()
				ok.ReconnectSpreadMS = 600_000 // no dial in between
				p.sendAs(TypeAuthOK, "", ok)
				p.sendAs(TypeAnnounceAck, "", AnnounceAck{})
				go p.readUntilClose()
			}
			synctest.Wait()
			if after == 1500*time.Millisecond {
				p.close()
			}
			time.Sleep(after)
			cancel()
			<-done
			if n := closing.Load(); n != 0 {
				t.Errorf("after Run %d links are still closing", n)
			}
		}
	})
}

// TestOnReadyComesFirst: what OnReady stores is there when the state becomes StateReady.
func TestOnReadyComesFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dialled, during := make(chan Conn, 1), make(chan State, 1)
		var c *Client
		c = NewClient(ClientOptions{
			Dial:    func(context.Context) (Conn, error) { dev, rel := Pipe(); dialled <- rel; return dev, nil },
			Token:   func() (string, error) { return "good", nil },
			Handler: &testHandler{},
			OnReady: func(AuthOK) { during <- c.Status().State },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		p := &peer{t, <-dialled}
		p.sendAs(TypeHello, "", Hello{Protocol: Protocol})
		p.sendAs(TypeAuthOK, "", testAuthOK())
		p.sendAs(TypeAnnounceAck, "", AnnounceAck{})
		go p.readUntilClose()
		if s := <-during; s != StateConnecting {
			t.Errorf("the state during OnReady is %s, want %s", s, StateConnecting)
		}
		synctest.Wait()
		if s := c.Status().State; s != StateReady {
			t.Errorf("the state after OnReady is %s, want %s", s, StateReady)
		}
		cancel()
		<-done
	})
}

// TestRelayDoesNotRead: the client drops a relay that has stopped reading after 10 s, even
// while the device's reader waits for space in the send queue.
func TestRelayDoesNotRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.admit()
		start := time.Now()
		done := make(chan bool)
		go func() {
			defer close(done)
			for p.conn.Write(AppendCmd(nil, NewID(), echoTool, []byte("{}"), 0, "", Expiry{})) == nil {
				_ = p.conn.Ping(nil)
			}
		}()
		<-d.dialled
		if took := time.Since(start); took < writeTimeout || took > writeTimeout+2*time.Second+2*time.Second {
			t.Errorf("the next dial came after %v", took)
		}
		<-done
		d.end()
	})
}

func TestClientLiveness(t *testing.T) {
	bubble(t, func(t *testing.T) { // a silent relay is dropped after 60 s
		d := startDevice(t, echoArgs)
		p := d.admit()
		start := time.Now()
		var pings []time.Duration
		for {
			select { // a pipe answers pings only while it is read
			case m := <-p.conn.(*pipeConn).in:
				if m.op == opPing {
					pings = append(pings, time.Since(start))
				}
				continue
			case <-d.dialled:
			}
			break
		}
		if took := time.Since(start); took < IdleTimeout || took > IdleTimeout+2*time.Second {
			t.Errorf("the next dial came after %v, want 60 s and at most the spread of 2 s", took)
		}
		if len(pings) < 2 || pings[0] < 20*time.Second || pings[0] > 30*time.Second || pings[1]-pings[0] < 20*time.Second || pings[1]-pings[0] > 30*time.Second {
			t.Errorf("pings after %v", pings)
		}
		if s := d.client.Status(); !strings.Contains(s.LastErr, "the relay sent nothing") {
			t.Errorf("the owner reads %q", s.LastErr)
		}
		d.end()
	})
	bubble(t, func(t *testing.T) { // a relay that answers pings, or pings, stays
		d := startDevice(t, echoArgs)
		p := d.admit()
		var pings atomic.Int64
		p.conn.OnPing(func(ping bool, _ []byte) {
			if ping {
				pings.Add(1)
			}
		})
		done := make(chan bool)
		go func() { p.readUntilClose(); close(done) }()
		time.Sleep(10 * time.Minute)
		before := pings.Load()
		if before < 20 || before > 30 {
			t.Errorf("%d pings in 10 min, want one in 20 to 30 s", before)
		}
		for range 30 {
			_ = p.conn.Ping(nil)
			time.Sleep(20 * time.Second)
		}
		if n := pings.Load() - before; n > 1 {
			t.Errorf("%d pings in 10 min although the relay pings", n)
		}
		if d.dialCount() != 1 {
			t.Errorf("%d dials", d.dialCount())
		}
		d.end()
		<-done
	})
}

// TestReconnectKeepsTrying: when a relay returns after 10 minutes, its device links again
// within maxBackoff.
func TestReconnectKeepsTrying(t *testing.T) {
	for range 20 {
		bubble(t, func(t *testing.T) {
			d := startDevice(t, echoArgs)
			p := d.admit()
			go p.readUntilClose()
			time.Sleep(2 * time.Minute)
			d.fail(errors.New("connection refused"))
			p.close()
			time.Sleep(10 * time.Minute)
			if s := d.client.Status(); s.State != StateWaiting || s.LastErr != "connection refused" {
				t.Errorf("status %+v", s)
			}
			if n := d.dialCount(); n < 60 || n > 300 { // 5 min below the spread of 5 s, then below 60 s
				t.Errorf("%d dials in 10 min", n)
			}
			d.fail(nil)
			start := time.Now()
			d.admit()
			if took := time.Since(start); took > maxBackoff {
				t.Errorf("back after %v, want %v at most", took, maxBackoff)
			}
			d.end()
		})
	}
}

// TestWake: what may let a dial succeed ends the wait for it, but not that after a refusal, and
// changes without end cause no dials without end.
func TestWake(t *testing.T) {
	refuse := func(d *device, code int) {
		p := d.greet()
		_ = p.conn.Close(code, "no")
	}
	for _, tt := range []struct {
		name  string
		code  int
		token string // before the wake; "": the same
		wakes bool
	}{
		{"no network", 0, "", true},
		{"draining", CloseDraining, "", true},
		{"superseded", CloseSuperseded, "", false},
		{"superseded, and a new token", CloseSuperseded, "new", true},
		{"manifest", CloseManifestInvalid, "", false},
		{"rate", CloseRateLimited, "", false},
	} {
		bubble(t, func(t *testing.T) {
			d := startDevice(t, echoArgs)
			if tt.code == 0 {
				d.fail(errors.New("no route to host"))
				time.Sleep(10 * time.Minute) // waits of up to 60 s
				for s := d.client.Status(); s.State != StateWaiting || time.Until(s.NextTry) < 5*time.Second; s = d.client.Status() {
					time.Sleep(time.Second)
				}
				d.fail(nil)
			} else {
				refuse(d, tt.code)
			}
			synctest.Wait()
			next := d.client.Status().NextTry
			if next.IsZero() {
				t.Fatalf("%s: status %+v", tt.name, d.client.Status())
			}
			if tt.token != "" {
				d.mu.Lock()
				d.token = tt.token
				d.mu.Unlock()
			}
			before, start := d.dialCount(), time.Now()
			d.client.Wake()
			synctest.Wait()
			if dialed := d.dialCount() > before; dialed != tt.wakes {
				t.Errorf("%s: dialed %v", tt.name, dialed)
			}
			if !tt.wakes && !d.client.Status().NextTry.Equal(next) {
				t.Errorf("%s: the wake moved the next try", tt.name)
			}
			if tt.wakes {
				p := d.greet()
				_ = p.conn.Close(CloseBadFrame, "again")
				n := d.dialCount()
				d.fail(errors.New("no route to host"))
				for time.Since(start) < 10*time.Minute { // an interface that comes and goes
					d.client.Wake()
					time.Sleep(100 * time.Millisecond)
				}
				if n = d.dialCount() - n; n > 200 {
					t.Errorf("%s: %d dials in 10 min of wakes", tt.name, n)
				}
				d.fail(nil)
				d.admit()
			}
			d.end()
		})
	}
}

// TestWakeWhileReady: a wake of a ready link leaves nothing behind that would let the device skip
// the spread after the relay's next restart.
func TestWakeWhileReady(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.admit()
		synctest.Wait()
		for range 3 {
			d.client.Wake()
		}
		if len(d.client.wakes) != 0 {
			t.Error("a wake of a ready link is kept")
		}
		go p.readUntilClose()
		p.close()
		d.end()
	})
}

func TestHungDial(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var starts []time.Time
		c := NewClient(ClientOptions{Token: func() (string, error) { return "", nil }, Handler: &testHandler{},
			Dial: func(ctx context.Context) (Conn, error) {
				starts = append(starts, time.Now())
				<-ctx.Done()
				return nil, ctx.Err()
			}})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		if err := c.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run ended with %v", err)
		}
		if len(starts) < 3 || starts[1].Sub(starts[0]) > 35*time.Second {
			t.Errorf("dials at %v", starts)
		}
	})
}

// TestClientCloseCodes: the state and the wait that follow each close code.
func TestClientCloseCodes(t *testing.T) {
	tests := []struct {
		code     int
		state    State
		min, max time.Duration
		cloned   bool
	}{
		{CloseNormal, StateWaiting, 0, 2 * time.Second, false},
		{CloseGoingAway, StateWaiting, 0, 2 * time.Second, false},
		{CloseBadFrame, StateWaiting, 0, 2 * time.Second, false},
		{CloseAuthFailed, StateRefused, 5 * time.Minute, 330 * time.Second, false},
		{CloseForbidden, StateRefused, 5 * time.Minute, 330 * time.Second, false},
		{CloseTimeout, StateWaiting, 0, 2 * time.Second, false},
		{CloseSuperseded, StateWaiting, time.Minute, time.Minute, true},
		{CloseTooLarge, StateWaiting, 0, 2 * time.Second, false},
		{CloseManifestInvalid, StateRefused, time.Hour, 65 * time.Minute, false},
		{CloseUpgradeRequired, StateRefused, time.Hour, 65 * time.Minute, false},
		{CloseRateLimited, StateWaiting, 30 * time.Second, time.Minute, false},
		{CloseDraining, StateWaiting, 0, 2 * time.Second, false},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.code), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, echoArgs)
				p := d.admit()
				start := time.Now()
				_ = p.conn.Close(tt.code, "because\x07")
				synctest.Wait()
				s := d.client.Status()
				if tt.min > 0 && (s.State != tt.state || s.LastCode != tt.code || s.CloneSuspected != tt.cloned || s.LastErrAt != start || s.Since != start) {
					t.Errorf("status %+v", s)
				}
				<-d.dialled
				if took := time.Since(start); took < tt.min || took > tt.max {
					t.Errorf("the next dial came after %v, want %v to %v", took, tt.min, tt.max)
				}
				d.end()
			})
		})
	}
}

// TestNewToken: a refused token is tried again after 5 min, a new token at once.
func TestNewToken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		p := d.greet()
		p.read(TypeAuth, nil)
		_ = p.conn.Close(CloseAuthFailed, "auth_failed")
		time.Sleep(time.Minute)
		if n := d.dialCount(); n != 1 {
			t.Errorf("%d dials with the refused token", n)
		}
		d.mu.Lock()
		d.token = "another"
		d.mu.Unlock()
		start := time.Now()
		p = d.greet()
		var a Auth
		if p.read(TypeAuth, &a); a.Token != "another" || time.Since(start) > tokenPollInterval {
			t.Errorf("dialled with %q after %v", a.Token, time.Since(start))
		}
		d.end()
	})
}

// TestSupersededBackoff: a superseded installation waits 60 s, then twice that, and reports
// CloneSuspected for 2 hours.
func TestSupersededBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, echoArgs)
		for wait := time.Minute; wait <= 8*time.Minute; wait *= 2 {
			p := d.admit()
			go p.readUntilClose()
			time.Sleep(wait) // as long as the other installation waits
			start := time.Now()
			_ = p.conn.Close(CloseSuperseded, "superseded")
			time.Sleep(wait - time.Nanosecond)
			dials := d.dialCount()
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if n := d.dialCount(); n != dials+1 {
				t.Errorf("%d dials %v after the takeover, want 1", n-dials, time.Since(start))
			}
			if !d.client.Status().CloneSuspected {
				t.Error("no clone is suspected")
			}
		}
		p := d.admit()
		go p.readUntilClose()
		time.Sleep(111 * time.Minute) // and 8 before
		if !d.client.Status().CloneSuspected {
			t.Error("the clone is forgotten too soon")
		}
		d.end()
		time.Sleep(time.Minute)
		if d.client.Status().CloneSuspected {
			t.Error("a clone is suspected for ever")
		}
	})
}

func TestTokenUnreadable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dials := make(chan Conn, 10)
		c := NewClient(ClientOptions{Handler: &testHandler{}, Token: func() (string, error) { return "", errors.New("open token: permission denied") },
			Dial: func(context.Context) (Conn, error) { dev, rel := Pipe(); dials <- rel; return dev, nil }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		p := &peer{t, <-dials}
		p.sendAs(TypeHello, "", Hello{Protocol: Protocol})
		if code, _ := p.readUntilClose(); code != CloseNormal {
			t.Errorf("closed with %d", code)
		}
		<-dials
		if s := c.Status(); !strings.Contains(s.LastErr, "permission denied") {
			t.Errorf("status %+v", s)
		}
		cancel()
		<-done
	})
}

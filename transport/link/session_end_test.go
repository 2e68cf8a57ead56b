package link

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestBackpressure: a device that does not read is closed with 4413 when its queue is full,
// and its link breaks when one write blocks for 10 s. Send does not block.
func TestBackpressure(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		start := time.Now()
		n := 0
		for r.session.Send([]byte(goldenCmd)) == nil {
			n++
		}
		if n < maxQueuedFrames || n > maxQueuedFrames+20 || time.Since(start) != 0 {
			t.Errorf("%d frames were taken in %v", n, time.Since(start))
		}
		code, before := p.readUntilClose()
		if err := <-r.done; code != CloseTooLarge || CloseCode(err) != CloseTooLarge || len(before) > 20 {
			t.Errorf("closed with %d and %v after %d frames", code, err, len(before))
		}
		if r.session.Send([]byte(goldenCmd)) == nil {
			t.Error("a closed session took a frame")
		}
	})
	bubble(t, func(t *testing.T) {
		r, _ := readyPair(t)
		start := time.Now()
		for range 20 {
			_ = r.session.Send([]byte(goldenCmd))
		}
		if err := <-r.done; CloseCode(err) != 0 || time.Since(start) != writeTimeout {
			t.Errorf("ended with %v after %v, want a broken link after 10 s", err, time.Since(start))
		}
	})
}

func TestSessionClose(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		r.session.Close(CloseSuperseded, "superseded")
		r.session.Close(CloseNormal, "normal") // the first code wins
		if code, _ := p.readUntilClose(); code != CloseSuperseded {
			t.Errorf("the device got %d", code)
		}
		if err := <-r.done; CloseCode(err) != CloseSuperseded {
			t.Errorf("Run returned %v", err)
		}
	})
	bubble(t, func(t *testing.T) { // the relay stops
		r, p := readyPair(t)
		r.cancel()
		if code, _ := p.readUntilClose(); code != CloseDraining {
			t.Errorf("the device got %d", code)
		}
		if err := <-r.done; CloseCode(err) != CloseDraining {
			t.Errorf("Run returned %v", err)
		}
	})
	bubble(t, func(t *testing.T) { // the relay stops during a handshake
		dev, rel := Pipe()
		r, p := startRelay(rel), &peer{t, dev}
		p.read(TypeHello, nil)
		r.cancel()
		if code, _ := p.readUntilClose(); code != CloseDraining {
			t.Errorf("the device got %d", code)
		}
		if err := <-r.done; CloseCode(err) != CloseDraining {
			t.Errorf("Accept returned %v", err)
		}
	})
}

// TestCheckLiveness: a device that has been silent for 60 s is closed; one that does not
// ping is pinged.
func TestCheckLiveness(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		pings := 0
		p.conn.OnPing(func(ping bool, _ []byte) { pings++ })
		go p.readUntilClose()
		for range 10 { // the device's own pings make the relay's unnecessary
			time.Sleep(24 * time.Second)
			_ = p.conn.Ping(nil)
			synctest.Wait()
			r.session.CheckLiveness()
		}
		synctest.Wait()
		if pings != 10 { // the pongs
			t.Errorf("%d pings and pongs, want the 10 pongs only", pings)
		}
		time.Sleep(25 * time.Second)
		r.session.CheckLiveness()
		synctest.Wait()
		if pings != 11 || r.session.IdleTime() != 0 {
			t.Errorf("%d pings and pongs, idle for %v, want a ping that was answered", pings, r.session.IdleTime())
		}
		p.close()
		<-r.done
	})
	bubble(t, func(t *testing.T) {
		r, p := readyPair(t)
		time.Sleep(59 * time.Second)
		r.session.CheckLiveness() // pings a device that does not answer
		time.Sleep(time.Second)
		r.session.CheckLiveness()
		code, _ := p.readUntilClose()
		if err := <-r.done; code != CloseTimeout || CloseCode(err) != CloseTimeout {
			t.Errorf("closed with %d, %v, want 4408", code, err)
		}
	})
}

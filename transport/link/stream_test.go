package link

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// TestHungStream is TestHungHandler for a stream that hangs. A stream that checks only the
// error of send ends.
func TestHungStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release, ended := make(chan bool), make(chan error, 1)
		n := 0
		d := startDevice(t, func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
			if n++; n == 1 {
				return []byte("{}"), func(context.Context, func([]byte) error) error { <-release; return nil }, nil
			}
			return []byte("{}"), func(_ context.Context, send func([]byte) error) error {
				for {
					if err := send([]byte("{}")); err != nil {
						ended <- err
						return err
					}
					time.Sleep(time.Second)
				}
			}, nil
		})
		p := d.admit()
		p.ack(p.cmd(testSub, "{}"))
		p.ack(p.cmd(testSub, "{}"))
		_ = p.conn.Close(CloseGoingAway, "going_away")
		start := time.Now()
		d.admit()
		if time.Since(start) > 2*time.Second {
			t.Errorf("back after %v", time.Since(start))
		}
		<-ended
		close(release)
		d.end()
	})
}

// ticks is a stream of frames {"n":1}, {"n":2} ... at a cadence.
func ticks(every time.Duration) tool {
	return func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
		return []byte(fmt.Sprintf(`{"interval_ms":%d}`, every.Milliseconds())), func(ctx context.Context, send func([]byte) error) error {
			for n := 1; ; n++ {
				if err := send([]byte(fmt.Sprintf(`{"n":%d}`, n))); err != nil {
					return err
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(every):
				}
			}
		}, nil
	}
}

func TestStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, ticks(time.Second))
		p := d.admit()
		id := p.cmd(testSub, `{"interval_ms":1000}`)
		var sub Subscribed
		if a := p.ack(id); !a.OK || manifest.Validate("system.metrics.subscribe.output@1.0.0", a.Result) != nil {
			t.Fatalf("the opening gave %+v", a)
		} else if e := (&Envelope{Payload: a.Result}); e.Decode(&sub) != nil || sub.IntervalMS != 1000 {
			t.Fatalf("the opening gave %s", a.Result)
		}
		for n := int64(1); n <= 3; n++ {
			e := p.read(TypeMetric, nil)
			m, err := e.decodeMetric()
			if err != nil || m.StreamID != sub.StreamID || m.Seq != n || string(m.Sample) != fmt.Sprintf(`{"n":%d}`, n) {
				t.Errorf("frame %d: %+v, %v", n, m, err)
			}
		}
		p.sendAs(TypeCmdCancel, id, nil)
		var end StreamEnd
		if p.read(TypeStreamEnd, &end); end != (StreamEnd{sub.StreamID, EndCanceled}) {
			t.Errorf("got %+v", end)
		}
		p.expectSilence(5 * time.Second)
		d.end()
	})
}

func TestStreamEnds(t *testing.T) {
	tests := []struct {
		name string
		fn   StreamFunc
		want string
	}{
		{"no more", func(context.Context, func([]byte) error) error { return nil }, EndShutdown},
		{"failed", func(context.Context, func([]byte) error) error { return errors.New("no sensor") }, EndHandlerError},
		{"panicked", func(context.Context, func([]byte) error) error { panic("no") }, EndHandlerError},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := startDevice(t, func(context.Context, manifest.ToolName, []byte) ([]byte, StreamFunc, error) {
					return []byte(`{"interval_ms":1000}`), tt.fn, nil
				})
				p := d.admit()
				p.ack(p.cmd(testSub, "{}"))
				var end StreamEnd
				if p.read(TypeStreamEnd, &end); end.Reason != tt.want {
					t.Errorf("got %+v, want %s", end, tt.want)
				}
				d.end()
			})
		})
	}
}

// streamEnds records the streams that ended.
type streamEnds struct {
	recorder
	ids []string
}

func (h *streamEnds) OnStreamEnd(e *StreamEnd) { h.ids = append(h.ids, e.StreamID) }

// TestStreamEndID: the relay accepts a stream id in upper and lower case, and refuses what
// is not an id.
func TestStreamEndID(t *testing.T) {
	var h streamEnds
	var s Session
	for id, good := range map[string]bool{strings.ToLower(deviceID): true, "x": false, "": false} {
		err := s.handle(Encode(TypeStreamEnd, NewID(), "", StreamEnd{id, EndCanceled}), &h)
		if (err == nil) != good {
			t.Errorf("%q: %v", id, err)
		}
	}
	if len(h.ids) != 1 || h.ids[0] != deviceID {
		t.Errorf("ended streams %q", h.ids)
	}
}

func TestStreamsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, ticks(time.Hour))
		p := d.admit()
		var ids []string
		for range MaxStreams {
			id := p.cmd(testSub, "{}")
			if a := p.ack(id); !a.OK {
				t.Fatalf("stream %d: %+v", len(ids), a)
			}
			p.read(TypeMetric, nil)
			ids = append(ids, id)
		}
		p.wantCode(p.cmd(testSub, "{}"), manifest.RateLimited)
		p.sendAs(TypeCmdCancel, ids[7], nil)
		p.read(TypeStreamEnd, nil)
		synctest.Wait()
		if a := p.ack(p.cmd(testSub, "{}")); !a.OK {
			t.Errorf("after one ended: %+v", a)
		}
		d.end()
	})
}

// TestDrops: on a link slower than the cadence, frames are dropped and counted, and seq has
// gaps.
func TestDrops(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := startDevice(t, ticks(10*time.Millisecond))
		p := d.admit()
		p.ack(p.cmd(testSub, "{}"))
		time.Sleep(5 * time.Second) // the pipe takes 16, the queue 64; writing waits for 10 s
		var seqs []int64
		for range 200 {
			e := p.read(TypeMetric, nil)
			m, err := e.decodeMetric()
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, m.Seq)
		}
		drops := uint64(seqs[199]) - 200
		if got := d.client.Status().Drops; got != drops || drops < 300 || drops > 500 {
			t.Errorf("%d frames are missing, Drops says %d", drops, got)
		}
		p.sendAs(TypeCmd, "", Cmd{Tool: echoTool, Arguments: []byte("{}")}) // the link is still up
		d.end()
	})
}

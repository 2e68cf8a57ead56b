package hub

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/transport/fanout"
	"agentctl/transport/link"
)

func TestSharedStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		var cost acquireCounter
		first := r.startSubscribe(t.Context(), n, 1000, &cost)
		waits := r.startSubscribe(t.Context(), n, 1000, &cost) // joins before the device has answered
		cmdID, sid := b.open()
		one, two := (<-first).reader, (<-waits).reader
		b.metric(sid, 1, sample(nodeA, 10))
		three, err := r.subscribeFor(t.Context(), n, 1000, &cost)
		if err != nil {
			t.Fatal(err)
		}
		for i, reader := range []*Subscriber{one, two, three} { // the last one joined later and still got the frame
			f, ok := reader.Next()
			if !ok || string(f.Data) != sample(nodeA, 10) || string(f.Event) != "data: "+sample(nodeA, 10) {
				t.Errorf("reader %d got %v", i, f)
			}
		}
		time.Sleep(time.Second) // the last frame is as old as the interval
		late, err := r.subscribeFor(t.Context(), n, 1000, &cost)
		if err != nil || frames(late) != 0 {
			t.Errorf("a late reader: %v, or an old frame", err)
		}
		b.metric(sid, 3, sample(nodeA, 11)) // the device dropped 2
		if frames(one) != 1 || frames(two) != 1 || frames(three) != 1 || frames(late) != 1 {
			t.Error("a frame did not reach all")
		}
		b.expectNothing() // one command for all of them
		if cost.acquired.Load() != 1 || cost.released.Load() != 1 {
			t.Errorf("charged %d times, given back %d times, want 1 and 1", cost.acquired.Load(), cost.released.Load())
		}
		if s := r.hub.Stats(); s.Streams != 1 || s.Frames != 2 {
			t.Errorf("stats %+v", s)
		}
		one.Close()
		two.Close()
		two.Close()
		late.Close()
		b.expectNothing()
		three.Close()
		if e := b.next(link.TypeCmdCancel); e.InReplyTo != cmdID {
			t.Errorf("cancelled %s, want %s", e.InReplyTo, cmdID)
		}
		b.metric(sid, 4, sample(nodeA, 12)) // was under way
		b.sendAs(link.TypeStreamEnd, "", link.StreamEnd{StreamID: sid, Reason: link.EndCanceled})
		synctest.Wait()
		if s := r.hub.Stats(); s.Streams != 0 || s.Frames != 2 {
			t.Errorf("stats %+v", s)
		}

		other := r.startSubscribe(t.Context(), n, 2000, &cost) // another interval is another stream
		again := r.startSubscribe(t.Context(), n, 1000, &cost)
		_, sid2 := b.open()
		_, sid1 := b.open()
		o, a := (<-other).reader, (<-again).reader
		b.metric(sid2, 1, sample(nodeA, 20))
		b.metric(sid1, 1, sample(nodeA, 21))
		f, _ := o.Next()
		g, _ := a.Next()
		if !strings.Contains(string(f.Data), ":20,") || !strings.Contains(string(g.Data), ":21,") || cost.acquired.Load() != 3 {
			t.Errorf("got %s and %s, charged %d times", f.Data, g.Data, cost.acquired.Load())
		}
		o.Close()
		a.Close()
		r.end()
	})
}

// TestCancelBeforeReopen: the device gets the cancel of a stream before the command that
// opens it again.
func TestCancelBeforeReopen(t *testing.T) {
	for range 50 {
		bubble(t, func(t *testing.T) {
			r := newTestHub(t)
			b := r.attach(nodeA, instance1)
			n := r.node(nodeA)
			first := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
			b.open()
			reader := (<-first).reader
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan subscribeReturn, 1)
			go reader.Close()
			go func() {
				reader, err := r.subscribe(ctx, n, 1000)
				done <- subscribeReturn{reader, err}
			}()
			synctest.Wait()
			select {
			case e := <-b.in: // it was closed first
				if e.Type != link.TypeCmdCancel {
					t.Errorf("the board got %s first", e.Type)
				}
				b.next(link.TypeCmd)
			default: // it was joined first
			}
			cancel()
			if o := <-done; o.err == nil {
				o.reader.Close()
			}
			r.end()
		})
	}
}

// TestOpenerCanceled: when the caller that opens a stream leaves before the device has
// answered, those who joined open it themselves.
func TestOpenerCanceled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		var cost acquireCounter
		gone := errors.New("gone fishing")
		ctx, leave := context.WithCancelCause(t.Context())
		opener := r.startSubscribe(ctx, n, 1000, &cost)
		joiners := []chan subscribeReturn{r.startSubscribe(t.Context(), n, 1000, &cost), r.startSubscribe(t.Context(), n, 1000, &cost)}
		first, _ := b.cmd()
		leave(gone)
		if o := <-opener; o.err != gone {
			t.Errorf("the opener got %v", o.err)
		}
		if e := b.next(link.TypeCmdCancel); e.InReplyTo != first {
			t.Errorf("cancelled %s, want %s", e.InReplyTo, first)
		}
		_, sid := b.open()
		b.expectNothing()
		b.metric(sid, 1, sample(nodeA, 1))
		for _, j := range joiners {
			o := <-j
			if o.err != nil || frames(o.reader) != 1 {
				t.Errorf("a joiner got %v", o.err)
				continue
			}
			o.reader.Close()
		}
		if cost.acquired.Load() != 2 || cost.released.Load() != 2 {
			t.Errorf("charged %d times, given back %d times, want 2 and 2", cost.acquired.Load(), cost.released.Load())
		}
		r.end()
	})
}

// TestSubscriberLeavesEarly: a joining caller may leave, and the device may disconnect,
// before the device has answered.
func TestSubscriberLeavesEarly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		opener := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		ctx, leave := context.WithCancel(t.Context())
		joiner := r.startSubscribe(ctx, n, 1000, new(acquireCounter))
		leave()
		if o := <-joiner; !errors.Is(o.err, context.Canceled) {
			t.Errorf("the joiner got %v", o.err)
		}
		joiner = r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		b.cmd()
		b.close()
		for _, c := range []chan subscribeReturn{opener, joiner} {
			o := <-c
			r.wantError(o.err, manifest.NodeOffline)
		}
		_, err := r.subscribe(t.Context(), n, 1000)
		r.wantError(err, manifest.NodeOffline)
		r.end()
	})
}

// TestOpeningDeadline: when the device does not answer an opening, its budget ends it for all
// who wait.
func TestOpeningDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		opener := r.startSubscribe(ctx, n, 1000, new(acquireCounter))
		time.Sleep(time.Second)
		joiner := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		id, _ := b.cmd()
		for _, c := range []chan subscribeReturn{opener, joiner} {
			o := <-c
			r.wantOutcome(o.err, manifest.DeadlineExceeded, manifest.OutcomeUnknown)
		}
		b.next(link.TypeCmdCancel)
		b.ack(id, `{"stream_id":"`+link.NewID()+`","interval_ms":1000}`)
		synctest.Wait()
		if s := r.hub.Stats(); s.Streams != 0 || s.LateAcks != 1 {
			t.Errorf("stats %+v", s)
		}
		r.end()
	})
}

// TestAckMeetsCancel: when the device answers while the caller leaves, either the caller gets
// the stream or the device gets a cancel.
func TestAckMeetsCancel(t *testing.T) {
	for range 50 {
		bubble(t, func(t *testing.T) {
			r := newTestHub(t)
			ctx, leave := context.WithCancel(t.Context())
			r.result = func(string, []byte) error { leave(); time.Sleep(time.Millisecond); return nil }
			b := r.attach(nodeA, instance1)
			n := r.node(nodeA)
			opener := r.startSubscribe(ctx, n, 1000, new(acquireCounter))
			id, _ := b.open()
			if o := <-opener; o.err == nil {
				o.reader.Close()
			}
			if e := b.next(link.TypeCmdCancel); e.InReplyTo != id {
				t.Errorf("cancelled %s, want %s", e.InReplyTo, id)
			}
			b.expectNothing()
			if s := r.hub.Stats(); s.Streams != 0 {
				t.Errorf("stats %+v", s)
			}
			r.end()
		})
	}
}

// TestOpeningFails: an opening that fails releases what it acquired and leaves no stream.
func TestOpeningFails(t *testing.T) {
	sid := link.NewID()
	tests := []struct {
		name   string
		answer func(b *board, id string)
		code   manifest.Code
		cancel bool // the device gets a cancel for what it may have opened
	}{
		{"refused", func(b *board, id string) {
			b.sendAs(link.TypeCmdAck, id, link.CmdAck{Code: manifest.RateLimited})
		}, manifest.RateLimited, false},
		{"another interval", func(b *board, id string) { b.ack(id, `{"stream_id":"`+sid+`","interval_ms":2000}`) }, manifest.Internal, true},
		{"no stream id", func(b *board, id string) { b.ack(id, `{"interval_ms":1000}`) }, manifest.Internal, true},
		{"stream id in lower case", func(b *board, id string) {
			b.ack(id, `{"stream_id":"`+strings.ToLower(sid)+`","interval_ms":1000}`)
		}, manifest.Internal, true},
		{"an echo", func(b *board, id string) { b.ack(id, echoed(nodeA, "ping")) }, manifest.Internal, true},
	}
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		var cost acquireCounter
		for _, tt := range tests {
			opener, joiner := r.startSubscribe(t.Context(), n, 1000, &cost), r.startSubscribe(t.Context(), n, 1000, &cost)
			id, _ := b.cmd()
			tt.answer(b, id)
			for _, c := range []chan subscribeReturn{opener, joiner} {
				o := <-c
				r.wantError(o.err, tt.code)
			}
			if tt.cancel {
				if e := b.next(link.TypeCmdCancel); e.InReplyTo != id {
					t.Errorf("%s: cancelled %s", tt.name, e.InReplyTo)
				}
			}
			b.expectNothing()
		}
		_, err := n.Subscribe(t.Context(), r.tool(n, "metrics.subscribe"), IntervalArgs(1000), 1000,
			func() (func(), error) { return nil, manifest.E(manifest.RateLimited, "rate") }, CallOptions{})
		r.wantError(err, manifest.RateLimited)
		b.expectNothing()
		if s := r.hub.Stats(); s.Streams != 0 || len(n.streams) != 0 || cost.acquired.Load() != cost.released.Load() {
			t.Errorf("stats %+v, %d streams, charges %d and %d", s, len(n.streams), cost.acquired.Load(), cost.released.Load())
		}

		// A stream id that is in use.
		one := r.startSubscribe(t.Context(), n, 1000, &cost)
		_, used := b.open()
		two := r.startSubscribe(t.Context(), n, 2000, &cost)
		id, _ := b.cmd()
		b.ack(id, `{"stream_id":"`+used+`","interval_ms":2000}`)
		o := <-two
		r.wantError(o.err, manifest.Internal)
		b.next(link.TypeCmdCancel)
		reader := (<-one).reader
		b.metric(used, 1, sample(nodeA, 1))
		if frames(reader) != 1 {
			t.Error("the first stream suffered")
		}
		reader.Close()
		r.end()
	})
}

func TestStreamEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		open := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		_, sid := b.open()
		reader := (<-open).reader
		b.sendAs(link.TypeStreamEnd, "", link.StreamEnd{StreamID: link.NewID(), Reason: link.EndShutdown}) // not ours
		b.metric(sid, 1, sample(nodeA, 1))
		b.sendAs(link.TypeStreamEnd, "", link.StreamEnd{StreamID: sid, Reason: link.EndHandlerError})
		synctest.Wait()
		if frames(reader) != 1 || !errors.Is(reader.Err(), ErrOffline) {
			t.Errorf("the reader ended with %v", reader.Err())
		}
		// The next one opens it again, while the old reader has not closed yet.
		again := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		_, sid = b.open()
		second := (<-again).reader
		other := r.startSubscribe(t.Context(), n, 5000, new(acquireCounter))
		id, _ := b.cmd()
		b.ack(id, `{"stream_id":"`+link.NewID()+`","interval_ms":5e3}`)
		if o := <-other; o.err != nil {
			t.Errorf("5e3 is not 5000: %v", o.err)
		} else {
			o.reader.Close()
			b.next(link.TypeCmdCancel)
		}
		reader.Close()
		b.metric(sid, 1, sample(nodeA, 2))
		if frames(second) != 1 || second.Err() != nil {
			t.Errorf("the second reader ended with %v", second.Err())
		}
		b.expectNothing()
		b.close() // and now the device
		synctest.Wait()
		if !errors.Is(second.Err(), ErrOffline) {
			t.Errorf("the second reader ended with %v", second.Err())
		}
		second.Close()
		r.end()
	})
}

// TestSlowSubscriber: a subscriber whose queue is full ends; the others are not affected.
func TestSlowSubscriber(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		open := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		_, sid := b.open()
		fast := (<-open).reader
		slow, err := r.subscribe(t.Context(), n, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for seq := int64(1); seq <= subscriberQueueSize+1; seq++ {
			if slow.Err() != nil {
				t.Errorf("the slow reader ended before frame %d", seq)
			}
			b.metric(sid, seq, sample(nodeA, 1))
			if frames(fast) != 1 {
				t.Errorf("frame %d is missing", seq)
			}
		}
		if !errors.Is(slow.Err(), fanout.ErrOverflow) || frames(slow) != subscriberQueueSize {
			t.Errorf("the slow reader ended with %v", slow.Err())
		}
		slow.Close()
		b.expectNothing()
		fast.Close()
		b.next(link.TypeCmdCancel)
		r.end()
	})
}

// TestCatchUp: a device whose link was stalled for a minute sends its frames all at once,
// and no subscriber is too slow because of that.
func TestCatchUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		open := r.startSubscribe(t.Context(), r.node(nodeA), 1000, new(acquireCounter))
		_, sid := b.open()
		reader := (<-open).reader
		late := int64(link.IdleTimeout / time.Second)
		for seq := int64(1); seq <= late; seq++ {
			b.metric(sid, seq, sample(nodeA, 1))
		}
		if got := frames(reader); int64(got) != late || reader.Err() != nil {
			t.Errorf("%d frames of %d, and the reader ended with %v", got, late, reader.Err())
		}
		reader.Close()
		b.next(link.TypeCmdCancel)
		r.end()
	})
}

// TestWithdrawn: an announce without a tool ends its streams on both sides.
func TestWithdrawn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		open := r.startSubscribe(t.Context(), r.node(nodeA), 1000, new(acquireCounter))
		_, sid := b.open()
		reader := (<-open).reader
		b.sendAs(link.TypeAnnounce, "", announce(manifest.Metrics())) // it stays: nothing ends
		b.next(link.TypeAnnounceAck)
		b.metric(sid, 1, sample(nodeA, 1))
		b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
		b.next(link.TypeAnnounceAck)
		if got := frames(reader); got != 1 || !errors.Is(reader.Err(), ErrOffline) {
			t.Errorf("%d frames, ended with %v", got, reader.Err())
		}
		reader.Close()
		b.next(link.TypeCmdCancel)
		if s := r.hub.Stats(); s.Streams != 0 {
			t.Errorf("stats %+v", s)
		}
		r.end()
	})
}

// TestBadSamples: samples that break the schema are dropped, and the first of each hundred
// is audited; a sequence number that does not rise ends the link.
func TestBadSamples(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		open := r.startSubscribe(t.Context(), n, 1000, new(acquireCounter))
		_, sid := b.open()
		reader := (<-open).reader
		r.takeLines(&r.events)
		seq := int64(0)
		for _, bad := range []string{sample(nodeB, 1), sample(nodeA, 101), `{}`, strings.Replace(sample(nodeA, 1), "{", `{"x":1,`, 1)} {
			for range 50 {
				seq++
				b.metric(sid, seq, bad)
			}
		}
		r.wantEvents("bad_sample acme y E_INTERNAL metrics.subscribe, bad_sample acme y E_INTERNAL metrics.subscribe") // of 200
		if frames(reader) != 0 || r.hub.Stats().BadFrames != 200 {
			t.Errorf("bad frames reached the reader; stats %+v", r.hub.Stats())
		}
		b.metric(sid, seq+5, sample(nodeA, 1))
		if frames(reader) != 1 {
			t.Error("a good frame is missing")
		}
		b.metric(sid, seq+5, sample(nodeA, 1))
		if code := b.waitClosed(); code != link.CloseBadFrame {
			t.Errorf("closed with %d, want 4400", code)
		}
		reader.Close()
		r.wantEvents("device_disconnect acme y 4400")
		r.end()
	})
}

func TestStreamsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		var readers []*Subscriber
		for i := range link.MaxStreams {
			open := r.startSubscribe(t.Context(), n, int64(1000+i), new(acquireCounter))
			b.open()
			readers = append(readers, (<-open).reader)
		}
		_, err := r.subscribe(t.Context(), n, 60000)
		r.wantError(err, manifest.RateLimited)
		shared, err := r.subscribe(t.Context(), n, 1000) // an interval that is open costs nothing
		if err != nil {
			t.Error(err)
		}
		b.expectNothing()
		shared.Close()
		for _, reader := range readers {
			reader.Close()
			b.next(link.TypeCmdCancel)
		}
		if s := r.hub.Stats(); s.Streams != 0 {
			t.Errorf("stats %+v", s)
		}
		r.end()
	})
}

// TestNewestFrame: of several open streams the newest frame counts; without a stream there is none.
func TestNewestFrame(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		newest := func(want string) {
			t.Helper()
			frame, at, ok := r.hub.NewestFrame(nodeA)
			if ok != (want != "") || string(frame) != want || ok && time.Since(at) > 3*time.Second {
				t.Errorf("got %s of %v, want %s", frame, at, want)
			}
		}
		newest("")
		var cost acquireCounter
		slow := r.startSubscribe(t.Context(), n, 60000, &cost)
		_, slowID := b.open()
		slowReader := (<-slow).reader
		newest("") // open, and nothing has come
		fast := r.startSubscribe(t.Context(), n, 1000, &cost)
		_, fastID := b.open()
		fastReader := (<-fast).reader
		first := sample(nodeA, 1)
		b.metric(slowID, 1, first)
		synctest.Wait()
		newest(first)
		time.Sleep(time.Second)
		b.metric(fastID, 1, sample(nodeA, 2))
		synctest.Wait()
		newest(sample(nodeA, 2))
		fastReader.Close()
		newest(first)
		slowReader.Close()
		newest("")
		if r.hub.Tools("nobody") != nil || r.hub.Protocol("nobody") != "" || len(r.hub.Tools(nodeA)) == 0 || r.hub.Protocol(nodeA) != "v2" {
			t.Errorf("%d tools over %q", len(r.hub.Tools(nodeA)), r.hub.Protocol(nodeA))
		}
		r.end()
	})
}

package gateway

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// longLog has 100 large events, and those of the tenant b among them.
type longLog struct{ failingLog }

func (longLog) Last() uint64                   { return 100 }
func (longLog) CanResume(uint64, Visible) bool { return true }
func (longLog) Follow(ctx context.Context, _ uint64, _ func(Event) error) error {
	<-ctx.Done()
	return ctx.Err()
}
func (longLog) Select(_ context.Context, after, to uint64, _ Visible, fn func(Event) error) error {
	for id := after + 1; id <= to; id++ {
		e := Event{ID: id, Tenant: "a", Topic: "t", Data: []byte(`"` + strings.Repeat("x", 30<<10) + `"`)}
		if id == 50 {
			e.Tenant = "b"
		}
		if err := fn(e); err != nil {
			return err
		}
	}
	return nil
}

// TestSlowReplays: many slow readers of one identity do not keep others from the log, those
// that wait get heartbeats, and each replay ends after its time slice.
func TestSlowReplays(t *testing.T) {
	who := authFunc(func(r *http.Request) (Identity, error) {
		return Identity{Tenant: strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), Subject: "s", Scopes: scopes{ScopeSubscribe}}, nil
	})
	runSynctest(t, Options{Identities: who, Log: longLog{}}, func(t *testing.T, g *Gateway, ln *pipeListener) {
		open := func(tenant string) *stream {
			s := subscribe(t, ln.dial(), "", "Authorization", "Bearer "+tenant, "Last-Event-ID", "0")
			_ = s.conn.SetDeadline(time.Now().Add(time.Hour))
			return s
		}
		ends := make(chan time.Duration, 100)
		begin := time.Now()
		var streams []*stream
		for range 2 * maxReplays {
			s := open("a")
			streams = append(streams, s)
			go func() { // takes an event in 5 s
				defer func() { ends <- time.Since(begin) }()
				for beats, events := 0, 0; ; {
					ev, err := s.read.Next()
					if err != nil {
						return
					}
					if ev.Type == "heartbeat" {
						beats++
						continue
					}
					if events++; events == 1 && beats == 0 && time.Since(begin) > 20*time.Second {
						t.Error("nothing came while it waited")
					}
					time.Sleep(5 * time.Second)
				}
			}()
		}
		synctest.Wait()
		if n := len(g.replaySlots.acquired); n != maxReplaysPerIdentity {
			t.Errorf("%d of one identity read the log", n)
		}
		s := open("b")
		if ev := s.next(); ev.LastEventID != "50" || time.Since(begin) > time.Second {
			t.Errorf("event %s after %s", ev.LastEventID, time.Since(begin))
		}
		for range maxReplaysPerIdentity {
			if at := <-ends; at < replayTimeSlice || at > replayTimeSlice+15*time.Second {
				t.Errorf("a replay ended after %s", at)
			}
		}
		for _, s := range append(streams, s) {
			_ = s.conn.Close()
		}
		for range 2*maxReplays - maxReplaysPerIdentity {
			<-ends
		}
	})
}

// TestReplaySlots: a replay whose wait was ended holds no slot of its identity or of all.
func TestReplaySlots(t *testing.T) {
	own, all := newSlots(maxReplaysPerIdentity), newSlots(maxReplays)
	ctx, cancel := context.WithCancel(t.Context())
	first, err := acquireReplay(ctx, own, all, time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range maxReplaysPerIdentity - 1 {
		slot, err := acquireReplay(ctx, own, all, time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer slot.release()
	}
	cancel()
	for i := range 10 {
		if slot, err := acquireReplay(ctx, own, all, time.Hour, nil); err == nil {
			t.Errorf("a slot too many: %d", i)
			slot.release()
		}
	}
	first.release()
	if n := len(own.acquired); n != maxReplaysPerIdentity-1 {
		t.Errorf("%d slots of the identity are taken", n)
	}
	if n := len(all.acquired); n != maxReplaysPerIdentity-1 {
		t.Errorf("%d slots of all are taken", n)
	}
	if n := own.waiting.Load() + all.waiting.Load(); n != 0 {
		t.Errorf("%d wait", n)
	}
}

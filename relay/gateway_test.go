package relay

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/eventlog"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
)

// TestTopics checks which events of the log are published, under which topic and in which form.
func TestTopics(t *testing.T) {
	for _, tt := range []struct{ typ, payload, topic, data string }{
		{"event", `{"data":[1,"x"]}`, "garden/Bed-1", `[1,"x"]`},
		{"ticket.created", `{"title":"x"}`, "ticket", `{"type":"ticket.created","aggregate_id":"garden/Bed-1","created_at":7,"payload":{"title":"x"}}`},
		{"presence.offline", `{}`, "presence", `{"type":"presence.offline","aggregate_id":"garden/Bed-1","created_at":7,"payload":{}}`},
		{"ticket.commented", `{"text":"<b>"}`, "ticket", `{"type":"ticket.commented","aggregate_id":"garden/Bed-1","created_at":7,"payload":{"text":"<b>"}}`},
		{"alert.raised", `{}`, "alert", `{"type":"alert.raised","aggregate_id":"garden/Bed-1","created_at":7,"payload":{}}`},
		{"kernel.middleware", `{}`, "kernel", `{"type":"kernel.middleware","aggregate_id":"garden/Bed-1","created_at":7,"payload":{}}`},
		{"call", `{}`, "audit", `{"type":"call","aggregate_id":"garden/Bed-1","created_at":7,"payload":{}}`},
		{"ticket.snapshot", `{}`, "", ""},
		{"presence.snapshot", `{}`, "", ""},
		{"other.thing", `{}`, "", ""},
		{"event", `7`, "", ""},
		{"call", `{"x":1},"y":{}`, "", ""}, // not from this relay
	} {
		e, ok := toTopicEvent(&kernel.Event{Seq: 5, Tenant: "a", Type: tt.typ, Aggregate: "garden/Bed-1", Payload: []byte(tt.payload), CreatedMS: 7})
		if ok != (tt.topic != "") || ok && (e.Topic != tt.topic || string(e.Data) != tt.data || e.ID != 5 || e.Tenant != "a" || e.TimeMS != 7) {
			t.Errorf("%s: %+v %s %v", tt.typ, e, e.Data, ok)
		}
	}
}

// TestGatewayLog checks that the log returns a topic event unchanged, and that gateway and log
// share the next id.
func TestGatewayLog(t *testing.T) {
	store, err := eventlog.Open(eventlog.Options{Path: filepath.Join(t.TempDir(), "events.db")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- store.Run(ctx) }()
	defer func() { cancel(); <-ended; _ = store.Close() }()
	log := NewGatewayLog(store)
	next := log.Last() + 1
	in := gateway.Event{Tenant: "a", Topic: "log/Level-1", Data: []byte(`{"x":"<ä&>"}`), TimeMS: 1795000000000}
	<-store.Started()
	id, err := log.Append(ctx, in)
	if err != nil || id != next {
		t.Fatalf("id %d, %v, want %d", id, err, next)
	}
	if _, err := store.Append(ctx, kernel.Event{Type: "other.thing"}); err != nil {
		t.Fatal(err)
	}
	var got []gateway.Event
	if err := log.Select(ctx, 0, log.Last(), gateway.Visible{}, func(e gateway.Event) error { got = append(got, e); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0].ID != id || got[0].Topic != in.Topic || string(got[0].Data) != string(in.Data) || got[0].TimeMS != in.TimeMS || !log.CanResume(id, gateway.Visible{}) {
		t.Errorf("%+v", got)
	}
}

// TestSupervise checks that a part that crashes is restarted with growing delays and then
// given up, and that a long run resets the count.
func TestSupervise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs, begin := 0, time.Now()
		err := supervise(t.Context(), zap.NewNop(), "sse", 3, func(context.Context) error {
			switch runs++; runs {
			case 1:
				panic("no")
			case 2:
				return nil
			case 3:
				time.Sleep(2 * steadyAfter)
			}
			return errors.New("disk on fire")
		})
		if !errors.Is(err, ErrGivenUp) || !strings.HasSuffix(err.Error(), "sse was given up after 3 restarts: disk on fire") || runs != 6 {
			t.Errorf("%v after %d runs", err, runs)
		}
		if took := time.Since(begin) - 2*steadyAfter; took < 500*time.Millisecond || took > 5*time.Second {
			t.Errorf("the waits were %s", took)
		}
	})
	synctest.Test(t, func(t *testing.T) { // with many restarts the waits do not overflow
		runs, begin := 0, time.Now()
		_ = supervise(t.Context(), zap.NewNop(), "sse", 100, func(context.Context) error { runs++; return nil })
		if took := time.Since(begin); runs != 101 || took < 90*maxRestartDelay/2 || took > 100*maxRestartDelay {
			t.Errorf("%d runs in %s", runs, took)
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	if err := supervise(ctx, zap.NewNop(), "sse", 3, func(ctx context.Context) error { cancel(); <-ctx.Done(); return ctx.Err() }); err != nil {
		t.Error(err)
	}
}

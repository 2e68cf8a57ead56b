package eventlog

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"agentctl/relay/kernel"
)

// TestSelectNewest: it selects what Select does, in the other order, in one call or in many.
func TestSelectNewest(t *testing.T) {
	c := newClock()
	s := start(t, Options{Path: logPath(t), Now: c.now})
	for n := 0; n < 2*maxPageRows; n += MaxAppend {
		var group []kernel.Event
		for i := range MaxAppend {
			e := event([]string{"call", "ticket.created", "alert.raised", "presence.online"}[i%4], []string{"a", "b", "c"}[i%3], i)
			e.Tenant = []string{"default", "greenhouse"}[i%2]
			group = append(group, e)
		}
		mustAppend(t, s, group...)
		c.move(time.Hour)
	}
	mustAppend(t, s, event("rare", "a", 0))
	mid := (s.Stats().First + s.Last()) / 2
	for _, q := range []Query{
		{}, {Class: ClassState}, {Tenant: "greenhouse"}, {Types: []string{"ticket.*", "rare"}}, {Types: []string{"alert.raised"}, Aggregates: []string{"b"}},
		{To: mid}, {After: mid}, {After: mid, To: mid + 900, Class: ClassCalls}, {Tenant: "nobody"}, {After: 1 << 63}, {After: s.Last()},
	} {
		want := all(t, s, q)
		slices.Reverse(want)
		if got, next := newest(t, s, NewestQuery{Query: q, MaxRows: 1 << 20}, len(want)+1); !reflect.DeepEqual(got, want) || next != 0 {
			t.Errorf("%+v: %d events and next %d, want %d", q, len(got), next, len(want))
		}
		// In parts, which end when fn says so or when enough rows were looked at.
		var got []kernel.Event
		part := NewestQuery{Query: q, MaxRows: 1}
		for calls := 0; ; calls++ {
			list, next := newest(t, s, part, 100)
			got = append(got, list...)
			if part.To = next; next == 0 {
				break
			}
			if calls > 200 {
				t.Fatalf("%+v never ends", q)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v in parts: %d events, want %d", q, len(got), len(want))
		}
	}
	since := c.now().Add(-90 * time.Minute).UnixMilli()
	var want []kernel.Event
	for _, e := range all(t, s, Query{}) {
		if e.CreatedMS >= since {
			want = append(want, e)
		}
	}
	slices.Reverse(want)
	if got, next := newest(t, s, NewestQuery{SinceMS: since, MaxRows: 1 << 20}, len(want)+1); !reflect.DeepEqual(got, want) || len(want) != MaxAppend+1 || next != 0 {
		t.Errorf("since %d: %d events and next %d, want %d", since, len(got), next, len(want))
	}
	if _, err := s.SelectNewest(t.Context(), NewestQuery{Query: Query{Types: make([]string, 65)}}, nil); err == nil {
		t.Error("65 types are accepted")
	}
}

// newest returns up to most events, and where to continue.
func newest(t *testing.T, s *Store, q NewestQuery, most int) (list []kernel.Event, next uint64) {
	t.Helper()
	next, err := s.SelectNewest(t.Context(), q, func(e kernel.Event) bool {
		list = append(list, e)
		return len(list) < most
	})
	if err != nil {
		t.Fatal(err)
	}
	return list, next
}

package tickets

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"agentctl/relay/kernel"
)

const openURI, approvalsURI, mineURI = "mcp://tickets/queue/open.json", "mcp://tickets/queue/approvals.json", "mcp://tickets/queue/mine.json"

// read is what a queue shows.
func (d *harness) read(c *kernel.Caller, uri string) (titles []string, total int) {
	d.t.Helper()
	_, data, err := d.k.Read(context.Background(), c, uri)
	if err != nil {
		d.t.Fatal(err)
	}
	var q struct {
		Total   int
		Tickets []Ticket
	}
	if err := json.Unmarshal(data, &q); err != nil {
		d.t.Fatal(err)
	}
	for _, k := range q.Tickets {
		titles = append(titles, k.Title)
	}
	return titles, q.Total
}

func TestQueues(t *testing.T) {
	d := newHarness(t)
	var ids []string
	for _, p := range []string{"low", "urgent", "normal", "urgent"} {
		ids = append(ids, d.do(ann, "create", object{"title": p, "priority": p}).Ticket.ID)
	}
	d.do(ann, "create", object{"title": "ask", "approval": object{"action": "y"}})
	d.do(ann, "assign", object{"id": ids[0], "agent_id": "bob"})
	d.move(ann, ids[3], Resolved)
	for _, tt := range []struct {
		c    *kernel.Caller
		uri  string
		want []string
	}{
		{ann, openURI, []string{"urgent", "normal", "low"}},
		{ann, approvalsURI, []string{"ask"}},
		{ann, mineURI, nil},
		{bob, mineURI, []string{"low"}},
		{caller("b", "bob"), mineURI, nil},
	} {
		if got, total := d.read(tt.c, tt.uri); !slices.Equal(got, tt.want) || total != len(tt.want) {
			t.Errorf("%s sees %v in %s, want %v", tt.c.Actor, got, tt.uri, tt.want)
		}
	}
	for i := range maxQueue + 5 {
		fill(d, i, Open, 1)
	}
	if got, total := d.read(ann, openURI); len(got) != maxQueue || total != maxQueue+8 {
		t.Errorf("%d tickets of %d", len(got), total)
	}
}

// TestNotifications: subscribers in the tenant are notified of a change, for the queues that
// show it, once per burst; nobody else is notified.
func TestNotifications(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newHarness(t)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = d.k.Run(ctx) })
		defer func() { stop(); wg.Wait() }()
		sub, err := d.k.Subscribe("a")
		if err != nil {
			t.Fatal(err)
		}
		other, err := d.k.Subscribe("b")
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range resources {
			release, err := d.k.Watch(ann, r.URI)
			if err != nil {
				t.Fatal(err)
			}
			defer release()
		}
		synctest.Wait()
		id, asked := "", ""
		for _, tt := range []struct {
			name string
			do   func()
			want []string
		}{
			{"create", func() { id = d.create(ann, "x") }, []string{openURI}},
			{"burst", func() {
				for range 50 {
					d.do(ann, "comment", object{"id": id, "text": "y"})
				}
			}, []string{openURI}},
			{"assign", func() { d.do(ann, "assign", object{"id": id, "agent_id": "bob"}) }, []string{mineURI, openURI}},
			{"the same again", func() { d.do(ann, "assign", object{"id": id, "agent_id": "bob"}) }, nil},
			{"unassign", func() { d.do(ann, "assign", object{"id": id, "agent_id": ""}) }, []string{mineURI, openURI}},
			{"close", func() { d.move(ann, id, Closed) }, []string{openURI}},
			{"comment on a closed one", func() { d.do(ann, "comment", object{"id": id, "text": "y"}) }, nil},
			{"refused", func() { _, _ = d.try(ann, "transition", object{"id": id, "to": Waiting}) }, nil},
			{"ask", func() {
				asked = d.do(ann, "create", object{"title": "x", "approval": object{"action": "y"}}).Ticket.ID
			}, []string{approvalsURI}},
			{"approve", func() { d.move(bob, asked, Approved) }, []string{approvalsURI}},
		} {
			tt.do()
			synctest.Wait()
			if got := sub.Next().Updated; !slices.Equal(got, tt.want) {
				t.Errorf("%s: notified of %v, want %v", tt.name, got, tt.want)
			}
			if got := other.Next().Updated; got != nil {
				t.Errorf("%s: another tenant was notified of %v", tt.name, got)
			}
		}
		// Unloaded: the resources are gone and subscribers are notified.
		if !d.k.Unload(d.p) || !sub.Next().Resources {
			t.Error("nobody was notified that the resources are gone")
		}
		if _, _, err := d.k.Read(ctx, ann, openURI); err == nil {
			t.Error("a queue of an unloaded plugin")
		}
	})
}

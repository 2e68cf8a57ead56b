package tickets

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

var ann, bob = caller("a", "ann"), caller("a", "bob")

const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"

// TestCRUD walks through every tool once, and again after a restart.
func TestCRUD(t *testing.T) {
	d := newHarness(t)
	made := d.do(ann, "create", object{"title": "Disk full", "body": "90 %\nsince noon", "node_id": node, "priority": "high"}).Ticket
	if made.Status != Open || made.CreatedBy != "ann" || made.NodeID != node || made.Priority != "high" || made.Body != "" || made.Version != 1 {
		t.Errorf("created %+v", made)
	}
	if c := d.do(bob, "comment", object{"id": made.ID, "text": "on it"}).Ticket; c.CommentCount != 1 {
		t.Errorf("commented %+v", c)
	}
	d.do(bob, "assign", object{"id": made.ID, "agent_id": "bob"})
	d.move(bob, made.ID, InProgress)
	check := func(d *harness) {
		t.Helper()
		got := d.do(ann, "get", object{"id": made.ID}).Ticket
		if got.Body != "90 %\nsince noon" || got.Status != InProgress || got.AgentID != "bob" || got.Version != 4 ||
			len(got.Comments) != 1 || got.Comments[0].By != "bob" || got.Comments[0].Text != "on it" || !slices.Equal(got.Allowed, InProgress.Next()) {
			t.Errorf("got %+v", got)
		}
		if l := d.do(ann, "list", object{}); len(l.Tickets) != 1 || l.Tickets[0].Comments != nil || l.Tickets[0].Body != "" {
			t.Errorf("listed %+v", l.Tickets)
		}
	}
	check(d)
	types := []string{}
	_ = d.log.Replay(context.Background(), 0, func(e kernel.Event) error {
		if e.Aggregate != made.ID || e.Tenant != "a" {
			t.Errorf("event %+v", e)
		}
		types = append(types, e.Type)
		return nil
	})
	if want := []string{eventCreated, eventCommented, eventAssigned, eventTransitioned}; !slices.Equal(types, want) {
		t.Errorf("events %v, want %v", types, want)
	}
	again := open(t, d.log)
	check(again)
	if dump(again.p) != dump(d.p) {
		t.Error("the restarted plugin has another state")
	}
	if id := again.create(ann, "next"); id <= made.ID {
		t.Errorf("id %s after %s", id, made.ID)
	}
}

// ticketIn makes a ticket of ann and moves it to a status. bob makes the decisions, which ann cannot.
func (d *harness) ticketIn(status Status) (id string) {
	d.t.Helper()
	args := object{"title": "x"}
	isApproval := status == Pending || status == Approved || status == Rejected || status == Expired
	if isApproval {
		args["approval"] = object{"action": "reboot attic", "expires_in_s": 60}
	}
	id = d.do(ann, "create", args).Ticket.ID
	switch status {
	case Open, Pending: // it begins like this
	case Expired:
		time.Sleep(time.Minute)
		if err := d.p.expireOne(d.t.Context(), d.p.tenant("a", false), id); err != nil {
			d.t.Fatal(err)
		}
	default:
		d.move(bob, id, status)
	}
	return id
}

// TestStatusMachine tries every pair of statuses. A refusal changes nothing and names what is allowed.
func TestStatusMachine(t *testing.T) {
	legal := map[Status][]Status{
		Open:       {InProgress, Waiting, Resolved, Closed},
		InProgress: {Open, Waiting, Resolved, Closed},
		Waiting:    {Open, InProgress, Resolved, Closed},
		Resolved:   {Open, Closed},
		Closed:     {Open},
		Pending:    {Approved, Rejected},
		Approved:   {},
		Rejected:   {},
		Expired:    {},
	}
	for _, from := range Statuses {
		synctest.Test(t, func(t *testing.T) {
			for _, to := range Statuses {
				d := newHarness(t)
				id := d.ticketIn(from)
				before := d.log.Last()
				v, err := d.try(bob, "transition", object{"id": id, "to": to})
				if err != nil {
					t.Fatal(err)
				}
				now := d.do(bob, "get", object{"id": id}).Ticket.Status
				if slices.Contains(legal[from], to) {
					if v.Error.Code != "" || now != to {
						t.Errorf("%s -> %s: %+v, now %s", from, to, v.Error, now)
					}
					continue
				}
				e := v.Error
				if e.Reason != "illegal_transition" || e.Code != manifest.BadRequest || e.Status != from || e.Allowed == nil || !slices.Equal(e.Allowed, legal[from]) {
					t.Errorf("%s -> %s: %+v, want the refusal illegal_transition with what is allowed, %v", from, to, e, legal[from])
				}
				if now != from || d.log.Last() != before {
					t.Errorf("%s -> %s: the refusal left it %s, with %d more events", from, to, now, d.log.Last()-before)
				}
			}
		})
	}
}

func TestApproval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newHarness(t)
		ask := func() string {
			return d.do(ann, "create", object{"title": "Reboot", "approval": object{"action": "reboot attic"}}).Ticket.ID
		}
		id := ask()
		if v, err := d.try(ann, "transition", object{"id": id, "to": Approved}); err != nil || v.Error.Reason != "own_request" || v.Error.Code != manifest.SafetyDenied {
			t.Errorf("ann approves her own request: %v %+v", err, v.Error)
		}
		time.Sleep(time.Hour - time.Second)
		d.move(bob, id, Approved)
		a := d.do(ann, "get", object{"id": id}).Ticket.Approval
		if a == nil || a.DecidedBy != "bob" || a.DecidedAt != time.Now().UnixMilli() || a.Action != "reboot attic" {
			t.Errorf("approval %+v", a)
		}
		d.move(ann, ask(), Rejected) // she may withdraw it

		// Nobody runs Run here: a decision that comes too late is refused all the same.
		late := ask()
		time.Sleep(time.Hour)
		v, err := d.try(bob, "transition", object{"id": late, "to": Approved})
		if err != nil || v.Error.Reason != "illegal_transition" || v.Error.Status != Expired || len(v.Error.Allowed) != 0 {
			t.Errorf("late: %v %+v", err, v.Error)
		}
		if dump(open(t, d.log).p) != dump(d.p) {
			t.Error("another state after a restart")
		}
	})
}

// expiryHarness is a plugin that runs, on a log that can fail.
func expiryHarness(t *testing.T) (*harness, *slowLog) {
	log := &slowLog{}
	k := kernel.New(kernel.Options{})
	d := &harness{t: t, k: k, p: New(k, log), log: &log.MemoryLog}
	if err := k.Load(d.p, false); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.p.Run(ctx) })
	t.Cleanup(func() { stop(); wg.Wait() })
	synctest.Wait()
	return d, log
}

// askApproval makes an approval that expires after some seconds.
func (d *harness) askApproval(seconds int) (id string) {
	d.t.Helper()
	return d.do(ann, "create", object{"title": "x", "approval": object{"action": "y", "expires_in_s": seconds}}).Ticket.ID
}

// wantStatus checks the status of a ticket after Run has done what it is due to do.
func (d *harness) wantStatus(id string, want Status) {
	d.t.Helper()
	synctest.Wait()
	if got := d.do(bob, "get", object{"id": id}).Ticket.Status; got != want {
		d.t.Errorf("the ticket is %s, want %s", got, want)
	}
}

// TestExpiry: Run lets an approval expire on the millisecond, also one that expires before those that it
// has slept for.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _ := expiryHarness(t)
		d.askApproval(600)
		synctest.Wait() // Run sleeps until then, or for maxSleep
		id := d.askApproval(30)
		time.Sleep(30*time.Second - time.Millisecond)
		d.wantStatus(id, Pending)
		time.Sleep(time.Millisecond)
		d.wantStatus(id, Expired)
	})
}

// TestExpiryIsTriedAgain: an approval expires as soon as the log takes the event.
func TestExpiryIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, log := expiryHarness(t)
		id := d.askApproval(30)
		log.failWith(kernel.ErrLogFull)
		time.Sleep(5 * time.Minute)
		d.wantStatus(id, Pending)
		log.failWith(nil)
		time.Sleep(time.Second)
		d.wantStatus(id, Expired)
	})
}

// TestTenants: another tenant's ticket is one that does not exist, for every tool.
func TestTenants(t *testing.T) {
	d := newHarness(t)
	eve := caller("b", "ann")
	id := d.create(ann, "secret")
	d.create(eve, "own")
	for tool, args := range map[string]object{"get": {}, "comment": {"text": "x"}, "assign": {"agent_id": "eve"}, "transition": {"to": Closed}} {
		args["id"] = id
		_, theirs := d.try(eve, tool, args)
		args["id"] = "01HZX9K3M4P7Q8R9S0T1V2W3XY"
		_, nobodys := d.try(eve, tool, args)
		if reason(theirs) != "not_found" || theirs.Error() != nobodys.Error() {
			t.Errorf("%s: %v and %v", tool, theirs, nobodys)
		}
	}
	if l := d.do(eve, "list", object{"cursor": "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"}); len(l.Tickets) != 1 || l.Tickets[0].Title != "own" {
		t.Errorf("eve sees %+v", l.Tickets)
	}
	for _, r := range resources {
		_, data, err := d.k.Read(context.Background(), eve, r.URI)
		if err != nil || bytes.Contains(data, []byte("secret")) {
			t.Errorf("%s: %s %v", r.URI, data, err)
		}
	}
	if _, err := d.try(caller("c", "x"), "list", object{}); err != nil || len(d.p.tenantList()) != 2 {
		t.Errorf("reading made a tenant: %v, %d", err, len(d.p.tenantList()))
	}
}

func TestScopes(t *testing.T) {
	d := newHarness(t)
	id := d.create(ann, "x")
	reader := &kernel.Caller{Tenant: "a", Actor: "r", Scopes: scopes{manifest.ScopeTicketsRead}}
	nobody := &kernel.Caller{Tenant: "a", Actor: "n", Scopes: scopes{manifest.ScopeCallReadOnly, manifest.ScopeToolsList}}
	for tool, args := range map[string]object{"create": {"title": "y"}, "get": {"id": id}, "list": {}, "comment": {"id": id, "text": "y"},
		"assign": {"id": id, "agent_id": "r"}, "transition": {"id": id, "to": Closed}} {
		reads := tool == "get" || tool == "list"
		if _, err := d.try(reader, tool, args); (err == nil) != reads {
			t.Errorf("a reader's %s: %v", tool, err)
		}
		if _, err := d.try(nobody, tool, args); reason(err) != "scope" {
			t.Errorf("%s without a scope: %v", tool, err)
		}
	}
	if _, _, err := d.k.Read(context.Background(), nobody, resources[0].URI); !errors.Is(err, kernel.ErrNoResource) {
		t.Errorf("a queue without a scope: %v", err)
	}
}

// TestConcurrentDecisions: of many who move a ticket at once exactly one succeeds.
func TestConcurrentDecisions(t *testing.T) {
	d := newHarness(t)
	id := d.do(ann, "create", object{"title": "x", "approval": object{"action": "y"}}).Ticket.ID
	var won, lost atomic.Int32
	var wg sync.WaitGroup
	for i := range 30 {
		to := []Status{Approved, Rejected}[i%2]
		wg.Go(func() {
			v, err := d.try(caller("a", fmt.Sprint("w", i)), "transition", object{"id": id, "to": to})
			switch {
			case err == nil && v.Error.Code == "":
				won.Add(1)
			case v.Error.Reason == "illegal_transition":
				lost.Add(1)
			default:
				t.Errorf("%v %+v", err, v.Error)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || lost.Load() != 29 || d.log.Last() != 2 {
		t.Errorf("%d won, %d lost, %d events", won.Load(), lost.Load(), d.log.Last())
	}
}

func TestPages(t *testing.T) {
	d := newHarness(t)
	var want []string
	for i := range 25 {
		id := d.create(ann, fmt.Sprint("t", i))
		if i%2 == 0 {
			d.move(ann, id, Closed)
			want = append([]string{id}, want...)
		}
	}
	var got []string
	args := object{"limit": 5, "status": Closed}
	for pages := 0; pages < 10; pages++ {
		v := d.do(ann, "list", args)
		for _, k := range v.Tickets {
			got = append(got, k.ID)
		}
		d.move(ann, d.create(ann, "new"), Closed) // does not shift the pages
		if v.Next == "" {
			break
		}
		args["cursor"] = v.Next
	}
	if !slices.Equal(got, want) {
		t.Errorf("pages gave %v, want %v", got, want)
	}
}

func TestIdempotency(t *testing.T) {
	d := newHarness(t)
	args := object{"title": "x", "body": "b", "idempotency_key": "k1"}
	first := d.do(ann, "create", args).Ticket.ID
	for _, d := range []*harness{d, open(t, d.log)} {
		if again := d.do(ann, "create", args).Ticket.ID; again != first {
			t.Errorf("the same key made %s and %s", first, again)
		}
		if _, err := d.try(ann, "create", object{"title": "y", "idempotency_key": "k1"}); reason(err) != "key_reused" {
			t.Errorf("another ticket with the same key: %v", err)
		}
		if d.log.Last() != 1 {
			t.Errorf("%d events", d.log.Last())
		}
	}
	if theirs := d.do(bob, "create", args).Ticket.ID; theirs == first {
		t.Error("bob got ann's ticket for his key")
	}
}

// TestLogFails: what the log does not take does not happen, and nobody is notified of it.
func TestLogFails(t *testing.T) {
	log := &slowLog{}
	k := kernel.New(kernel.Options{})
	d := &harness{t: t, k: k, p: New(k, log)}
	if err := k.Load(d.p, false); err != nil {
		t.Fatal(err)
	}
	id := d.create(ann, "x")
	before := dump(d.p)
	sub, err := k.Subscribe("a")
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	log.err = fmt.Errorf("append: %w", &storage.Error{Store: "events.db", Kind: storage.Full, Err: errors.New("no space left on device")})
	for i := range 40 { // more than a breaker would bear
		tool := []string{"create", "comment", "assign", "transition"}[i%4]
		args := map[string]object{"create": {"title": "y"}, "comment": {"id": id, "text": "y"}, "assign": {"id": id, "agent_id": "r"}, "transition": {"id": id, "to": Closed}}[tool]
		if _, err := d.try(ann, tool, args); reason(err) != "storage" || strings.Contains(err.Error(), "space") {
			t.Errorf("%s: %v", tool, err)
		}
	}
	d.do(ann, "get", object{"id": id}) // what was is still read
	if dump(d.p) != before || len(sub.Next().Updated) != 0 {
		t.Errorf("changed to %s", dump(d.p))
	}
}

// TestReadsDoNotWait: a log that hangs holds the change that waits for it and a bounded
// number behind it, but no reader.
func TestReadsDoNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &slowLog{}
		k := kernel.New(kernel.Options{})
		d := &harness{t: t, k: k, p: New(k, log)}
		if err := k.Load(d.p, false); err != nil {
			t.Fatal(err)
		}
		id := d.create(ann, "x")
		hold := make(chan struct{})
		log.mu.Lock()
		log.hold = hold
		log.mu.Unlock()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = d.try(ann, "transition", object{"id": id, "to": Closed}) })
		synctest.Wait()
		start := time.Now()
		if s := d.do(ann, "get", object{"id": id}).Ticket.Status; s != Open || time.Since(start) > 0 {
			t.Errorf("read %s after %v, before the log had it", s, time.Since(start))
		}
		if _, err := d.try(bob, "comment", object{"id": id, "text": "y"}); reason(err) != "queue" || time.Since(start) != maxAcquireWait {
			t.Errorf("behind a log that hangs: %v after %v", err, time.Since(start))
		}
		var refused atomic.Int32
		for range 200 { // more than the plugin's calls in flight
			wg.Go(func() {
				begun := time.Now()
				if _, err := d.try(bob, "comment", object{"id": id, "text": "y"}); reason(err) == "queue" && time.Since(begun) == 0 {
					refused.Add(1)
				}
			})
		}
		synctest.Wait()
		if refused.Load() != 200-maxWaiting {
			t.Errorf("%d changes were refused at once, want %d", refused.Load(), 200-maxWaiting)
		}
		log.fault.Store(&storage.Error{Store: "events.db", Kind: storage.Hung})
		if _, err := d.try(bob, "comment", object{"id": id, "text": "y"}); reason(err) != "storage" || !manifest.AsError(err).Retryable() {
			t.Errorf("behind a log that says that it hangs: %v", err)
		}
		log.fault.Store(nil)
		close(hold)
		wg.Wait()
		synctest.Wait()
		if s := d.do(ann, "get", object{"id": id}).Ticket.Status; s != Closed {
			t.Errorf("in the end %s", s)
		}
	})
}

func TestRestoreSkips(t *testing.T) {
	d := newHarness(t)
	id := d.create(ann, "x")
	d.move(ann, id, Waiting)
	want := dump(d.p)
	for _, e := range []kernel.Event{
		{Type: "ticket.merged", Tenant: "a", Aggregate: id, Payload: json.RawMessage(`{"v":3}`)},
		{Type: "presence.online", Tenant: "a", Aggregate: "x"},
		{Type: eventCommented, Tenant: "a", Aggregate: id, Payload: json.RawMessage(`{"v":"three"}`)},
		{Type: eventCommented, Tenant: "a", Aggregate: id, Payload: json.RawMessage(`{"v":9,"text":"lost its past"}`)},
		{Type: eventTransitioned, Tenant: "a", Aggregate: id, Payload: json.RawMessage(`{"v":2,"to":"closed"}`)},
		{Type: eventCreated, Tenant: "A B", Aggregate: id, Payload: json.RawMessage(`{"v":1}`)},
		{Type: eventCreated, Tenant: "a", Aggregate: "../x", Payload: json.RawMessage(`{"v":1}`)},
	} {
		if _, err := d.log.Append(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	p := New(d.k, d.log)
	for range 2 { // the second time changes nothing
		done, err := p.Restore(t.Context(), d.log)
		if err != nil || done.Tickets != 1 || done.Skipped != 5 {
			t.Errorf("restored %+v, %v", done, err)
		}
		if got := dump(p); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

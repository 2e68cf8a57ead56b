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

// TestStatusMachine tries every pair of statuses.
func TestStatusMachine(t *testing.T) {
	way := map[Status][]Status{
		Open: {}, InProgress: {InProgress}, Waiting: {Waiting}, Resolved: {Resolved}, Closed: {Closed},
		Pending: {}, Approved: {Approved}, Rejected: {Rejected}, Expired: nil,
	}
	legal := map[Status][]Status{
		Open: {InProgress, Waiting, Resolved, Closed}, InProgress: {Open, Waiting, Resolved, Closed},
		Waiting: {Open, InProgress, Resolved, Closed}, Resolved: {Open, Closed}, Closed: {Open},
		Pending: {Approved, Rejected}, Approved: {}, Rejected: {}, Expired: {},
	}
	for _, from := range Statuses {
		for _, to := range Statuses {
			synctest.Test(t, func(t *testing.T) {
				d := newHarness(t)
				args := object{"title": "x"}
				if from == Pending || from == Approved || from == Rejected || from == Expired {
					args["approval"] = object{"action": "reboot attic", "expires_in_s": 60}
				}
				id := d.do(ann, "create", args).Ticket.ID
				d.move(bob, id, way[from]...)
				if from == Expired {
					time.Sleep(time.Minute)
					if err := d.p.expireOne(t.Context(), d.p.tenant("a", false), id); err != nil {
						t.Fatal(err)
					}
				}
				before := d.log.Last()
				v, err := d.try(bob, "transition", object{"id": id, "to": to})
				if err != nil {
					t.Fatal(err)
				}
				got := d.do(bob, "get", object{"id": id}).Ticket.Status
				if slices.Contains(legal[from], to) {
					if v.Error.Code != "" || got != to {
						t.Errorf("%s -> %s: %+v, now %s", from, to, v.Error, got)
					}
					return
				}
				if v.Error.Reason != "illegal_transition" || v.Error.Code != manifest.BadRequest || v.Error.Status != from ||
					!slices.Equal(v.Error.Allowed, legal[from]) || v.Error.Allowed == nil || got != from || d.log.Last() != before {
					t.Errorf("%s -> %s: %+v, now %s", from, to, v.Error, got)
				}
			})
		}
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

// TestExpiry: Run lets approvals expire on the millisecond, also those that were there
// before it began, and tries again when the log fails.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &slowLog{}
		k := kernel.New(kernel.Options{})
		d := &harness{t: t, k: k, p: New(k, log), log: &log.MemoryLog}
		if err := k.Load(d.p, false); err != nil {
			t.Fatal(err)
		}
		ask := func(seconds int) string {
			return d.do(ann, "create", object{"title": "x", "approval": object{"action": "y", "expires_in_s": seconds}}).Ticket.ID
		}
		first := ask(600)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = d.p.Run(ctx) })
		synctest.Wait()
		second := ask(30)
		status := func(id string) Status {
			synctest.Wait()
			return d.do(bob, "get", object{"id": id}).Ticket.Status
		}
		time.Sleep(30*time.Second - time.Millisecond)
		if s := status(second); s != Pending {
			t.Errorf("second is %s too early", s)
		}
		time.Sleep(time.Millisecond)
		if s := status(second); s != Expired {
			t.Errorf("second is %s, want expired", s)
		}
		log.mu.Lock()
		log.err = kernel.ErrLogFull
		log.mu.Unlock()
		time.Sleep(570 * time.Second)
		if s := status(first); s != Pending {
			t.Errorf("first is %s though the log failed", s)
		}
		log.mu.Lock()
		log.err = nil
		log.mu.Unlock()
		time.Sleep(time.Second)
		if s := status(first); s != Expired {
			t.Errorf("first is %s, want expired", s)
		}
		stop()
		wg.Wait()
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

// TestFleetTools: the merged tools do what tickets.* do, and only one of these things a call.
func TestFleetTools(t *testing.T) {
	d := newHarness(t)
	d.p.UseBoards(Boards{
		Find: func(tenant, ref string) (string, error) {
			if tenant == "acme" && ref == "attic" {
				return node, nil
			}
			return "", manifest.E(manifest.SafetyDenied, "none of your boards")
		},
		Name: func(tenant, id string) string { return map[string]string{"acme" + node: "attic"}[tenant+id] },
	})
	ann, bob := caller("acme", "ann"), caller("acme", "bob")
	call := func(c *kernel.Caller, tool string, args object) (v struct {
		view
		Ticket struct {
			Ticket
			NodeName string `json:"node_name"`
		}
	}, err error) {
		t.Helper()
		res, err := d.k.Call(t.Context(), &kernel.Request{Caller: c, Tool: "fleet." + tool, Arguments: mustJSON(args)})
		if err != nil {
			return v, err
		}
		return v, json.Unmarshal(res.Structured, &v)
	}
	must := func(c *kernel.Caller, tool string, args object) (v struct {
		view
		Ticket struct {
			Ticket
			NodeName string `json:"node_name"`
		}
	}) {
		t.Helper()
		v, err := call(c, tool, args)
		if err != nil || v.Error.Code != "" {
			t.Fatalf("%s %v: %v %+v", tool, args, err, v.Error)
		}
		return v
	}
	newTicket := object{"title": "Disk full", "board": "attic", "priority": "high", "idempotency_key": "k"}
	made := must(ann, "ticket", newTicket).Ticket
	if made.NodeID != node || made.NodeName != "attic" || made.Priority != "high" || made.Status != Open || made.CreatedBy != "ann" {
		t.Errorf("created %+v", made)
	}
	if again := must(ann, "ticket", newTicket).Ticket; again.ID != made.ID {
		t.Error("the same key made another ticket")
	}
	must(bob, "ticket", object{"id": made.ID, "comment": "on it"})
	must(bob, "ticket", object{"id": made.ID, "agent_id": "bob"})
	if k := must(bob, "ticket", object{"id": made.ID, "status": "in_progress"}).Ticket; k.Version != 4 || k.AgentID != "bob" || k.Status != InProgress {
		t.Errorf("changed to %+v", k)
	}
	if k := must(ann, "tickets", object{"id": made.ID}).Ticket; len(k.Comments) != 1 {
		t.Errorf("read %+v", k)
	}
	asked := must(ann, "ticket", object{"title": "Reboot", "action": "reboot attic", "expires_in_s": 60}).Ticket
	if asked.Status != Pending || asked.Approval.ExpiresAt-asked.CreatedAt > 60_000 {
		t.Errorf("asked %+v", asked)
	}
	if v, _ := call(ann, "decide", object{"id": asked.ID, "decision": "approved"}); v.Error.Reason != "own_request" {
		t.Errorf("the own request: %+v", v.Error)
	}
	if k := must(bob, "decide", object{"id": asked.ID, "decision": "approved"}).Ticket; k.Status != Approved || k.Approval.DecidedBy != "bob" {
		t.Errorf("decided %+v", k)
	}
	for _, tt := range []struct {
		tool string
		args object
		code manifest.Code
		want string
	}{
		{"ticket", object{}, manifest.ManifestInvalid, "argument title: missing"},
		{"ticket", object{"comment": "x"}, manifest.ManifestInvalid, "argument comment: needs id"},
		{"ticket", object{"id": made.ID}, manifest.ManifestInvalid, "one of comment, agent_id, status"},
		{"ticket", object{"id": made.ID, "comment": "x", "status": "open"}, manifest.ManifestInvalid, "one of comment, agent_id, status"},
		{"ticket", object{"id": made.ID, "title": "x"}, manifest.ManifestInvalid, "one of comment, agent_id, status"},
		{"ticket", object{"id": asked.ID, "status": "approved"}, manifest.ManifestInvalid, "must be one of open"},
		{"ticket", object{"title": "x", "expires_in_s": 60}, manifest.ManifestInvalid, "needs action"},
		{"ticket", object{"title": "x", "board": "cellar"}, manifest.SafetyDenied, "none of your boards"},
		{"tickets", object{"id": made.ID, "limit": 1}, manifest.ManifestInvalid, "argument id: without others"},
		{"tickets", object{"board": "cellar"}, manifest.SafetyDenied, "none of your boards"},
	} {
		if _, err := call(ann, tt.tool, tt.args); err == nil || manifest.AsError(err).Code != tt.code || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %v: %v, want %s", tt.tool, tt.args, err, tt.want)
		}
	}
	if _, err := call(caller("other", "ann"), "tickets", object{"id": made.ID}); err == nil {
		t.Error("another tenant reads the ticket")
	}
}

// TestFleetPages: without a limit a page has 2 KB, and the pages have each ticket once.
func TestFleetPages(t *testing.T) {
	d := newHarness(t)
	ann := caller("acme", "ann")
	const tickets = 60
	for i := range tickets {
		d.create(ann, strings.Repeat("x", 1+i*3))
	}
	seen, cursor := 0, ""
	for page := 0; page == 0 || cursor != ""; page++ {
		args := object{}
		if cursor != "" {
			args["cursor"] = cursor
		}
		res, err := d.k.Call(t.Context(), &kernel.Request{Caller: ann, Tool: "fleet.tickets", Arguments: mustJSON(args)})
		if err != nil || len(res.Structured) > 2048 {
			t.Fatalf("page %d: %d bytes, %v", page, len(res.Structured), err)
		}
		var v view
		if err := json.Unmarshal(res.Structured, &v); err != nil || len(v.Tickets) == 0 {
			t.Fatalf("page %d: %v, %s", page, err, res.Structured)
		}
		seen, cursor = seen+len(v.Tickets), v.Next
	}
	if seen != tickets {
		t.Errorf("%d tickets on all pages, want %d", seen, tickets)
	}
	res, err := d.k.Call(t.Context(), &kernel.Request{Caller: ann, Tool: "fleet.tickets", Arguments: mustJSON(object{"limit": 50})})
	var v view
	if err != nil || json.Unmarshal(res.Structured, &v) != nil || len(v.Tickets) != 50 || v.Next == "" {
		t.Errorf("with a limit: %d tickets, %v", len(v.Tickets), err)
	}
}

// TestFleetSize: the tools cost a model little.
func TestFleetSize(t *testing.T) {
	size := 0
	for _, x := range fleetTools() {
		size += len(x.tool.Name) + len(x.tool.Description) + len(x.tool.InputSchema)
		t.Logf("%s %d %s", x.tool.Name, len(x.tool.InputSchema), x.tool.InputSchema)
	}
	if size > 1500 {
		t.Errorf("%d bytes", size)
	}
}

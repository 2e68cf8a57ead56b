package tickets

import (
	"encoding/json"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Callers of a tenant that has a board named attic, whose id is node.
var fleetAnn, fleetBob = caller("acme", "ann"), caller("acme", "bob")

// newFleetHarness is a plugin that knows that board.
func newFleetHarness(t testing.TB) *harness {
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
	return d
}

// fleetView is an answer of a fleet tool, with the name of the ticket's board.
type fleetView struct {
	view
	Ticket struct {
		Ticket
		NodeName string `json:"node_name"`
	}
	bytes int
}

// tryFleet calls fleet.TOOL.
func (d *harness) tryFleet(c *kernel.Caller, tool string, args object) (v fleetView, err error) {
	d.t.Helper()
	res, err := d.k.Call(d.t.Context(), &kernel.Request{Caller: c, Tool: "fleet." + tool, Arguments: mustJSON(args)})
	if err != nil {
		return v, err
	}
	v.bytes = len(res.Structured)
	return v, json.Unmarshal(res.Structured, &v)
}

// fleet is tryFleet of what has to succeed.
func (d *harness) fleet(c *kernel.Caller, tool string, args object) fleetView {
	d.t.Helper()
	v, err := d.tryFleet(c, tool, args)
	if err != nil || v.Error.Code != "" {
		d.t.Fatalf("fleet.%s %v: %v %+v", tool, args, err, v.Error)
	}
	return v
}

func TestFleetTicketCreates(t *testing.T) {
	d := newFleetHarness(t)
	args := object{"title": "Disk full", "board": "attic", "priority": "high", "idempotency_key": "k"}
	made := d.fleet(fleetAnn, "ticket", args).Ticket
	if made.NodeID != node || made.NodeName != "attic" || made.Priority != "high" || made.Status != Open || made.CreatedBy != "ann" {
		t.Errorf("created %+v", made)
	}
	if again := d.fleet(fleetAnn, "ticket", args).Ticket; again.ID != made.ID {
		t.Errorf("the same key made %s, and %s before", again.ID, made.ID)
	}
}

func TestFleetTicketChanges(t *testing.T) {
	d := newFleetHarness(t)
	id := d.create(fleetAnn, "Disk full")
	d.fleet(fleetBob, "ticket", object{"id": id, "comment": "on it"})
	d.fleet(fleetBob, "ticket", object{"id": id, "agent_id": "bob"})
	if k := d.fleet(fleetBob, "ticket", object{"id": id, "status": "in_progress"}).Ticket; k.Version != 4 || k.AgentID != "bob" || k.Status != InProgress {
		t.Errorf("changed to %+v, want version 4, of bob, in progress", k)
	}
	if k := d.fleet(fleetAnn, "tickets", object{"id": id}).Ticket; len(k.Comments) != 1 {
		t.Errorf("read %+v, want the comment", k)
	}
}

// An approval is asked for with fleet.ticket and decided with fleet.decide, by somebody else.
func TestFleetDecide(t *testing.T) {
	d := newFleetHarness(t)
	asked := d.fleet(fleetAnn, "ticket", object{"title": "Reboot", "action": "reboot attic", "expires_in_s": 60}).Ticket
	if asked.Status != Pending || asked.Approval.ExpiresAt-asked.CreatedAt > 60_000 {
		t.Errorf("asked %+v, want a pending approval for a minute", asked)
	}
	approve := object{"id": asked.ID, "decision": "approved"}
	if v, _ := d.tryFleet(fleetAnn, "decide", approve); v.Error.Reason != "own_request" {
		t.Errorf("ann approves her own request: %+v", v.Error)
	}
	if k := d.fleet(fleetBob, "decide", approve).Ticket; k.Status != Approved || k.Approval.DecidedBy != "bob" {
		t.Errorf("decided %+v, want approved by bob", k)
	}
}

// A call makes one change, and the errors say which arguments go together.
func TestFleetToolsRefuse(t *testing.T) {
	d := newFleetHarness(t)
	id := d.create(fleetAnn, "Disk full")
	const oneChange = "one of comment, agent_id, status"
	for _, tt := range []struct {
		tool string
		args object
		code manifest.Code
		want string
	}{
		{"ticket", object{}, manifest.ManifestInvalid, "argument title: missing"},
		{"ticket", object{"comment": "x"}, manifest.ManifestInvalid, "argument comment: needs id"},
		{"ticket", object{"id": id}, manifest.ManifestInvalid, oneChange},
		{"ticket", object{"id": id, "comment": "x", "status": "open"}, manifest.ManifestInvalid, oneChange},
		{"ticket", object{"id": id, "title": "x"}, manifest.ManifestInvalid, oneChange},
		{"ticket", object{"id": id, "title": "x", "status": "open"}, manifest.ManifestInvalid, oneChange},
		{"ticket", object{"id": id, "status": "approved"}, manifest.ManifestInvalid, "must be one of open"},
		{"ticket", object{"title": "x", "expires_in_s": 60}, manifest.ManifestInvalid, "needs action"},
		{"ticket", object{"title": "x", "board": "cellar"}, manifest.SafetyDenied, "none of your boards"},
		{"tickets", object{"id": id, "limit": 1}, manifest.ManifestInvalid, "argument id: without others"},
		{"tickets", object{"board": "cellar"}, manifest.SafetyDenied, "none of your boards"},
	} {
		if _, err := d.tryFleet(fleetAnn, tt.tool, tt.args); err == nil || manifest.AsError(err).Code != tt.code || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("fleet.%s %v: %v, want %s with %q", tt.tool, tt.args, err, tt.code, tt.want)
		}
	}
	if _, err := d.tryFleet(caller("other", "ann"), "tickets", object{"id": id}); reason(err) != "not_found" {
		t.Errorf("another tenant reads the ticket: %v", err)
	}
}

// Without a limit a page has at most 2 KB, and the pages have each ticket once.
func TestFleetPages(t *testing.T) {
	d := newFleetHarness(t)
	const tickets = 60
	for i := range tickets {
		d.create(fleetAnn, strings.Repeat("x", 1+i*3))
	}
	seen, args := 0, object{}
	for page := 0; page == 0 || args["cursor"] != ""; page++ {
		v := d.fleet(fleetAnn, "tickets", args)
		if v.bytes > 2048 || len(v.Tickets) == 0 {
			t.Fatalf("page %d: %d tickets in %d bytes, want some in at most 2048", page, len(v.Tickets), v.bytes)
		}
		seen += len(v.Tickets)
		args["cursor"] = v.Next
	}
	if seen != tickets {
		t.Errorf("%d tickets on all pages, want %d", seen, tickets)
	}
	if v := d.fleet(fleetAnn, "tickets", object{"limit": 50}); len(v.Tickets) != 50 || v.Next == "" {
		t.Errorf("with a limit: %d tickets, next %q; want 50, and more", len(v.Tickets), v.Next)
	}
}

// The tools cost a model little, in each of its conversations.
func TestFleetSize(t *testing.T) {
	const budget = 1500 // bytes
	size := 0
	for _, x := range fleetTools() {
		size += len(x.tool.Name) + len(x.tool.Description) + len(x.tool.InputSchema)
		t.Logf("%s %d %s", x.tool.Name, len(x.tool.InputSchema), x.tool.InputSchema)
	}
	if size > budget {
		t.Errorf("%d bytes, want at most %d", size, budget)
	}
}

package triage

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// The life of a ticket, by the events of its alert:
//
//	no ticket, or a finished one ── raised ──> open (create)
//	open ── raised ──> a comment, at most one in commentInterval (raiseAgain)
//	open ── cleared ──> resolved
//	resolved ── raised ──> open again
//	resolved for closeAfter ──> closed (closeOld)
//
// Changes of a status are scheduled, and made at most once in changeInterval: changeDue applies the newest one.
// People may change tickets too. What they did is seen by events (applyTicketEvent), or by the refusal of a
// change that is no longer possible.

// tenant is what the plugin knows of the tickets that it made in a tenant.
type tenant struct {
	name    string
	tickets map[alertKey]*ticket
	byID    map[string]*ticket
}

// alertKey identifies an alert: a rule of a board, or a metric without a rule. It has one ticket at a time.
type alertKey struct{ node, rule string }

// skipKey identifies the subject of a triage.skipped event: a board, or with node "" a whole tenant.
type skipKey struct{ tenant, node string }

// ticket is a ticket of the plugin.
type ticket struct {
	tenant *tenant
	key    alertKey
	id     string
	status string
	// updatedMS is the wall clock of the newest change when the ticket was read; 0 if it was opened on
	// this connection, so that it shows none of the events that followed.
	updatedMS   int64
	commented   time.Time // the last comment of the plugin
	changed     time.Time // the last change of status by the plugin
	resolved    time.Time // since when it is resolved; after a restart, of its last change
	uncommented int       // alerts since the last comment
	target      string    // the status that it is to get; "" for none
}

// isOpen reports whether somebody has to work on the ticket.
func (t *ticket) isOpen() bool {
	return t.status == "open" || t.status == "in_progress" || t.status == "waiting"
}

// isFinished reports whether the ticket is of the past: a new alert opens another.
func (t *ticket) isFinished() bool { return !t.isOpen() && t.status != "resolved" }

// row is a ticket as the tools tickets.* answer, as far as the plugin needs it.
type row struct {
	ID        string `json:"id"`
	Title     string `json:"title"`
	Status    string `json:"status"`
	NodeID    string `json:"node_id"`
	CreatedBy string `json:"created_by"`
	UpdatedAt int64  `json:"updated_at"`
}

// titlePrefix begins the titles of the plugin's tickets; the rule follows.
const titlePrefix = "Alert "

// loadTenant returns the tickets of a tenant. The first time it reads them from the relay.
func (p *plugin) loadTenant(ctx context.Context, name string) (*tenant, error) {
	if t := p.tenants[name]; t != nil {
		return t, nil
	}
	t := &tenant{name: name, tickets: make(map[alertKey]*ticket), byID: make(map[string]*ticket)}
	cursor := ""
	for range maxPages {
		args := map[string]any{"limit": 100}
		if cursor != "" {
			args["cursor"] = cursor
		}
		var page struct {
			Tickets []row  `json:"tickets"`
			Next    string `json:"next_cursor"`
		}
		if err := p.call(ctx, name, "list", args, &page); err != nil {
			return nil, err
		}
		for _, r := range page.Tickets { // the newest first
			// Any client can choose a title, but the relay sets created_by. Tickets beyond maxPages
			// are not read: their alerts get new ones.
			rule, isOurs := strings.CutPrefix(r.Title, titlePrefix)
			if k := (alertKey{r.NodeID, rule}); isOurs && r.CreatedBy == "plugin:"+Name && t.tickets[k] == nil {
				t.add(k, &r)
			}
		}
		if cursor = page.Next; cursor == "" {
			break
		}
	}
	p.tenants[name] = t
	return t, nil
}

// add keeps a ticket, in place of an older one of its alert. Its last comment may have been its newest change,
// so that after a restart the next comment waits for commentInterval. Beyond maxTracked the finished tickets
// are forgotten: a new alert opens another one anyway.
func (t *tenant) add(k alertKey, r *row) *ticket {
	if old := t.tickets[k]; old != nil {
		delete(t.byID, old.id)
	}
	if len(t.tickets) >= maxTracked {
		for k, old := range t.tickets {
			if old.isFinished() {
				delete(t.tickets, k)
				delete(t.byID, old.id)
			}
		}
	}
	tk := &ticket{tenant: t, key: k, id: r.ID, status: r.Status, updatedMS: r.UpdatedAt, commented: time.UnixMilli(r.UpdatedAt), resolved: time.UnixMilli(r.UpdatedAt)}
	t.tickets[k], t.byID[r.ID] = tk, tk
	return tk
}

// countOpen counts the open tickets of a board.
func (t *tenant) countOpen(node string) (n int) {
	for k, tk := range t.tickets {
		if k.node == node && tk.isOpen() {
			n++
		}
	}
	return n
}

// alert is the payload of an alert.
type alert struct {
	NodeID    string   `json:"node_id"`
	Level     string   `json:"level"`
	Metric    string   `json:"metric"`
	Value     float64  `json:"value"`
	Threshold *float64 `json:"threshold"`
	RuleID    string   `json:"rule_id"`
	Message   string   `json:"message"`
}

// rule names what raised the alert: its rule, or the metric of one without a rule.
func (a *alert) rule() string { return cmp.Or(a.RuleID, a.Metric) }

// String is the alert in a line.
func (a *alert) String() string {
	s := fmt.Sprintf("%s: %s (%s is %g", a.Level, a.Message, a.Metric, a.Value)
	if a.Threshold != nil {
		s += fmt.Sprintf(", threshold %g", *a.Threshold)
	}
	return s + ")"
}

// handleEvent handles an event. What the relay refuses for good is dropped: the next alert of the rule
// is another chance.
func (p *plugin) handleEvent(ctx context.Context, e event) {
	if e.Seq <= p.last {
		return
	}
	p.last = e.Seq
	isReplayed := e.Seq <= p.replayed
	if strings.HasPrefix(e.Type, "ticket.") {
		// The tickets that were read have the replayed changes already.
		if t := p.tenants[e.Tenant]; t != nil && !isReplayed {
			t.applyTicketEvent(&e)
		}
		return
	}
	var a alert
	if json.Unmarshal(e.Payload, &a) != nil || a.NodeID == "" {
		return
	}
	t, err := p.loadTenant(ctx, e.Tenant)
	if err != nil {
		return
	}
	tk := t.tickets[alertKey{a.NodeID, a.rule()}]
	if tk != nil && isReplayed && e.CreatedMS <= tk.updatedMS {
		return // the ticket shows it, or somebody has worked on it since
	}
	switch {
	case e.Type == "alert.cleared":
		if tk != nil {
			tk.scheduleChange(p, "resolved")
		}
	case tk == nil || tk.isFinished():
		p.create(ctx, t, &e, &a)
	default:
		p.raiseAgain(ctx, tk, &a)
	}
}

// applyTicketEvent keeps a ticket in memory up to date with a change that anybody made.
func (t *tenant) applyTicketEvent(e *event) {
	tk := t.byID[e.Aggregate]
	if tk == nil {
		return
	}
	var c struct{ To string }
	switch _ = json.Unmarshal(e.Payload, &c); {
	case e.Type == "ticket.dropped":
		delete(t.byID, tk.id)
		delete(t.tickets, tk.key)
	case e.Type == "ticket.transitioned" && c.To != "":
		tk.status, tk.resolved = c.To, time.Now()
	}
}

// create opens a ticket. The same event opens the same one, however often it is handled: the idempotency key is
// made of the board, the rule and the event's seq.
func (p *plugin) create(ctx context.Context, t *tenant, e *event, a *alert) {
	k := alertKey{a.NodeID, a.rule()}
	if t.countOpen(k.node) >= maxOpen {
		p.skip(ctx, t.name, k.node, map[string]any{"rule": k.rule, "open_tickets": maxOpen})
		return
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %d", k.node, k.rule, e.Seq))
	var out struct{ Ticket row }
	err := p.call(ctx, t.name, "create", map[string]any{
		"title": titlePrefix + k.rule, "body": a.String() + "\n\nThe plugin triage opened this ticket and resolves it when the alert clears.",
		"node_id": k.node, "priority": p.priority(a), "idempotency_key": hex.EncodeToString(sum[:16]),
	}, &out)
	r, isRefusal := errors.AsType[*refusal](err)
	switch {
	case err == nil:
		t.add(k, &out.Ticket).updatedMS = 0
	case isRefusal && r.Reason == "full": // tickets takes no more in this tenant, of whatever board
		p.skip(ctx, t.name, "", map[string]any{"rule": k.rule, "node_id": k.node, "reason": "full"})
	}
}

// priority is that of a new ticket.
func (p *plugin) priority(a *alert) string {
	return cmp.Or(p.cfg.Priorities[a.rule()], p.cfg.Priorities[a.Level], defaultPriorities[a.Level], "normal")
}

// skip says in an event that an alert has no ticket: for each board once in a while, or for a whole
// tenant if node is "".
func (p *plugin) skip(ctx context.Context, tenant, node string, payload map[string]any) {
	k := skipKey{tenant, node}
	if time.Since(p.skipped[k]) < skippedInterval {
		return
	}
	// Old entries are deleted when one is added, so boards that come and go do not fill the map.
	for k, at := range p.skipped {
		if time.Since(at) >= skippedInterval {
			delete(p.skipped, k)
		}
	}
	p.skipped[k] = time.Now()
	_, _ = p.ask(ctx, "append", map[string]any{"type": "triage.skipped", "tenant": tenant, "aggregate_id": node, "payload": payload})
}

// raiseAgain comments on a ticket whose alert was raised again, and opens it if it was resolved. Alerts within
// commentInterval are only counted, and the next comment says how many there were. Opening counts against
// maxOpen, like a new ticket.
func (p *plugin) raiseAgain(ctx context.Context, tk *ticket, a *alert) {
	if !tk.isOpen() && tk.tenant.countOpen(tk.key.node) >= maxOpen {
		p.skip(ctx, tk.tenant.name, tk.key.node, map[string]any{"rule": tk.key.rule, "open_tickets": maxOpen})
		return
	}
	tk.scheduleChange(p, "open")
	if time.Since(tk.commented) < commentInterval {
		tk.uncommented++
		return
	}
	text := "Raised again: " + a.String()
	if tk.uncommented > 0 {
		text += fmt.Sprintf("; %d more since the last comment", tk.uncommented)
	}
	tk.commented, tk.uncommented = time.Now(), 0 // also when the ticket takes no more comments
	_ = p.call(ctx, tk.tenant.name, "comment", map[string]any{"id": tk.id, "text": text}, &struct{}{})
}

// scheduleChange makes changeDue change the status of a ticket, if that is still needed then.
func (t *ticket) scheduleChange(p *plugin, status string) {
	t.target = status
	p.due[t] = struct{}{}
}

// closeOld closes what has been resolved for closeAfter. Otherwise the tickets of past alerts would
// take up all that a tenant may have, and people could create none.
func (p *plugin) closeOld() {
	for _, t := range p.tenants {
		for _, tk := range t.tickets {
			if tk.status == "resolved" && tk.target != "open" && time.Since(tk.resolved) >= closeAfter {
				tk.scheduleChange(p, "closed")
			}
		}
	}
}

// hasTarget reports whether the ticket needs no change any more to have its target: it has the status, or
// somebody else has moved it past that.
func (t *ticket) hasTarget() bool {
	if t.isFinished() {
		return true
	}
	switch t.target {
	case "open":
		return t.isOpen()
	case "resolved":
		return !t.isOpen()
	}
	return t.status != "resolved" // closed: only what is still resolved
}

// untilNextChange returns how long it is until the next change of a status is due.
func (p *plugin) untilNextChange() time.Duration {
	next := changeInterval
	for tk := range p.due {
		next = min(next, changeInterval-time.Since(tk.changed))
	}
	return max(next, 0)
}

// changeDue changes the statuses that are due. An alert that flaps changes its ticket once in
// changeInterval, and in the end as its last event says.
func (p *plugin) changeDue(ctx context.Context) {
	for tk := range p.due {
		isDone := tk.hasTarget()
		if !isDone && time.Since(tk.changed) < changeInterval {
			continue
		}
		delete(p.due, tk)
		if isDone {
			continue
		}
		var out struct{ Ticket row }
		err := p.call(ctx, tk.tenant.name, "transition", map[string]any{"id": tk.id, "to": tk.target}, &out)
		illegal, isIllegal := errors.AsType[*illegalChange](err)
		switch {
		case err == nil:
			tk.status, tk.changed, tk.resolved = out.Ticket.Status, time.Now(), time.Now()
		case isIllegal && illegal.status != "":
			tk.status = illegal.status // somebody else changed it
		}
		// After any other error the ticket stays as it is, until the next event of the alert: ask has
		// repeated the request as long as that could help.
	}
}

package tickets

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

type scopes []string

func (s scopes) Has(scope string) bool {
	for _, v := range s {
		if v == scope {
			return true
		}
	}
	return false
}

func caller(tenant, actor string) *kernel.Caller {
	return &kernel.Caller{Tenant: tenant, Actor: actor, Scopes: scopes{manifest.ScopeTicketsRead, manifest.ScopeTicketsWrite}}
}

// harness is a loaded plugin with its kernel and log.
type harness struct {
	t   testing.TB
	k   *kernel.Kernel
	p   *Plugin
	log *kernel.MemoryLog
}

func newHarness(t testing.TB) *harness {
	t.Helper()
	return open(t, &kernel.MemoryLog{Max: 100_000})
}

// open starts a plugin on a log, as a relay that starts does.
func open(t testing.TB, log *kernel.MemoryLog) *harness {
	t.Helper()
	d := &harness{t: t, k: kernel.New(kernel.Options{}), log: log}
	d.p = New(d.k, log)
	if _, err := d.p.Restore(context.Background(), log); err != nil {
		t.Fatal(err)
	}
	if err := d.k.Load(d.p, false); err != nil {
		t.Fatal(err)
	}
	return d
}

// view is an answer of any of the tools.
type view struct {
	Ticket struct {
		Ticket
		Allowed      []Status
		CommentCount int `json:"comment_count"`
	}
	Tickets []Ticket
	Next    string `json:"next_cursor"`
	Error   struct {
		Code    manifest.Code
		Reason  string
		Message string
		Status  Status
		Allowed []Status
	}
}

// try calls a tool through the kernel.
func (d *harness) try(c *kernel.Caller, tool string, args any) (v view, err error) {
	raw, ok := args.(string)
	if !ok {
		b, _ := json.Marshal(args)
		raw = string(b)
	}
	res, err := d.k.Call(context.Background(), &kernel.Request{Caller: c, Tool: "tickets." + tool, Arguments: json.RawMessage(raw)})
	if err != nil {
		return v, err
	}
	if err := json.Unmarshal(res.Structured, &v); err != nil {
		return v, fmt.Errorf("%s: %w", res.Structured, err)
	}
	if res.IsError != (v.Error.Code != "") {
		return v, fmt.Errorf("IsError is %v of %s", res.IsError, res.Structured)
	}
	return v, nil
}

// do is try of what has to succeed.
func (d *harness) do(c *kernel.Caller, tool string, args any) view {
	d.t.Helper()
	v, err := d.try(c, tool, args)
	if err != nil || v.Error.Code != "" {
		d.t.Fatalf("%s %.200v: %v %+v", tool, args, err, v.Error)
	}
	return v
}

type object = map[string]any

func (d *harness) create(c *kernel.Caller, title string) string {
	d.t.Helper()
	return d.do(c, "create", object{"title": title}).Ticket.ID
}

func (d *harness) move(c *kernel.Caller, id string, to ...Status) {
	d.t.Helper()
	for _, s := range to {
		d.do(c, "transition", object{"id": id, "to": s})
	}
}

// dump is the whole state, in a form that can be compared.
func dump(p *Plugin) string {
	var b strings.Builder
	for _, t := range p.tenantList() {
		t.mu.RLock()
		for _, id := range t.order {
			e := t.tickets[id]
			line, _ := json.Marshal(e.Ticket)
			fmt.Fprintf(&b, "%s %s %q %v\n", t.name, line, e.key, t.keys[e.key] == id)
		}
		fmt.Fprintf(&b, "%s text %d", t.name, t.text)
		for _, s := range Statuses {
			fmt.Fprintf(&b, " %s %d", s, t.count[s])
		}
		fmt.Fprintf(&b, " keys %d tickets %d\n", len(t.keys), len(t.tickets))
		t.mu.RUnlock()
	}
	return b.String()
}

func reason(err error) string {
	var e *manifest.Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return ""
}

// slowLog is a log that fails, or waits, as the test says.
type slowLog struct {
	kernel.MemoryLog
	mu   sync.Mutex
	err  error
	hold chan struct{}

	fault atomic.Pointer[storage.Error]
}

// failWith makes each Append fail; nil: no longer.
func (l *slowLog) failWith(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

func (l *slowLog) Fault() error {
	if e := l.fault.Load(); e != nil {
		return e
	}
	return nil
}

func (l *slowLog) Append(ctx context.Context, events ...kernel.Event) (uint64, error) {
	l.mu.Lock()
	err, hold := l.err, l.hold
	l.mu.Unlock()
	if hold != nil {
		<-hold
	}
	if err != nil {
		return 0, err
	}
	return l.MemoryLog.Append(ctx, events...)
}

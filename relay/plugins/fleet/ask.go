package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A question to a board has to pass these limits, in this order. In parentheses is the reason that the
// answer gives for a board that did not:
//
//	share of the identity    maxAskingCalls; a call beyond it is refused with E_RATE_LIMITED
//	slots of the tenant      maxAsked and maxSlow; a question waits as long as its call has time
//	                         (not_asked)
//	limits of the tool       rate and concurrency, in the kernel; the question is refused (busy)
//	time of the board        askTimeout, or another timeout of the tool (no_answer)
//
// The share comes first, so that one agent with many calls cannot hold all slots of its tenant.

// Bounds of a call that asks many boards.
const (
	askTimeout     = time.Second     // for one board
	askAllTimeout  = 4 * time.Second // for all of them; the rest of kernel.CallBudget is for the answer
	maxAskingCalls = 4               // calls of one identity that ask many boards at a time
	maxSearchCalls = 8               // calls of one identity that search the event log or wait for that
)

// callBoard calls a tool through the kernel as the caller of r. The tool's own checks, scope, limits,
// audit record and event apply. Invisible characters are left to the kernel's treatment of the
// plugin's answer.
func (p *Plugin) callBoard(ctx context.Context, r *kernel.Request, tool string, args json.RawMessage) (*kernel.Result, error) {
	// ConnID: the stages see the same connection as for the outer call. TraceID and Traced: the board gets
	// the trace id only if the caller sent one. Session is for a tool that sends to the client.
	return p.opt.Call(ctx, &kernel.Request{Caller: r.Caller, Tool: tool, Arguments: args, ConnID: r.ConnID,
		TraceID: r.TraceID, Traced: r.Traced, Stream: r.Stream, Session: r.Session, Inner: true})
}

// question asks one board by a tool without arguments.
type question struct {
	tool  string // canonical name
	about int    // index of what the caller wants to know, for its onAnswer
}

// askBoards asks as many boards at a time as the slots of the tenant allow, and calls onAnswer with each
// question, one call at a time. A question that there was no time for gets errNotAsked. It returns after
// all questions have an answer; an error says that nothing was asked.
func (p *Plugin) askBoards(ctx context.Context, r *kernel.Request, questions []question, onAnswer func(q question, res *kernel.Result, err error)) error {
	release, err := p.acquireAsking(r.Caller)
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, askAllTimeout)
	defer cancel()
	var mu sync.Mutex // orders onAnswer
	started := p.slots.each(ctx, r.Caller.Tenant, len(questions), askTimeout, func(ctx context.Context, i int) {
		res, err := p.callBoard(ctx, r, questions[i].tool, nil)
		mu.Lock()
		defer mu.Unlock()
		onAnswer(questions[i], res, err)
	})
	// Without the lock: all calls have returned, so no other answer comes.
	for _, q := range questions[started:] {
		onAnswer(q, nil, errNotAsked)
	}
	return nil
}

// Refusals of calls beyond the share of an identity.
var (
	errAsking    = errShare(maxAskingCalls, "ask many boards", "asking")
	errSearching = errShare(maxSearchCalls, "search the event log", "searching")
)

// errShare is the refusal of a call beyond a share: what its calls do, and the reason for the audit log.
func errShare(limit int, what, reason string) *manifest.Error {
	return &manifest.Error{Code: manifest.RateLimited, Reason: reason, RetryAfterMS: 1000, Outcome: manifest.NotSent,
		Message: fmt.Sprintf("%d calls of this identity %s already; wait for one of them", limit, what)}
}

// acquireAsking counts a call that asks many boards against the share of its identity.
func (p *Plugin) acquireAsking(c *kernel.Caller) (release func(), err error) {
	return p.acquire(share{c.Tenant, c.Actor, "boards"}, maxAskingCalls, errAsking)
}

// acquireSearch counts a call that searches the event log. Few searches run at a time, and those that
// wait must not all be of one identity.
func (p *Plugin) acquireSearch(c *kernel.Caller) (release func(), err error) {
	return p.acquire(share{c.Tenant, c.Actor, "events"}, maxSearchCalls, errSearching)
}

// share names what the calls of one identity are counted for. resource is "boards" or "events".
type share struct{ tenant, actor, resource string }

// acquire counts a call against a share, until release, or returns refusal if limit calls of it are in
// progress.
func (p *Plugin) acquire(s share, limit int, refusal *manifest.Error) (release func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used[s] >= limit {
		return nil, refusal
	}
	p.used[s]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		// An entry is deleted with its last call, so identities that come and go do not fill the map.
		if p.used[s]--; p.used[s] == 0 {
			delete(p.used, s)
		}
	}, nil
}

// boardTool returns the tool of a board with a kind and a verb; ok is false if it has announced none. ok is
// false as well if its tools cannot be read, which for a board that is not connected are in the store.
func (p *Plugin) boardTool(ctx context.Context, tenant, nodeID, kind, verb string) (name string, ok bool) {
	list, err := p.opt.Boards.Tools(ctx, tenant, nodeID)
	if err != nil {
		return "", false
	}
	return toolOf(list, kind, verb)
}

// toolOf returns the first tool of a kind and a verb. If a board has several capabilities of a kind, its
// figures are those of the one that it announced first.
func toolOf(list []manifest.Tool, kind, verb string) (name string, ok bool) {
	for i := range list {
		if list[i].Kind.Name == kind && list[i].Verb.Name == verb {
			return list[i].Canonical, true
		}
	}
	return "", false
}

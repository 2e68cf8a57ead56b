package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/transport/sse"
)

// subscribe answers GET and HEAD of StreamPath. It returns once the stream is with its
// shard; net/http's goroutine and buffers are free then.
func (g *Gateway) subscribe(w http.ResponseWriter, r *http.Request) {
	id, err := g.identify(r, ScopeSubscribe)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	filter, err := requestedFilter(r, id)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		return
	}
	if n := g.subscribers.Add(1); n > int64(g.opts.MaxSubscribers) {
		g.subscribers.Add(-1)
		g.unavailable(w, r, "the gateway has as many subscribers as it may have")
		return
	}
	identity := id.Tenant + "\n" + id.Subject
	quota := g.quotas.acquireStream(identity, id.open, max(1, g.opts.MaxSubscribers/identityShare))
	if quota == nil {
		g.subscribers.Add(-1)
		g.slowDown(w, r, 10*time.Second, "too many streams of this identity are open")
		return
	}
	st, ok := g.openStart(r)
	if !ok {
		g.releaseStream(quota)
		g.unavailable(w, r, "the gateway is stopping; connect again")
		return
	}
	defer g.replays.Done()
	out, err := st.shard.streams.Open(w, r, sse.Options{
		Policy: sse.Drop, MaxQueued: maxQueued, IdleTimeout: stallTimeout, Budget: quota.budget,
	})
	if err != nil {
		g.releaseStream(quota)
		if !errors.Is(err, sse.ErrPeerClosed) {
			g.fail(w, r, http.StatusInternalServerError, manifest.Internal, err.Error())
		}
		return
	}
	c := &subscriber{shard: st.shard, out: out, filter: filter, isActive: id.Active, identity: identity, quota: quota}
	if err := g.start(st, c); err != nil {
		_ = out.Close(0)
		g.releaseStream(quota)
	}
}

func (g *Gateway) releaseStream(q *quota) {
	q.releaseStream()
	g.subscribers.Add(-1)
}

// requestedFilter is what the request asks for, within what the identity may see.
func requestedFilter(r *http.Request, id Identity) (eventFilter, error) {
	topics, ok := parseTopics(r.URL.Query()["topics"])
	if !ok {
		return eventFilter{}, refused(manifest.BadRequest,
			fmt.Sprintf("topics is a list like a,b,log/* of at most %d names: each begins with a letter, a digit or _, and has up to 128 of A-Z a-z 0-9 _ . / -", maxTopics))
	}
	filter := eventFilter{tenant: id.Tenant, admin: id.Scopes.Has(ScopeAdmin), topics: topics, granted: id.Topics}
	for _, t := range topics {
		name := strings.TrimSuffix(t, "/*")
		if adminTopic(name) && !filter.admin {
			return eventFilter{}, refused(manifest.SafetyDenied, "the topics audit and kernel need the scope "+ScopeAdmin)
		}
		if name == t && !filter.granted.match(t) {
			return eventFilter{}, refused(manifest.SafetyDenied, "the token does not cover this topic")
		}
	}
	return filter, nil
}

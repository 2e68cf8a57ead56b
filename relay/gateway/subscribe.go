package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"agentctl/relay/topic"
	"agentctl/transport/sse"
)

var errAdminTopic = denied("the topics audit and kernel need the scope " + ScopeAdmin)

// errTopicNotGranted refuses a topic, and lists those that the token has.
func errTopicNotGranted(granted topic.Patterns) error {
	return denied(fmt.Sprintf("the token is limited to other topics: %.500s", granted))
}

// subscribe opens a stream. It refuses a request before the response head is sent, since an
// EventSource reconnects when a stream ends. It returns once the stream has been handed to
// its shard, so that net/http's goroutine and buffers are free.
func (g *Gateway) subscribe(w http.ResponseWriter, r *http.Request) error {
	id, err := g.identify(r, ScopeSubscribe)
	if err != nil {
		return unauthorized(err)
	}
	filter, err := requestedFilter(r, id)
	if err != nil {
		return err
	}
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		return nil
	}
	q, err := g.acquireStream(id)
	if err != nil {
		return err
	}
	if err := g.openStream(w, r, &subscriber{Stream: sse.Stream{Active: id.Active}, filter: filter, quota: q}); err != nil {
		g.releaseStream(q)
		return err
	}
	return nil
}

// openStream opens the stream of c and hands c to its shard. After an error the caller
// releases c.quota.
func (g *Gateway) openStream(w http.ResponseWriter, r *http.Request, c *subscriber) error {
	st, ok := g.openStart(r, c.filter.visible())
	if !ok {
		return unavailable("the gateway is stopping; connect again")
	}
	defer g.replays.Done()
	var err error
	c.shard, c.Handler = st.shard, c
	c.Writer, err = c.shard.streams.Open(w, r, sse.Options{
		Policy: sse.Drop, MaxQueued: maxQueued, IdleTimeout: stallTimeout, Budget: c.quota.budget,
		PingInterval: g.opts.Heartbeat, PingEvent: heartbeat,
	})
	if err != nil {
		return err
	}
	if err := g.start(st, c); err != nil {
		_ = c.Close(0)
		return sse.ErrPeerClosed // also for other errors: the head has been sent, so no other response is possible
	}
	return nil
}

// acquireStream counts a stream against the bounds of the gateway and of the identity. Its
// caller, or the stream's shard, calls releaseStream.
func (g *Gateway) acquireStream(id Identity) (*quota, error) {
	if n := g.subscribers.Add(1); n > int64(g.opts.MaxSubscribers) {
		g.subscribers.Add(-1)
		g.refusedStreams.Add(1)
		return nil, rateLimited("the gateway has as many subscribers as it may have; connect again later", 10*time.Second)
	}
	q := g.quotas.acquireStream(id.key(), id.isShared, max(1, g.opts.MaxSubscribers/identityShare))
	if q == nil {
		g.subscribers.Add(-1)
		g.refusedStreams.Add(1)
		return nil, rateLimited("too many streams of this identity are open", 10*time.Second)
	}
	return q, nil
}

func (g *Gateway) releaseStream(q *quota) {
	q.releaseStream()
	g.subscribers.Add(-1)
}

// requestedFilter returns the filter of the requested topics. A topic that the identity may
// not see is refused, and a prefix below which it may see nothing. Of a prefix below which it may
// see some topics it gets those.
func requestedFilter(r *http.Request, id Identity) (eventFilter, error) {
	topics, err := topic.Parse(r.URL.Query()["topics"]...)
	if err != nil {
		return eventFilter{}, badRequest(fmt.Sprintf(
			"topics is a list like a,b,log/* of at most %d names: each begins with a letter, a digit or _, and has up to 128 of A-Z a-z 0-9 _ . / -", topic.MaxPatterns))
	}
	filter := eventFilter{tenant: id.Tenant, isAdmin: id.Scopes.Has(ScopeAdmin), topics: topics, granted: id.Topics}
	for _, t := range topics {
		if isAdminTopic(strings.TrimSuffix(t, "/*")) && !filter.isAdmin {
			return eventFilter{}, errAdminTopic
		}
		if !filter.granted.Overlaps(t) {
			return eventFilter{}, errTopicNotGranted(filter.granted)
		}
	}
	return filter, nil
}

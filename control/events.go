package control

import (
	"bytes"
	"encoding/json"
	"strconv"

	"agentctl/prober"
	"agentctl/transport/fanout"

	"go.uber.org/zap"
)

// event is an event as it is written, the same bytes for all clients.
type event struct {
	// key identifies events that replace one another: of two that wait with the same key
	// only the newer one is sent.
	key   string
	frame []byte
}

func eventKey(e event) string { return e.key }

// newEvent encodes an event as a JSON-RPC notification with its header.
func newEvent(method, key string, params any) (event, error) {
	body, err := json.Marshal(struct {
		JSONRPC string `json:"jsonrpc"`
		Method  string `json:"method"`
		Params  any    `json:"params"`
	}{"2.0", method, params})
	return event{key, frame(body)}, err
}

// pingEvent is the same for all clients. It cannot fail to be encoded.
var pingEvent, _ = newEvent(EventPing, EventPing, struct{}{})

// subscription holds the queues of a connection that takes events. Alerts have a separate
// one, so that neither metrics nor states can displace them. An event is encoded once; the
// queues of all connections share its bytes.
type subscription struct {
	events     *fanout.Subscriber[event] // metrics and states; newer metrics replace older ones
	notices    *fanout.Subscriber[event] // alerts and updates; dropped and counted when full
	standing   []event                   // alerts that were raised before the subscription
	lastUpdate event                     // update_ready from before the subscription; may be empty
}

// subscribe adds a connection that takes events. It enables push and starts cpu and mem.
func (s *Server) subscribe() (*subscription, prober.ModuleSet, error) {
	set, err := s.applySampling(true, func(now prober.ModuleSet) prober.ModuleSet { return now | defaultModules })
	if err != nil {
		return nil, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sub := &subscription{
		events:     s.events.Subscribe(fanout.SubscribeOptions[event]{Buffer: maxQueue, Overflow: fanout.Coalesce, Key: eventKey}),
		notices:    s.notices.Subscribe(fanout.SubscribeOptions[event]{Buffer: maxNotices, Overflow: fanout.DropAndCount}),
		lastUpdate: s.update,
	}
	// After the subscription: an alert that is raised in between comes twice and not never.
	if s.o.Alerts != nil {
		for _, a := range s.o.Alerts() {
			if e, ok := s.alertEvent(a); ok {
				sub.standing = append(sub.standing, e)
			}
		}
	}
	s.sampling.subscribers++
	s.sampling.pushEnabled = true
	s.sampling.sentReadings = prober.ModuleReadings{} // send also what is seldom read again
	s.replanLocked()
	return sub, set, nil
}

// unsubscribe removes a connection that takes events. Without any the sampler is idle,
// unless a burst runs.
func (s *Server) unsubscribe(sub *subscription) {
	sub.events.Close()
	sub.notices.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sampling.subscribers--
	s.replanLocked()
}

// publishState publishes the event state.
func (s *Server) publishState(phase, reason string, extra any) {
	ms, _ := s.clock.NowMS()
	s.mu.Lock()
	s.sampling.stateCount++
	key := EventState + strconv.FormatUint(s.sampling.stateCount, 10) // unique: no state replaces another
	s.mu.Unlock()
	e, err := newEvent(EventState, key, State{ms, phase, reason, extra})
	if err != nil {
		s.log.Error("event state", zap.Error(err))
		return
	}
	s.events.Publish(e)
}

// PublishAlert sends an alert to all clients that take events. A client that reads too
// slowly misses those beyond maxNotices, which Stats counts. It does not wait for clients.
func (s *Server) PublishAlert(a Alert) {
	if e, ok := s.alertEvent(a); ok {
		s.notices.Publish(e)
	}
}

// alertEvent encodes an alert, unless its value is not a number.
func (s *Server) alertEvent(a Alert) (e event, ok bool) {
	e, err := newEvent(EventAlert, "", a)
	if err != nil {
		s.log.Error("event alert", zap.String("rule", a.RuleID), zap.Error(err))
	}
	return e, err == nil
}

// PublishUpdateReady announces a newer version of a component to all clients that take
// events, now or when they connect. A repeated version is announced once. An empty version
// withdraws the announcement for clients that connect later.
func (s *Server) PublishUpdateReady(component, version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if version == "" {
		s.update = event{}
		return
	}
	e, err := newEvent(EventUpdateReady, "", UpdateReady{component, version})
	if err != nil || bytes.Equal(e.frame, s.update.frame) {
		return
	}
	s.update = e
	s.notices.Publish(e)
}

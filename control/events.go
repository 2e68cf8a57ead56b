package control

import (
	"bytes"
	"encoding/json"
	"strconv"

	"agentctl/prober"
	"agentctl/transport/fanout"

	"go.uber.org/zap"
)

// event is an event as it goes over the wire, the same bytes for everybody.
type event struct {
	key   string // of two waiting events with one key, the newer replaces the older
	frame []byte
}

func eventKey(e event) string { return e.key }

func newEvent(method, key string, params any) (event, error) {
	body, err := json.Marshal(struct {
		JSONRPC string `json:"jsonrpc"`
		Method  string `json:"method"`
		Params  any    `json:"params"`
	}{"2.0", method, params})
	return event{key, frame(body)}, err
}

var pingEvent, _ = newEvent(EventPing, EventPing, struct{}{})

// subscription is what a connection that takes events reads. Alerts have a queue of their
// own, so that neither metrics nor states can push one out.
type subscription struct {
	events     *fanout.Subscriber[event] // metrics and states
	notices    *fanout.Subscriber[event] // alerts and updates
	lastUpdate event                     // one that came before this reader; empty when there is none
}

// subscribe makes a connection one that takes events: push goes on, cpu and mem start.
func (s *Server) subscribe() (*subscription, prober.ModuleSet, error) {
	set, err := s.applySampling(true, func(now prober.ModuleSet) prober.ModuleSet { return now | defaultModules })
	if err != nil {
		return nil, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &subscription{
		events:     s.events.Subscribe(fanout.SubscribeOptions[event]{Buffer: maxQueue, Overflow: fanout.Coalesce, Key: eventKey}),
		notices:    s.notices.Subscribe(fanout.SubscribeOptions[event]{Buffer: maxNotices, Overflow: fanout.DropAndCount}),
		lastUpdate: s.update,
	}
	s.sampling.subscribers++
	s.sampling.pushEnabled = true
	s.sampling.sentReadings = prober.ModuleReadings{} // a module that is seldom read is told to this reader as well
	s.replanLocked()
	return r, set, nil
}

func (s *Server) unsubscribe(r *subscription) {
	r.events.Close()
	r.notices.Close()
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
	key := EventState + strconv.FormatUint(s.sampling.stateCount, 10) // states never replace one another
	s.mu.Unlock()
	e, err := newEvent(EventState, key, State{ms, phase, reason, extra})
	if err != nil {
		s.log.Error("event state", zap.Error(err))
		return
	}
	s.events.Publish(e)
}

// PublishAlert tells every client that takes events. A client that reads too slowly misses
// those beyond 32; they are counted in Stats.
func (s *Server) PublishAlert(a Alert) {
	e, err := newEvent(EventAlert, "", a)
	if err != nil { // a value that is no number
		s.log.Error("event alert", zap.String("rule", a.RuleID), zap.Error(err))
		return
	}
	s.notices.Publish(e)
}

// PublishUpdateReady tells every client that takes events, now or when it comes, that a newer
// version of a component is there; once, however often it is called for a version. An
// empty version takes the word back for those who come later.
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

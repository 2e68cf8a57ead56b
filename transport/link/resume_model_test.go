package link

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

// The model check of RFC-0002 §7.3: all interleavings of a small configuration of the real
// Calls of the relay, the real dedupTable of the device and a network between them. The
// actions are
//
//	call, expire, leave       a caller calls; its deadline passes; it goes away
//	deliver, duplicate        a message in flight arrives; it is doubled
//	finish                    the device's handler returns
//	break                     the link is lost with all that is in flight
//	auth, ready               the device links again; the relay resumes the session or not
//	restart                   the device starts anew, with another boot_id
//	forget                    the relay no longer keeps the session that it could resume
//	tick                      time passes
//
// auth and ready are two steps: a command may finish, and the link break, between them.

// modelConfig bounds one configuration.
type modelConfig struct {
	name                                        string
	calls, breaks, restarts, duplicates, leaves int
	ticks, deadline                             int  // of the whole run, and of each call from its start
	seenFull                                    bool // the list of seen commands is full of others
}

// linkState of the model.
const (
	linkDown  = iota
	linkAuth  // the device has sent auth with what it has seen
	linkReady // commands are sent
)

// modelMessage is a message in flight: a cmd, a cmd_cancel, or an ack.
type modelMessage struct {
	kind   byte // 'c', 'x', 'a'
	call   int
	expiry int
	late   bool // an ack of E_DEADLINE_EXCEEDED: the device did not start it
}

// model is one state. It is a value but for what clone copies.
type model struct {
	cfg       *modelConfig
	now       int
	link      int
	resumable bool // the relay knows the session and the device's boot
	asked     bool // auth carried a resume
	seen      []ResumedCommand

	calls    Calls[int]
	deadline []int
	outcome  []string // by call: "" while live, "-" before it is made
	toDevice []modelMessage
	toRelay  []modelMessage

	dedup   dedupTable
	session int // of the device's client
	running []int
	ran     []int // starts by call

	breaks, restarts, duplicates, leaves int // done so far
}

func modelID(call int) string { return fmt.Sprintf("01J%023d", call) }

var modelEpoch = time.Unix(1_800_000_000, 0)

// at is a time of the model: ticks are a second, shorter than dedupTTL and seenWindow.
func at(tick int) time.Time { return modelEpoch.Add(time.Duration(tick) * time.Second) }

func (m *model) clone() *model {
	c := *m
	c.seen = slices.Clone(m.seen)
	c.calls.live, c.calls.recent = slices.Clone(m.calls.live), slices.Clone(m.calls.recent)
	c.deadline, c.outcome = slices.Clone(m.deadline), slices.Clone(m.outcome)
	c.toDevice, c.toRelay = slices.Clone(m.toDevice), slices.Clone(m.toRelay)
	c.running, c.ran = slices.Clone(m.running), slices.Clone(m.ran)
	c.dedup.order = slices.Clone(m.dedup.order)
	c.dedup.byID = make(map[string]*dedupEntry, len(m.dedup.byID))
	for id, e := range m.dedup.byID {
		entry := *e
		c.dedup.byID[id] = &entry
	}
	return &c
}

// key identifies a state.
func (m *model) key() string {
	var b bytes.Buffer
	fmt.Fprint(&b, m.now, m.link, m.resumable, m.asked, m.seen, m.deadline, m.outcome, m.toDevice, m.toRelay,
		m.session, m.running, m.ran, m.breaks, m.restarts, m.duplicates, m.leaves, m.calls.ages)
	for i := range m.calls.live {
		fmt.Fprint(&b, "L", m.calls.live[i].value, m.calls.live[i].state)
	}
	for i := range m.calls.recent {
		fmt.Fprint(&b, "R", string(m.calls.recent[i].id[20:]), m.calls.recent[i].awaitingAck, m.calls.recent[i].mayRepeat)
	}
	for _, id := range m.dedup.order {
		e := m.dedup.byID[id]
		fmt.Fprint(&b, "D", id[20:], e.done, e.session, string(e.ack))
	}
	return b.String()
}

// end records the outcome of a call.
func (m *model) end(call int, outcome string) {
	if m.outcome[call] != "" {
		panic(fmt.Sprintf("I2: call %d ended twice: %s, then %s", call, m.outcome[call], outcome))
	}
	if m.now > m.deadline[call] {
		panic(fmt.Sprintf("I2: call %d ended %d ticks after its deadline", call, m.now-m.deadline[call]))
	}
	m.outcome[call] = outcome
}

// endedIn is the outcome of a call that ended without an answer in that state.
func endedIn(s CallState) string {
	if s == Queued {
		return "not_sent"
	}
	return "unknown"
}

func (m *model) write(call int) {
	m.toDevice = append(m.toDevice, modelMessage{kind: 'c', call: call, expiry: m.deadline[call]})
	m.calls.MarkSent(modelID(call))
}

// expire ends a call; why is left out for a deadline.
func (m *model) expire(call int) {
	was, ended := m.calls.Expire(modelID(call))
	if !ended {
		panic(fmt.Sprintf("call %d has no outcome and is not live", call))
	}
	if was == Sent && m.link == linkReady {
		m.toDevice = append(m.toDevice, modelMessage{kind: 'x', call: call})
	}
	m.end(call, endedIn(was))
}

// lose is the loss of the link, with all that is in flight.
func (m *model) lose() {
	if m.link == linkReady {
		m.calls.Lost()
	}
	m.link, m.asked, m.seen, m.toDevice, m.toRelay = linkDown, false, nil, nil, nil
}

// fail ends the relay's session.
func (m *model) fail() {
	for _, f := range m.calls.Fail() {
		m.end(f.Value, endedIn(f.State))
	}
	m.resumable = false
}

// ack sends a stored answer.
func (m *model) ack(a []byte) {
	var msg modelMessage
	_, err := fmt.Sscanf(string(a), "%d %t", &msg.call, &msg.late)
	if err != nil {
		panic(err)
	}
	msg.kind = 'a'
	m.toRelay = append(m.toRelay, msg)
}

// finish is Client.finish and Client.answer.
func (m *model) finish(call int, late bool) {
	a := fmt.Appendf(nil, "%d %t", call, late)
	session := m.dedup.finish(modelID(call), a, false, at(m.now))
	if m.link == linkReady && session == m.session {
		m.ack(a)
	}
}

// receive is the device's reading of one message.
func (m *model) receive(msg modelMessage) {
	if msg.kind == 'x' {
		return // the handler may return all the same
	}
	isNew, ack, ok := m.dedup.begin(modelID(msg.call), m.session, at(m.now))
	switch {
	case !ok:
		panic("the device's table is full")
	case !isNew && ack != nil:
		m.ack(ack)
	case !isNew:
	case m.now >= msg.expiry:
		m.finish(msg.call, true)
	default:
		if m.ran[msg.call]++; m.ran[msg.call] > 1 {
			panic(fmt.Sprintf("I1: call %d ran twice", msg.call))
		}
		if o := m.outcome[msg.call]; o != "" && o != "left" && m.now >= m.deadline[msg.call] {
			panic(fmt.Sprintf("call %d was started after its caller was answered: %s", msg.call, o))
		}
		m.running = append(m.running, msg.call)
	}
}

// receiveAck is the relay's reading of one ack.
func (m *model) receiveAck(msg modelMessage) {
	id := modelID(msg.call)
	call, verdict := m.calls.Ack(id)
	switch verdict {
	case AckAccepted:
		if call != msg.call {
			panic(fmt.Sprintf("I3: the ack of call %d ended call %d", msg.call, call))
		}
		if msg.late {
			m.end(call, "refused")
		} else {
			m.end(call, "ok")
		}
	case AckForeign:
		panic(fmt.Sprintf("the ack of call %d is foreign", msg.call))
	}
	if info, ok := m.calls.Ended(id); !ok || info.Tool != id {
		panic(fmt.Sprintf("call %d is not remembered: %+v", msg.call, info))
	}
}

// ready is READY on a new link: the relay resumes the session or starts a fresh one.
func (m *model) ready() {
	m.link = linkReady
	if !m.asked || !m.resumable {
		m.fail()
		m.resumable = true
		m.session++
		m.running = nil // canceled; an answer would not be sent
		return
	}
	if m.cfg.seenFull { // of others, so that these have no place in it
		m.seen = slices.Repeat([]ResumedCommand{{MsgID: "another", State: SeenDone}}, MaxInflight)
	}
	for _, id := range m.calls.Resume(m.seen, at(m.now)) {
		for call := range m.outcome {
			if modelID(call) == id {
				m.write(call)
			}
		}
	}
	for _, a := range m.dedup.answers(m.seen) {
		m.ack(a)
	}
}

// next calls yield with each state that can follow.
func (m *model) next(yield func(action string, n *model)) {
	step := func(action string, do func(n *model)) {
		n := m.clone()
		defer func() {
			if p := recover(); p != nil {
				panic(fmt.Sprintf("%v\n  by %s from %s", p, action, m.key()))
			}
		}()
		do(n)
		n.check()
		yield(action, n)
	}
	due := false
	for call, outcome := range m.outcome {
		switch {
		case outcome == "-" && (call == 0 || m.outcome[call-1] != "-") && (m.link == linkReady || m.resumable) && m.now+m.cfg.deadline <= m.cfg.ticks:
			step(fmt.Sprint("call ", call), func(n *model) {
				n.outcome[call], n.deadline[call] = "", n.now+n.cfg.deadline
				if err := n.calls.Add(modelID(call), at(n.deadline[call]), CallInfo{Tool: modelID(call)}, call); err != nil {
					panic(err)
				}
				if n.link == linkReady {
					n.write(call)
				}
			})
		case outcome == "" && m.now >= m.deadline[call]:
			due = true
			step(fmt.Sprint("expire ", call), func(n *model) { n.expire(call) })
		case outcome == "" && m.leaves < m.cfg.leaves:
			step(fmt.Sprint("leave ", call), func(n *model) {
				n.leaves++
				n.expire(call)
				if n.outcome[call] == "unknown" {
					n.outcome[call] = "left"
				}
			})
		}
	}
	if len(m.toDevice) > 0 {
		step("deliver to device", func(n *model) {
			msg := n.toDevice[0]
			n.toDevice = n.toDevice[1:]
			n.receive(msg)
		})
	}
	if len(m.toRelay) > 0 {
		step("deliver to relay", func(n *model) {
			msg := n.toRelay[0]
			n.toRelay = n.toRelay[1:]
			n.receiveAck(msg)
		})
	}
	if m.duplicates < m.cfg.duplicates {
		if len(m.toDevice) > 0 {
			step("duplicate to device", func(n *model) { n.duplicates++; n.toDevice = append(n.toDevice, n.toDevice[0]) })
		}
		if len(m.toRelay) > 0 {
			step("duplicate to relay", func(n *model) { n.duplicates++; n.toRelay = append(n.toRelay, n.toRelay[0]) })
		}
	}
	for i, call := range m.running {
		step(fmt.Sprint("finish ", call), func(n *model) {
			n.running = slices.Delete(n.running, i, i+1)
			n.finish(call, false)
		})
	}
	switch m.link {
	case linkDown:
		step("auth", func(n *model) {
			n.link, n.asked = linkAuth, n.session > 0
			n.seen = n.dedup.seen(n.session, at(n.now))
		})
		if m.resumable {
			step("forget", func(n *model) { n.fail() })
		}
	case linkAuth:
		step("ready", func(n *model) { n.ready() })
	}
	if m.link != linkDown && m.breaks < m.cfg.breaks {
		step("break", func(n *model) { n.breaks++; n.lose() })
	}
	if m.restarts < m.cfg.restarts {
		step("restart", func(n *model) {
			n.restarts++
			n.lose()
			n.dedup, n.running, n.session = dedupTable{}, nil, 0
		})
	}
	if !due && m.now < m.cfg.ticks {
		step("tick", func(n *model) { n.now++ })
	}
}

// check checks what holds in each state.
func (m *model) check() {
	if m.calls.Len() > m.cfg.calls || len(m.calls.recent) > m.cfg.calls || len(m.dedup.order) > m.cfg.calls {
		panic(fmt.Sprintf("I4: %d live, %d ended, %d seen", m.calls.Len(), len(m.calls.recent), len(m.dedup.order)))
	}
	for call, outcome := range m.outcome {
		live := m.calls.find(modelID(call)) >= 0
		switch {
		case live != (outcome == ""):
			panic(fmt.Sprintf("call %d: live %v with outcome %q", call, live, outcome))
		case (outcome == "not_sent" || outcome == "refused") && m.ran[call] > 0:
			panic(fmt.Sprintf("call %d ended %s and ran", call, outcome))
		case outcome == "ok" && m.ran[call] != 1:
			panic(fmt.Sprintf("I5: call %d ended ok and ran %d times", call, m.ran[call]))
		case m.now == m.cfg.ticks && m.now > m.deadline[call] && outcome == "":
			panic(fmt.Sprintf("I2: call %d has not ended", call))
		case m.link == linkReady && live && m.now < m.deadline[call] && !m.isUnderWay(call):
			panic(fmt.Sprintf("call %d is live, but neither it nor its answer is under way", call))
		}
	}
}

// isUnderWay reports whether a call will get its answer if the link stays.
func (m *model) isUnderWay(call int) bool {
	inFlight := func(msg modelMessage) bool { return msg.call == call && msg.kind != 'x' }
	return slices.ContainsFunc(m.toDevice, inFlight) || slices.ContainsFunc(m.toRelay, inFlight) || slices.Contains(m.running, call)
}

// explore visits all states that can be reached, and counts them and the outcomes.
func (cfg *modelConfig) explore(t *testing.T) (states int, outcomes map[string]int) {
	start := &model{cfg: cfg, deadline: make([]int, cfg.calls), outcome: slices.Repeat([]string{"-"}, cfg.calls), ran: make([]int, cfg.calls)}
	start.ready()
	visited := map[string]struct{}{start.key(): {}}
	outcomes = make(map[string]int)
	todo := []*model{start}
	for len(todo) > 0 {
		m := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, o := range m.outcome {
			outcomes[o]++
		}
		m.next(func(_ string, n *model) {
			k := n.key()
			if _, ok := visited[k]; !ok {
				visited[k] = struct{}{}
				todo = append(todo, n)
			}
		})
	}
	return len(visited), outcomes
}

// TestResumeModel checks in all states of small configurations that a command is executed at
// most once (I1), each call ends exactly once and by its deadline (I2), with the ack of its
// command (I3), the tables keep their bounds (I4) and no call ends in success unless its
// command ran (I5). Also: a call that ends not_sent never runs, none is started after its
// deadline, on a ready link each live call waits for something that will come, and no ack of
// the node's own is foreign.
func TestResumeModel(t *testing.T) {
	configs := []modelConfig{
		{name: "two calls, two breaks", calls: 2, breaks: 2, ticks: 2, deadline: 2},
		{name: "one call, all faults", calls: 1, breaks: 2, restarts: 1, duplicates: 1, leaves: 1, ticks: 3, deadline: 2},
		{name: "seen is full", calls: 2, breaks: 1, ticks: 2, deadline: 1, seenFull: true},
	}
	if raceDetector && !slow() { // the model is one goroutine: the detector has nothing to find
		configs = []modelConfig{{name: "two calls, one break", calls: 2, breaks: 1, ticks: 2, deadline: 2}}
	} else {
		configs = append(configs, modelConfig{name: "two calls, all faults", calls: 2, breaks: 1, restarts: 1, duplicates: 1, ticks: 2, deadline: 1})
	}
	if slow() {
		configs = append(configs,
			modelConfig{name: "two calls, more faults", calls: 2, breaks: 2, restarts: 1, duplicates: 1, leaves: 1, ticks: 2, deadline: 1},
			modelConfig{name: "three calls", calls: 3, breaks: 1, ticks: 1, deadline: 1})
	}
	for _, cfg := range configs {
		t.Run(cfg.name, func(t *testing.T) {
			start := time.Now()
			states, outcomes := cfg.explore(t)
			t.Logf("%d states in %v, calls by outcome: %v", states, time.Since(start).Round(time.Millisecond), outcomes)
			for _, o := range []string{"ok", "not_sent", "unknown"} {
				if outcomes[o] == 0 {
					t.Errorf("no call ends %s: the model does not reach it", o)
				}
			}
			if keys := slices.Sorted(maps.Keys(outcomes)); len(keys) > 7 {
				t.Errorf("outcomes %v", keys)
			}
		})
	}
}

package link

import (
	"slices"
	"testing"
	"time"

	"agentctl/manifest"

	"pgregory.net/rapid"
)

// TestCallsModel compares Calls with a model that stores everything in maps.
func TestCallsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c Calls[int]
		type entry struct {
			value int
			state CallState
		}
		live := make(map[string]entry)
		var order, past []string // past: ended, oldest first
		isAcked := make(map[string]bool)
		all := []string{NewID()} // one that was never added
		now := time.Unix(1_800_000_000, 0)
		deadline := make(map[string]time.Time)
		end := func(id string, wasAcked bool) {
			delete(live, id)
			order = slices.DeleteFunc(order, func(o string) bool { return o == id })
			past = append(past, id)
			isAcked[id] = wasAcked
		}
		anyID := func(t *rapid.T) string { return rapid.SampledFrom(all).Draw(t, "id") }
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				for range rapid.IntRange(1, 40).Draw(t, "n") {
					id := NewID()
					d := now.Add(time.Duration(rapid.IntRange(-1, 5).Draw(t, "deadline")) * time.Second)
					err := c.Add(id, d, CallInfo{Tool: id}, len(all))
					if full := len(live) == MaxInflight; full != (err != nil) {
						t.Fatalf("Add with %d live: %v", len(live), err)
					}
					if err == nil {
						live[id], deadline[id] = entry{len(all), Queued}, d
						all, order = append(all, id), append(order, id)
					}
				}
			},
			"sent": func(t *rapid.T) {
				id := anyID(t)
				c.MarkSent(id)
				if e, ok := live[id]; ok {
					live[id] = entry{e.value, Sent}
				}
			},
			"ack": func(t *rapid.T) {
				id := anyID(t)
				v, verdict := c.Ack(id)
				e, alive := live[id]
				i := slices.Index(past, id)
				want := AckForeign
				switch {
				case alive:
					want = AckAccepted
				case i >= 0 && i >= len(past)-maxRecent && !isAcked[id]:
					want = AckLate
				case i >= 0 && i >= len(past)-maxRecent:
					want = AckDuplicate
				}
				info, remembered := c.Ended(id)
				if remembered != (want != AckForeign) || remembered && info.Tool != id {
					t.Fatalf("Ended(%s) = %+v, %v after verdict %d", id, info, remembered, want)
				}
				if verdict != want || v != e.value {
					t.Fatalf("Ack(%s) = %d, %d, want %d, %d", id, v, verdict, e.value, want)
				}
				if alive {
					end(id, true)
				} else if i >= 0 {
					isAcked[id] = true
				}
			},
			"expire": func(t *rapid.T) {
				id := anyID(t)
				was, ended := c.Expire(id)
				e, alive := live[id]
				if ended != alive || was != e.state {
					t.Fatalf("Expire(%s) = %v, %v with %+v, alive %v", id, was, ended, e, alive)
				}
				if alive {
					end(id, false)
					want := manifest.DeadlineExceeded
					if was == InDoubt {
						want = manifest.NodeOffline
					}
					if info, ok := c.Ended(id); !ok || info.Code != want {
						t.Fatalf("Ended(%s) = %+v, %v after Expire in %d", id, info, ok, was)
					}
				}
			},
			"lost": func(*rapid.T) {
				c.Lost()
				for id, e := range live {
					if e.state == Sent {
						live[id] = entry{e.value, InDoubt}
					}
				}
			},
			"resume": func(t *rapid.T) {
				var seen []ResumedCommand
				var want []string
				for _, id := range order {
					if live[id].state == InDoubt && rapid.Bool().Draw(t, "seen") {
						seen = append(seen, ResumedCommand{id, SeenDone})
						live[id] = entry{live[id].value, Sent}
					}
				}
				if rapid.Bool().Draw(t, "full") {
					for len(seen) < MaxInflight {
						seen = append(seen, ResumedCommand{NewID(), SeenDone})
					}
				}
				for _, id := range order {
					e := live[id]
					if e.state == InDoubt && len(seen) < MaxInflight {
						live[id] = entry{e.value, Queued}
					}
					if e.state != Sent && now.Before(deadline[id]) {
						want = append(want, id)
					}
				}
				if got := c.Resume(seen, now); !slices.Equal(got, want) {
					t.Fatalf("Resume = %v, want %v", got, want)
				}
			},
			"fail": func(t *rapid.T) {
				var want []FailedCall[int]
				for _, id := range slices.Clone(order) {
					want = append(want, FailedCall[int]{live[id].value, live[id].state})
					end(id, false)
				}
				if got := c.Fail(); !slices.Equal(got, want) {
					t.Fatalf("Fail = %v, want %v", got, want)
				}
			},
			"time": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 4000).Draw(t, "ms")) * time.Millisecond)
			},
			"": func(t *rapid.T) {
				if len(c.live) != len(live) || len(c.recent) > maxRecent {
					t.Fatalf("%d live, want %d; %d recent", len(c.live), len(live), len(c.recent))
				}
				for id, e := range live {
					if i := c.find(id); i < 0 || c.live[i].state != e.state {
						t.Fatalf("%s at %d of %+v, want state %v", id, i, c.live, e.state)
					}
				}
			},
		})
	})
}

// world is a relay's Calls, a device's dedupTable and a network that loses messages in
// flight.
type world struct {
	now  time.Time
	up   bool
	boot int // of the device, counts its restarts
	link int // boot of the session that the relay can resume

	calls    Calls[int]
	ids      []string // by call
	deadline []time.Time
	outcome  []string // by call; "" while it runs
	toDevice []string
	toRelay  []string

	seen    dedupTable
	running []string
	ran     map[string]int
	acked   map[string]bool // the call ended with the device's success
}

func (w *world) finish(t *rapid.T, call int, outcome string) {
	if w.outcome[call] != "" {
		t.Fatalf("call %d ended twice: %s, then %s", call, w.outcome[call], outcome) // I2
	}
	w.outcome[call] = outcome
	if late := w.now.Sub(w.deadline[call]); late > 250*time.Millisecond {
		t.Fatalf("call %d ended %v after its deadline", call, late) // I2
	}
}

func (w *world) sweep(t *rapid.T) {
	for i, id := range w.ids {
		if w.outcome[i] == "" && !w.now.Before(w.deadline[i]) {
			if _, ended := w.calls.Expire(id); !ended {
				t.Fatalf("call %d has no outcome and was not alive", i)
			}
			w.finish(t, i, "expired")
		}
	}
}

func (w *world) lose() {
	if w.up {
		w.up, w.toDevice, w.toRelay = false, nil, nil
		w.calls.Lost()
	}
}

func (w *world) reconnect(t *rapid.T) {
	w.lose()
	w.up = true
	if w.link != w.boot || rapid.Bool().Draw(t, "session forgotten") {
		for _, call := range w.calls.Fail() {
			w.finish(t, call.Value, "offline")
		}
		w.link = w.boot
		return
	}
	var known []ResumedCommand // at most MaxInflight, the newest
	for i := len(w.seen.order) - 1; i >= 0 && len(known) < MaxInflight; i-- {
		id := w.seen.order[i]
		known = append(known, ResumedCommand{MsgID: id})
		if c := w.seen.byID[id]; c.done {
			w.toRelay = append(w.toRelay, id)
		}
	}
	for _, id := range w.calls.Resume(known, w.now) {
		w.calls.MarkSent(id)
		w.toDevice = append(w.toDevice, id)
	}
}

// TestAtMostOnce: with a network that loses messages and with restarts of either side, a
// command is executed at most once (I1), each call ends exactly once and in time (I2), with
// the ack of its command (I3), the tables keep their bounds (I4), and no expired call
// ends in success (I5).
func TestAtMostOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{now: time.Unix(1_800_000_000, 0), up: true, ran: make(map[string]int), acked: make(map[string]bool)}
		t.Repeat(map[string]func(*rapid.T){
			"call": func(t *rapid.T) {
				for range rapid.IntRange(1, 40).Draw(t, "n") {
					id := NewID()
					if !w.up || w.calls.Add(id, w.now.Add(5*time.Second), CallInfo{}, len(w.ids)) != nil {
						return
					}
					w.ids, w.outcome = append(w.ids, id), append(w.outcome, "")
					w.deadline = append(w.deadline, w.now.Add(5*time.Second))
					w.calls.MarkSent(id)
					w.toDevice = append(w.toDevice, id)
				}
			},
			"device reads": func(t *rapid.T) {
				for range rapid.IntRange(0, len(w.toDevice)).Draw(t, "n") {
					id := w.toDevice[0]
					w.toDevice = w.toDevice[1:]
					switch fresh, ack, ok := w.seen.begin(id, 0, w.now); {
					case !ok:
					case fresh:
						w.running = append(w.running, id)
						if w.ran[id]++; w.ran[id] > 1 {
							t.Fatalf("%s ran %d times", id, w.ran[id]) // I1
						}
					case ack != nil:
						w.toRelay = append(w.toRelay, id)
					}
				}
			},
			"device answers": func(t *rapid.T) {
				for range rapid.IntRange(0, len(w.running)).Draw(t, "n") {
					i := rapid.IntRange(0, len(w.running)-1).Draw(t, "which")
					id := w.running[i]
					w.running = slices.Delete(w.running, i, i+1)
					w.seen.finish(id, []byte(id), false, w.now)
					if w.up {
						w.toRelay = append(w.toRelay, id)
					}
				}
			},
			"relay reads": func(t *rapid.T) {
				for range rapid.IntRange(0, len(w.toRelay)).Draw(t, "n") {
					id := w.toRelay[0]
					w.toRelay = w.toRelay[1:]
					if call, verdict := w.calls.Ack(id); verdict == AckAccepted {
						if w.ids[call] != id {
							t.Fatalf("the ack of %s ended call %d", id, call) // I3
						}
						w.finish(t, call, "ok")
					}
				}
			},
			"link lost":  func(*rapid.T) { w.lose() },
			"reconnect":  func(t *rapid.T) { w.reconnect(t) },
			"restart":    func(*rapid.T) { w.lose(); w.boot++; w.seen, w.running = dedupTable{}, nil },
			"time":       func(t *rapid.T) { w.pass(t, time.Duration(rapid.IntRange(1, 250).Draw(t, "ms"))*time.Millisecond) },
			"much later": func(t *rapid.T) { w.pass(t, 10*time.Minute) },
			"": func(t *rapid.T) {
				if len(w.calls.live) > MaxInflight || len(w.calls.recent) > maxRecent || len(w.seen.order) > maxDedup || len(w.seen.byID) != len(w.seen.order) {
					t.Fatalf("bounds: %d calls, %d recent, %d and %d seen", len(w.calls.live), len(w.calls.recent), len(w.seen.order), len(w.seen.byID)) // I4
				}
			},
		})
		w.pass(t, 6*time.Second)
		for i, o := range w.outcome {
			if o == "" {
				t.Fatalf("call %d never ended", i)
			}
			if o == "ok" && w.ran[w.ids[i]] != 1 {
				t.Fatalf("call %d succeeded and ran %d times", i, w.ran[w.ids[i]])
			}
		}
	})
}

// pass advances time in steps, so that the relay's timers fire.
func (w *world) pass(t *rapid.T, d time.Duration) {
	for d > 0 {
		step := min(d, 100*time.Millisecond)
		w.now, d = w.now.Add(step), d-step
		w.sweep(t)
		if len(w.calls.live) == 0 {
			w.now, d = w.now.Add(d), 0
		}
	}
}

func TestDedupBounds(t *testing.T) {
	var s dedupTable
	now := time.Unix(1_800_000_000, 0)
	first := NewID()
	start := func(id string) (bool, bool) {
		fresh, _, ok := s.begin(id, 0, now)
		s.finish(id, []byte("ack"), false, now)
		return fresh, ok
	}
	for i := range maxDedup {
		id := NewID()
		if i == 0 {
			id = first
		}
		if fresh, ok := start(id); !fresh || !ok {
			t.Fatalf("command %d was refused", i)
		}
	}
	if _, ok := start(NewID()); ok {
		t.Error("a full table of young commands took one more")
	}
	if fresh, ok := start(first); fresh || !ok {
		t.Error("the oldest command was forgotten")
	}
	now = now.Add(dedupTTL)
	if fresh, ok := start(NewID()); !fresh || !ok {
		t.Error("old commands keep new ones out")
	}
	if len(s.order) != dedupSize || len(s.byID) != dedupSize {
		t.Errorf("%d and %d commands are remembered, want the last %d", len(s.order), len(s.byID), dedupSize)
	}
}

// TestDedupKeepsRunningCommands: a running command is not forgotten, whatever its age.
func TestDedupKeepsRunningCommands(t *testing.T) {
	var s dedupTable
	now := time.Unix(1_800_000_000, 0)
	hung := NewID()
	s.begin(hung, 0, now)
	for range maxDedup - 1 {
		now = now.Add(time.Second)
		id := NewID()
		s.begin(id, 0, now)
		s.finish(id, []byte("ack"), false, now)
	}
	if fresh, ack, ok := s.begin(hung, 0, now); fresh || ack != nil || !ok {
		t.Errorf("the running command: fresh %v, ack %q, ok %v", fresh, ack, ok)
	}
}

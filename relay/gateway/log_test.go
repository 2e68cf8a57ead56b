package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/topic"
)

// storeLog is the relay's event log as a Log.
type storeLog struct{ *eventlog.Store }

func toEvent(k kernel.Event) (Event, bool) {
	data, ok := bytes.CutPrefix(k.Payload, []byte(`{"data":`))
	return Event{ID: k.Seq, Tenant: k.Tenant, Topic: k.Aggregate, Data: bytes.TrimSuffix(data, []byte("}")), TimeMS: k.CreatedMS}, ok && k.Type == "event"
}

func fromEvent(e Event) kernel.Event {
	return kernel.Event{Tenant: e.Tenant, Type: "event", Aggregate: e.Topic, Payload: fmt.Appendf(nil, `{"data":%s}`, e.Data), CreatedMS: e.TimeMS}
}

func (l storeLog) Append(ctx context.Context, e Event) (uint64, error) {
	return l.Store.Append(ctx, fromEvent(e))
}
func (l storeLog) Offer(e Event) bool { return l.Store.Offer(fromEvent(e)) }
func (l storeLog) Follow(ctx context.Context, after uint64, fn func(Event) error) error {
	return l.Store.Follow(ctx, eventlog.Query{After: after}, each(fn))
}
func (l storeLog) CanResume(after uint64, v Visible) bool {
	return l.Store.CanResume(after, eventlog.Query{Tenants: v.Tenants})
}

func (l storeLog) Select(ctx context.Context, after, to uint64, _ Visible, fn func(Event) error) error {
	return l.Store.Select(ctx, eventlog.Query{After: after, To: to}, each(fn))
}
func each(fn func(Event) error) func(kernel.Event) error {
	return func(k kernel.Event) error {
		if e, ok := toEvent(k); ok {
			return fn(e)
		}
		return nil
	}
}

// openLog opens the log in dir and runs it; close ends both.
func openLog(t *testing.T, dir string) (_ storeLog, closeLog func()) {
	t.Helper()
	s, err := eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = s.Run(ctx) }()
	closeLog = sync.OnceFunc(func() {
		cancel()
		<-ended
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(closeLog)
	return storeLog{s}, closeLog
}

// TestLog: with the log an event is durable when it is answered, ids go on over a
// restart, and a client resumes from the log beyond the ring.
func TestLog(t *testing.T) {
	dir := t.TempDir()
	log, closeLog := openLog(t, dir)
	g := start(t, Options{Log: log, Ring: 4})
	live := g.open("")
	var ids []uint64
	for i := range 10 {
		if i == 5 { // another event of the log's takes a number
			if _, err := log.Store.Append(context.Background(), kernel.Event{Type: "call"}); err != nil {
				t.Fatal(err)
			}
		}
		id := g.post("t", strconv.Itoa(i))
		if log.Last() < id {
			t.Fatalf("answered %d before it is durable: %d", id, log.Last())
		}
		ids = append(ids, id)
	}
	g.Emit("", "emitted", 1)
	live.want("t", "0")
	s := g.open("", "Last-Event-ID", fmt.Sprint(ids[0]))
	for i := 1; i < 10; i++ {
		s.want("t", strconv.Itoa(i))
	}
	s.want("emitted", "1")
	if _, err := strconv.ParseUint(s.read.LastEventID(), 10, 64); err != nil || ids[5] != ids[4]+2 {
		t.Errorf("ids %v", ids)
	}
	if err := g.stop(); err != nil {
		t.Fatal(err)
	}
	closeLog()

	log, _ = openLog(t, dir)
	g = start(t, Options{Log: log, Ring: 4})
	s = g.open("?topics=t", "Last-Event-ID", fmt.Sprint(ids[7]))
	next := g.post("t", "10")
	if next <= ids[9] {
		t.Errorf("id %d after the restart, %d before", next, ids[9])
	}
	s.want("t", "8", "t", "9", "t", "10")
	g.open("", "Last-Event-ID", fmt.Sprint(next+1)).want("gateway/reset", fmt.Sprintf(`{"requested":%d,"oldest":%d}`, next+1, next), "t", "10")
}

// retentionLog removes old events while a client reads them.
type retentionLog struct {
	failingLog
	first atomic.Uint64 // the oldest event
}

func (l *retentionLog) Last() uint64 { return 100 }
func (l *retentionLog) CanResume(after uint64, _ Visible) bool {
	return after+1 >= l.first.Load() && after <= 100
}
func (l *retentionLog) Select(_ context.Context, after, to uint64, _ Visible, fn func(Event) error) error {
	for id := after + 1; id <= to; id++ {
		if id == 50 {
			l.first.Store(80)
		}
		if id >= l.first.Load() {
			data := fmt.Appendf(nil, `"%d %s"`, id, strings.Repeat("x", 30<<10))
			if err := fn(Event{ID: id, Topic: "t", Data: data}); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestRetention: a client that retention overtakes gets a reset, and loses nothing silently.
func TestRetention(t *testing.T) {
	log := &retentionLog{}
	g := start(t, Options{Log: log})
	s := g.open("", "Last-Event-ID", "10")
	last := uint64(10)
	for {
		ev := s.next()
		if ev.Type == "gateway/reset" {
			if want := fmt.Sprintf(`{"requested":%d,"oldest":101}`, last); string(ev.Data) != want {
				t.Errorf("reset %s, want %s", ev.Data, want)
			}
			break
		}
		if last++; ev.LastEventID != fmt.Sprint(last) {
			t.Fatalf("event %s after %d", ev.LastEventID, last-1)
		}
	}
	if last < 40 || last > 50 {
		t.Errorf("reset after %d", last)
	}
	g.open("", "Last-Event-ID", "90").want("t", fmt.Sprintf(`"91 %s"`, strings.Repeat("x", 30<<10)))
	g.open("", "Last-Event-ID", "20").want("gateway/reset", `{"requested":20,"oldest":101}`)
}

func TestRing(t *testing.T) {
	r := newRing(5, 1000)
	if r.oldest() != 1000 || r.floor != 999 || r.last != 999 {
		t.Errorf("a new ring: %+v", r)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	var all []*event
	for range 500 {
		e := &event{id: r.last + 1 + uint64(rng.IntN(3)), frame: make([]byte, rng.IntN(100))}
		if rng.IntN(50) == 0 {
			e.frame = make([]byte, maxRingBytes/3)
		}
		r.push(e)
		all = append(all, e)
		size := 0
		for i := range r.n {
			if r.at(i) != all[len(all)-r.n+i] {
				t.Fatalf("event %d of %d is not the right one", i, r.n)
			}
			size += len(r.at(i).frame)
		}
		if r.n > 5 || size != r.bytes || size > maxRingBytes || r.last != e.id || r.oldest() != r.at(0).id {
			t.Fatalf("%d events, %d bytes: %+v", r.n, size, r)
		}
		if gone := len(all) - r.n; gone > 0 && r.floor != all[gone-1].id {
			t.Fatalf("floor %d, want %d", r.floor, all[gone-1].id)
		}
		ask := r.floor + uint64(rng.IntN(int(r.last-r.floor+2)))
		i := slices.IndexFunc(all, func(e *event) bool { return e.id > ask })
		if i < 0 {
			i = len(all)
		}
		if got := slices.Collect(r.since(ask)); !slices.Equal(got, all[i:]) {
			t.Fatalf("%d events since %d, want %d", len(got), ask, len(all)-i)
		}
	}
}

// failingLog fails with the given errors.
type failingLog struct {
	Log
	append error
	follow error
}

func (l failingLog) Append(context.Context, Event) (uint64, error) { return 0, l.append }
func (l failingLog) Follow(ctx context.Context, _ uint64, _ func(Event) error) error {
	if l.follow == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return l.follow
}
func (l failingLog) Last() uint64     { return 5 }
func (l failingLog) Offer(Event) bool { return false }

func TestFailingLog(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want int
		code string
	}{{ErrBusy, 429, "E_RATE_LIMITED"}, {errors.New("disk full"), 500, "E_INTERNAL"}} {
		g := start(t, Options{Log: failingLog{append: tt.err}})
		status, h, body := g.request("POST", IngestPath, `{"topic":"a","data":1}`)
		if status != tt.want || !strings.Contains(body, tt.code) || !strings.Contains(body, `"retryable":true`) || (status == 429) != (h.Get("Retry-After") != "") {
			t.Errorf("%v: %d %s", tt.err, status, body)
		}
		g.Emit("", "a", 1)
		if st := g.Stats(); st.Emitted != 1 || st.EmitLost != 1 || st.Ingested != 0 {
			t.Errorf("%+v", st)
		}
	}
	g, err := New(Options{Listen: "127.0.0.1:0", Log: failingLog{follow: errors.New("gone")}})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("Run returned %v when the log failed", err)
	}
}

// TestEmit: invalid data is counted and does not fail the caller.
func TestEmit(t *testing.T) {
	g, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	g.Emit("", "early", 1)                                  // before Run
	g.Emit("", "bad topic", 1)                              // lost
	g.Emit("", "a", func() {})                              // lost: no JSON
	g.Emit("", "a", panics{})                               // lost
	g.Emit("", "a", strings.Repeat("x", MaxData))           // lost
	g.Emit("", "a", json.RawMessage("{\"a\":\r\n\"\\n\"}")) // one line
	g.Emit("", "heartbeat", 1)                              // lost
	if st := g.Stats(); st.Emitted != 7 || st.EmitLost != 5 || st.RingEvents != 2 {
		t.Errorf("%+v", st)
	}
	var none *Gateway
	none.Emit("", "a", 1) // a relay without a gateway
}

type panics struct{}

func (panics) MarshalJSON() ([]byte, error) { panic("no") }

// TestResumeModel: clients that disconnect at random and resume after their last event get each event
// of their topics exactly once, in order, from the ring or, where that is small, from the log.
func TestResumeModel(t *testing.T) {
	t.Run("ring", func(t *testing.T) { testResume(t, Options{Ring: 400}) })
	t.Run("log", func(t *testing.T) {
		log, _ := openLog(t, t.TempDir())
		testResume(t, Options{Log: log, Ring: 5})
	})
}

// testResume posts events from several clients while others subscribe, disconnect and resume. The
// event "end" comes last.
func testResume(t *testing.T, o Options) {
	const events, posters, subscribers = 300, 3, 8
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	g := start(t, o)
	begin := g.Stats().LastID
	var mu sync.Mutex             // protects posted
	posted := map[uint64]string{} // topics by event id
	var posting, reading sync.WaitGroup
	for p := range posters {
		posting.Go(func() {
			for i := range events / posters {
				topic := []string{"a", "b", "log/x"}[(i+p)%3]
				id := g.post(topic, fmt.Sprintf(`"%d-%d"`, p, i))
				mu.Lock()
				posted[id] = topic
				mu.Unlock()
			}
		})
	}
	topics := []string{"", "a,end", "b,log/*,end", "log/*,end"}
	var received [subscribers][]uint64
	for c := range received {
		rng := rand.New(rand.NewPCG(seed, uint64(c)))
		reading.Go(func() { received[c] = g.readUntilEnd(topics[c%len(topics)], begin, rng) })
	}
	posting.Wait()
	g.post("end", "0")
	reading.Wait()
	for c, ids := range received {
		wantTopics, want := topics[c%len(topics)], 0
		patterns, _ := topic.Parse(wantTopics)
		for _, name := range posted {
			if patterns.Match(name) {
				want++
			}
		}
		for i, id := range ids {
			if posted[id] == "" || (i > 0 && id <= ids[i-1]) {
				t.Fatalf("client %d: event %d has id %d, which was not posted, or is not above the one before", c, i, id)
			}
		}
		if len(ids) != want {
			t.Errorf("client %d of %q got %d events, want %d", c, wantTopics, len(ids), want)
		}
	}
}

// readUntilEnd subscribes after an event, disconnects after a random number of events, and resumes,
// until the event "end". It returns the ids of the events before that.
func (g *testGateway) readUntilEnd(topics string, after uint64, rng *rand.Rand) (ids []uint64) {
	for {
		s := g.open("?topics="+topics, "Last-Event-ID", fmt.Sprint(after))
		for range 1 + rng.IntN(60) {
			ev := s.next()
			if ev.Type == "end" {
				return ids
			}
			id, err := strconv.ParseUint(ev.LastEventID, 10, 64)
			if err != nil || ev.Type == "gateway/reset" {
				g.t.Errorf("after event %d of %q: %s %s %s", after, topics, ev.Type, ev.LastEventID, ev.Data)
				return ids
			}
			ids, after = append(ids, id), id
		}
		_ = s.conn.Close()
	}
}

// TestCounters: under load, delivered is ingested times the matching clients, less what
// was dropped, to the last event; and what was delivered arrives.
func TestCounters(t *testing.T) {
	g := start(t, Options{Shards: 3})
	const posts, posters = 400, 4
	var received atomic.Int64
	var posting, reading sync.WaitGroup
	read := func(s *stream) {
		reading.Go(func() {
			for {
				ev, err := s.read.Next()
				if err != nil {
					return
				}
				if ev.Type == "a" || ev.Type == "b" {
					received.Add(1)
				}
			}
		})
	}
	var streams []*stream
	for i := range 12 {
		s := g.open([]string{"", "?topics=a", "?topics=b,c", "?topics=nothing"}[i%4])
		streams = append(streams, s)
		read(s)
	}
	stalled := g.open("?topics=a,b")
	stalled.limitReceiveBuffer()
	for p := range posters {
		posting.Go(func() {
			for i := range posts / posters {
				g.post([]string{"a", "b"}[(i+p)%2], `"`+strings.Repeat("x", 16<<10)+`"`)
			}
		})
	}
	posting.Wait()
	want := uint64(3*posts + 6*posts/2 + posts)
	eventually(t, "all is given or dropped", func() bool { st := g.Stats(); return st.Delivered+st.Dropped == want })
	st := g.Stats()
	if st.Ingested != posts || st.Subscribers != 13 || st.Connections != 13 || st.Dropped == 0 {
		t.Errorf("%+v", st)
	}
	read(stalled)
	eventually(t, "all that was given arrives", func() bool { return received.Load() == int64(st.Delivered) })
	for _, s := range append(streams, stalled) {
		_ = s.conn.Close()
	}
	reading.Wait()
	if received.Load() != int64(st.Delivered) {
		t.Errorf("%d arrived, %d were delivered", received.Load(), st.Delivered)
	}
}

package hub

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// The simulation runs the real hub and real link.Clients in virtual time, with faults from a
// seed: links that break, hold what passes for up to 40 s, repeat messages, refuse to open;
// boards and relays that restart; a relay whose wall clock jumps. AGENTCTL_SEED runs one seed, AGENTCTL_SEEDS that many.
const (
	simBoards      = 20
	simMinutes     = 10
	simSeeds       = 1  // without AGENTCTL_SEEDS
	simFastBoards  = 10 // with neither AGENTCTL_SEEDS nor AGENTCTL_SEED
	simFastMinutes = 5  // likewise
)

// fleet is the state of one run.
type fleet struct {
	t    *testing.T
	seed uint64

	mu      sync.Mutex
	current *testHub // the relay that runs now
	boards  []*simBoard
	runs    map[string][]time.Time // starts by message
	counts  map[string]int         // calls by outcome
	audit   map[string]int         // of relays that have ended
	alerts  map[string]int         // the last one that arrived, by board and process
	sent    int                    // alerts
	got     int                    // alerts
	copies  int                    // messages that a link repeated
}

// simBoard is one board, whose process may be restarted.
type simBoard struct {
	f      *fleet
	index  int
	random *rand.Rand // of the board's faults; dial runs in another goroutine and has its own
	stop   func()
	client *link.Client
	starts int // of its process

	mu      sync.Mutex
	newest  *simConn
	refused time.Time  // dials fail until then
	links   *rand.Rand // seeds the faults of each link
}

func (b *simBoard) node() string { return fmt.Sprintf("01hzx9k3m4p7q8r9s0t1v2w3%02d", b.index) }

// simConn is the device's end of a link.
type simConn struct {
	link.Conn
	f     *fleet
	end   sync.Once
	ended chan bool

	mu        sync.Mutex
	random    *rand.Rand
	heldUntil time.Time
	lost      bool
	silent    bool // the relay does not learn that this end has closed
}

// wait blocks while the link holds what passes, at most limit; false: the link is gone.
func (c *simConn) wait(limit time.Duration) error {
	c.mu.Lock()
	held := time.Until(c.heldUntil)
	c.mu.Unlock()
	if held > 0 {
		select {
		case <-time.After(min(held, limit)):
		case <-c.ended:
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.lost:
		return net.ErrClosed
	case held > limit:
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (c *simConn) Read(fn func(msg []byte) error) error {
	return c.Conn.Read(func(msg []byte) error {
		if c.wait(time.Hour) != nil {
			return nil // lost; the next read finds the end
		}
		if c.repeats(msg, link.TypeCmd) {
			if err := fn(bytes.Clone(msg)); err != nil {
				return err
			}
		}
		return fn(msg)
	})
}

// repeats reports whether the link repeats a message of a type: one of fifty. No link repeats
// messages by itself; a relay that resends a command and a board that resends an answer do.
func (c *simConn) repeats(msg []byte, typ string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !bytes.Contains(msg, []byte(`"type":"`+typ+`"`)) || c.random.IntN(50) > 0 {
		return false
	}
	c.f.mu.Lock()
	c.f.copies++
	c.f.mu.Unlock()
	return true
}

func (c *simConn) OnPing(fn func(ping bool, payload []byte)) {
	c.Conn.OnPing(func(ping bool, payload []byte) {
		if c.wait(time.Hour) == nil {
			fn(ping, payload)
		}
	})
}

func (c *simConn) Write(msg []byte) error {
	if err := c.wait(10 * time.Second); err != nil {
		return err
	}
	if c.repeats(msg, link.TypeCmdAck) {
		if err := c.Conn.Write(msg); err != nil {
			return err
		}
	}
	return c.Conn.Write(msg)
}

func (c *simConn) Close(code int, reason string) error {
	c.end.Do(func() { close(c.ended) })
	c.mu.Lock()
	silent := c.silent
	c.mu.Unlock()
	if silent {
		return c.Conn.SetReadDeadline(time.Unix(1, 0))
	}
	return c.Conn.Close(code, reason)
}

// cut breaks the link; what it holds is lost.
func (c *simConn) cut() {
	c.mu.Lock()
	c.lost = true
	c.mu.Unlock()
	_ = c.Close(1006, "")
}

// halfOpen makes the link a half-open one: its device is gone, and the relay does not notice.
func (c *simConn) halfOpen() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost, c.silent = true, true
}

func (c *simConn) hold(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heldUntil = time.Now().Add(d)
}

// Capabilities and Call are the board's echo.
func (b *simBoard) Capabilities() []manifest.Capability {
	return []manifest.Capability{manifest.Echo()}
}

func (b *simBoard) Call(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, link.StreamFunc, error) {
	message := strings.TrimSuffix(strings.TrimPrefix(string(args), `{"message":"`), `"}`)
	b.f.mu.Lock()
	b.f.runs[message] = append(b.f.runs[message], time.Now())
	b.f.mu.Unlock()
	if n := len(message); message[n-1] == '0' { // one of ten is slow
		select {
		case <-time.After(1500 * time.Millisecond):
		case <-ctx.Done():
			return nil, nil, manifest.E(manifest.DeadlineExceeded, "late")
		}
	}
	return []byte(echoed(tool.NodeID, message)), nil, nil
}

func (b *simBoard) dial(context.Context) (link.Conn, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.f.relay()
	if r == nil || time.Now().Before(b.refused) {
		return nil, errors.New("connection refused")
	}
	dev, rel := link.Pipe21()
	b.newest = &simConn{Conn: dev, f: b.f, random: rand.New(rand.NewPCG(b.links.Uint64(), 0)), ended: make(chan bool)}
	r.hub.Attach(rel, netip.Addr{})
	return b.newest, nil
}

// start starts the board's process.
func (b *simBoard) start() {
	c := link.NewClient(link.ClientOptions{Dial: b.dial, Token: func() (string, error) { return b.node(), nil }, InstanceID: instance1, Handler: b})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	b.client, b.starts = c, b.starts+1
	go func() { done <- c.Run(ctx) }()
	b.stop = func() { cancel(); <-done }
}

// alert sends the next alert of the board's process.
func (b *simBoard) alert(number int) {
	b.f.mu.Lock()
	b.f.sent++
	b.f.mu.Unlock()
	b.client.SendEvent(link.TopicAlert, fmt.Appendf(nil, `{"start":%d,"n":%d}`, b.starts, number))
}

// onAlert checks that the alerts of a process arrive in order and once.
func (f *fleet) onAlert(n *Node, data []byte) {
	var a struct{ Start, N int }
	if err := json.Unmarshal(data, &a); err != nil {
		f.t.Errorf("seed %d: alert %s: %v", f.seed, data, err)
	}
	key := fmt.Sprint(n.ID(), " ", a.Start)
	f.mu.Lock()
	defer f.mu.Unlock()
	if last, ok := f.alerts[key]; ok && a.N <= last {
		f.t.Errorf("seed %d: alert %d of %s after %d", f.seed, a.N, key, last)
	}
	f.alerts[key] = a.N
	f.got++
}

// watchTools checks each second that the tools of every ready board are listed, and that those
// of a board that is gone are not: a second later, or for a lost link when it can no longer be
// resumed.
func (f *fleet) watchTools(end time.Time) {
	const lostFor = 7 * time.Second
	wrong, readies := map[string]time.Duration{}, map[string]int{}
	for ; time.Now().Before(end); time.Sleep(time.Second) {
		r := f.relay()
		for _, b := range f.boards {
			id := b.node()
			if r == nil || r != f.relay() {
				clear(wrong)
				break
			}
			r.mu.Lock()
			isListed := r.listed[id] != nil
			if r.readies[id] != readies[id] { // it was ready since, if only for a moment
				readies[id] = r.readies[id]
				delete(wrong, id)
			}
			r.mu.Unlock()
			isReady, limit := r.hub.Status(id).Ready, lostFor
			if isReady {
				limit = time.Second
			}
			if isListed == isReady {
				delete(wrong, id)
			} else if wrong[id] += time.Second; wrong[id] > limit+time.Second {
				f.t.Errorf("seed %d: for %v board %d is ready: %v, its tools are listed: %v", f.seed, wrong[id], b.index, isReady, isListed)
			}
		}
	}
}

// fault injects one fault.
func (b *simBoard) fault() {
	b.mu.Lock()
	conn := b.newest
	b.mu.Unlock()
	switch n := b.random.IntN(20); {
	case conn == nil:
	case n < 11:
		conn.cut()
	case n < 14:
		conn.hold(time.Duration(b.random.Int64N(int64(40 * time.Second))))
	case n < 17:
		b.mu.Lock()
		b.refused = time.Now().Add(time.Duration(b.random.Int64N(int64(20 * time.Second))))
		b.mu.Unlock()
		conn.cut()
	case n == 17: // killed, or the network is gone
		conn.halfOpen()
		b.stop()
		b.start()
	default:
		b.stop()
		b.start()
	}
}

// relay is the relay that runs now, nil while there is none.
func (f *fleet) relay() *testHub {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.current
}

func (f *fleet) startRelay() {
	r := newTestHub(f.t)
	r.mu.Lock()
	r.onEvent = f.onAlert
	r.mu.Unlock()
	f.mu.Lock()
	f.current = r
	f.mu.Unlock()
}

// stopRelay ends the relay and counts its audit log by kind.
func (f *fleet) stopRelay() {
	r := f.relay()
	f.mu.Lock()
	f.current = nil
	f.mu.Unlock()
	r.end()
	for _, e := range r.events {
		kind, _, _ := strings.Cut(e, " ")
		f.audit[kind]++
	}
}

// call makes one call and checks, 50 s after its end, that its outcome is true.
func (f *fleet) call(b *simBoard, number int) {
	r := f.relay()
	if r == nil {
		return
	}
	r.mu.Lock()
	n := r.nodes[b.node()]
	r.mu.Unlock()
	if n == nil {
		return
	}
	message := fmt.Sprintf("%d-%d", b.index, number)
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	result, err := n.Call(ctx, r.tool(n, "echo.invoke"), []byte(`{"message":"`+message+`"}`), CallOptions{})
	answered := time.Now()
	time.Sleep(50 * time.Second) // what a link holds has come through

	outcome := "ok"
	var me *manifest.Error
	switch {
	case err == nil && !strings.Contains(string(result), `"`+message+`"`):
		f.t.Errorf("seed %d: %s got %s", f.seed, message, result)
	case errors.As(err, &me):
		outcome = string(me.Code) + " " + string(me.Outcome)
	case err != nil:
		outcome = err.Error()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[outcome]++
	runs := f.runs[message]
	delete(f.runs, message)
	notSent := me != nil && me.Outcome == manifest.NotSent
	switch {
	case len(runs) > 1, err == nil && len(runs) != 1, notSent && len(runs) != 0:
		f.t.Errorf("seed %d: %s ended %s and ran %d times", f.seed, message, outcome, len(runs))
	case len(runs) == 1 && runs[0].After(start.Add(5*time.Second)):
		f.t.Errorf("seed %d: %s was started %v after its caller's deadline: %s", f.seed, message, runs[0].Sub(start)-5*time.Second, outcome)
	case answered.Sub(start) > 5250*time.Millisecond:
		f.t.Errorf("seed %d: %s ended after %v", f.seed, message, answered.Sub(start))
	}
}

// simulate runs one seed.
func simulate(t *testing.T, seed uint64) {
	f := &fleet{t: t, seed: seed, runs: make(map[string][]time.Time), counts: make(map[string]int), audit: make(map[string]int), alerts: make(map[string]int)}
	f.startRelay()
	boardCount, minutes := simBoards, simMinutes
	if os.Getenv("AGENTCTL_SEEDS") == "" && os.Getenv("AGENTCTL_SEED") == "" {
		boardCount, minutes = simFastBoards, simFastMinutes // each has the faults of the first minutes of a longer run
	}
	for i := range boardCount {
		b := &simBoard{f: f, index: i, random: rand.New(rand.NewPCG(seed, uint64(i))), links: rand.New(rand.NewPCG(seed, uint64(i)+1<<32))}
		f.boards = append(f.boards, b)
		b.start()
	}
	end := time.Now().Add(time.Duration(minutes) * time.Minute)
	var boards, calls sync.WaitGroup
	for _, b := range f.boards {
		boards.Go(func() {
			nextFault := time.Now()
			for number := 0; time.Now().Before(end); number++ {
				if time.Now().After(nextFault) {
					b.fault()
					nextFault = time.Now().Add(time.Duration(b.random.Int64N(int64(90 * time.Second))))
				}
				calls.Go(func() { f.call(b, number) })
				if number%20 == 0 {
					b.alert(number)
				}
				time.Sleep(time.Duration(b.random.Int64N(int64(2 * time.Second))))
			}
		})
	}
	calls.Go(func() { f.watchTools(end) })
	random := rand.New(rand.NewPCG(seed, simBoards))
	for time.Now().Before(end) {
		time.Sleep(time.Duration(random.Int64N(int64(4 * time.Minute))))
		r := f.relay()
		r.mu.Lock() // forwards or back by up to a day
		r.clockError = time.Duration(random.Int64N(int64(48*time.Hour))) - 24*time.Hour
		r.mu.Unlock()
		time.Sleep(time.Duration(random.Int64N(int64(4 * time.Minute))))
		f.stopRelay()
		time.Sleep(time.Duration(random.Int64N(int64(30 * time.Second))))
		f.startRelay()
	}
	boards.Wait()
	calls.Wait()
	time.Sleep(2 * time.Minute) // faults are over
	for _, b := range f.boards {
		if !f.relay().hub.Status(b.node()).Ready {
			t.Errorf("seed %d: board %d is not ready two minutes after the last fault", seed, b.index)
		}
	}
	for _, b := range f.boards {
		b.stop()
	}
	f.stopRelay()
	if f.audit["dup_ack"] > f.copies {
		t.Errorf("seed %d: %d times dup_ack, with %d repeated messages", seed, f.audit["dup_ack"], f.copies)
	}
	if f.got*2 < f.sent {
		t.Errorf("seed %d: of %d alerts %d arrived", seed, f.sent, f.got)
	}
	for _, kind := range []string{"foreign_ack", "clone_suspected", "bad_result"} {
		if n := f.audit[kind]; n != 0 {
			t.Errorf("seed %d: %d times %s", seed, n, kind)
		}
	}
	if f.counts["ok"] < f.counts["E_NODE_OFFLINE not_sent"] {
		t.Errorf("seed %d: calls %v: the simulation tests little", seed, f.counts)
	}
	t.Logf("seed %d: calls %v, audit %v, %d repeated messages, %d of %d alerts", seed, f.counts, f.audit, f.copies, f.got, f.sent)
}

// TestSimulation checks, for each seed, that every call ends once and in time, that its outcome
// is true, that no command runs twice or is started after its caller's deadline, that no
// board's own answer or restart is taken for another's, that alerts arrive in order, that the
// tools that are listed are those of the boards that are ready, and that all boards come back.
func TestSimulation(t *testing.T) {
	var seeds []uint64
	number := func(name string) uint64 {
		n, err := strconv.ParseUint(os.Getenv(name), 10, 64)
		if err != nil && os.Getenv(name) != "" {
			t.Fatal(err)
		}
		return n
	}
	if os.Getenv("AGENTCTL_SEED") != "" {
		seeds = []uint64{number("AGENTCTL_SEED")}
	} else {
		for seed := range max(number("AGENTCTL_SEEDS"), simSeeds) {
			seeds = append(seeds, seed)
		}
	}
	for seed := range slices.Values(seeds) {
		bubble(t, func(t *testing.T) { simulate(t, seed) })
		if t.Failed() {
			t.Fatalf("AGENTCTL_SEED=%d repeats the faults", seed)
		}
	}
}

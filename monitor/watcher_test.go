package monitor

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/term"
)

// fakeDaemon is a control socket with a simulated machine behind it.
func fakeDaemon(t *testing.T, path string, h control.History) (stop func()) {
	t.Helper()
	p := prober.New(prober.Options{Source: prober.NewMockSource(1), Interval: 200 * time.Millisecond})
	var srv *control.Server
	srv, err := control.NewServer(control.Options{Path: path, Prober: p, History: h, Version: "v9",
		Allow:  func(uint32, uint32) error { return nil },
		Status: func(context.Context) any { return map[string]any{"sampling": srv.Sampling()} }})
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- p.Run(ctx) }()
	go func() { done <- srv.Serve(ctx) }()
	return func() {
		cancel()
		<-done
		<-done
	}
}

func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "s.sock")
}

// want waits for an event that ok likes, and fails the test without one.
func want(t *testing.T, msgs <-chan Message, what string, ok func(Message) bool) Message {
	t.Helper()
	limit := time.After(10 * time.Second)
	for {
		select {
		case m := <-msgs:
			if ok(m) {
				return m
			}
		case <-limit:
			t.Fatalf("no %s within 10 s", what)
		}
	}
}

func is(event string) func(Message) bool { return func(m Message) bool { return m.Event == event } }

// A restart of the daemon is said and survived; a faster interval is a burst, on the new
// connection as well.
func TestWatchRestart(t *testing.T) {
	path := socketPath(t)
	stop := fakeDaemon(t, path, nil)
	w := &Watcher{Socket: path, Interval: 100 * time.Millisecond, Modules: []string{"cpu", "load"}}
	ctx, cancel := context.WithCancel(context.Background())
	msgs := make(chan Message, 1000)
	ended := make(chan error, 1)
	go func() {
		ended <- w.Run(ctx, func(ctx context.Context, in <-chan Message) error {
			for {
				select {
				case m := <-in:
					msgs <- m
				case <-ctx.Done():
					return nil
				}
			}
		})
	}()
	state := func(s string) func(Message) bool {
		return func(m Message) bool {
			return m.Event == EventConnection && strings.Contains(string(m.Params), `"state":"`+s+`"`)
		}
	}
	for range 2 {
		want(t, msgs, "connection", state("ready"))
		m := want(t, msgs, "snapshot of what is not pushed", is(EventSnapshot))
		if !bytes.Contains(m.Params, []byte(`"load"`)) || bytes.Contains(m.Params, []byte(`"cpu"`)) {
			t.Errorf("snapshot is %s, want load alone", m.Params)
		}
		m = want(t, msgs, "metrics", is(control.EventMetrics))
		if bytes.Contains(m.Params, []byte("memory")) || !bytes.Contains(m.Params, []byte("cpu")) {
			t.Errorf("metrics are %s, want cpu alone", m.Params)
		}
		stop()
		want(t, msgs, "loss", state("lost"))
		stop = fakeDaemon(t, path, nil)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("it ended with %v", err)
	}
	stop()
}

func TestWatchBurst(t *testing.T) {
	path := socketPath(t)
	defer fakeDaemon(t, path, nil)()
	w := &Watcher{Socket: path, Interval: 100 * time.Millisecond}
	cl, err := w.dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cl.Close() }()
	w.release()
	if err := w.burst(t.Context(), cl); err != nil {
		t.Fatal(err)
	}
	m := want(t, w.out, "burst", func(m Message) bool {
		return m.Event == control.EventState && bytes.Contains(m.Params, []byte(`"phase":"burst"`))
	})
	if !bytes.Contains(m.Params, []byte(`"interval_ms":100`)) {
		t.Errorf("the burst is %s", m.Params)
	}
	for range 9 { // more than the daemon allows: others have it fast already
		if err := w.burst(t.Context(), cl); err != nil {
			t.Fatal(err)
		}
	}
}

// No more metrics than asked for, and what is held back is joined to the next.
func TestWatchInterval(t *testing.T) {
	w := &Watcher{Interval: time.Second, out: make(chan Message, 10)}
	for i, m := range []string{`"cpu":1`, `"memory":2`, `"cpu":3`, `"load":4`} {
		ts := []string{"1000", "1300", "1700", "2000"}[i]
		w.onEvent(control.Event{Method: control.EventMetrics, Params: json.RawMessage(`{"ts":` + ts + `,"seq":1,` + m + `}`)})
	}
	w.onEvent(control.Event{Method: control.EventPing, Params: json.RawMessage(`{}`)})
	var got []string
	for range len(w.out) {
		got = append(got, string((<-w.out).Line()))
	}
	want := []string{
		`{"event":"metrics","cpu":1,"seq":1,"ts":1000}` + "\n",
		`{"event":"metrics","cpu":3,"load":4,"memory":2,"seq":1,"ts":2000}` + "\n",
		`{"event":"ping"}` + "\n",
	}
	if strings.Join(got, "") != strings.Join(want, "") {
		t.Errorf("got %s, want %s", got, want)
	}
}

// What a slow reader misses is counted, and reported when its queue has space again.
func TestWatchLost(t *testing.T) {
	w := &Watcher{out: make(chan Message, 2)}
	for range 5 {
		w.send(Message{"ping", nil})
	}
	<-w.out
	<-w.out
	w.send(Message{"ping", nil})
	if got := string((<-w.out).Line()); got != `{"event":"lost","count":3}`+"\n" {
		t.Errorf("got %s", got)
	}
}

func TestView(t *testing.T) {
	v := NewView(false, false)
	v.zone = time.UTC
	now := time.Now()
	const raised = `{"level":"error","metric":"disk_pct","value":96,"message":"disk is 96 % full","ts":1772366399000}`
	v.handle(Message{EventConnection, []byte(`{"state":"ready","node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","name":"attic","alerts":[` + raised + `]}`)})
	v.handle(Message{"alert", []byte(raised)}) // once more, as an event that came meanwhile
	for _, m := range []string{
		`{"ts":1772366400000,"cpu":{"usage_percent":10},"memory":{"total":512,"used":128},"disk":{"usage_percent":63.2},"load":{"load_1m":0.5,"load_5m":0.4,"load_15m":0.3}}`,
		`{"ts":1772366401000,"cpu":{"usage_percent":50},"network":{"bytes_in_per_s":1500,"bytes_out_per_s":20},"temperature":{"hottest_c":71.5},"power":{"under_voltage":true}}`,
		`{"ts":1772366402000,"cpu":{"usage_percent":97}}`,
	} {
		v.handle(Message{control.EventMetrics, []byte(m)})
	}
	v.handle(Message{"alert", []byte(`{"level":"warn","metric":"temperature.hottest_c","value":71.5,"message":"too \u001b[2Jhot: give it air, or a cooler place, away from the oven","ts":1772366402000}`)})
	v.handle(Message{"update_ready", []byte(`{"component":"agentctl","version":"v2"}`)})
	v.newestAt, v.backAt = now, time.Time{}
	var all strings.Builder
	for _, size := range [][2]int{{80, 24}, {40, 24}, {40, 8}, {12, 4}} {
		lines := v.lines(size[0], size[1], now)
		if len(lines) > size[1] {
			t.Errorf("%v: %d lines", size, len(lines))
		}
		for i, l := range lines {
			if strings.Contains(l, "\x1b") {
				t.Errorf("%v: an escape sequence in %q", size, l)
			}
			lines[i] = strings.TrimRight(term.Truncate(l, size[0]), " ")
			if size[0] >= 40 && utf8.RuneCountInString(l) > size[0] {
				t.Errorf("%v: %d columns: %s", size, utf8.RuneCountInString(l), l)
			}
		}
		all.WriteString(strings.Repeat("=", size[0]) + "\n" + strings.Join(lines, "\n") + "\n")
	}
	compareGolden(t, "view.txt", all.String())

	v.handle(Message{EventConnection, []byte(`{"state":"lost"}`)})
	if s := v.footer(time.Now(), 80); !strings.Contains(s, "daemon gone for 0 s") {
		t.Errorf("the footer is %q", s)
	}
	v.handle(Message{EventConnection, []byte(`{"state":"ready"}`)})
	v.handle(Message{control.EventState, []byte(`{"phase":"stop"}`)})
	if s := v.footer(time.Now(), 80); !strings.Contains(s, "agentctl start") {
		t.Errorf("the footer is %q", s)
	}
}

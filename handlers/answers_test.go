package handlers_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober"
)

const (
	now     int64 = 1_790_000_000_000
	echoOut       = "mcp://schemas/system.echo.invoke.output@1.0.0"
	snapOut       = "mcp://schemas/system.metrics.snapshot.output@1.0.0"
)

func fixed(ms int64, ok bool) handlers.Clock { return func() (int64, bool) { return ms, ok } }

func TestEchoIsVerbatim(t *testing.T) {
	name := tool(t, "sysecho.NODE.echo.invoke")
	rapid.Check(t, func(t *rapid.T) {
		message := rapid.StringMatching(`[ -~]{0,60}`).Draw(t, "message")
		ms := rapid.Int64Range(prober.MinTSMS, 1<<53).Draw(t, "clock")
		m := mux(t, handlers.Options{}, handlers.NewEcho(fixed(ms, true)))
		args, _ := json.Marshal(map[string]string{"message": message}) // escapes what it likes
		result, stream, err := m.Call(context.Background(), name, args)
		if err != nil || stream != nil {
			t.Fatalf("%s: %v", args, err)
		}
		if err := manifest.CheckResult(echoOut, result, node); err != nil {
			t.Fatalf("%s: %v", result, err)
		}
		var got struct {
			Message string `json:"message"`
			MS      int64  `json:"received_at_ms"`
			Node    string `json:"node_id"`
		}
		if err := json.Unmarshal(result, &got); err != nil || got.Message != message || got.MS != ms || got.Node != node {
			t.Fatalf("%q at %d became %s", message, ms, result)
		}
	})
}

func TestEchoOnTheWire(t *testing.T) {
	m := mux(t, handlers.Options{}, handlers.NewEcho(fixed(1745236800012, true)))
	got, _, err := m.Call(t.Context(), tool(t, "sysecho.NODE.echo.invoke"), []byte(`{"message":"ping <&> \"\\"}`))
	want := `{"message":"ping <&> \"\\","received_at_ms":1745236800012,"node_id":"` + node + `"}`
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
}

// A result without trusted time is never made.
func TestNoTime(t *testing.T) {
	sampler := &sampled{s: sample(now)}
	for _, c := range []handlers.Clock{fixed(0, false), fixed(prober.MinTSMS-1, true), fixed(now, false)} {
		m := mux(t, handlers.Options{}, handlers.NewEcho(c), handlers.NewMetrics(sampler, c))
		for name, args := range map[string]string{"sysecho.NODE.echo.invoke": `{"message":"x"}`, "sys.NODE.metrics.snapshot": `{}`} {
			got, _, err := m.Call(t.Context(), tool(t, name), []byte(args))
			wantCode(t, name, err, manifest.Internal)
			if got != nil {
				t.Errorf("%s: got %s", name, got)
			}
		}
	}
}

// sampled is a Sampler with one sample.
type sampled struct {
	s   prober.Sample
	err error
}

func (f *sampled) Now(ctx context.Context) (prober.Sample, error) { return f.s, f.err }

func (f *sampled) Watch(ctx context.Context, _ time.Duration, fn func(prober.Sample) error) error {
	if f.err != nil {
		return f.err
	}
	return fn(f.s)
}

func sample(ts int64) prober.Sample {
	return prober.Sample{TSMS: ts, CPUPct: 12.4, MemBytes: 1234567890, MemTotalBytes: 8589934592,
		DiskPct: 31.2, Load1: 0.42, Load5: 0.39, Load15: 0.35}
}

// The frame of RFC-0009 §5.1, byte for byte.
func TestSnapshot(t *testing.T) {
	const want = `{"ts_ms":1745300000000,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","cpu_pct":12.4,"mem_bytes":1234567890,"mem_total_bytes":8589934592,"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}`
	m := mux(t, handlers.Options{}, handlers.NewMetrics(&sampled{s: sample(1745300000000)}, fixed(now, true)))
	got, stream, err := m.Call(t.Context(), tool(t, "sys.NODE.metrics.snapshot"), []byte("{}"))
	if err != nil || stream != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
}

func TestSnapshotRefusals(t *testing.T) {
	impossible := sample(now)
	impossible.CPUPct = 101
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	tests := []struct {
		name string
		ctx  context.Context
		s    *sampled
		code manifest.Code
	}{
		{"the sampler hangs", t.Context(), &sampled{err: prober.ErrHung}, manifest.Internal},
		{"an impossible reading", t.Context(), &sampled{s: impossible}, manifest.Internal},
		{"zeros", t.Context(), &sampled{s: prober.Sample{TSMS: now}}, manifest.Internal},
		{"the call ended", gone, &sampled{err: gone.Err()}, manifest.DeadlineExceeded},
	}
	for _, tt := range tests {
		m := mux(t, handlers.Options{}, handlers.NewMetrics(tt.s, fixed(now, true)))
		got, _, err := m.Call(tt.ctx, tool(t, "sys.NODE.metrics.snapshot"), []byte("{}"))
		wantCode(t, tt.name, err, tt.code)
		if got != nil {
			t.Errorf("%s: got %s", tt.name, got)
		}
	}
}

// A sample from the second before the clock was set gets the time it is now.
func TestSampleFromBeforeTheClock(t *testing.T) {
	m := mux(t, handlers.Options{}, handlers.NewMetrics(&sampled{s: sample(12345)}, fixed(now, true)))
	got, _, err := m.Call(t.Context(), tool(t, "sys.NODE.metrics.snapshot"), []byte("{}"))
	if err != nil || !strings.HasPrefix(string(got), `{"ts_ms":1790000000000,`) {
		t.Errorf("got %s, %v", got, err)
	}
}

// Every sample that passes its own check becomes a frame that the schema admits, with
// the same numbers in it.
func TestFramesFit(t *testing.T) {
	name := tool(t, "sys.NODE.metrics.snapshot")
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.OneOf(rapid.Float64Range(0, 100), rapid.SampledFrom([]float64{0, 100, 1e-9, 1e15, 1e21, 1.5e300, 0.1 + 0.2}))
		s := prober.Sample{
			TSMS: rapid.Int64Range(0, 1<<53).Draw(t, "ts"), CPUPct: number.Draw(t, "cpu"), DiskPct: number.Draw(t, "disk"),
			MemTotalBytes: rapid.Uint64Range(0, 1<<54).Draw(t, "total"), MemBytes: rapid.Uint64Range(0, 1<<40).Draw(t, "mem"),
			Load1: number.Draw(t, "1"), Load5: number.Draw(t, "5"), Load15: number.Draw(t, "15"),
		}
		m := mux(t, handlers.Options{}, handlers.NewMetrics(&sampled{s: s}, fixed(now, true)))
		frame, _, err := m.Call(context.Background(), name, []byte("{}"))
		if checked := s.Check(); (err == nil) != (checked == nil || errors.Is(checked, prober.ErrClock)) {
			t.Fatalf("%+v: Call says %v, Check says %v", s, err, checked)
		}
		if err != nil {
			return
		}
		if err := manifest.CheckFrame(frame, node); err != nil {
			t.Fatalf("%s: %v", frame, err)
		}
		if err := manifest.CheckResult(snapOut, frame, node); err != nil {
			t.Fatalf("%s: %v", frame, err)
		}
		var got struct {
			prober.Sample
			NodeID string `json:"node_id"`
		}
		if err := json.Unmarshal(frame, &got); err != nil {
			t.Fatal(err)
		}
		if s.TSMS < prober.MinTSMS {
			s.TSMS = now
		}
		if got.Sample != s || got.NodeID != node {
			t.Fatalf("%+v became %s", s, frame)
		}
	})
}

// steady is a prober.Source with constant readings.
type steady struct{}

func (steady) Read(s *prober.Sample) error {
	*s = sample(0)
	return nil
}
func (steady) Close() error { return nil }

// board is a running prober and the Mux over it, inside a synctest bubble. Its clock is
// set `after` the start.
func board(t *testing.T, after time.Duration) *handlers.Mux {
	t.Helper()
	start := time.Now()
	clock := func() (int64, bool) {
		d := time.Since(start)
		return now + d.Milliseconds(), d >= after
	}
	p := prober.New(prober.Options{Source: steady{}, Now: func() int64 {
		ms, ok := clock()
		if !ok {
			return 0
		}
		return ms
	}})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	synctest.Wait()
	return mux(t, handlers.Options{}, handlers.NewMetrics(p, clock))
}

// open subscribes and runs the stream until n frames came; it gives the ts_ms of each,
// in ms since the board started.
func open(t *testing.T, m *handlers.Mux, args, ack string, n int) (at []int64) {
	t.Helper()
	result, stream, err := m.Call(context.Background(), tool(t, "sys.NODE.metrics.subscribe"), []byte(args))
	if err != nil || string(result) != ack {
		t.Fatalf("got %s, %v; want %s", result, err, ack)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err = stream(ctx, func(frame []byte) error {
		if err := manifest.CheckFrame(frame, node); err != nil {
			t.Errorf("%s: %v", frame, err)
		}
		var f struct {
			TS int64 `json:"ts_ms"`
		}
		if err := json.Unmarshal(frame, &f); err != nil {
			t.Error(err)
		}
		if at = append(at, f.TS-now); len(at) == n {
			cancel()
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("the stream ended with %v", err)
	}
	return at
}

func TestStreamCadence(t *testing.T) {
	tests := []struct {
		args, ack string
		wait      time.Duration // before the stream is opened
		want      string
	}{
		{`{}`, `{"interval_ms":5000}`, 0, "[0 5000 10000 15000 20000 25000]"},
		{`{"interval_ms":1000}`, `{"interval_ms":1000}`, 0, "[0 1000 2000 3000 4000 5000]"},
		{`{"interval_ms":60000}`, `{"interval_ms":60000}`, 0, "[0 60000 120000 180000 240000 300000]"},
		{`{"interval_ms":1e3}`, `{"interval_ms":1000}`, 2500 * time.Millisecond, "[2500 3500 4500 5500 6500 7500]"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := board(t, 0)
				time.Sleep(tt.wait)
				if got := fmt.Sprint(open(t, m, tt.args, tt.ack, 6)); got != tt.want {
					t.Errorf("frames at %s ms, want %s", got, tt.want)
				}
			})
		})
	}
}

// No frame leaves before there is a time to put on it, and the first one after does.
func TestStreamWaitsForTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := board(t, 12*time.Second)
		if got := fmt.Sprint(open(t, m, `{}`, `{"interval_ms":5000}`, 3)); got != "[15000 20000 25000]" {
			t.Errorf("frames at %s ms", got)
		}
	})
}

// Many streams at once; each gets its cadence.
func TestManyStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := board(t, 0)
		done := make(chan string)
		for i := range 3 {
			go func() {
				args := fmt.Sprintf(`{"interval_ms":%d000}`, i+1)
				done <- fmt.Sprint(args, open(t, m, args, args, 4))
			}()
		}
		got := map[string]bool{<-done: true, <-done: true, <-done: true}
		for _, want := range []string{
			`{"interval_ms":1000}[0 1000 2000 3000]`, `{"interval_ms":2000}[0 2000 4000 6000]`, `{"interval_ms":3000}[0 3000 6000 9000]`,
		} {
			if !got[want] {
				t.Errorf("no stream went %s: %v", want, got)
			}
		}
	})
}

func TestStreamEnds(t *testing.T) {
	broken := errors.New("the link is gone")
	tests := []struct {
		name string
		s    *sampled
		want error
	}{
		{"send fails", &sampled{s: sample(now)}, broken},
		{"the device stops", &sampled{err: prober.ErrStopped}, nil},
		{"too many watchers", &sampled{err: prober.ErrBusy}, prober.ErrBusy},
	}
	for _, tt := range tests {
		m := mux(t, handlers.Options{}, handlers.NewMetrics(tt.s, fixed(now, true)))
		_, stream, err := m.Call(t.Context(), tool(t, "sys.NODE.metrics.subscribe"), []byte("{}"))
		if err != nil {
			t.Fatal(err)
		}
		if got := stream(t.Context(), func([]byte) error { return broken }); !errors.Is(got, tt.want) || (tt.want == nil && got != nil) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

func BenchmarkSnapshot(b *testing.B) {
	h := handlers.NewMetrics(&sampled{s: sample(now)}, fixed(now, true))
	name := manifest.ToolName{Short: "sys", NodeID: node, CapID: "metrics", Verb: "snapshot"}
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := h.Call(context.Background(), name, []byte("{}")); err != nil {
			b.Fatal(err)
		}
	}
}

func ExampleMux() {
	m, err := handlers.New(handlers.Options{}, handlers.NewEcho(fixed(1745236800012, true)))
	if err != nil {
		fmt.Println(err)
		return
	}
	name, _ := manifest.ParseToolName("sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke")
	result, _, err := m.Call(context.Background(), name, []byte(`{"message":"ping"}`))
	fmt.Println(string(result), err)
	_, _, err = m.Call(context.Background(), name, []byte(`{"message":"ping","loud":true}`))
	fmt.Println(err)
	// Output:
	// {"message":"ping","received_at_ms":1745236800012,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"} <nil>
	// E_MANIFEST_INVALID: unknown argument; known: message
}

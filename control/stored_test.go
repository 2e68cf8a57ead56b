//go:build linux

package control

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"agentctl/prober"
	"agentctl/prober/history"
)

// stored is a history on disk, joined as a daemon joins it.
type stored struct{ store *history.Store }

func (h stored) Query(ctx context.Context, q HistoryQuery, fn func(HistoryRow) error) error {
	var sample prober.Sample // one for all rows
	return h.store.Query(ctx, history.Query{FromMS: q.FromMS, ToMS: q.ToMS, StepMS: q.StepMS, Modules: q.Modules}, func(r history.Row) error {
		row := HistoryRow{TS: r.TSMS}
		if r.HasSample {
			sample = r.Sample
			row.Sample = &sample
		}
		row.Readings = r.Modules
		return fn(row)
	})
}

// record makes a history of n samples, one a second until now, with the readings of a
// board each 10 s.
func record(t testing.TB, path string, n int) (from int64) {
	t.Helper()
	s, err := history.Open(history.Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	from = time.Now().UnixMilli() - int64(n)*1000
	for i := range n {
		x := prober.Sample{TSMS: from + int64(i)*1000, CPUPct: float64(i%10000) / 100, MemTotalBytes: 1 << 30, MemBytes: 1<<28 + uint64(i)<<10, DiskPct: 41.37, Load1: float64(i%300) / 100, Load5: 0.25, Load15: 0.1}
		if i%10 == 0 {
			s.Add(x, readingOf("temperature.hottest_c", 40+float64(i%20)),
				readingOf("network.bytes_in_per_s", float64(i)), readingOf("power.under_voltage", 0))
		} else {
			s.Add(x)
		}
		if i%2000 == 1999 {
			if err := s.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return from
}

// TestStoredHistory asks for what is on disk.
func TestStoredHistory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.db")
	from := record(t, path, 1000)
	store, err := history.Open(history.Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	r := onSocket(t, Options{History: stored{store}})
	c, err := Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all := []string{"cpu", "mem", "disk", "load", "network", "temperature", "power", "wear"}
	got, err := c.History(t.Context(), HistoryQuery{FromMS: from + 1000, ToMS: from + 900_000, Modules: all})
	if err != nil || len(got) != 900 || got[0].TS != from+1000 || got[899].TS != from+900_000 {
		t.Fatalf("%d items, %v", len(got), err)
	}
	for i, x := range got {
		_, hasTemperature := x.Values["temperature.hottest_c"]
		_, hasWear := x.Values["wear.used_pct"]
		if n := i + 1; x.TS != from+int64(n)*1000 || x.Values["cpu.usage_percent"] != float64(n%10000)/100 || hasTemperature != (n%10 == 0) || hasWear {
			t.Fatalf("item %d is %+v", i, x)
		}
	}
	want := map[string]float64{"cpu.usage_percent": 0.2, "memory.total": 1024, "memory.used": 256, "disk.usage_percent": 41.37,
		"load.load_1m": 0.2, "load.load_5m": 0.25, "load.load_15m": 0.1,
		"network.bytes_in_per_s": 20, "temperature.hottest_c": 40, "power.under_voltage": 0}
	if x := got[19]; !maps.Equal(x.Values, want) {
		t.Errorf("item 19 is %+v", x)
	}
	steps, err := c.History(t.Context(), HistoryQuery{FromMS: from, StepMS: 60_000, Modules: []string{"temperature", "cpu"}})
	if err != nil || len(steps) < 16 || len(steps) > 18 || steps[1].TS%60_000 < 50_000 || steps[1].Values["temperature.hottest_c"] == 0 {
		t.Errorf("in steps came %d items, %v", len(steps), err)
	}
	if far, err := c.History(t.Context(), HistoryQuery{FromMS: 1, ToMS: 2}); err != nil || len(far) != 1 {
		t.Errorf("where nothing is came %v, %v", far, err)
	}
}

// BenchmarkHistory is a day of samples, one a second, both ends.
func BenchmarkHistory(b *testing.B) {
	path := filepath.Join(b.TempDir(), "history.db")
	from := record(b, path, 86_400)
	store, err := history.Open(history.Options{Path: path})
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	r := onSocket(b, Options{History: stored{store}})
	c, err := Dial(b.Context(), r.srv.Addr())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	for name, q := range map[string]HistoryQuery{"raw": {FromMS: from}, "60s": {FromMS: from, StepMS: 60_000}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := c.History(b.Context(), q); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("raw/parts", func(b *testing.B) {
		for b.Loop() {
			if err := c.HistoryEach(b.Context(), HistoryQuery{FromMS: from}, func(HistoryItem) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("raw/server", func(b *testing.B) {
		nc := r.dial()
		defer nc.Close()
		nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`)))
		in := newFrameReader(nc, maxAnswer)
		body := make([]byte, maxAnswer)
		read := func() {
			n, err := in.header()
			if err == nil {
				err = in.body(body[:n])
			}
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(n))
		}
		read()
		for b.Loop() {
			nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":2,"method":"query_history","params":{"from_ts":0,"to_ts":0}}`)))
			read()
		}
	})
}

// historyFile is where a child daemon keeps its history, if the file is there.
func historyFile(socket string) string { return filepath.Join(filepath.Dir(socket), "history.db") }

func openHistory(socket string) History {
	path := historyFile(socket)
	if _, err := os.Stat(path); err != nil {
		return nil
	}
	store, err := history.Open(history.Options{Path: path})
	if err != nil {
		panic(err)
	}
	return stored{store}
}

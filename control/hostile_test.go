//go:build linux

package control

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// rssKB reads a line of /proc/PID/status, in KiB.
func rssKB(t *testing.T, pid int, key string) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(key + `:\s+(\d+) kB`).FindSubmatch(b)
	if m == nil {
		t.Fatalf("no %s in %s", key, b)
	}
	n, _ := strconv.Atoi(string(m[1]))
	return n
}

// TestHostileClient runs a hostile client against a daemon in a child process. The daemon's
// memory must hardly grow, and it must still answer.
func TestHostileClient(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	record(t, historyFile(path), 20_000/historyDivisor)
	cmd := startServer(t, path)
	pid := cmd.Process.Pid
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/status", pid)); err != nil {
		t.Skip("no /proc to read the daemon's memory from")
	}
	ask := func() {
		t.Helper()
		for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			c, err := Dial(t.Context(), path)
			if err == nil {
				_, err = c.Snapshot(t.Context())
				if err == nil {
					_, err = c.History(t.Context(), HistoryQuery{FromMS: 1, StepMS: 60_000, Limit: 100})
				}
				c.Close()
			}
			if err == nil {
				return
			}
			if time.Since(begun) > 10*time.Second {
				t.Fatalf("the daemon does not answer any more: %v", err)
			}
		}
	}
	for range 50 / historyDivisor {
		ask()
	}
	before := rssKB(t, pid, "VmRSS")
	os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0) // the peak begins here

	last := before
	for _, a := range attacks() {
		if raceEnabled && !a.inRace {
			continue
		}
		begun := time.Now()
		a.run(t, path)
		ask()
		peak := rssKB(t, pid, "VmHWM")
		t.Logf("%-40s peak %+6d KiB, in %v", a.name, peak-last, time.Since(begun).Round(time.Millisecond))
		last = peak
	}
	// A quarter of the smallest flood. On a calm machine it is 6 MiB, which `make bench` checks; on a
	// busy one the collector begins later.
	grown, limit := last-before, 16<<10
	if raceEnabled {
		limit *= 10 // the detector's shadow of all memory that was ever touched
	}
	t.Logf("resident %d KiB before, peak %+d KiB", before, grown)
	if grown > limit {
		t.Errorf("the daemon's memory grew by %d KiB, want at most %d", grown, limit)
	}
}

// attack is what a hostile client does. inRace: also with the race detector, which is slow. One of
// each sort is enough for it to see the code; `make test-slow` runs all without it.
type attack struct {
	name   string
	inRace bool
	run    func(*testing.T, string)
}

// attacks is a function, so that the daemon, which is the same binary, has no heap of
// their messages, in whose shadow more would grow before it is collected.
func attacks() []attack {
	return []attack{
		{"1,000 connects", false, func(t *testing.T, path string) {
			var held []net.Conn
			for range 1000 {
				if nc, err := net.Dial("unix", path); err == nil {
					held = append(held, nc)
				}
			}
			for _, nc := range held {
				nc.Close()
			}
		}},
		{"64 MB header line", false, func(t *testing.T, path string) { flood(path, "", "a", 64) }},
		{"64 MB of header lines", true, func(t *testing.T, path string) { flood(path, "", "a: b\r\n", 64) }},
		{"64 MB body announced and sent", false, func(t *testing.T, path string) { flood(path, "Content-Length: 67108864\r\n\r\n", "x", 64) }},
		{"1 MiB messages of blanks", false, each(20, `{"jsonrpc":"2.0","id":1,`+strings.Repeat(" ", 1<<20-100)+`"method":"snapshot"}`)},
		{"1 MiB messages of one string", false, each(20, `{"jsonrpc":"2.0","id":1,"method":"snapshot","params":{"a":"`+strings.Repeat("x", 1<<20-100)+`"}}`)},
		{"1 MiB messages of brackets", false, each(20, strings.Repeat("[", 1<<20))},
		{"1 MiB messages of small objects", true, each(20, "["+strings.Repeat("{},", 349000)+"{}]")},
		{"1 MiB messages of keys", false, each(20, manyKeys(1<<20-100))},
		{"60 KiB messages of keys", false, each(200, manyKeys(60<<10))},
		{"60 KiB messages of commas", false, each(200, `{"jsonrpc":"2.0","id":1,"method":"start","params":{"modules":[1`+strings.Repeat(",1", 4000)+`]}}`)},
		{"1 MiB messages half sent", true, func(t *testing.T, path string) {
			all(path, func(nc net.Conn) { nc.Write([]byte("Content-Length: 1048576\r\n\r\n" + strings.Repeat("x", 1<<19))) })
		}},
		{"long histories, read", false, func(t *testing.T, path string) {
			all(path, func(nc net.Conn) {
				nc.SetDeadline(time.Now().Add(5 * attackTime))
				nc.Write(longHistory)
				io.CopyN(io.Discard, nc, 256<<10/historyDivisor)
			})
		}},
		{"long histories, not read", false, func(t *testing.T, path string) {
			all(path, func(nc net.Conn) {
				for range 20 {
					nc.Write(longHistory)
				}
				time.Sleep(300 * time.Millisecond)
			})
		}},
		{"long histories, hung up on", true, func(t *testing.T, path string) {
			for range 5 {
				all(path, func(nc net.Conn) {
					nc.Write(longHistory)
					nc.Read(make([]byte, 1000))
				})
			}
		}},
		{"short histories", false, func(t *testing.T, path string) {
			all(path, func(nc net.Conn) {
				for range 20 {
					nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"query_history","params":{"from_ts":0,"to_ts":0,"limit":350}}`)))
				}
				io.Copy(io.Discard, nc)
			})
		}},
		{"requests without reading", false, each(20000, `{"jsonrpc":"2.0","id":1,"method":"nope"}`)},
		{"events without reading", true, func(t *testing.T, path string) {
			all(path, func(nc net.Conn) {
				nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":2,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t","capabilities":["metrics_stream"]}}`)))
				for range 500 {
					nc.Write(frame([]byte(`{"jsonrpc":"2.0","method":"start"}`)))
				}
			})
		}},
	}
}

var longHistory = frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"query_history","params":{"from_ts":0,"to_ts":0,"modules":["cpu","mem","disk","load","network","temperature","power","wear"]}}`))

// all runs f on as many connections as the daemon lets in.
func all(path string, f func(net.Conn)) {
	var wg sync.WaitGroup
	for range MaxClients - 1 {
		wg.Go(func() {
			nc, err := net.Dial("unix", path)
			if err != nil {
				return
			}
			defer nc.Close()
			nc.SetDeadline(time.Now().Add(attackTime))
			nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`)))
			f(nc)
		})
	}
	wg.Wait()
}

// each has all connections send a message n times, and read nothing.
func each(n int, body string) func(*testing.T, string) {
	f := frame([]byte(body))
	n = max(n/loadDivisor, 1)
	return func(t *testing.T, path string) {
		all(path, func(nc net.Conn) {
			for range n {
				if _, err := nc.Write(f); err != nil {
					return
				}
			}
		})
	}
}

// flood writes head and then what, until it is mb MB or the daemon hangs up.
func flood(path, head, what string, mb int) {
	nc, err := net.Dial("unix", path)
	if err != nil {
		return
	}
	defer nc.Close()
	nc.SetDeadline(time.Now().Add(5 * time.Second))
	nc.Write([]byte(head))
	block := []byte(strings.Repeat(what, 1<<20/len(what)))
	for range mb {
		if _, err := nc.Write(block); err != nil {
			return
		}
	}
}

func manyKeys(size int) string {
	var b strings.Builder
	b.WriteString(`{"jsonrpc":"2.0","id":1,"method":"snapshot","params":{`)
	for i := 0; b.Len() < size-20; i++ {
		fmt.Fprintf(&b, `"k%d":0,`, i)
	}
	b.WriteString(`"z":0}}`)
	return b.String()
}

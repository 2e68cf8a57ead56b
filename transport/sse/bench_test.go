//go:build linux

package sse

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"agentctl/transport/fanout"
)

// BenchmarkStream measures events delivered per second of server CPU at 1,000
// subscribers: each server runs in a separate process so that its CPU is counted
// alone, the subscribers here. Rounds are interleaved, medians quoted:
//
//	go test -run '^$' -bench Stream -benchtime 1x ./transport/sse
//
// naive is a net/http loop that writes and flushes and ignores slow readers.
// stream is this package. "busy" is 20 frames a second, "slow" one, the most RFC-0009 allows;
// there everything that happens between frames weighs most.
func BenchmarkStream(b *testing.B) {
	b.Run("busy", func(b *testing.B) {
		benchCompare(b, []string{"naive", "stream"}, benchLoad{Frames: 60, Pause: 50 * time.Millisecond})
	})
	b.Run("slow", func(b *testing.B) {
		benchCompare(b, []string{"naive", "stream"}, benchLoad{Frames: 8, Pause: time.Second})
	})
}

func benchCompare(b *testing.B, modes []string, load benchLoad) {
	for b.Loop() {
		perCPU := map[string][]float64{}
		perStream := map[string][]float64{}
		for range benchRounds {
			for _, m := range modes {
				r := benchRound(b, m, load)
				perCPU[m] = append(perCPU[m], float64(r.Events)/(float64(r.CPU)/1e9))
				perStream[m] = append(perStream[m], float64(r.RSS)/benchReaders/1024)
			}
		}
		for _, m := range modes {
			b.ReportMetric(median(perCPU[m]), m+"-events/cpu-s")
			b.ReportMetric(median(perStream[m]), m+"-KiB/stream")
			if m != "naive" {
				b.ReportMetric(median(perCPU[m])/median(perCPU["naive"]), m+"/naive")
			}
			b.Logf("%-10s events per CPU second, by round: %.0f", m, perCPU[m])
		}
	}
}

const (
	benchReaders = 1000
	benchRounds  = 5
	benchEnv     = "AGENTCTL_SSE_BENCH_SERVER"
)

// benchLoad is what a server publishes.
type benchLoad struct {
	Frames int
	Pause  time.Duration // between frames
}

var benchFrame = []byte(`event: metric
data: {"ts_ms":1745300000000,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","cpu_pct":12.4,"mem_bytes":1234567890,"mem_total_bytes":8589934592,"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}

`)

// benchResult is what a server process prints at its end.
type benchResult struct {
	CPU    int64 // ns, user and system
	Events int64 // written
	RSS    int64 // growth by the streams, bytes
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

func TestMain(m *testing.M) {
	if mode := os.Getenv(benchEnv); mode != "" {
		benchServer(mode)
		return
	}
	os.Exit(m.Run())
}

// benchRound runs one server process and its readers, and checks that every
// reader received every frame.
func benchRound(b *testing.B, mode string, load benchLoad) benchResult {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), benchEnv+"="+mode)
	cmd.Stderr = os.Stderr
	stdin, _ := cmd.StdinPipe()
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer cmd.Wait()
	defer stdin.Close() // ends the server, also when the benchmark fails
	lines := bufio.NewReader(stdout)
	addr, err := lines.ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}

	var got atomic.Int64
	var readers sync.WaitGroup
	for range benchReaders {
		c, err := net.Dial("tcp", strings.TrimSpace(addr))
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
			b.Fatal(err)
		}
		readers.Go(func() {
			buf := make([]byte, 4096)
			for {
				n, err := c.Read(buf)
				got.Add(int64(bytes.Count(buf[:n], []byte("{")))) // one a frame
				if err != nil {
					return
				}
			}
		})
	}
	json.NewEncoder(stdin).Encode(load)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		b.Fatal(err)
	}
	var r benchResult
	if err := json.Unmarshal(line, &r); err != nil {
		b.Fatal(err)
	}
	stdin.Close() // the server ends, and with it the connections
	readers.Wait()
	if want := int64(benchReaders * load.Frames); r.Events != want || got.Load() != want {
		b.Fatalf("%s: %d events written, %d received, want %d", mode, r.Events, got.Load(), want)
	}
	return r
}

// benchServer is the other process: it serves, waits for all readers and
// the load, publishes, and prints what that cost.
func benchServer(mode string) {
	var topic fanout.Topic[[]byte]
	var streams Streams
	var written atomic.Int64
	var naive channels
	subscribe := func() *fanout.Subscriber[[]byte] {
		return topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 64})
	}
	handlers := map[string]http.HandlerFunc{
		"stream": func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			wr, err := streams.Open(w, r, Options{})
			if err != nil {
				panic(err)
			}
			sub := subscribe()
			defer sub.Close()
			wr.Close(CodeOf(runStream(r.Context(), wr, sub)))
		},
		"naive": func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			frames := naive.join()
			for {
				select {
				case <-r.Context().Done():
					return
				case b := <-frames:
					w.Write(b)
					w.(http.Flusher).Flush()
					written.Add(1)
				}
			}
		},
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	srv := &http.Server{Handler: handlers[mode]}
	if mode != "naive" {
		ln = NewListener(ln)
	}
	before := benchRSS()
	go srv.Serve(ln)
	fmt.Println(ln.Addr())
	in := json.NewDecoder(os.Stdin)
	var load benchLoad
	if err := in.Decode(&load); err != nil {
		panic(err)
	}
	for topic.Len()+naive.len() < benchReaders {
		time.Sleep(10 * time.Millisecond)
	}
	runtime.GC()
	time.Sleep(200 * time.Millisecond)
	rss := benchRSS() - before

	done := func() int64 { return written.Load() + int64(streams.Stats().Frames) }
	start := benchCPU()
	for range load.Frames {
		topic.Publish(benchFrame)
		naive.publish(benchFrame)
		time.Sleep(load.Pause)
	}
	for end := time.Now().Add(5 * time.Second); done() < int64(benchReaders*load.Frames) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	cpu := benchCPU() - start
	out, _ := json.Marshal(benchResult{CPU: cpu, Events: done(), RSS: rss})
	fmt.Println(string(out))
	in.Decode(&load) // until the parent closes it
}

// channels is the plainest way to many readers: a channel each.
type channels struct {
	mu   sync.Mutex
	list []chan []byte
}

func (c *channels) join() chan []byte {
	ch := make(chan []byte, 16)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, ch)
	return ch
}

func (c *channels) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.list)
}

func (c *channels) publish(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.list {
		ch <- b
	}
}

func benchCPU() int64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

func benchRSS() int64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	var kib int64
	_, after, _ := strings.Cut(string(b), "VmRSS:")
	fmt.Sscan(after, &kib)
	return kib << 10
}

package hub

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// The benchmarks put the devices into a child process, so that time of the CPU,
// allocations and memory are the relay's alone. For comparison, each is also run over
// gorilla/websocket connections without a hub.

const benchAck = `{"message":"ping","received_at_ms":1800000000000,"node_id":"`

// TestBenchDevices is the child process: it links devices to BENCH_URL and answers their
// commands.
func TestBenchDevices(t *testing.T) {
	url := os.Getenv("BENCH_URL")
	if url == "" {
		t.Skip("it is the child that the benchmarks start")
	}
	n, _ := strconv.Atoi(os.Getenv("BENCH_LINKS"))
	var wg sync.WaitGroup
	for i := range n {
		if i%50 == 49 {
			time.Sleep(20 * time.Millisecond)
		}
		wg.Go(func() {
			d := websocket.Dialer{Subprotocols: []string{link.Subprotocol}, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ReadBufferSize: 1024, WriteBufferSize: 1024}
			ws, _, err := d.Dial(url, nil)
			if err != nil {
				t.Error(err)
				return
			}
			serveBench(ws, benchNode(i))
		})
	}
	wg.Wait()
}

func benchNode(i int) string { return fmt.Sprintf("01hzx9k3m4p7q8r9s0t1v%05d", i) }

func serveBench(ws *websocket.Conn, node string) {
	ack := []byte(benchAck + node + `"}`)
	for {
		_, msg, err := ws.ReadMessage()
		if err != nil {
			return
		}
		var reply []byte
		switch head := string(msg[:20]); {
		case strings.HasPrefix(head, `{"type":"cmd"`):
			reply = link.AppendAck(nil, "01HZXC0000000000000000DEV0", string(msg[24:50]), ack)
		case strings.HasPrefix(head, `{"type":"hello"`):
			reply = link.Encode(link.TypeAuth, link.NewID(), "", link.Auth{Token: node, BootID: link.NewID(), InstanceID: instance1})
		case strings.HasPrefix(head, `{"type":"auth_ok"`):
			reply = link.Encode(link.TypeAnnounce, link.NewID(), "", announce(manifest.Echo(), manifest.Metrics()))
		default:
			continue
		}
		if ws.WriteMessage(websocket.TextMessage, reply) != nil {
			return
		}
	}
}

// benchRig is a relay's listener with its devices in a child.
type benchRig struct {
	srv   *httptest.Server
	child *exec.Cmd
	bare  chan *websocket.Conn
	hub   *Hub
	ready chan *Node
	stop  context.CancelFunc
	done  chan error
}

func startBench(b *testing.B, links int, secure, bare bool) *benchRig {
	b.Helper()
	r := &benchRig{bare: make(chan *websocket.Conn, links), ready: make(chan *Node, links), done: make(chan error, 1)}
	r.hub = New(Options{
		Authenticate: func(_ context.Context, a *link.Auth) (*link.Grant, error) {
			return &link.Grant{NodeID: a.Token, Tenant: "acme", CheckActive: func() error { return nil }}, nil
		},
		ValidateCapability: func(raw []byte) error { return manifest.Validate(manifest.CapabilityRef, raw) },
		CheckResult:        manifest.CheckAnswer, CheckSample: manifest.CheckFrame,
		OnReady: func(n *Node) { r.ready <- n },
	})
	r.hub.waitingStrangers.pace.SetLimit(rate.Inf) // the benchmarks are not about herds
	r.hub.readyPace.SetLimit(rate.Inf)
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() { r.done <- r.hub.Run(ctx) }()
	up := link.NewUpgrader(nil)
	r.srv = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if bare {
			u := websocket.Upgrader{Subprotocols: []string{link.Subprotocol}, ReadBufferSize: 1024, WriteBufferSize: 1024}
			if ws, err := u.Upgrade(w, req, nil); err == nil {
				r.bare <- ws
			}
			return
		}
		if conn, err := link.Upgrade(up, w, req); err == nil {
			r.hub.Attach(conn, netip.Addr{})
		}
	}))
	if secure {
		r.srv.StartTLS()
	} else {
		r.srv.Start()
	}
	r.child = exec.Command(os.Args[0], "-test.run=^TestBenchDevices$", "-test.timeout=10m")
	r.child.Env = append(os.Environ(), "BENCH_URL=ws"+strings.TrimPrefix(r.srv.URL, "http"), "BENCH_LINKS="+strconv.Itoa(links))
	if err := r.child.Start(); err != nil {
		b.Fatal(err)
	}
	return r
}

func (r *benchRig) end() {
	r.stop()
	<-r.done
	_ = r.child.Process.Kill()
	_ = r.child.Wait()
	r.srv.CloseClientConnections()
	r.srv.Close()
}

// cpu is the time of the CPU that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRoundTrip is one command and its answer: cpu-ns/op and allocations are the
// relay's.
func BenchmarkRoundTrip(b *testing.B) {
	for _, links := range []int{1, 32} {
		b.Run(fmt.Sprintf("links=%d/gorilla", links), func(b *testing.B) {
			r := startBench(b, links, false, true)
			defer r.end()
			conns := make([]*websocket.Conn, links)
			for i := range conns {
				conns[i] = <-r.bare
			}
			frame := link.AppendCmd(nil, link.NewID(), "sysecho."+nodeA+".echo.invoke", []byte(`{"message":"ping"}`), 0, "", link.Expiry{})
			exchange(b, links, func(i int) error {
				if err := conns[i].WriteMessage(websocket.TextMessage, frame); err != nil {
					return err
				}
				_, _, err := conns[i].ReadMessage()
				return err
			})
		})
		b.Run(fmt.Sprintf("links=%d/hub", links), func(b *testing.B) {
			r := startBench(b, links, false, false)
			defer r.end()
			nodes, tools := make([]*Node, links), make([]*manifest.Tool, links)
			for i := range nodes {
				nodes[i] = <-r.ready
				tools[i] = &nodes[i].Tools()[0]
			}
			args := []byte(`{"message":"ping"}`)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			exchange(b, links, func(i int) error {
				_, err := nodes[i].Call(ctx, tools[i], args, CallOptions{})
				return err
			})
		})
	}
}

// exchange runs b.N round trips over the links, one at a time on each.
func exchange(b *testing.B, links int, once func(i int) error) {
	b.ReportAllocs()
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	b.ResetTimer()
	before := cpu()
	for i := range links {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := once(i); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
	b.StopTimer()
}

// BenchmarkIdle is what a linked device that does nothing costs the relay: heap and
// stacks in use after a collection, and resident memory.
func BenchmarkIdle(b *testing.B) {
	const links = 1000
	for _, kind := range []string{"plain", "tls"} {
		b.Run(kind, func(b *testing.B) {
			for range min(b.N, 1) {
				before, rssBefore := memory()
				r := startBench(b, links, kind == "tls", false)
				for range links {
					<-r.ready
				}
				time.Sleep(200 * time.Millisecond) // net/http frees its buffers
				after, rss := memory()
				b.ReportMetric(float64(after-before)/links, "B/session")
				b.ReportMetric(float64(rss-rssBefore)/links, "RSS-B/session")
				b.ReportMetric(float64(runtime.NumGoroutine())/links, "goroutines/session")
				start := cpu()
				time.Sleep(2 * time.Second)
				b.ReportMetric(float64(cpu()-start)/float64(2*time.Second)*100, "%core/1000")
				r.end()
			}
		})
	}
}

func memory() (inUse, rss int64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	statm, _ := os.ReadFile("/proc/self/statm")
	if f := strings.Fields(string(statm)); len(f) > 1 {
		rss, _ = strconv.ParseInt(f[1], 10, 64)
	}
	return int64(m.HeapInuse + m.StackInuse), rss * int64(os.Getpagesize())
}

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"syscall"

	"github.com/gorilla/websocket"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	"agentctl/relay"
)

// The references are what a person writes in an hour: no authentication, no schema, no
// audit, no bounds. They print their address and serve until they are ended.
func serve(args []string) error {
	if len(args) == 0 {
		return errors.New("serve what? echo, ws, sdk, naive-events, naive-metrics, boards or relay")
	}
	switch args[0] {
	case "echo":
		return listen(http.HandlerFunc(echo))
	case "ws":
		return listen(http.HandlerFunc(websocketEcho))
	case "sdk":
		return listen(newSDKServer())
	case "naive-events":
		return listen(newNaive(naiveEvent))
	case "naive-metrics":
		return listen(newNaive(naiveMetric))
	case "boards":
		return serveBoards(args[1:])
	case "relay":
		return serveRelay(args[1:])
	}
	return fmt.Errorf("there is no reference %q", args[0])
}

func listen(h http.Handler) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	return http.Serve(l, h)
}

// echo is the bare JSON echo: decode, encode.
func echo(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Tool      string `json:"tool"`
		Arguments struct {
			Message string `json:"message"`
		} `json:"arguments"`
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &in)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	out, _ := json.Marshal(map[string]string{"message": in.Arguments.Message})
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(out)
}

// newSDKServer is an MCP server as the SDK's examples make it, with one tool. It has the tool under
// each name that it is asked for, as if every board were listed.
func newSDKServer() http.Handler {
	type message struct {
		Message string `json:"message"`
	}
	s := mcp.NewServer(&mcp.Implementation{Name: "bench", Version: "1"}, nil)
	s.AddReceivingMiddleware(func(next mcp.MethodHandler) mcp.MethodHandler {
		return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
			if p, ok := req.GetParams().(*mcp.CallToolParamsRaw); ok {
				p.Name = "echo"
			}
			return next(ctx, method, req)
		}
	})
	mcp.AddTool(s, &mcp.Tool{Name: "echo"}, func(_ context.Context, _ *mcp.CallToolRequest, in message) (*mcp.CallToolResult, message, error) {
		return nil, in, nil
	})
	server := func(*http.Request) *mcp.Server { return s }
	sessions := mcp.NewStreamableHTTPHandler(server, &mcp.StreamableHTTPOptions{JSONResponse: true})
	stateless := mcp.NewStreamableHTTPHandler(server, &mcp.StreamableHTTPOptions{JSONResponse: true, Stateless: true})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Mcp-Protocol-Version") == "2026-07-28" { // has no sessions
			stateless.ServeHTTP(w, r)
		} else {
			sessions.ServeHTTP(w, r)
		}
	})
}

// websocketEcho is the bare round trip: one message in, one message out.
func websocketEcho(w http.ResponseWriter, r *http.Request) {
	var up websocket.Upgrader
	c, err := up.Upgrade(w, r, nil)
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	for {
		t, msg, err := c.ReadMessage()
		if err != nil || c.WriteMessage(t, msg) != nil {
			return
		}
	}
}

// serveRelay is `agentctl relay` with two things that the product has not: SIGUSR1
// collects garbage and gives free memory back; --profile writes a CPU profile.
func serveRelay(args []string) error {
	var o relay.Options
	var profile string
	f := flag.NewFlagSet("relay", flag.ContinueOnError)
	f.StringVar(&o.StateDir, "state-dir", "", "")
	f.StringVar(&o.TLSCert, "tls-cert", "", "")
	f.StringVar(&o.TLSKey, "tls-key", "", "")
	f.StringVar(&profile, "profile", "", "")
	if err := f.Parse(args); err != nil {
		return err
	}
	o.Listen, o.Version, o.Logger = "127.0.0.1:0", "bench", zap.NewNop()
	if profile != "" {
		runtime.MemProfileRate = 256 // nearly every object: it costs time, so read no bars from such a run
		if err := cpuProfile(profile + ".cpu.prof"); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	r, err := relay.Open(o)
	if err != nil {
		return err
	}
	requests := make(chan os.Signal, 1)
	signal.Notify(requests, syscall.SIGUSR1)
	go func() {
		for range requests {
			debug.FreeOSMemory()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			fmt.Printf("%s: %d goroutines, heap %d KiB live in %d KiB, stacks %d KiB, other %d KiB\n", gcDoneMarker, runtime.NumGoroutine(),
				m.HeapAlloc>>10, (m.HeapSys-m.HeapReleased)>>10, m.StackInuse>>10, (m.Sys-m.HeapSys-m.StackInuse)>>10)
			if profile != "" {
				heapProfile(profile + ".heap.prof")
				pprof.StopCPUProfile() // what follows is another story
				_ = cpuProfile(profile + ".after.cpu.prof")
			}
		}
	}()
	line, _ := json.Marshal(map[string]any{"ready": true, "url": r.URL()})
	r.OnReady(func() { fmt.Printf("%s\n", line) })
	return r.Run(ctx)
}

func cpuProfile(path string) error {
	f, err := os.Create(path) // open until the process ends
	if err != nil {
		return err
	}
	return pprof.StartCPUProfile(f)
}

func heapProfile(path string) {
	f, err := os.Create(path)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	_ = pprof.Lookup("heap").WriteTo(f, 0)
}

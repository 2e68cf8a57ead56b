//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"agentctl/relay/gateway"
)

// serveGateway is the event gateway with its signature on.
func serveGateway() error {
	g, err := gateway.New(gateway.Options{Listen: "127.0.0.1:0", HMACSecret: []byte("a secret of the bench")})
	if err != nil {
		return err
	}
	g.OnReady(func(addr string) { fmt.Println(addr) })
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return g.Run(ctx)
}

// naiveEvents is the write-and-flush loop: a channel and a goroutine for each subscriber.
// It makes the frames that the gateway makes, without the work of signing them.
type naiveEvents struct {
	mu   sync.Mutex // protects the fields below
	subs map[chan []byte]struct{}
	id   uint64
}

func (n *naiveEvents) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost {
		n.ingest(w, r)
		return
	}
	c := make(chan []byte, 16)
	n.mu.Lock()
	n.subs[c] = struct{}{}
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		delete(n.subs, c)
		n.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = fmt.Fprintf(w, ": stream start\n\n")
	f := w.(http.Flusher)
	f.Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case frame := <-c:
			if _, err := w.Write(frame); err != nil {
				return
			}
			f.Flush()
		}
	}
}

func (n *naiveEvents) ingest(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Topic string
		Data  json.RawMessage
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	hex64 := strings.Repeat("0123456789abcdef", 4)
	n.mu.Lock()
	n.id++
	frame := fmt.Appendf(nil, "id: %016d\nevent: %s\ndata: %s\ndata: {\"sig\":\"%s\",\"ts\":1234567890123,\"d\":\"%s\"}\n\n", n.id, in.Topic, in.Data, hex64, hex64)
	for c := range n.subs {
		c <- frame
	}
	n.mu.Unlock()
	w.WriteHeader(http.StatusAccepted)
}

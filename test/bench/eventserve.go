//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
)

// naive is the write-and-flush loop: a channel and a goroutine for each subscriber. It makes the
// frames that the relay makes, without the work of signing or checking them. A reader that does
// not read is waited for.
type naive struct {
	frame func(id uint64, topic string, data json.RawMessage) []byte

	mu   sync.Mutex // protects the fields below
	subs map[chan []byte]struct{}
	id   uint64
}

func newNaive(frame func(uint64, string, json.RawMessage) []byte) *naive {
	return &naive{frame: frame, subs: make(map[chan []byte]struct{})}
}

var hex64 = strings.Repeat("0123456789abcdef", 4)

func naiveEvent(id uint64, topic string, data json.RawMessage) []byte {
	return fmt.Appendf(nil, "id: %016d\nevent: %s\ndata: %s\ndata: {\"sig\":\"%s\",\"ts\":1234567890123,\"d\":\"%s\"}\n\n", id, topic, data, hex64, hex64)
}

func naiveMetric(_ uint64, _ string, data json.RawMessage) []byte {
	return fmt.Appendf(nil, "event: metric\ndata: %s\n\n", data)
}

func (n *naive) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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

func (n *naive) ingest(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Topic string
		Data  json.RawMessage
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	n.mu.Lock()
	n.id++
	frame := n.frame(n.id, in.Topic, in.Data)
	for c := range n.subs {
		c <- frame
	}
	n.mu.Unlock()
	w.WriteHeader(http.StatusAccepted)
}

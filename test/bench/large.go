//go:build linux

package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"sync/atomic"
	"time"
)

// What grows with a large fleet and a long log: naming a board, listing tools, starting.

const (
	largeFleet   = 10_000
	largeEvents  = 800_000
	largeTickets = 100_000
)

// startLarge runs a relay with a large fleet.
func (b *bench) startLarge(name string) (r *relayProc, fleet *process, o relayOptions, err error) {
	o = relayOptions{devices: largeFleet, class: "tenant-admin", args: []string{"--events-max-mb", "2048"}}
	if r, err = b.startRelay(name, o); err != nil {
		return nil, nil, o, err
	}
	if fleet, err = b.startFleet(r, largeFleet); err == nil {
		err = r.listNodes(largeFleet)
	}
	if err != nil {
		fleet.stop()
		r.stop()
		return nil, nil, o, err
	}
	b.sleep(2 * time.Second) // a board is online a moment before its tools are
	return r, fleet, o, nil
}

// fleetBars measure what a command and a list cost with 10,000 boards.
func (b *bench) fleetBars() error {
	if b.isQuick {
		b.report.absent(fmt.Sprintf("commands and lists with %d boards", largeFleet), errors.New("left out of a quick run"))
		return nil
	}
	r, fleet, _, err := b.startLarge("fleet-large")
	if err != nil {
		return err
	}
	defer r.stop()
	defer fleet.stop()
	tokenFile := filepath.Join(r.state, "agent.token")
	if err := os.WriteFile(tokenFile, []byte(r.token), 0o600); err != nil {
		return err
	}
	// The boards' pings and what the arrivals left to do cost CPU too: what an equal time without a
	// call costs is taken off. Both last several seconds, since the relay does such work once a second.
	var calls []float64
	for round := range b.count {
		const window, each = 4 * time.Second, 10
		idle := r.cpu()
		b.sleep(window)
		idle = r.cpu() - idle
		cpu, at := r.cpu(), time.Now()
		for i := range each {
			board := fmt.Sprintf("mock-%d:echo", 100*(each*round+i)+1)
			if _, err := output(b.ctx, b.agentctl, "call", board, "message=hello", "--relay", r.url, "--token-file", tokenFile); err != nil {
				return err
			}
		}
		b.sleep(time.Until(at.Add(window)))
		calls = append(calls, (r.cpu()-cpu-idle).Seconds()*1000/each)
	}
	fmt.Printf("a call by name: %s ms of relay CPU\n", list(calls, "%.1f"))
	b.report.add(bar{name: fmt.Sprintf("agentctl call NAME: with %d boards: relay CPU", largeFleet), measured: median(calls), required: 2, stretch: 1, format: "%.1f ms"})

	cpu := r.cpu()
	pages, tools, wire, err := r.listTools(b.ctx)
	if err != nil {
		return err
	}
	if tools < minTools*largeFleet {
		return fmt.Errorf("tools/list has %d tools of %d boards", tools, largeFleet)
	}
	fmt.Printf("tools/list: %d tools in %d pages, %.0f ms of relay CPU\n", tools, pages, (r.cpu()-cpu).Seconds()*1000)
	b.report.add(bar{name: fmt.Sprintf("tools/list of %d boards, all pages: bytes on the wire, gzip", largeFleet), measured: float64(wire) / 1e6, required: 8, format: "%.1f MB"})
	return nil
}

// countingConn counts what is received.
type countingConn struct {
	net.Conn
	n *atomic.Int64
}

func (c countingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.n.Add(int64(n))
	return n, err
}

// listTools reads all pages of tools/list as a client that accepts gzip.
func (r *relayProc) listTools(ctx context.Context) (pages, tools int, wire int64, err error) {
	var received atomic.Int64
	transport := &http.Transport{DisableCompression: true, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return countingConn{c, &received}, err
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 20 * time.Second}
	for cursor := ""; ; {
		params := map[string]any{"_meta": map[string]any{"io.modelcontextprotocol/protocolVersion": "2026-07-28",
			"io.modelcontextprotocol/clientInfo": map[string]string{"name": "bench", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": map[string]any{}}}
		if cursor != "" {
			params["cursor"] = cursor
		}
		body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": pages + 1, "method": "tools/list", "params": params})
		if err != nil {
			return 0, 0, 0, err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/mcp", bytes.NewReader(body))
		if err != nil {
			return 0, 0, 0, err
		}
		for name, value := range map[string]string{"Authorization": "Bearer " + r.token, "Content-Type": "application/json", "Accept": "application/json, text/event-stream",
			"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/list", "Accept-Encoding": "gzip"} {
			req.Header.Set(name, value)
		}
		var answer struct {
			Result *struct {
				Tools      []json.RawMessage
				NextCursor string
			}
		}
		if err := decodeAnswer(client, req, &answer); err != nil {
			return 0, 0, 0, err
		}
		if answer.Result == nil {
			return 0, 0, 0, errors.New("tools/list: no result")
		}
		pages, tools = pages+1, tools+len(answer.Result.Tools)
		if cursor = answer.Result.NextCursor; cursor == "" {
			return pages, tools, received.Load(), nil
		}
	}
}

// decodeAnswer sends a request and decodes its JSON, which may be compressed.
func decodeAnswer(client *http.Client, req *http.Request, to any) error {
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	body := io.Reader(res.Body)
	if res.Header.Get("Content-Encoding") == "gzip" {
		if body, err = gzip.NewReader(body); err != nil {
			return err
		}
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", req.URL.Path, res.Status)
	}
	data, err := io.ReadAll(body) // to the end, so that the connection is used again
	if err != nil {
		return err
	}
	return json.Unmarshal(data, to)
}

// startBars measure how soon a relay is ready on a large state, which the relay itself made: it
// linked the boards, and was called until its log had so many events; then without and with
// tickets.
func (b *bench) startBars() error {
	if b.isQuick {
		b.report.absent(fmt.Sprintf("start with %d events", largeEvents), errors.New("left out of a quick run"))
		return nil
	}
	r, fleet, o, err := b.startLarge("start")
	if err != nil {
		return err
	}
	defer func() { r.stop() }()
	began := time.Now()
	next, logged := 0, 0
	for err == nil && logged < largeEvents { // a log that is behind drops rows of calls
		if err = callTimes(plainHTTP(r.addr, r.unaryRequest), 64, &next, largeEvents-logged); err == nil {
			b.sleep(time.Second)
			logged, err = r.eventCount(b)
		}
	}
	fleet.stop()
	if err != nil {
		return fmt.Errorf("calls: %w", err)
	}
	fmt.Printf("%d events of %d calls of %d boards took %s\n", logged, next, largeFleet, time.Since(began).Round(time.Second))
	if err := b.startTimes(r, o, "without tickets", 0.5, 0.2); err != nil {
		return err
	}
	began, next = time.Now(), 0
	for next < largeTickets {
		if err := r.makeTickets(&next, 1000); err != nil {
			return fmt.Errorf("tickets: %w", err)
		}
	}
	fmt.Printf("%d tickets took %s\n", next, time.Since(began).Round(time.Second))
	return b.startTimes(r, o, fmt.Sprintf("with %d tickets", largeTickets), 1.5, 0.8)
}

var ticketID = regexp.MustCompile(`"ticket":\{"id":"(\w+)"`)

// makeTickets creates n tickets and closes them, as a tenant must, which has 2,000 open ones at most.
func (r *relayProc) makeTickets(next *int, n int) error {
	var ids []string
	p := plainHTTP(r.addr, func(b []byte, host string, n int) []byte {
		return r.toolRequest(b, host, fmt.Appendf(nil, `{"tool":"tickets.create","arguments":{"title":"Incident %d","body":"The disk of the board is almost full.","priority":"low"}}`, n))
	})
	p.answered = func(in []byte) (bool, error) {
		done, err := answeredHTTP(in)
		if m := ticketID.FindSubmatch(in); done && err == nil && m != nil {
			ids = append(ids, string(m[1]))
		}
		return done, err
	}
	if err := callTimes(p, ticketCallers, next, n); err != nil {
		return err
	}
	closed := 0
	return callTimes(plainHTTP(r.addr, func(b []byte, host string, n int) []byte {
		return r.toolRequest(b, host, fmt.Appendf(nil, `{"tool":"tickets.transition","arguments":{"id":%q,"to":"closed"}}`, ids[(n-1)%len(ids)]))
	}), ticketCallers, &closed, len(ids))
}

// ticketCallers is less than the changes that a tenant may have waiting for the log.
const ticketCallers = 8

// eventCount is how many events the relay's log has.
func (r *relayProc) eventCount(b *bench) (int, error) {
	out, err := output(b.ctx, b.agentctl, "relay", "status", "--state-dir", r.state, "-o", "json")
	if err != nil {
		return 0, err
	}
	var status struct{ Events struct{ Count int } }
	err = json.Unmarshal([]byte(out), &status)
	return status.Events.Count, err
}

// callTimes makes n calls, as fast as they are answered.
func callTimes(p protocol, callers int, next *int, n int) error {
	c, err := openCallers(p, callers, next)
	if err != nil {
		return err
	}
	defer c.close()
	for last := -1; c.done < n; last = c.done {
		if err := c.runTimes(time.Now().Add(time.Second), n-c.done); err != nil {
			return err
		}
		c.latency = c.latency[:0]
		if c.failed > c.done/1000 || c.done == last {
			return fmt.Errorf("%d calls, %d failed: %w", c.done, c.failed, c.err)
		}
	}
	return nil
}

// startTimes restarts the relay some times, and leaves it running.
func (b *bench) startTimes(r *relayProc, o relayOptions, state string, required, stretch float64) error {
	var wall, cpu []float64
	for range b.count {
		r.stop()
		at := time.Now()
		if err := r.run(b, b.newName("restart"), o); err != nil {
			return err
		}
		wall, cpu = append(wall, time.Since(at).Seconds()), append(cpu, r.cpu().Seconds())
		b.sleep(time.Second)
	}
	fmt.Printf("ready with %d events, %s: %s s; CPU %s s\n", largeEvents, state, list(wall, "%.2f"), list(cpu, "%.2f"))
	b.report.add(bar{name: fmt.Sprintf("relay ready with %d events and %d boards, %s", largeEvents, largeFleet, state), measured: median(wall), required: required, stretch: stretch, format: "%.2f s"})
	return b.ctx.Err()
}

//go:build linux

package main

import (
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// The unary echo of RFC-0005, through authentication, schema, audit, the device link
// and back, beside two bare servers that together move as many messages: a JSON echo
// over net/http and a WebSocket echo. The same client asks all of them over as many
// connections, alternating.

// callers is how many connections ask at a time.
const callers = 16

// mcpHead begins the head of a request to /mcp.
var mcpHead = []byte("Mcp-Protocol-Version: 2026-07-28\r\n")

// contender is one server with the load that asks it.
type contender struct {
	name   string
	server *process
	load   load
	cpu    []float64 // µs per operation, by round
	rate   []float64
	p99    []float64 // ms, by round
}

func (b *bench) unaryBars() error {
	r, err := b.startRelay("unary", relayOptions{devices: b.devices})
	if err != nil {
		return err
	}
	defer r.stop()
	fleet, err := b.startFleet(r, b.devices)
	if err != nil {
		return err
	}
	defer fleet.stop()
	if err := r.listNodes(b.devices); err != nil {
		return err
	}
	b.sleep(time.Second) // a board is online a moment before its tools are
	sides, err := b.unaryContenders(r)
	if err != nil {
		return err
	}
	defer func() {
		for _, s := range sides {
			s.load.close()
			if s.server != r.process {
				s.server.stop()
			}
		}
	}()
	for range b.rounds {
		for _, s := range sides {
			cpu, rate, latency, err := s.load.measureRound(s.server, b.unary)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			s.cpu, s.rate, s.p99 = append(s.cpu, cpu), append(s.rate, rate), append(s.p99, quantile(latency, 0.99))
		}
		b.sleep(200 * time.Millisecond)
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
	}
	for _, s := range sides {
		fmt.Printf("%-24s %6.1f us CPU a call, %6.0f/s, p99 %5.2f ms; by round: %s us\n", s.name, median(s.cpu), median(s.rate), median(s.p99), list(s.cpu, "%.1f"))
	}
	http, ws, call, mcp := sides[0], sides[1], sides[2], sides[3]
	bare := make([]float64, len(http.cpu))
	for i := range bare {
		bare[i] = http.cpu[i] + ws.cpu[i]
	}
	b.report.add(bar{name: "unary echo: relay CPU / (bare HTTP + bare WebSocket)", measured: median(ratios(call.cpu, bare)), required: 1.8, format: "%.2f x"})
	b.report.add(bar{name: "/mcp echo: relay CPU / bare HTTP echo", measured: median(ratios(mcp.cpu, http.cpu)), required: 6, format: "%.2f x"})
	b.report.add(bar{name: fmt.Sprintf("unary echo: p99 with %d devices", b.devices), measured: median(call.p99), required: 50, format: "%.1f ms"})
	b.report.add(bar{name: fmt.Sprintf("/mcp echo: p99 with %d devices", b.devices), measured: median(mcp.p99), required: 50, format: "%.1f ms"})
	return nil
}

// unaryContenders starts the bare servers and connects the callers. All sides get the same
// rate at most: what the devices' limit of ten calls a second lets through.
func (b *bench) unaryContenders(r *relayProc) ([]*contender, error) {
	listening := func(line string) bool { _, _, err := net.SplitHostPort(line); return err == nil }
	echo, echoAddr, err := start(10*time.Second, listening, b.self, "serve", "echo")
	if err != nil {
		return nil, err
	}
	ws, wsAddr, err := start(10*time.Second, listening, b.self, "serve", "ws")
	if err != nil {
		echo.stop()
		return nil, err
	}
	sides := []*contender{{name: "bare HTTP echo", server: echo}, {name: "bare WebSocket echo", server: ws},
		{name: "relay, tools/call", server: r.process}, {name: "relay, /mcp", server: r.process}}
	dial := []func() (requester, error){
		func() (requester, error) { return dialHTTP(echoAddr, r.unaryRequest) },
		func() (requester, error) { return dialWS(wsAddr, deviceMessage) },
		func() (requester, error) { return dialHTTP(r.addr, r.unaryRequest) },
		func() (requester, error) { return dialHTTP(r.addr, r.mcpRequest) },
	}
	next := new(atomic.Int64)
	for i, s := range sides {
		s.load.perSecond, s.load.next = b.devices*9, next
		for range callers {
			a, err := dial[i]()
			if err != nil {
				return sides, fmt.Errorf("%s: %w", s.name, err)
			}
			s.load.askers = append(s.load.askers, a)
			// A server closes a connection that sends nothing; this one's round may be late.
			if err := a.do(int(next.Add(1))); err != nil {
				return sides, fmt.Errorf("%s: first call: %w", s.name, err)
			}
		}
	}
	return sides, nil
}

func (r *relayProc) echoTool(n int) string {
	return "sysecho." + r.nodes[n%len(r.nodes)] + ".echo.invoke"
}

func (r *relayProc) unaryRequest(n int) (head, body []byte) {
	head = append(head, "Accept: application/json\r\nAuthorization: Bearer "...)
	head = append(append(head, r.token...), "\r\n"...)
	body = append(body, `{"tool":"`...)
	body = append(body, r.echoTool(n)...)
	return head, append(body, `","arguments":{"message":"hello"}}`...)
}

func (r *relayProc) mcpRequest(n int) (head, body []byte) {
	tool := r.echoTool(n)
	head = append(head, mcpHead...)
	head = append(append(head, "Mcp-Method: tools/call\r\nMcp-Name: "...), tool...)
	head = append(head, "\r\nAccept: application/json, text/event-stream\r\nAuthorization: Bearer "...)
	head = append(append(head, r.token...), "\r\n"...)
	body = append(body, `{"jsonrpc":"2.0","id":`...)
	body = strconv.AppendInt(body, int64(n), 10)
	body = append(body, `,"method":"tools/call","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",`+
		`"io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}},"name":"`...)
	body = append(body, tool...)
	return head, append(body, `","arguments":{"message":"hello"}}}`...)
}

// deviceMessage is as long as a device's answer to an echo.
var deviceMessage = []byte(`{"type":"cmd_ack","msg_id":"01HZX9K3M4P7Q8R9S0T1V2W3XY","in_reply_to":"01HZX9K3M4P7Q8R9S0T1V2W3XZ","payload":{"ok":true,` +
	`"result":{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","received_at_ms":1745300000000,"message":"hello"}}}`)

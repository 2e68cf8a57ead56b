//go:build linux

package main

import (
	"bytes"
	"fmt"
	"net"
	"strconv"
	"time"
)

// Calls through the relay: authentication, schema, audit, event log, the device link and back,
// beside servers that do less. Each comparison is made twice. Saturated: each caller asks again
// as soon as it is answered, and there are as many callers as keep the server's core busy. Paced:
// all servers get the same number of calls a second, which every one of them must hold.

// pace is the calls a second of the paced comparison.
const pace = 2500

const (
	firstCallers = 16
	maxCallers   = 256
)

// side is one server of a comparison, with what was measured in each of the two ways.
type side struct {
	name      string
	server    *process
	protocol  protocol
	callers   int // that keep its core busy
	saturated []round
	paced     []round
}

func (b *bench) unaryBars() error {
	unpin, err := pinClient()
	if err != nil {
		return err
	}
	defer unpin()
	r, err := b.startRelay("unary", relayOptions{devices: b.devices, onCore: true})
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
	sides, stop, err := b.unarySides(r)
	defer stop()
	if err != nil {
		return err
	}
	if err := b.alternate(sides, b.unary); err != nil {
		return err
	}
	http, ws, call, mcp, session, sdk, sdkSession := sides[0], sides[1], sides[2], sides[3], sides[4], sides[5], sides[6]
	for _, row := range []struct {
		name              string
		side              *side
		than              []*side
		required, stretch float64
	}{
		{"unary echo: relay CPU / (bare HTTP + bare WebSocket)", call, []*side{http, ws}, 1.8, 1.5},
		{"/mcp 2026-07-28 echo: relay CPU / bare HTTP echo", mcp, []*side{http}, 5, 3},
		{"/mcp 2025-11-25 session echo: relay CPU / bare HTTP echo", session, []*side{http}, 6, 4},
		{"/mcp 2026-07-28 echo: relay CPU / plain go-sdk server", mcp, []*side{sdk}, 0, 0},
		{"/mcp 2025-11-25 session echo: relay CPU / plain go-sdk server", session, []*side{sdkSession}, 0, 0},
	} {
		b.compare(row.name, row.side, row.than, row.required, row.stretch)
	}
	for _, s := range []*side{call, mcp, session} {
		b.report.add(bar{name: fmt.Sprintf("%s: p99 at %d/s with %d boards", s.name, pace, b.devices), measured: median(each(s.paced, func(r round) float64 { return r.p99 })), required: 50, format: "%.1f ms"})
	}
	return nil
}

// alternate measures all sides in both ways, one after another, in each round.
func (b *bench) alternate(sides []*side, d time.Duration) error {
	next := 0
	run := func(s *side, callers int, d time.Duration, pace int) (round, error) {
		c, err := openCallers(s.protocol, callers, &next)
		if err != nil {
			return round{}, fmt.Errorf("%s: %w", s.name, err)
		}
		defer c.close()
		r, err := c.measure(s.server, d, pace)
		if err != nil {
			err = fmt.Errorf("%s, %d callers: %w", s.name, callers, err)
		}
		return r, err
	}
	for _, s := range sides {
		for s.callers = firstCallers; s.callers < maxCallers; s.callers *= 2 {
			r, err := run(s, s.callers, d/4, 0)
			if err != nil {
				return err
			}
			if saturation(r.busy, r.waited, b.shared) > minBusy+0.03 {
				break
			}
		}
	}
	for range b.rounds {
		for _, s := range sides {
			r, err := run(s, s.callers, d, 0)
			if err != nil {
				return err
			}
			s.saturated = append(s.saturated, r)
		}
		for _, s := range sides {
			r, err := run(s, firstCallers, d, pace)
			if err != nil {
				return err
			}
			s.paced = append(s.paced, r)
		}
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
	}
	for _, s := range sides {
		for _, way := range []struct {
			name   string
			rounds []round
		}{{"saturated", s.saturated}, {"paced", s.paced}} {
			fmt.Printf("%-26s %-9s %6.1f us CPU a call, %6.0f/s, core %3.0f %% busy, waited for %3.0f %%, %3d callers, p99 %5.2f ms; by round: %s us\n", s.name, way.name,
				median(each(way.rounds, roundCPU)), median(each(way.rounds, func(r round) float64 { return r.rate })), 100*median(each(way.rounds, func(r round) float64 { return r.busy })), 100*median(each(way.rounds, func(r round) float64 { return r.waited })),
				way.rounds[0].callers, median(each(way.rounds, func(r round) float64 { return r.p99 })), list(each(way.rounds, roundCPU), "%.1f"))
		}
	}
	return nil
}

func roundCPU(r round) float64 { return r.cpu }

func each[R any](rounds []R, of func(R) float64) []float64 {
	v := make([]float64, len(rounds))
	for i, r := range rounds {
		v[i] = of(r)
	}
	return v
}

// saturation is the share of the time in which a server had work. On a machine that others use
// as well, the time in which it could not do it counts.
func saturation(busy, waited float64, shared bool) float64 {
	if shared {
		return min(busy+waited, 1)
	}
	return busy
}

func medianOf[R any](rounds []R, of func(R) float64) float64 { return median(each(rounds, of)) }

// saturationFault says why a side's saturated figure is void; "": it is not.
func (s *side) saturationFault(shared bool) string {
	if busy := median(each(s.saturated, func(r round) float64 { return saturation(r.busy, r.waited, shared) })); busy < minBusy {
		return fmt.Sprintf("%s used %.0f %% of its core", s.name, 100*busy)
	}
	return ""
}

// paceFault says why a side's paced figure is void; "": it is not.
func (s *side) paceFault() string {
	if rate := median(each(s.paced, func(r round) float64 { return r.rate })); rate < 0.98*pace {
		return fmt.Sprintf("%s reached %.0f of %d/s", s.name, rate, pace)
	}
	return ""
}

// compare adds two rows: the CPU of a side by that of others together, saturated and paced. The
// limits apply to the saturated one.
func (b *bench) compare(name string, s *side, than []*side, required, stretch float64) {
	for _, way := range []struct {
		name              string
		rounds            func(*side) []round
		fault             func(*side) string
		required, stretch float64
	}{
		{"saturated", func(s *side) []round { return s.saturated }, func(s *side) string { return s.saturationFault(b.shared) }, required, stretch},
		{fmt.Sprintf("at %d/s", pace), func(s *side) []round { return s.paced }, (*side).paceFault, 0, 0},
	} {
		row := bar{name: name + ", " + way.name, required: way.required, stretch: way.stretch, format: "%.2f x", void: way.fault(s)}
		base := make([]float64, len(way.rounds(s)))
		for _, o := range than {
			for i, one := range way.rounds(o) {
				base[i] += one.cpu
			}
			if row.void == "" {
				row.void = way.fault(o)
			}
		}
		row.measured = median(ratios(each(way.rounds(s), roundCPU), base))
		b.report.add(row)
	}
}

// isAddress recognizes the line of a reference server.
func isAddress(line string) bool { _, _, err := net.SplitHostPort(line); return err == nil }

// unarySides starts the servers that the relay is compared with; the order is that of unaryBars.
func (b *bench) unarySides(r *relayProc) (sides []*side, stop func(), err error) {
	var servers []*process
	stop = func() {
		for _, p := range servers {
			p.stop()
		}
	}
	addrs := make(map[string]string)
	started := make(map[string]*process)
	for _, kind := range []string{"echo", "ws", "sdk"} {
		p, addr, err := startOnServerCore(10*time.Second, isAddress, b.self, "serve", kind)
		if err != nil {
			return nil, stop, err
		}
		servers, addrs[kind], started[kind] = append(servers, p), addr, p
	}
	return []*side{
		{name: "bare HTTP echo", server: started["echo"], protocol: plainHTTP(addrs["echo"], r.unaryRequest)},
		{name: "bare WebSocket echo", server: started["ws"], protocol: webSocketEcho(addrs["ws"])},
		{name: "relay, tools/call", server: r.process, protocol: plainHTTP(r.addr, r.unaryRequest)},
		{name: "relay, /mcp", server: r.process, protocol: plainHTTP(r.addr, r.mcpRequest)},
		{name: "relay, /mcp session", server: r.process, protocol: mcpSession(r.addr, r.token, r.echoTool)},
		{name: "plain go-sdk", server: started["sdk"], protocol: plainHTTP(addrs["sdk"], r.mcpRequest)},
		{name: "plain go-sdk session", server: started["sdk"], protocol: mcpSession(addrs["sdk"], r.token, r.echoTool)},
	}, stop, nil
}

func (r *relayProc) echoTool(n int) string {
	return "sysecho." + r.nodes[n%len(r.nodes)] + ".echo.invoke"
}

// plainHTTP is a protocol of requests that depend on nothing before them.
func plainHTTP(addr string, request func(b []byte, host string, n int) []byte) protocol {
	return protocol{
		open: func(int) (int, string, error) { fd, err := dialFD(addr); return fd, "", err },
		request: func(b []byte, _ string, n int) []byte {
			return request(b, addr, n)
		},
		answered: answeredHTTP,
	}
}

func (r *relayProc) unaryRequest(b []byte, host string, n int) []byte {
	body := append([]byte(`{"tool":"`), r.echoTool(n)...)
	body = append(body, `","arguments":{"message":"hello"}}`...)
	return r.toolRequest(b, host, body)
}

// toolRequest is a request of POST /mcp/tools/call.
func (r *relayProc) toolRequest(b []byte, host string, body []byte) []byte {
	return appendPost(b, "/mcp/tools/call", host, []byte("Accept: application/json\r\nAuthorization: Bearer "+r.token+"\r\n"), body)
}

func (r *relayProc) mcpRequest(b []byte, host string, n int) []byte {
	tool := r.echoTool(n)
	head := "Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: " + tool +
		"\r\nAccept: application/json, text/event-stream\r\nAuthorization: Bearer " + r.token + "\r\n"
	body := strconv.AppendInt([]byte(`{"jsonrpc":"2.0","id":`), int64(n), 10)
	body = append(body, `,"method":"tools/call","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",`+
		`"io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}},"name":"`...)
	body = append(body, tool...)
	return appendPost(b, "/mcp", host, []byte(head), append(body, `","arguments":{"message":"hello"}}}`...))
}

// mcpSession is a protocol whose callers each have a session of MCP 2025-11-25, which they keep
// over all rounds.
func mcpSession(addr, token string, tool func(n int) string) protocol {
	const accept = "Mcp-Protocol-Version: 2025-11-25\r\nAccept: application/json, text/event-stream\r\nAuthorization: Bearer "
	heads := make(map[int]string)
	return protocol{
		open: func(i int) (int, string, error) {
			fd, err := dialFD(addr)
			if err != nil || heads[i] != "" {
				return fd, heads[i], err
			}
			head := accept + token + "\r\n"
			answer, err := exchange(fd, appendPost(nil, "/mcp", addr, []byte(head),
				[]byte(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`)), answeredHTTP)
			if err == nil {
				_, id, _ := bytes.Cut(answer, []byte("\r\nMcp-Session-Id: "))
				id, _, _ = bytes.Cut(id, []byte("\r\n"))
				head += "Mcp-Session-Id: " + string(id) + "\r\n"
				_, err = exchange(fd, appendPost(nil, "/mcp", addr, []byte(head), []byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)), answeredHTTP)
			}
			if err != nil {
				closeFD(fd)
				return -1, "", fmt.Errorf("initialize: %w", err)
			}
			heads[i] = head
			return fd, head, nil
		},
		request: func(b []byte, head string, n int) []byte {
			body := strconv.AppendInt([]byte(`{"jsonrpc":"2.0","id":`), int64(n), 10)
			body = append(append(body, `,"method":"tools/call","params":{"name":"`...), tool(n)...)
			return appendPost(b, "/mcp", addr, []byte(head), append(body, `","arguments":{"message":"hello"}}}`...))
		},
		answered: answeredHTTP,
	}
}

// webSocketEcho is the protocol of the bare WebSocket server.
func webSocketEcho(addr string) protocol {
	message := maskedMessage(deviceMessage)
	return protocol{
		open: func(int) (int, string, error) {
			fd, err := dialFD(addr)
			if err != nil {
				return -1, "", err
			}
			_, err = exchange(fd, []byte("GET / HTTP/1.1\r\nHost: "+addr+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
				"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"), func(in []byte) (bool, error) {
				if bytes.HasSuffix(in, headEnd) && !bytes.HasPrefix(in, []byte("HTTP/1.1 101")) {
					return true, fmt.Errorf("no upgrade: %.200q", in)
				}
				return bytes.HasSuffix(in, headEnd), nil
			})
			if err != nil {
				closeFD(fd)
				return -1, "", err
			}
			return fd, "", nil
		},
		request:  func(b []byte, _ string, _ int) []byte { return append(b, message...) },
		answered: answeredMessage,
	}
}

// deviceMessage is as long as a device's answer to an echo.
var deviceMessage = []byte(`{"type":"cmd_ack","msg_id":"01HZX9K3M4P7Q8R9S0T1V2W3XY","in_reply_to":"01HZX9K3M4P7Q8R9S0T1V2W3XZ","payload":{"ok":true,` +
	`"result":{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","received_at_ms":1745300000000,"message":"hello"}}}`)

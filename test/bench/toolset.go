//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// The tools with which an agent works with a whole fleet: what they cost over so many mock boards,
// which answer from memory.
const toolsetFleet = 1000

// maxFigureAge is a little longer than the relay keeps the figures of a board.
const maxFigureAge = 31 * time.Second

// toolsetBars measure the fleet's tools as a client sees them, and what they leave in the relay's
// memory.
func (b *bench) toolsetBars() error {
	r, err := b.startRelay("toolset", relayOptions{devices: toolsetFleet})
	if err != nil {
		return err
	}
	defer r.stop()
	boards, err := b.startFleet(r, toolsetFleet)
	if err != nil {
		return err
	}
	defer boards.stop()
	if err := r.listNodes(toolsetFleet); err != nil {
		return err
	}
	b.sleep(2 * time.Second) // a board is online a moment before its tools are
	c := &fleetClient{r: r, http: r.client(), before: r.memory("VmRSS")}
	defer c.http.CloseIdleConnections()

	const nowArgs = `{"metrics":["cpu_pct","temperature_c"]}`
	cold := 1
	if !b.isQuick {
		cold = 3
	}
	for _, m := range []struct {
		name, tool, args string
		rounds           int
		pause            time.Duration // after each call
		required         float64
	}{
		// A board serves five questions about its history a second.
		{"fleet.query, 24 h", "fleet.query", `{"metrics":["temperature_c","cpu_pct"],"from":"24h","aggregate":"max"}`, 2*b.rounds + 1, time.Second, 1500},
		{"fleet.query, 24 h in steps of an hour", "fleet.query", `{"metrics":["cpu_pct"],"from":"24h","step":"1h"}`, 2*b.rounds + 1, time.Second, 1500},
		{"fleet.query, the hottest three and since when", "fleet.query", `{"metrics":["temperature_c"],"from":"24h","aggregate":"max","top":3}`, 2*b.rounds + 1, time.Second, 1500},
		// Figures are kept for half a minute.
		{"fleet.query, now, every board asked", "fleet.query", nowArgs, cold, maxFigureAge, 250},
		{"fleet.query, before those with warm figures", "fleet.query", nowArgs, 1, 0, 0},
		{"fleet.query, now, warm figures", "fleet.query", nowArgs, 20, 0, 250},
		{"fleet.find with where, warm figures", "fleet.find", `{"where":"cpu_pct > 80 and disk_pct > 10"}`, 50, 0, 50},
	} {
		took, err := c.times(b, m.rounds, m.pause, m.tool, m.args)
		if err != nil {
			return err
		}
		fmt.Printf("%s: %s ms\n", m.name, list(took, "%.1f"))
		if m.required > 0 {
			b.report.add(bar{name: fmt.Sprintf("%s, %d boards: p50", m.name, toolsetFleet), measured: median(took), required: m.required, format: "%.1f ms"})
		}
	}
	b.report.add(bar{name: fmt.Sprintf("relay RSS that these calls over %d boards add, at most", toolsetFleet), measured: (c.most - c.before) / 1024, format: "%.1f MiB"})

	took, size, err := c.listTimes(200)
	if err != nil {
		return err
	}
	b.report.add(bar{name: "tools/list of the toolset fleet: p50", measured: median(took), required: 1, format: "%.2f ms"})
	b.report.add(bar{name: "tools/list of the toolset fleet: bytes", measured: float64(size), format: "%.0f B"})
	b.sleep(20 * time.Second) // the relay returns memory 15 s after a load
	b.report.add(bar{name: fmt.Sprintf("relay RSS that these calls over %d boards add, 20 s later", toolsetFleet), measured: (r.memory("VmRSS") - c.before) / 1024, required: 32, format: "%.1f MiB"})
	return nil
}

// fleetClient is an agent over one connection.
type fleetClient struct {
	r            *relayProc
	http         *http.Client
	before, most float64 // the relay's RSS, KiB
}

// times calls a tool so many times, with a pause after each, and returns how long each took, ms. An
// answer of more than 2 KiB, or without most of the boards, is an error.
func (c *fleetClient) times(b *bench, rounds int, pause time.Duration, tool, args string) (took []float64, err error) {
	for range rounds {
		at := time.Now()
		answer, err := c.post("/mcp/tools/call", fmt.Appendf(nil, `{"tool":%q,"arguments":%s}`, tool, args), nil)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", tool, err)
		}
		took = append(took, time.Since(at).Seconds()*1000)
		c.most = max(c.most, c.r.memory("VmRSS"))
		var of struct {
			Matched *int
			Boards  json.RawMessage
		}
		var boards struct{ Answered int }
		if err := json.Unmarshal(answer, &of); err != nil || len(answer) > 2<<10 {
			return nil, fmt.Errorf("%s: an answer of %d bytes: %w", tool, len(answer), err)
		}
		if of.Matched == nil { // fleet.query
			if err := json.Unmarshal(of.Boards, &boards); err != nil || boards.Answered < toolsetFleet*99/100 {
				return nil, fmt.Errorf("%s: %d of %d boards answered", tool, boards.Answered, toolsetFleet)
			}
		}
		if pause > 0 {
			b.sleep(pause)
		}
	}
	return took, b.ctx.Err()
}

// listTimes lists the tools of the toolset so many times.
func (c *fleetClient) listTimes(rounds int) (took []float64, size int, err error) {
	const body = `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",` +
		`"io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`
	for range rounds {
		at := time.Now()
		answer, err := c.post("/mcp?toolset=fleet&names=flat", []byte(body), map[string]string{"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/list"})
		if err != nil {
			return nil, 0, err
		}
		took = append(took, time.Since(at).Seconds()*1000)
		if size = len(answer); !strings.Contains(string(answer), "fleet_query") {
			return nil, 0, errors.New("tools/list of the toolset fleet has no fleet_query")
		}
	}
	return took, size, nil
}

// post returns the body of an answer.
func (c *fleetClient) post(path string, body []byte, head map[string]string) ([]byte, error) {
	req, err := http.NewRequest(http.MethodPost, c.r.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.r.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	for name, value := range head {
		req.Header.Set(name, value)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.200s", res.Status, answer)
	}
	return answer, err
}

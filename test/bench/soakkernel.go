//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The kernel's part of the soak: a plugin whose process is killed, stages that are
// swapped all the time, and tickets that must be there whatever was killed meanwhile.
const (
	soakPlugin   = "notes" // docs/examples/notes
	soakWriters  = 4
	soakRemember = 64 // newest acknowledged tickets of a writer
)

// openPlugin builds the plugin and creates an administrator's token.
func (s *soaker) openPlugin() error {
	dir := filepath.Join(s.relay.state, "plugins", soakPlugin)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if _, err := output(s.ctx, "go", "build", "-o", filepath.Join(dir, "run"), "./docs/examples/"+soakPlugin); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join("docs", "examples", soakPlugin, "plugin.json"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "plugin.json"), b, 0o600); err != nil {
		return err
	}
	out, err := output(s.ctx, s.agentctl, "token", "create", "--state-dir", s.relay.state, "--class", "admin", "--ttl", "24h")
	s.admin = strings.TrimSpace(out)
	return err
}

// kernelFaults starts the kernel's part.
func (s *soaker) kernelFaults(ctx context.Context, wg *sync.WaitGroup) {
	wg.Go(func() { s.pluginKiller(ctx) })
	wg.Go(func() { s.pluginCaller(ctx) })
	wg.Go(func() { s.swapper(ctx) })
	for range soakWriters {
		wg.Go(func() { s.ticketWriter(ctx) })
	}
}

// callTool calls a tool. code is "" when it was served, "cut" when the relay was killed or is
// not there; every other end of a connection breaks an invariant.
func (s *soaker) callTool(tool, args string, v any) (code string) {
	kills := s.kills.Load()
	begin := time.Now()
	req, err := http.NewRequest(http.MethodPost, "http://"+s.relayAddr+"/mcp/tools/call", strings.NewReader(`{"tool":"`+tool+`","arguments":`+args+`}`))
	if err != nil {
		return err.Error()
	}
	req.Header = http.Header{"Authorization": {"Bearer " + s.admin}, "Content-Type": {"application/json"}}
	res, err := (&http.Client{Timeout: 2 * callBound, Transport: soakTransport}).Do(req)
	if err == nil {
		var body []byte
		body, err = io.ReadAll(res.Body)
		_ = res.Body.Close()
		switch {
		case err != nil:
		case res.StatusCode != http.StatusOK:
			code = errorCode.FindString(string(body))
			if code == "" {
				code = res.Status
			}
		case v != nil:
			err = json.Unmarshal(body, v)
		}
	}
	if time.Since(begin) > callBound {
		s.recordFailure("a call of " + tool + " took longer than 5.25 s")
	}
	if err != nil {
		code = "cut"
		if s.kills.Load() == 0 && kills == 0 {
			s.recordFailure("a call of " + tool + " ended with " + err.Error())
		}
	}
	return code
}

var soakTransport = &http.Transport{MaxIdleConnsPerHost: 16}

// pluginKiller kills the plugin's process; the kernel starts another.
func (s *soaker) pluginKiller(ctx context.Context) {
	for ctx.Err() == nil {
		pause(ctx, 2*time.Second+rand.N(8*time.Second))
		s.mu.Lock()
		pid := s.relay.pid()
		s.mu.Unlock()
		for _, child := range children(pid) {
			if syscall.Kill(child, syscall.SIGKILL) == nil {
				s.count("killed: plugin")
			}
		}
	}
}

// children are the processes that pid has started itself.
func children(pid int) (pids []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, t := range tasks {
		b, _ := os.ReadFile(t)
		for _, f := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// pluginCaller calls the plugin, which is there most of the time.
func (s *soaker) pluginCaller(ctx context.Context) {
	for ctx.Err() == nil {
		code := s.callTool(soakPlugin+".search", `{"word":"x"}`, nil)
		switch code {
		case "":
			s.count("plugin: ok")
		case "cut", "E_INTERNAL", "E_RATE_LIMITED", "E_DEADLINE_EXCEEDED", "E_BAD_REQUEST": // the last until it is loaded
			s.count("plugin: " + code)
		default:
			s.recordFailure("a call of the plugin got " + code)
		}
		pause(ctx, rand.N(40*time.Millisecond))
	}
}

// swapper switches stages that change nothing for the others' calls.
func (s *soaker) swapper(ctx context.Context) {
	scopes := []string{"global", "transport=http", "plugin=" + soakPlugin, "plugin=tickets"}
	for n := 0; ctx.Err() == nil; n++ {
		args := fmt.Sprintf(`{"name":%q,"scope":%q}`, []string{"redact", "acl", "compress"}[rand.N(3)], scopes[rand.N(len(scopes))])
		switch code := s.callTool("kernel.middleware."+[]string{"enable", "disable"}[n%2], args, nil); code {
		case "":
			s.count("swaps")
		case "cut":
		default:
			s.recordFailure("a swap got " + code)
		}
		begin := time.Now()
		if code := s.callTool("kernel.health.get", `{}`, nil); code == "" && time.Since(begin) > time.Second {
			s.recordFailure("kernel.health.get took more than 1 s")
		}
		pause(ctx, rand.N(200*time.Millisecond))
	}
}

// ticketWriter opens tickets and closes them; what was acknowledged stays so.
func (s *soaker) ticketWriter(ctx context.Context) {
	type answer struct {
		Ticket struct {
			ID      string
			Version int
		}
	}
	var acked []answer
	remember := func(a answer) {
		if acked = append(acked, a); len(acked) > soakRemember {
			acked = acked[1:]
		}
	}
	for n := 0; ctx.Err() == nil; n++ {
		var a answer
		code := s.callTool("tickets.create", fmt.Sprintf(`{"title":"soak %d"}`, n), &a)
		if code == "" {
			s.count("tickets")
			var closed answer
			if code = s.callTool("tickets.transition", `{"id":"`+a.Ticket.ID+`","to":"closed"}`, &closed); code == "" {
				a = closed
			}
			remember(a)
		}
		if code != "" && code != "cut" && code != "E_RATE_LIMITED" {
			s.recordFailure("a good change of a ticket got " + code)
		}
		if len(acked) > 0 {
			want := acked[rand.N(len(acked))]
			var got answer
			switch code := s.callTool("tickets.get", `{"id":"`+want.Ticket.ID+`"}`, &got); {
			case code == "cut":
			case code != "":
				s.recordFailure("an acknowledged ticket got " + code)
			case got.Ticket.Version < want.Ticket.Version:
				s.recordFailure("an acknowledged change of a ticket is gone")
			}
		}
		pause(ctx, rand.N(100*time.Millisecond))
	}
}

// checkKernel waits until the plugin answers again: its process may wait 30 s.
func (s *soaker) checkKernel() {
	code := "never asked"
	for end := time.Now().Add(45 * time.Second); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		if code = s.callTool(soakPlugin+".search", `{"word":"x"}`, nil); code == "" {
			return
		}
	}
	s.recordFailure("the plugin did not come back: " + code)
}

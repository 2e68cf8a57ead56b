package process

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// transcript returns the lines of the transcript of docs/kernel.md.
func transcript(t *testing.T) []string {
	t.Helper()
	doc, err := os.ReadFile("../../../docs/kernel.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(doc), "### A transcript")
	_, part, _ = strings.Cut(part, "```\n")
	part, _, ok := strings.Cut(part, "\n```")
	if !ok {
		t.Fatal("docs/kernel.md has no transcript")
	}
	return strings.Split(part, "\n")
}

// player is a plugin that plays a transcript.
type player struct {
	lines         []string
	onRelayLine   func(relayLine string) // before a line of the relay is read
	token, callID string
	failed        error
	at            atomic.Value // the line that is played
	done          chan struct{}
}

var (
	tokenRE = regexp.MustCompile(`"agentctl/call":"([A-Z0-9]{26})"`)
	traceRE = regexp.MustCompile(`00-[0-9a-f]{32}-[0-9a-f]{16}-01`)
)

func (p *player) serve(_ context.Context, rw io.ReadWriteCloser) error {
	in := bufio.NewReader(rw)
	for _, method := range []string{"initialize", "notifications/initialized", "tools/list"} {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		var req struct {
			ID     json.RawMessage
			Method string
		}
		if err := json.Unmarshal([]byte(line), &req); err != nil || req.Method != method {
			return fmt.Errorf("%s: %w", line, err)
		}
		if req.ID != nil {
			_, _ = fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"tools":[{"name":"notes.run","inputSchema":{"type":"object"}}]}}`+"\n", req.ID)
		}
	}
	for _, line := range p.lines {
		p.at.Store(line)
		if p.failed = p.play(in, rw, line); p.failed != nil {
			close(p.done)
			return p.failed
		}
	}
	close(p.done)
	_, _ = io.Copy(io.Discard, in)
	return nil
}

// play plays one line. Tokens, trace ids and the ids of the relay's requests differ each time.
func (p *player) play(in *bufio.Reader, out io.Writer, line string) error {
	if want, ok := strings.CutPrefix(line, "relay:  "); ok {
		p.onRelayLine(want)
		got, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		if m := tokenRE.FindStringSubmatch(got); m != nil {
			p.token = m[1]
			got = strings.Replace(got, p.token, "TOKEN", 1)
		}
		got = traceRE.ReplaceAllString(got, "00-TRACE-SPAN-01")
		var a, b map[string]any
		if err := json.Unmarshal([]byte(got), &a); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(want), &b); err != nil {
			return err
		}
		if a["method"] == "tools/call" {
			p.callID = fmt.Sprint(a["id"])
			a["id"] = b["id"]
		}
		if !reflect.DeepEqual(a, b) {
			return fmt.Errorf("the relay sent\n%s, the transcript has\n%s", got, want)
		}
		return nil
	}
	line, ok := strings.CutPrefix(line, "plugin: ")
	if !ok {
		return fmt.Errorf("not a line of a transcript: %s", line)
	}
	line = strings.Replace(line, "TOKEN", p.token, 1)
	line = strings.Replace(line, `"id":7,`, `"id":`+p.callID+`,`, 1)
	_, err := io.WriteString(out, line+"\n")
	return err
}

// TestTranscript: the relay says what docs/kernel.md shows.
func TestTranscript(t *testing.T) {
	p := &busPlugin{name: "notes", bus: `{"call": ["tickets.create"], "subscribe": ["alert"], "append": ["notes.seen"]}`}
	play := &player{lines: transcript(t), done: make(chan struct{})}
	answered := make(chan error, 1)
	start := make(chan struct{})
	var r *busHarness
	play.onRelayLine = func(line string) {
		switch {
		case strings.Contains(line, `"agentctl/consent"`):
			<-start
		case strings.Contains(line, `"agentctl/event"`):
			_, _ = r.log.Append(t.Context(), kernel.Event{Tenant: "default", Type: "alert.raised", Aggregate: "01jd8z3kq5e6r7t8v9w0x1y2z3", CreatedMS: 1767323045678,
				Payload: json.RawMessage(`{"level":"warn","metric":"disk_pct","value":93}`)})
		case strings.Contains(line, `"tools/call"`):
			go func() {
				_, err := r.call(all, "notes.run")
				answered <- err
			}()
		}
	}
	r = newBusHarness(t)
	tickets := &kernel.Manifest{Name: "tickets", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "tickets.create", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeTicketsWrite}}}}
	if err := r.k.Load(funcPlugin{tickets, func(_ context.Context, req *kernel.Request) (*kernel.Result, error) {
		data, err := json.Marshal(map[string]string{"created_by": req.Caller.Actor, "via": req.Caller.Via})
		return &kernel.Result{Structured: data}, err
	}}, false); err != nil {
		t.Fatal(err)
	}
	r.consents["notes "+Digest([]byte(p.manifest()))] = []string{"default"}
	r.h.o.Bundled["notes"] = Bundled{Manifest: []byte(p.manifest()), Serve: play.serve}
	close(start)
	hr := harness{t: t, k: r.k, h: r.h}
	if err := hr.load("notes"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-play.done:
	case <-time.After(10 * time.Second):
		t.Fatal("the transcript did not end; at: ", play.at.Load())
	}
	if play.failed != nil {
		t.Fatal(play.failed)
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

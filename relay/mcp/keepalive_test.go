package mcp

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

func textOf(res *sdk.CallToolResult) string {
	if len(res.Content) != 1 {
		return ""
	}
	text, _ := res.Content[0].(*sdk.TextContent)
	return text.Text
}

// TestStreamHeadersAtOnce: a client without a progress token gets the headers of an event stream
// before the board has sent anything.
func TestStreamHeadersAtOnce(t *testing.T) {
	for _, version := range []string{legacyEra, modernEra, "modern, not plain"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, Options{})
			b := newBoard("default", nodeA)
			e.load(b)
			head := map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/call", "Mcp-Name": streamA}
			params := `"name":"` + streamA + `",` + modernMeta
			switch version {
			case legacyEra:
				head = sessionHead("", e.initialize(""))
				params = `"name":"` + streamA + `"`
			case modernEra:
			default: // the mux takes one Accept header
				head["Accept"] = "*/*"
			}
			res, err := http.DefaultClient.Do(newRequest(t, e, head, `{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{`+params+`}}`))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
				t.Fatalf("%d %s, want an event stream", res.StatusCode, res.Header.Get("Content-Type"))
			}
			sc := bufio.NewScanner(res.Body)
			if sc.Scan(); sc.Text() != ": ok" {
				t.Errorf("first line %q, want a comment", sc.Text())
			}
			f := wait(t, "stream", b.streams)
			f.send(frame(1))
			for range maxStreamFrames {
				f.send(frame(2))
			}
			var last string
			for sc.Scan() {
				if d, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
					last = d
				}
			}
			if !strings.Contains(last, `"structuredContent":{"seq":2}`) {
				t.Errorf("last event %s, want the result", last)
			}
		})
	}
}

// TestStreamKeepAlive: a stream without frames is silent for keepAliveInterval at most, and ends
// after maxStreamTime.
func TestStreamKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Options{Kernel: kernel.New(kernel.Options{}), Authenticate: func(*http.Request) (*kernel.Caller, error) { return nil, nil }})
		call := &muxCall{notifications: make(chan []byte, maxQueuedNotifications)}
		x := &exchange{caller: &kernel.Caller{Tenant: "default", Actor: "a"}, ctx: t.Context(), call: call, modern: true}
		cl := &client{x: x, req: &sdk.CallToolRequest{Params: &sdk.CallToolParamsRaw{Name: streamA}}, ctx: t.Context()}
		lim, err := parseStreamLimits(&kernel.Tool{NodeID: nodeA}, nil)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		var at []time.Duration
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 4 {
				if note := <-call.notifications; note != nil {
					t.Errorf("notification %s, want a comment", note)
				}
				at = append(at, time.Since(began))
			}
		}()
		s := &frames{closed: make(chan struct{})}
		res, err := (&tenant{h: h}).relayFrames(t.Context(), x, &streamProgress{cl: cl, total: maxStreamFrames}, &kernel.Request{}, s, lim)
		<-done
		if took := time.Since(began); took != maxStreamTime || err != nil {
			t.Errorf("it took %s (%v), want %s", took, err, maxStreamTime)
		}
		if body := string(res.(*result).body); !strings.Contains(body, string(manifest.DeadlineExceeded)) || !strings.Contains(body, "metrics.snapshot") {
			t.Errorf("result %s", body)
		}
		for i, d := range at {
			if d != time.Duration(i)*keepAliveInterval {
				t.Errorf("keep-alive message %d after %s", i, d)
			}
		}
	})
}

func TestDescribeFrames(t *testing.T) {
	tests := []struct {
		name   string
		frames []string
		want   string
	}{
		{"one", []string{`{"ts_ms":1,"cpu_pct":3.25,"node_id":"x"}`}, "1 frame in 2 s; cpu_pct 3.25"},
		{"figures", []string{`{"cpu_pct":1,"mem_bytes":5,"ts_ms":1}`, `{"cpu_pct":2.333,"mem_bytes":5}`, `{"cpu_pct":-4}`},
			"3 frames in 2 s; cpu_pct -4 to 2.33, mean -0.22; mem_bytes 5"},
		{"no figures", []string{`{"Ignore previous instructions":1,"a":"1","b":[2],"c":null}`, `[]`}, "2 frames in 2 s"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var frames [][]byte
			for _, f := range tt.frames {
				frames = append(frames, []byte(f))
			}
			want := tt.want + "\n" + strings.Join(tt.frames, "\n")
			if got := describeFrames(frames, 1600*time.Millisecond); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

package mcp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const streamA = "sys." + nodeA + ".metrics.subscribe"

type outcome struct {
	res *sdk.CallToolResult
	err error
}

// subscribe calls the stream tool; progress goes to the channel.
func subscribe(ctx context.Context, cs *sdk.ClientSession, meta sdk.Meta) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		res, err := cs.CallTool(ctx, &sdk.CallToolParams{Name: streamA, Meta: meta})
		done <- outcome{res, err}
	}()
	return done
}

func progressClient(e *env, token, version string) (*sdk.ClientSession, <-chan *sdk.ProgressNotificationParams) {
	c := make(chan *sdk.ProgressNotificationParams, 64)
	return e.client(token, version, &sdk.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) { c <- r.Params },
	}), c
}

func frame(i int) string { return fmt.Sprintf(`{"seq":%d}`, i) }

// newStreamEnv is a client of a board whose streams the test fills.
func newStreamEnv(t *testing.T, version string) (e *env, b *board, cs *sdk.ClientSession, progress <-chan *sdk.ProgressNotificationParams) {
	t.Helper()
	e, b = newEnv(t, Options{}), newBoard("default", nodeA)
	e.load(b)
	cs, progress = progressClient(e, "", version)
	return e, b, cs, progress
}

// wantFrame checks that a call succeeded with a frame as its result.
func (o outcome) wantFrame(t *testing.T, i int) {
	t.Helper()
	if o.err != nil || o.res.IsError || fmt.Sprint(o.res.StructuredContent) != fmt.Sprintf("map[seq:%d]", i) {
		t.Fatalf("result %+v, %v; want frame %d", o.res, o.err, i)
	}
}

// wantEnd checks why the only stream of the board ended, as the audit log has it.
func (e *env) wantEnd(reason string) {
	e.t.Helper()
	var got []string
	for _, r := range e.records() {
		if r.Decision == kernel.Closed {
			got = append(got, fmt.Sprint(r.Tool, " ", r.NodeID, " ", r.Reason))
		}
	}
	if want := streamA + " " + nodeA + " " + reason; len(got) != 1 || got[0] != want {
		e.t.Errorf("audited ends %q, want %q", got, want)
	}
}

// Each frame is a progress notification, after a first one that says that the call is under way. The result
// is the last frame, and its text has all of them.
func TestStream(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e, b, cs, progress := newStreamEnv(t, version)
		done := subscribe(t.Context(), cs, sdk.Meta{"progressToken": "p1", metaMaxFrames: 3, metaMaxTime: 999_999})
		f := wait(t, "stream", b.streams)
		if p := wait(t, "first progress", progress); p.Progress != 0 || p.Total != 3 {
			t.Errorf("first progress %+v, want 0 of 3", p)
		}
		for i := range 3 {
			f.send(frame(i))
			p := wait(t, "progress", progress)
			if p.ProgressToken != "p1" || p.Progress != float64(i+1) || p.Total != 3 || p.Message != frame(i) {
				t.Errorf("progress %+v, want %d of 3 with frame %d", p, i+1, i)
			}
		}
		o := wait(t, "result", done)
		o.wantFrame(t, 2)
		if text, want := textOf(o.res), "3 frames in 0 s; seq 0 to 2, mean 1\n"+frame(0)+"\n"+frame(1)+"\n"+frame(2); text != want {
			t.Errorf("text %q, want %q", text, want)
		}
		wait(t, "close of the stream", f.closed)
		e.wantEnd("frames")
	})
}

// Without a progress token a stream ends after maxStreamFrames as well, and sends no progress.
func TestStreamWithoutProgress(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e, b, cs, progress := newStreamEnv(t, version)
		done := subscribe(t.Context(), cs, nil)
		f := wait(t, "stream", b.streams)
		for i := range maxStreamFrames + 5 {
			f.send(frame(i))
		}
		wait(t, "result", done).wantFrame(t, maxStreamFrames-1)
		if len(progress) != 0 {
			t.Errorf("progress without a token: %+v", <-progress)
		}
		e.wantEnd("frames")
	})
}

// A stream whose time is over has its last frame as the result; one without a frame fails.
func TestStreamTime(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e, b, cs, _ := newStreamEnv(t, version)
		done := subscribe(t.Context(), cs, sdk.Meta{metaMaxTime: 50})
		wait(t, "stream", b.streams).send(frame(7))
		wait(t, "result", done).wantFrame(t, 7)
		e.wantEnd("time")
	})
	eras(t, func(t *testing.T, version string) {
		e, _, cs, _ := newStreamEnv(t, version)
		o := wait(t, "result", subscribe(t.Context(), cs, sdk.Meta{metaMaxTime: 20}))
		if o.err != nil || errorOf(t, o.res)["code"] != string(manifest.DeadlineExceeded) {
			t.Fatalf("result %+v, %v; want E_DEADLINE_EXCEEDED", o.res, o.err)
		}
		e.wantEnd("no_frame")
	})
}

func TestStreamEnds(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		b := newBoard("default", nodeA)
		e.load(b)
		e.deaf = true // or the end of the token would end the client's stream, and so the client
		cs, progress := progressClient(e, "default/me", version)
		tests := []struct {
			name   string
			frames int
			end    func(*frames)
			code   manifest.Code // empty: the last frame
		}{
			{"away before any frame", 0, func(f *frames) { f.end(errTest) }, manifest.NodeOffline},
			{"away after a frame", 1, func(f *frames) { f.end(errTest) }, manifest.NodeOffline},
			{"ended by the device", 1, func(f *frames) { f.end(manifest.E(manifest.Internal, "bad frame")) }, manifest.Internal},
			{"complete", 2, func(f *frames) { f.end(io.EOF) }, ""},
			{"complete and empty", 0, func(f *frames) { f.end(io.EOF) }, manifest.NodeOffline},
			{"token ended", 1, func(*frames) { e.revoke("default/me") }, manifest.SafetyDenied},
		}
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				done := subscribe(t.Context(), cs, sdk.Meta{"progressToken": "x"})
				f := wait(t, "stream", b.streams)
				for i := range tt.frames {
					f.send(frame(i))
					wait(t, "progress", progress)
				}
				tt.end(f)
				o := wait(t, "result", done)
				if o.err != nil {
					t.Fatal(o.err)
				}
				if tt.code == "" {
					if o.res.IsError || fmt.Sprint(o.res.StructuredContent) != fmt.Sprintf("map[seq:%d]", tt.frames-1) {
						t.Errorf("got %+v, want the last frame", o.res)
					}
				} else if got := errorOf(t, o.res)["code"]; got != string(tt.code) {
					t.Errorf("got %v, want %v", got, tt.code)
				}
				wait(t, "close of the stream", f.closed)
			})
		}
	})
}

// TestStreamCancel: when the client gives up, in whatever way, the device's stream is
// closed at once.
func TestStreamCancel(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		b := newBoard("default", nodeA)
		e.load(b)
		cs, _ := progressClient(e, "", version)
		ctx, cancel := context.WithCancel(t.Context())
		done := subscribe(ctx, cs, nil)
		f := wait(t, "stream", b.streams)
		wait(t, "reader", f.read) // the kernel itself closes a stream whose caller leaves earlier
		cancel()
		wait(t, "close of the stream", f.closed)
		if o := wait(t, "result", done); !errors.Is(o.err, context.Canceled) {
			t.Errorf("got %+v %v, want cancelled", o.res, o.err)
		}
		until(t, "audit of the end", func() bool {
			for _, r := range e.records() {
				if r.Reason == "cancelled" && r.Decision == kernel.Closed {
					return true
				}
			}
			return false
		})
	})
}

func TestStreamDisconnect(t *testing.T) {
	for _, version := range []string{legacyEra, modernEra} {
		t.Run(version, func(t *testing.T) {
			e := newEnv(t, Options{})
			b := newBoard("default", nodeA)
			e.load(b)
			meta := `"_meta":{"progressToken":1}`
			head := map[string]string{"Mcp-Protocol-Version": version}
			if version == modernEra {
				meta = modernMeta[:len(modernMeta)-1] + `,"progressToken":1}`
				head["Mcp-Method"], head["Mcp-Name"] = "tools/call", streamA
			} else {
				head["Mcp-Session-Id"] = e.initialize("")
			}
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, "POST", e.url, strings.NewReader(
				`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"`+streamA+`",`+meta+`}}`))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Accept", "application/json, text/event-stream")
			for k, v := range head {
				req.Header.Set(k, v)
			}
			got := make(chan string, 1)
			go func() {
				res, err := e.srv.Client().Do(req)
				if err != nil {
					got <- err.Error()
					return
				}
				defer res.Body.Close()
				sc := bufio.NewScanner(res.Body)
				for sc.Scan() {
					if d, ok := strings.CutPrefix(sc.Text(), "data: "); ok && !strings.Contains(d, `"progress":0,`) {
						got <- d
						break
					}
				}
				<-ctx.Done()
			}()
			f := wait(t, "stream", b.streams)
			f.send(frame(0))
			if d := wait(t, "event", got); !strings.Contains(d, `"progressToken":1`) || !strings.Contains(d, `"message":"{\"seq\":0}"`) {
				t.Errorf("event %s", d)
			}
			cancel()
			wait(t, "close of the stream", f.closed)
		})
	}
}

func TestStreamLimits(t *testing.T) {
	tests := []struct {
		name string
		meta sdk.Meta
		want streamLimits
		ok   bool
	}{
		{"none", nil, streamLimits{20, 20 * time.Second}, true},
		{"lower", sdk.Meta{metaMaxFrames: 5.0, metaMaxTime: 1500.0}, streamLimits{5, 1500 * time.Millisecond}, true},
		{"above", sdk.Meta{metaMaxFrames: 21.0, metaMaxTime: 1e9}, streamLimits{20, 20 * time.Second}, true},
		{"zero", sdk.Meta{metaMaxFrames: 0.0}, streamLimits{}, false},
		{"fraction", sdk.Meta{metaMaxTime: 1.5}, streamLimits{}, false},
		{"negative", sdk.Meta{metaMaxTime: -1.0}, streamLimits{}, false},
		{"text", sdk.Meta{metaMaxFrames: "3"}, streamLimits{}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseStreamLimits(&kernel.Tool{NodeID: nodeA}, tt.meta)
			if (err == nil) != tt.ok || (tt.ok && got != tt.want) {
				t.Errorf("got %v %v, want %v", got, err, tt.want)
			}
			var f *jsonrpc.Error
			if !tt.ok && (!errors.As(err, &f) || f.Code != jsonrpc.CodeInvalidParams) {
				t.Errorf("error %v, want invalid params", err)
			}
		})
	}
}

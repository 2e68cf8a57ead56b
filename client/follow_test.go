package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"agentctl/client"
)

const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"

// script is a relay that answers subscription N with the handler N, and other requests by path.
type script struct {
	streams []http.HandlerFunc
	other   http.HandlerFunc // nil: 404
	history []string         // arguments that were asked for
	visits  int
}

func (s *script) serve(w http.ResponseWriter, r *http.Request) {
	var call struct {
		Tool      string
		Arguments json.RawMessage
	}
	switch {
	case r.Method == http.MethodPost:
		_ = json.NewDecoder(r.Body).Decode(&call)
		if strings.HasPrefix(call.Tool, "syshist.") {
			s.history = append(s.history, string(call.Arguments))
			s.other(w, r)
			return
		}
		s.streams[s.visits](w, r)
		s.visits++
	case r.URL.Path == "/readyz":
		answer(200, "ok")(w, r)
	default:
		answer(200, `{"nodes":[]}`)(w, r)
	}
}

// follow runs a Follow against a script until it ends; it returns the times of the frames,
// with a b behind one of the history, and the gaps.
func follow(t *testing.T, s *script, open func() (*client.Client, error), f client.Follow) (frames string, gaps []client.Gap, err error) {
	t.Helper()
	c := serve(t, s.serve)
	f.Tool, f.Open = "sys."+node+".metrics.subscribe", func() (*client.Client, error) { return c, nil }
	if open != nil {
		f.Open = open
	}
	f.Arguments = []byte(`{"interval_ms":1000}`)
	f.OnFrame = func(frame []byte) error {
		var v struct {
			TS         int64 `json:"ts_ms"`
			Backfilled bool
		}
		if err := json.Unmarshal(frame, &v); err != nil {
			t.Errorf("%s: %v", frame, err)
		}
		v.TS -= base
		frames += fmt.Sprint(v.TS)
		if v.Backfilled {
			frames += "b"
		}
		if frames += " "; v.TS == 99_000 {
			return client.ErrStop
		}
		return nil
	}
	f.OnGap = func(g client.Gap) { gaps = append(gaps, g) }
	err = f.Run(t.Context())
	return frames, gaps, err
}

// base is time 0 of these tests: no frame may be older.
const base int64 = 1_700_000_000_000

func at(seconds ...int) []string {
	var out []string
	for _, s := range seconds {
		out = append(out, fmt.Sprintf(`{"ts_ms":%d,"node_id":%q,"cpu_pct":1,"mem_bytes":1,"mem_total_bytes":2,"disk_pct":3,"load_1m":1,"load_5m":1,"load_15m":1}`, base+int64(s)*1000, node))
	}
	return out
}

// A stream comes back after each failure that may pass, and says what was missed; a frame that
// the relay repeats is no gap.
func TestFollow(t *testing.T) {
	s := &script{streams: []http.HandlerFunc{
		frames("", at(1, 2)...),
		answer(503, `{"error":{"code":"E_NODE_OFFLINE","message":"x"}}`),
		frames("event: close\ndata: {\"code\":4503,\"reason\":\"device_offline\"}\n\n", at(2, 3)...),
		frames("", at(10)...),
		answer(401, `{"error":{"code":"E_SAFETY_DENIED","message":"revoked"}}`),
	}}
	retries := 0
	got, gaps, err := follow(t, s, nil, client.Follow{OnRetry: func(error, time.Duration) { retries++ }})
	var denied *client.Error
	if got != "1000 2000 3000 10000 " || retries != 4 || !errors.As(err, &denied) || denied.Status != 401 {
		t.Errorf("frames %s, %d retries, %v", got, retries, err)
	}
	if len(gaps) != 1 || gaps[0] != (client.Gap{FromMS: base + 3000, ToMS: base + 10_000, Missed: 6}) {
		t.Errorf("gaps %+v", gaps)
	}

	_, _, err = follow(t, &script{streams: []http.HandlerFunc{answer(503, `{"error":{"code":"E_NODE_OFFLINE","message":"x"}}`)}}, nil, client.Follow{})
	if !errors.As(err, &denied) || denied.Code != "E_NODE_OFFLINE" {
		t.Errorf("the first subscription failed with %v", err)
	}
	const normal = "event: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n"
	if got, _, err := follow(t, &script{streams: []http.HandlerFunc{frames(normal, at(1)...)}}, nil, client.Follow{}); got != "1000 " || err != nil {
		t.Errorf("after a normal close: %s, %v", got, err)
	}
}

// A normal close because the token has ended: a replaced token is used.
func TestFollowNewToken(t *testing.T) {
	const normal = "event: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n"
	s := &script{streams: []http.HandlerFunc{frames(normal, at(1)...), func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer new" {
			t.Errorf("the token is %q", r.Header.Get("Authorization"))
		}
		frames("", at(99)...)(w, r)
	}}}
	url := serve(t, s.serve).URL()
	open := func() (*client.Client, error) {
		token := "old"
		if s.visits > 0 {
			token = "new"
		}
		return client.New(client.Options{URL: url, Token: token})
	}
	if got, gaps, err := follow(t, s, open, client.Follow{}); got != "1000 99000 " || err != nil || len(gaps) != 1 || gaps[0].Missed != 97 {
		t.Errorf("frames %s, %+v, %v", got, gaps, err)
	}
}

// The gap is filled in order and before the live frame; steps that lack a value stay out.
func TestFollowBackfill(t *testing.T) {
	pages := []string{
		`{"from_ms":1700000002500,"step_ms":1000,"metrics":{"cpu_pct":[1,2],"mem_bytes":[1,1],"mem_total_bytes":[1,1],"disk_pct":[1,1],"load_1m":[1,1],"load_5m":[1,1],"load_15m":[1,1]},"next_cursor":"1700000004500"}`,
		`{"from_ms":1700000004500,"step_ms":1000,"metrics":{"cpu_pct":[3,null],"mem_bytes":[1,1],"mem_total_bytes":[1,1],"disk_pct":[null,1],"load_1m":[1,1],"load_5m":[1,1],"load_15m":[1.25,1]}}`,
	}
	s := &script{streams: []http.HandlerFunc{frames("", at(1, 2)...), frames("", at(7, 99)...)}}
	s.other = func(w http.ResponseWriter, r *http.Request) { answer(200, pages[len(s.history)-1])(w, r) }
	got, gaps, err := follow(t, s, nil, client.Follow{Backfill: true})
	if got != "1000 2000 3000b 4000b 7000 99000 " || err != nil {
		t.Errorf("frames %s, %v", got, err)
	}
	if len(gaps) != 1 || gaps[0] != (client.Gap{FromMS: base + 2000, ToMS: base + 7000, Missed: 4, Filled: 2}) {
		t.Errorf("gaps %+v", gaps)
	}
	want := `{"from_ms":1700000002500,"to_ms":1700000006500,"step_ms":1000,"metrics":["cpu_pct","mem_bytes","mem_total_bytes","disk_pct","load_1m","load_5m","load_15m"]}`
	if len(s.history) != 2 || s.history[0] != want || !strings.HasSuffix(s.history[1], `,"cursor":"1700000004500"}`) {
		t.Errorf("asked %q", s.history)
	}

	s = &script{streams: []http.HandlerFunc{frames("", at(1, 2)...), frames("", at(7, 99)...)}, other: answer(400, `{"error":{"code":"E_BAD_REQUEST","message":"x"}}`)}
	if got, gaps, err = follow(t, s, nil, client.Follow{Backfill: true}); got != "1000 2000 7000 99000 " || err != nil || !errors.Is(gaps[0].Err, client.ErrNoHistory) {
		t.Errorf("without a history: frames %s, %+v, %v", got, gaps, err)
	}
}

// A refusal for the rate is repeated; pages that do not advance end the query.
func TestHistory(t *testing.T) {
	visits := 0
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if visits++; visits == 1 {
			answer(429, `{"error":{"code":"E_RATE_LIMITED","message":"x","retry_after_ms":1}}`)(w, r)
			return
		}
		answer(200, `{"from_ms":1000,"step_ms":1000,"metrics":{"cpu_pct":[1]},"next_cursor":"1000"}`)(w, r)
	})
	points := 0
	err := c.History(t.Context(), node, client.HistoryQuery{}, func(ts int64, values map[string]float64) error { points++; return nil })
	var protocol *client.ProtocolError
	if !errors.As(err, &protocol) || visits != 3 || points != 2 {
		t.Errorf("%d visits, %d points, %v", visits, points, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.History(ctx, node, client.HistoryQuery{}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

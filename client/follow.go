package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"agentctl/manifest"
)

// Follow is a metric stream that is subscribed to again when it ends for a reason that may
// pass: a broken connection, a board that went offline, a relay that restarts, a token that
// was replaced. After each interruption it says what was missed and, with Backfill, fills the
// gap from the board's own history.
type Follow struct {
	// Open makes the client of each attempt, so that a replaced token is used. Required.
	Open      func() (*Client, error)
	Tool      string // sys.NODE.metrics.subscribe
	Arguments json.RawMessage
	Backfill  bool

	// OnFrame gets each frame, a JSON object. One of the board's history has the additional
	// member "backfilled": true. ErrStop ends the stream without an error, another one with it.
	OnFrame func(frame []byte) error
	// OnRetry is called before each wait for a new attempt, OnGap with the first frame after
	// an interruption, when the missed ones have been passed to OnFrame. nil: not called.
	OnRetry func(err error, wait time.Duration)
	OnGap   func(Gap)

	// State of the goroutine that called Run.
	interval int64 // ms between frames
	began    bool  // a frame has arrived
	last     int64 // ts_ms of the last live frame
	isGap    bool  // the stream was interrupted since the last frame
	stopped  bool  // OnFrame returned ErrStop
}

// Gap is a time from which no live frames arrived.
type Gap struct {
	FromMS, ToMS int64 // of the frames before and after it, milliseconds since 1970
	Missed       int   // frames; 0 after a short interruption
	Filled       int   // of those, from the board's history
	Err          error // why not more could be filled; nil: the history has no more
}

// defaultInterval is the cadence of a stream that names none, in ms (RFC-0009 §4).
const defaultInterval = 5000

// Run follows the stream until ctx ends, or the relay ends it for good. The first
// subscription must succeed. It returns nil when ctx ends after the first frame, when OnFrame
// returned ErrStop, and when a relay that still serves this token closed the stream normally.
func (f *Follow) Run(ctx context.Context) error {
	var retry backoff
	f.interval = intervalOf(f.Arguments)
	for {
		c, err := f.Open()
		if err == nil {
			err = c.Metrics(ctx, f.Tool, f.Arguments, func(frame []byte) error {
				f.began = true
				retry.reset()
				return f.onFrame(ctx, c, frame)
			})
			if err == nil && ctx.Err() == nil && !f.stopped {
				if err = f.whyClosed(ctx, c); err == nil {
					return nil
				}
			}
		}
		switch {
		case ctx.Err() != nil && f.began:
			return nil
		case err == nil, !f.began, err != errRelayStops && err != errNewToken && !isTemporary(err):
			return err
		}
		f.isGap = true
		wait := retry.next(err)
		if f.OnRetry != nil {
			f.OnRetry(err, wait)
		}
		if !sleep(ctx, wait) {
			return nil
		}
	}
}

// errRelayStops and errNewToken are the reasons of a normal close after which a new
// subscription is worthwhile.
var (
	errRelayStops = errors.New("the relay is stopping")
	errNewToken   = errors.New("the token has ended; there is a new one")
)

// whyClosed finds out why the relay closed a stream normally (1000): because it stops, or
// because the token has ended (docs/protocol.md). nil: for none of these.
func (f *Follow) whyClosed(ctx context.Context, c *Client) error {
	var answer *Error
	var transport *TransportError
	switch err := c.Ready(ctx); {
	case errors.As(err, &answer) && answer.Status == http.StatusServiceUnavailable, errors.As(err, &transport):
		return errRelayStops
	}
	if next, err := f.Open(); err == nil && next.token != c.token {
		return errNewToken
	}
	if err := c.getJSON(ctx, "/v1/nodes?limit=1", &struct{}{}); errors.As(err, &answer) && answer.Status == http.StatusUnauthorized {
		return err
	}
	return nil
}

// frameTime is the part of a frame that Follow reads.
type frameTime struct {
	TS int64 `json:"ts_ms"`
}

// onFrame passes a live frame on, after what was missed before it. The frame that a relay
// repeats to a new subscriber is dropped.
func (f *Follow) onFrame(ctx context.Context, c *Client, frame []byte) error {
	var t frameTime
	_ = json.Unmarshal(frame, &t) // a frame without a time makes no gap
	if f.isGap {
		f.isGap = false
		if t.TS == f.last && t.TS != 0 {
			return nil
		}
		frame = bytes.Clone(frame) // the reader's buffer is not ours during other requests
		if err := f.reportGap(ctx, c, t.TS); err != nil {
			return err
		}
	}
	f.last = t.TS
	return f.pass(frame)
}

// pass calls OnFrame.
func (f *Follow) pass(frame []byte) error {
	err := f.OnFrame(frame)
	f.stopped = errors.Is(err, ErrStop)
	return err
}

// reportGap fills and reports the gap before a frame. Nothing is missed after a board's clock
// was set back.
func (f *Follow) reportGap(ctx context.Context, c *Client, until int64) error {
	g := Gap{FromMS: f.last, ToMS: until, Missed: int(math.Round(float64(until-f.last)/float64(f.interval))) - 1}
	g.Missed = max(g.Missed, 0)
	if f.Backfill && g.Missed > 0 {
		if err := f.fill(ctx, c, &g); err != nil {
			return err
		}
	}
	if f.OnGap != nil {
		f.OnGap(g)
	}
	return nil
}

// frameMetrics are the fields of a frame after ts_ms and node_id, in order.
var frameMetrics = []string{"cpu_pct", "mem_bytes", "mem_total_bytes", "disk_pct", "load_1m", "load_5m", "load_15m"}

// fill passes the frames of a gap on, of one step each, stamped with the middle of the step.
// Steps for which the board recorded nothing, or not all of a frame, are left out.
func (f *Follow) fill(ctx context.Context, c *Client, g *Gap) (err error) {
	name, _ := manifest.ParseToolName(f.Tool)
	q := HistoryQuery{FromMS: g.FromMS + f.interval/2, ToMS: g.ToMS - f.interval/2, StepMS: f.interval, Metrics: frameMetrics}
	if q.ToMS <= q.FromMS {
		return nil
	}
	var stopped error
	g.Err = c.History(ctx, name.NodeID, q, func(ts int64, values map[string]float64) error {
		if len(values) < len(frameMetrics) {
			return nil
		}
		frame := fmt.Appendf(nil, `{"ts_ms":%d,"node_id":%q`, ts+f.interval/2, name.NodeID)
		for _, metric := range frameMetrics {
			v, _ := json.Marshal(values[metric]) // it was JSON before
			frame = fmt.Appendf(frame, `,%q:%s`, metric, v)
		}
		g.Filled++
		stopped = f.pass(append(frame, `,"backfilled":true}`...))
		return stopped
	})
	if stopped != nil {
		return stopped
	}
	return ctx.Err()
}

// intervalOf is the cadence that a subscription asks for, in ms.
func intervalOf(arguments json.RawMessage) int64 {
	in := struct {
		IntervalMS float64 `json:"interval_ms"`
	}{defaultInterval}
	if json.Unmarshal(arguments, &in) != nil || in.IntervalMS < 1 {
		return defaultInterval // the relay refuses it, or there are none
	}
	return int64(in.IntervalMS)
}

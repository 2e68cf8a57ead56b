package client

import (
	"context"
	"encoding/json"
	"errors"

	"agentctl/manifest"
)

// HistoryQuery asks for what a board has recorded: one value of each metric per step, from
// FromMS to ToMS, which is not included. Times are milliseconds since 1970 by the board's
// clock; ToMS 0 is now. Metrics and the meaning of the rest: docs/protocol.md, History.
type HistoryQuery struct {
	FromMS    int64    `json:"from_ms"`
	ToMS      int64    `json:"to_ms"`
	StepMS    int64    `json:"step_ms"`
	Metrics   []string `json:"metrics"`
	Aggregate string   `json:"aggregate,omitempty"` // "": the last of each step
	Cursor    string   `json:"cursor,omitempty"`
}

// ErrNoHistory reports a board that does not answer system.history: it records nothing, or
// its agentctl is too old.
var ErrNoHistory = errors.New("keeps no history, or runs an agentctl without it")

// HasHistory reports whether the node's last manifest has the capability system.history.
func (n *Node) HasHistory() bool {
	for i := range n.Capabilities {
		if n.Capabilities[i].Kind == manifest.KindHistory {
			return true
		}
	}
	return false
}

// maxRateRetries bounds how often one page is asked for again when the board is busy.
const maxRateRetries = 10

// History calls fn with each step that has a value, in ascending order: its begin and the
// values by metric. It reads one page after the other. When the board has no such tool the
// error is ErrNoHistory.
func (c *Client) History(ctx context.Context, nodeID string, q HistoryQuery, fn func(ts int64, values map[string]float64) error) error {
	tool := manifest.ToolName{Short: "syshist", NodeID: nodeID, CapID: "history", Verb: manifest.VerbQuery}.String()
	for {
		body, err := c.historyPage(ctx, tool, &q)
		if err != nil {
			return err
		}
		var page struct {
			FromMS  int64                 `json:"from_ms"`
			StepMS  int64                 `json:"step_ms"`
			Metrics map[string][]*float64 `json:"metrics"`
			Next    string                `json:"next_cursor"`
		}
		if err := json.Unmarshal(body, &page); err != nil {
			return &ProtocolError{"unexpected answer to " + tool, err}
		}
		points := 0
		for _, column := range page.Metrics {
			points = max(points, len(column))
		}
		for i := range points {
			values := make(map[string]float64, len(page.Metrics))
			for name, column := range page.Metrics {
				if i < len(column) && column[i] != nil {
					values[name] = *column[i]
				}
			}
			if len(values) == 0 {
				continue
			}
			if err := fn(page.FromMS+int64(i)*page.StepMS, values); err != nil {
				return err
			}
		}
		if page.Next == "" {
			return nil
		}
		if page.Next == q.Cursor || points == 0 {
			return &ProtocolError{What: "the pages of " + tool + " do not advance"}
		}
		q.Cursor = page.Next
	}
}

// historyPage reads one page. A board takes few of these calls a second, so a refusal for the
// rate is repeated after a wait.
func (c *Client) historyPage(ctx context.Context, tool string, q *HistoryQuery) (json.RawMessage, error) {
	var retry backoff
	for attempt := 0; ; attempt++ {
		body, err := c.Call(ctx, tool, q)
		var answer *Error
		switch {
		case !errors.As(err, &answer):
			return body, err
		case answer.Code == manifest.BadRequest:
			return nil, ErrNoHistory // the name is right, so the node has no such tool
		case answer.Code != manifest.RateLimited || attempt == maxRateRetries:
			return nil, err
		}
		if !sleep(ctx, retry.next(err)) {
			return nil, ctx.Err()
		}
	}
}

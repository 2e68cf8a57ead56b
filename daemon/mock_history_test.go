package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober"
)

// A mock board answers system.history with a day as one value, and with pages of minutes.
func TestMockHistory(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	h := handlers.NewHistory(mockHistory{prober.NewMockHistory(3, now)}, func() (int64, bool) { return now.UnixMilli(), true })
	ask := func(step time.Duration, aggregate string) (answer struct {
		Metrics map[string][]*float64
		Next    string `json:"next_cursor"`
	}) {
		t.Helper()
		from := now.Add(-24 * time.Hour).UnixMilli()
		out, _, err := h.Call(t.Context(), manifest.ToolName{}, fmt.Appendf(nil, `{"from_ms":%d,"to_ms":%d,"step_ms":%d,"metrics":["temperature.hottest_c","wear.used_pct"],"aggregate":%q}`,
			from, now.UnixMilli(), step.Milliseconds(), aggregate))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &answer); err != nil {
			t.Fatal(err)
		}
		return answer
	}
	value := func(aggregate string) float64 {
		t.Helper()
		a := ask(24*time.Hour, aggregate)
		got := a.Metrics["temperature.hottest_c"]
		if len(got) != 1 || got[0] == nil || a.Metrics["wear.used_pct"][0] != nil || a.Next != "" {
			t.Fatalf("%s of a day: %v", aggregate, a)
		}
		return *got[0]
	}
	if low, mean, high := value("min"), value("mean"), value("max"); low >= mean || mean >= high {
		t.Errorf("min %v, mean %v, max %v", low, mean, high)
	}
	value("last")
	if a := ask(time.Minute, "mean"); len(a.Metrics["temperature.hottest_c"]) != 24*60 || a.Next != "" {
		t.Errorf("%d minutes, then %q", len(a.Metrics["temperature.hottest_c"]), a.Next)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := mockHistory{prober.NewMockHistory(3, now)}.Series(ctx, handlers.HistoryQuery{EndMS: 10, StepMS: 1}, nil)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled series: %v", err)
	}
}

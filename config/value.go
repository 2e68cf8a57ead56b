package config

import (
	"time"

	"agentctl/duration"
	"agentctl/prober/alert"
)

// Plain returns a value as JSON and YAML have it: durations and rules become texts and
// objects.
//
// Values of other types are returned as they are. The result shares no memory with rules.
func Plain(v any) any {
	switch v := v.(type) {
	case time.Duration:
		return duration.Format(v)
	case []alert.Rule:
		rules := make([]RuleText, len(v))
		for i, r := range v {
			rules[i] = RuleText{r.ID, r.Metric, string(r.Op), r.Threshold, r.Hysteresis, duration.Format(r.For), duration.Format(r.ClearFor), string(r.Level)}
		}
		return rules
	}
	return v
}

// RuleText is an alert rule as a file has it: its durations are texts in the grammar of package
// duration, and its threshold is in the unit of the metric.
type RuleText struct {
	ID         string  `json:"id" yaml:"id"`
	Metric     string  `json:"metric" yaml:"metric"`
	Op         string  `json:"op" yaml:"op"`
	Threshold  float64 `json:"threshold" yaml:"threshold"`
	Hysteresis float64 `json:"hysteresis" yaml:"hysteresis"`
	For        string  `json:"for" yaml:"for"`
	ClearFor   string  `json:"clear_for" yaml:"clear_for"`
	Level      string  `json:"level" yaml:"level"`
}

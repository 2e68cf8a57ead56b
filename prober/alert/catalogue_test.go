package alert

import (
	"slices"
	"testing"

	"agentctl/prober"
)

// TestMetricsCoverCatalogue: every sensor that names a metric can be used by a rule, and the
// default rules use metrics that there are.
func TestMetricsCoverCatalogue(t *testing.T) {
	n := 0
	for _, s := range prober.Sensors() {
		if s.Metric.Name == "" {
			continue
		}
		n++
		rule := Rule{ID: "r", Metric: s.Metric.Name, Op: AtLeast, Threshold: min(s.Metric.Max, 2), Level: Warn}
		if err := Check([]Rule{rule}); err != nil {
			t.Errorf("%s: %v", s.Metric.Name, err)
		}
		if e, err := New([]Rule{rule}); err != nil || slices.Contains(e.Modules(), s.Module.String()) != s.Module.IsOptional() {
			t.Errorf("%s needs the modules %v, %v", s.Metric.Name, e.Modules(), err)
		}
	}
	if len(MetricNames()) != n {
		t.Errorf("%d metrics of %d in the catalogue", len(MetricNames()), n)
	}
}

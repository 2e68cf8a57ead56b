package alert

import (
	"slices"

	"agentctl/prober"
)

// metrics are the sensors that rules can use. The published schema of the configuration
// lists those of the network last.
var metrics = func() (list []*prober.Sensor) {
	var network []*prober.Sensor
	sensors := prober.Sensors()
	for i := range sensors {
		switch s := &sensors[i]; {
		case s.Metric.Name == "":
		case s.Module == prober.ModuleNetwork:
			network = append(network, s)
		default:
			list = append(list, s)
		}
	}
	return append(list, network...)
}()

// MetricNames returns the metrics that a rule can watch.
func MetricNames() []string {
	names := make([]string, len(metrics))
	for i, s := range metrics {
		names[i] = s.Metric.Name
	}
	return names
}

// sensorOf returns the sensor of a metric, nil when there is none.
func sensorOf(metric string) *prober.Sensor {
	if i := slices.IndexFunc(metrics, func(s *prober.Sensor) bool { return s.Metric.Name == metric }); i >= 0 {
		return metrics[i]
	}
	return nil
}

// describe returns the value of a metric in words.
func describe(s *prober.Sensor, v float64) string {
	switch {
	case s.Form != prober.FormFlag:
		return s.Metric.Noun + " is " + format(s, v)
	case v == 0:
		return s.Metric.Good
	}
	return s.Metric.Noun
}

func format(s *prober.Sensor, v float64) string {
	if s.Unit == "" || s.Metric.HasUnit {
		return number(v)
	}
	return number(v) + " " + s.Unit
}

package alert

import (
	"slices"
	"strings"

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

// netPrefix begins the metrics of the module network, which may also begin with the module's name.
const netPrefix = "net_"

// MetricName returns the usual name of a metric: net_bytes_in_per_s for network_bytes_in_per_s.
func MetricName(name string) string {
	if rest, ok := strings.CutPrefix(name, "network_"); ok && sensorOf(netPrefix+rest) != nil {
		return netPrefix + rest
	}
	return name
}

// OtherMetricNames returns the names that MetricName gives usual ones for.
func OtherMetricNames() (names []string) {
	for _, s := range metrics {
		if rest, ok := strings.CutPrefix(s.Metric.Name, netPrefix); ok {
			names = append(names, "network_"+rest)
		}
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

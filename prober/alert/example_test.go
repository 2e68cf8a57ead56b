package alert_test

import (
	"fmt"
	"time"

	"agentctl/prober"
	"agentctl/prober/alert"
)

func Example() {
	engine, err := alert.New([]alert.Rule{{
		ID: "disk-full", Metric: "disk_pct", Op: alert.AtLeast, Threshold: 95, Hysteresis: 2,
		For: 2 * time.Second, Level: alert.Error,
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	for i, pct := range []float64{94, 96, 97, 98, 94, 92, 91, 90} {
		for _, e := range engine.Evaluate(prober.Sample{DiskPct: pct, Mono: time.Duration(i) * time.Second}) {
			fmt.Println(i, e.Level, e.RuleID, e.Value)
		}
	}
	// Output:
	// 3 error disk-full 98
	// 7 info disk-full 90
}

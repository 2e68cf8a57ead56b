package prober_test

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"agentctl/prober"
)

// board stands for a machine, so that the output is known.
type board struct{}

func (board) Read(s *prober.Sample) error {
	s.CPUPct, s.MemBytes, s.MemTotalBytes, s.DiskPct = 12.4, 1234567890, 8589934592, 31.2
	s.Load1, s.Load5, s.Load15 = 0.42, 0.39, 0.35
	return nil
}

func (board) Close() error { return nil }

func Example() {
	p := prober.New(prober.Options{
		Source: board{}, // leave it out to read the machine
		Now:    func() int64 { return 1745300000000 },
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()

	p.Watch(ctx, time.Second, func(s prober.Sample) error {
		frame, err := json.Marshal(s)
		fmt.Println(string(frame))
		cancel() // one is enough here
		return err
	})
	fmt.Println(<-done)
	// Output:
	// {"ts_ms":1745300000000,"cpu_pct":12.4,"mem_bytes":1234567890,"mem_total_bytes":8589934592,"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}
	// context canceled
}

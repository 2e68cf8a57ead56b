package history_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"agentctl/prober"
	"agentctl/prober/history"
)

func Example() {
	dir, err := os.MkdirTemp("", "history")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	const start = 1_795_132_800_000 // 2026-11-20
	s, err := history.Open(history.Options{
		Path: filepath.Join(dir, "history.db"),
		Now:  func() (int64, bool) { return start + 600_000, true },
	})
	if err != nil {
		panic(err)
	}
	defer s.Close()

	// Record does this with the samples of a prober.
	for sec := range int64(300) {
		s.Add(prober.Sample{TSMS: start + sec*1000, CPUPct: float64(sec % 60), MemBytes: 1 << 30, MemTotalBytes: 4 << 30})
	}

	ctx := context.Background()
	err = s.Query(ctx, history.Query{FromMS: start, StepMS: 60_000}, func(r history.Row) error {
		fmt.Printf("%d s: %v %%\n", (r.TSMS-start)/1000, r.Sample.CPUPct)
		return nil
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(s.Stats().Unsaved, "samples wait to be saved")
	if err := s.Flush(ctx); err != nil {
		panic(err)
	}
	fmt.Println(s.Stats().Rows, "samples are saved")
	// Output:
	// 59 s: 59 %
	// 119 s: 59 %
	// 179 s: 59 %
	// 239 s: 59 %
	// 299 s: 59 %
	// 300 samples wait to be saved
	// 300 samples are saved
}

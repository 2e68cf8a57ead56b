//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// buildBars makes the release binaries for a 64-bit board, as the Makefile does, and checks
// at their size, MB of a million bytes.
func (b *bench) buildBars() error {
	for _, kind := range []struct {
		name, target, binary string
		limit                float64
	}{
		{"board", "board", "agentctl-board", 14},
		{"full", "build", "agentctl", 24},
	} {
		cmd := exec.CommandContext(b.ctx, "make", "-s", kind.target, "BIN="+b.dir, "VERSION=bench", "BUILT_AT=0")
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=", "GOOS=linux", "GOARCH=arm64")
		if msg, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build for linux/arm64: %w: %s", err, msg)
		}
		st, err := os.Stat(filepath.Join(b.dir, kind.binary))
		if err != nil {
			return err
		}
		b.report.add(bar{name: "binary, linux/arm64, stripped: " + kind.name, measured: float64(st.Size()) / 1e6, required: kind.limit, format: "%.2f MB"})
	}
	return nil
}

var benchLine = regexp.MustCompile(`(?m)^BenchmarkSample/(\w+?)(?:-\d+)?\s+\d+\s+([\d.]+) ns/op\s+\d+ B/op\s+(\d+) allocs/op`)

// samplerBars runs the sampler's own benchmark, which reads this machine through both.
func (b *bench) samplerBars() error {
	ns, allocs := map[string][]float64{}, map[string][]float64{}
	for range max(b.count, 3) { // one run each, alternating
		out, err := output(b.ctx, "go", "test", "-run", "^$", "-bench", "Sample", "-benchtime", "300ms", "./prober")
		if err != nil {
			return err
		}
		for _, m := range benchLine.FindAllStringSubmatch(out, -1) {
			t, err1 := strconv.ParseFloat(m[2], 64)
			n, err2 := strconv.ParseFloat(m[3], 64)
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
			ns[m[1]], allocs[m[1]] = append(ns[m[1]], t), append(allocs[m[1]], n)
		}
		if len(ns["ours"]) == 0 || len(ns["gopsutil"]) == 0 {
			return fmt.Errorf("the benchmark printed no figures: %s", strings.TrimSpace(out))
		}
	}
	fmt.Printf("a sample: ours %.1f us, gopsutil %.1f us and %.0f allocations\n", median(ns["ours"])/1000, median(ns["gopsutil"])/1000, median(allocs["gopsutil"]))
	b.report.add(bar{name: "sampler: allocations a sample", measured: median(allocs["ours"]), required: 5, format: "%.0f"})
	b.report.add(bar{name: "sampler / gopsutil: time a sample", measured: median(ratios(ns["ours"], ns["gopsutil"])), required: 0.35, format: "%.2f x"})
	return nil
}

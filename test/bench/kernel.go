//go:build linux

package main

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// kernelBars runs the kernel's benchmarks alternately. What a call costs without the
// kernel is measured in the same run and taken off.
func (b *bench) kernelBars() error {
	got := make(figures)
	for range b.rounds {
		for _, run := range [][2]string{
			{"Call|ListTools/(rest|churn)|Fanout/1000|Registry", "./relay/kernel"},
			{"ListTools", "./relay/mcp"},
			{"Append/(64|512)", "./relay/eventlog"},
		} {
			out, err := output(b.ctx, "go", "test", "-run", "^$", "-bench", run[0], "-benchtime", "300ms", run[1])
			if err != nil {
				return err
			}
			if err := got.read(out); err != nil {
				return err
			}
		}
	}
	var missing error
	of := func(name, unit string) []float64 {
		v := got[name+" "+unit]
		if len(v) == 0 {
			missing = errors.Join(missing, fmt.Errorf("the benchmarks printed no %s of %s", unit, name))
		}
		return v
	}
	less := func(a, b []float64) []float64 {
		d := make([]float64, min(len(a), len(b)))
		for i := range d {
			d[i] = a[i] - b[i]
		}
		return d
	}
	add := func(name string, v []float64, scale, required float64, more bool, format string) {
		if len(v) == 0 {
			return // "of" says what is missing
		}
		b.report.add(bar{name: name, measured: median(v) / scale, required: required, more: more, format: format})
	}
	bareNS, bareAllocs := of("Call/bare", "ns/op"), of("Call/bare", "allocs/op")
	for _, kind := range []string{"device", "plugin"} {
		add("kernel: time it adds to a call of a "+kind, less(of("Call/"+kind, "ns/op"), bareNS), 1000, 5, false, "%.1f us")
		add("kernel: allocations it adds to a call of a "+kind, less(of("Call/"+kind, "allocs/op"), bareAllocs), 1, 10, false, "%.0f")
	}
	add("kernel: a routing entry among 30,000 tools", of("Registry", "B/tool"), 1, 200, false, "%.0f B")
	add("kernel: a page of 200 of 30,000 tools", of("ListTools/rest", "ns/op"), 1e6, 5, false, "%.3f ms")
	add("kernel: the same while devices come and go", of("ListTools/churn", "ns/op"), 1e6, 5, false, "%.3f ms")
	add("kernel: that page as MCP's tools/list", of("ListTools/default", "ns/op"), 1e6, 5, false, "%.3f ms")
	add("kernel: one change taken by 1,000 subscribers", of("Fanout/1000", "ns/op"), 1e6, 0, false, "%.2f ms")
	add("event log: durable events/s, 64 at once", of("Append/64", "events/s"), 1, 5000, true, "%.0f")
	add("event log: durable events/s, 512 at once", of("Append/512", "events/s"), 1, 5000, true, "%.0f")
	return missing
}

// figures are values of Go benchmarks by "NAME UNIT", one a run.
type figures map[string][]float64

var figureLine = regexp.MustCompile(`(?m)^Benchmark(\S+?)(?:-\d+)?\s+\d+\s+(.*)$`)

func (f figures) read(out string) error {
	for _, m := range figureLine.FindAllStringSubmatch(out, -1) {
		words := strings.Fields(m[2])
		for i := 0; i+1 < len(words); i += 2 {
			v, err := strconv.ParseFloat(words[i], 64)
			if err != nil {
				return fmt.Errorf("benchmark line %q: %w", m[0], err)
			}
			f[m[1]+" "+words[i+1]] = append(f[m[1]+" "+words[i+1]], v)
		}
	}
	return nil
}

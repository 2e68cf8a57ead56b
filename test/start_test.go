package test

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// Every command initializes all packages of the binary. Ours compile no schema and no regular
// expression there: each has a bound on the allocations of its initialization, which unlike its
// time is the same on every run. One schema of a tool takes about 300. Other packages have a wider
// bound, so that a new library that works at the start is noticed; docs/performance.md, "The start of
// a command", has the one exception.
func TestInitIsCheap(t *testing.T) {
	const exception = "github.com/santhosh-tekuri/jsonschema/v6"
	for _, name := range []string{"agentctl", "agentctl-board"} {
		tags := ""
		if name == "agentctl-board" {
			tags = "agentctl_omit_relay"
		}
		cmd := exec.Command(binary(t, name, tags), "version")
		cmd.Env = append(cmd.Environ(), "GODEBUG=inittrace=1")
		var trace bytes.Buffer
		cmd.Stderr = &trace
		if err := cmd.Run(); err != nil {
			t.Fatalf("%s: %v %s", name, err, &trace)
		}
		packages := 0
		for line := range strings.Lines(trace.String()) {
			var path string
			var at, clock float64
			var size, allocs int
			// init internal/bytealg @0.008 ms, 0 ms clock, 0 bytes, 0 allocs
			if _, err := fmt.Sscanf(line, "init %s @%f ms, %f ms clock, %d bytes, %d allocs", &path, &at, &clock, &size, &allocs); err != nil {
				t.Fatalf("%s: %v: %q", name, err, line)
			}
			maxAllocs, maxBytes := 600, 128<<10
			switch {
			case path == exception:
				continue
			case path == "main" || strings.HasPrefix(path, "agentctl/"):
				packages++
				maxAllocs, maxBytes = 150, 16<<10
			}
			if allocs > maxAllocs || size > maxBytes {
				t.Errorf("%s: the initialization of %s makes %d allocations, %d bytes: at most %d and %d; use lazyregexp or sync.OnceValue", name, path, allocs, size, maxAllocs, maxBytes)
			}
		}
		if packages < 10 {
			t.Errorf("%s: only %d packages of ours in the trace:\n%s", name, packages, &trace)
		}
	}
}

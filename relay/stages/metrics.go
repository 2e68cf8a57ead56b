package stages

import (
	"context"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Classes of requests. They are a closed set and name neither tenants nor nodes, so that
// the number of series is fixed.
const (
	ClassDevice   = "device"   // tools of devices
	ClassKernel   = "kernel"   // tools of the control plane
	ClassPlugin   = "plugin"   // tools of other plugins
	ClassResource = "resource" // reads
	ClassUnknown  = "unknown"  // nothing that the caller may see
)

// Classes lists them in the order of Stats.
var Classes = []string{ClassDevice, ClassKernel, ClassPlugin, ClassResource, ClassUnknown}

// Upper bounds of the buckets, in seconds and bytes; one more bucket takes the rest.
var (
	LatencyBounds = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	SizeBounds    = []float64{64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
)

const maxBuckets = 14

// Metrics counts requests by class. The zero value is ready; it is safe for concurrent
// use and takes no lock.
type Metrics struct {
	classes [5]classCounts // as Classes
}

type classCounts struct {
	calls, errors       atomic.Uint64
	codes               [7]atomic.Uint64 // as manifest.Codes
	latency             histogram        // nanoseconds
	requests, responses histogram        // bytes
}

type histogram struct {
	buckets [maxBuckets]atomic.Uint64
	sum     atomic.Uint64
}

func (h *histogram) add(bounds []float64, value float64, unit uint64) {
	i := 0
	for i < len(bounds) && value > bounds[i] {
		i++
	}
	h.buckets[i].Add(1)
	h.sum.Add(unit)
}

// Histogram is a histogram as it is told: Counts has one element for each bound and one
// for the rest; they are not cumulative.
type Histogram struct {
	Bounds []float64 `json:"bounds"`
	Counts []uint64  `json:"counts"`
	Sum    float64   `json:"sum"`
}

func (h *histogram) snapshot(bounds []float64, unit float64) Histogram {
	out := Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds)+1), Sum: float64(h.sum.Load()) / unit}
	for i := range out.Counts {
		out.Counts[i] = h.buckets[i].Load()
	}
	return out
}

func (h *histogram) reset() {
	for i := range h.buckets {
		h.buckets[i].Store(0)
	}
	h.sum.Store(0)
}

// ClassStats is what was counted of one class.
type ClassStats struct {
	Class         string            `json:"class"`
	Calls         uint64            `json:"calls"`
	Errors        uint64            `json:"errors"`
	Codes         map[string]uint64 `json:"codes"`          // errors by code; only those that happened
	Latency       Histogram         `json:"latency_s"`      // inside the relay; of a stream: its opening
	RequestBytes  Histogram         `json:"request_bytes"`  // arguments
	ResponseBytes Histogram         `json:"response_bytes"` // structured result and content, without streams
}

// Stats gives the figures of all classes since the start or the last Reset.
func (m *Metrics) Stats() []ClassStats {
	out := make([]ClassStats, len(Classes))
	for i, name := range Classes {
		c := &m.classes[i]
		s := ClassStats{Class: name, Calls: c.calls.Load(), Errors: c.errors.Load(), Codes: make(map[string]uint64),
			Latency: c.latency.snapshot(LatencyBounds, 1e9), RequestBytes: c.requests.snapshot(SizeBounds, 1), ResponseBytes: c.responses.snapshot(SizeBounds, 1)}
		for j, code := range manifest.Codes {
			if n := c.codes[j].Load(); n > 0 {
				s.Codes[string(code)] = n
			}
		}
		out[i] = s
	}
	return out
}

// Reset begins anew.
func (m *Metrics) Reset() {
	for i := range m.classes {
		c := &m.classes[i]
		c.calls.Store(0)
		c.errors.Store(0)
		for j := range c.codes {
			c.codes[j].Store(0)
		}
		c.latency.reset()
		c.requests.reset()
		c.responses.reset()
	}
}

// counting is the stage around a Metrics.
type counting struct{ m *Metrics }

func newMetrics(e *env, config []byte) (stage, error) {
	return counting{&e.metrics}, decode("metrics", config)
}

func (counting) config() any { return struct{}{} }

func (s counting) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		start, sent := time.Now(), len(r.Arguments)
		res, err := next(ctx, r)
		s.m.count(r, res, err, sent, time.Since(start))
		return res, err
	}
}

func (m *Metrics) count(r *kernel.Request, res *kernel.Result, err error, sent int, took time.Duration) {
	c := &m.classes[classOf(r)]
	c.calls.Add(1)
	c.latency.add(LatencyBounds, took.Seconds(), uint64(took))
	c.requests.add(SizeBounds, float64(sent), uint64(sent))
	if err != nil {
		c.errors.Add(1)
		code := manifest.AsError(err).Code
		for i := range manifest.Codes {
			if manifest.Codes[i] == code {
				c.codes[i].Add(1)
			}
		}
		return
	}
	if res == nil {
		return
	}
	n := len(res.Structured) + len(res.Data)
	for _, block := range res.Content {
		n += len(block)
	}
	c.responses.add(SizeBounds, float64(n), uint64(n))
}

// classOf is an index into Classes.
func classOf(r *kernel.Request) int {
	switch t := r.Target(); {
	case r.Plugin() == "":
		return 4
	case r.Method == kernel.MethodRead:
		return 3
	case r.Plugin() == controlPlane:
		return 1
	case t != nil && t.NodeID != "":
		return 0
	case t == nil: // refused before the kernel looked at the tool
		if _, ok := manifest.ParseToolName(r.Tool); ok {
			return 0
		}
	}
	return 2
}

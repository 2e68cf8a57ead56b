package stages

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Classes of requests. They are a closed set and name neither tenants nor nodes, so that
// the number of time series is fixed.
const (
	ClassDevice   = "device"   // tools of devices
	ClassKernel   = "kernel"   // tools of the control plane
	ClassPlugin   = "plugin"   // tools of other plugins
	ClassResource = "resource" // reads
	ClassUnknown  = "unknown"  // nothing that the caller may see
)

// Classes lists the classes in the order of Stats.
var Classes = []string{ClassDevice, ClassKernel, ClassPlugin, ClassResource, ClassUnknown}

// Indexes into Classes.
const (
	deviceClass = iota
	kernelClass
	pluginClass
	resourceClass
	unknownClass
	numClasses
)

// Upper bounds of the buckets, in seconds and bytes. A last bucket counts larger values.
var (
	LatencyBounds = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	SizeBounds    = []float64{64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
)

// maxBuckets is the number of buckets for LatencyBounds, the larger of the two.
const maxBuckets = 14

// Metrics counts requests by class. The zero value is ready. It may be used from any
// goroutine and takes no lock.
type Metrics struct {
	classes [numClasses]classCounts // in the order of Classes
}

// classCounts are the counters of one class. Each is atomic, but not all of them together:
// a reader may see a call without its latency.
type classCounts struct {
	calls, errors       atomic.Uint64
	codes               [7]atomic.Uint64 // in the order of manifest.Codes
	latency             histogram        // nanoseconds
	requests, responses histogram        // bytes
}

// histogram counts values by bucket. Its bounds are kept by the caller.
type histogram struct {
	buckets [maxBuckets]atomic.Uint64
	sum     atomic.Uint64
}

// add counts value in its bucket, and adds unit to the sum: the value as a whole number of
// the histogram's unit. The sum is an integer, since there is no atomic addition of floats. A
// value equal to a bound belongs to the bucket below it, as in Prometheus.
func (h *histogram) add(bounds []float64, value float64, unit uint64) {
	i := 0
	for i < len(bounds) && value > bounds[i] {
		i++
	}
	h.buckets[i].Add(1)
	h.sum.Add(unit)
}

// Histogram is the state of a histogram. Counts has one element for each bound and one for
// larger values; they are not cumulative.
type Histogram struct {
	Bounds []float64 `json:"bounds"`
	Counts []uint64  `json:"counts"`
	Sum    float64   `json:"sum"`
}

// snapshot returns the counts. The sum is divided by unit, so that nanoseconds become
// seconds.
func (h *histogram) snapshot(bounds []float64, unit float64) Histogram {
	out := Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds)+1), Sum: float64(h.sum.Load()) / unit}
	for i := range out.Counts {
		out.Counts[i] = h.buckets[i].Load()
	}
	return out
}

// ClassStats are the figures of one class.
type ClassStats struct {
	Class  string `json:"class"`
	Calls  uint64 `json:"calls"`
	Errors uint64 `json:"errors"`
	// Codes counts the errors by code; codes that did not occur are not in it.
	Codes map[string]uint64 `json:"codes"`
	// Latency is the time inside the relay; of a stream, the time to open it.
	Latency Histogram `json:"latency_s"`
	// RequestBytes are the sizes of arguments, ResponseBytes those of structured result,
	// content and data. Frames of streams are not counted.
	RequestBytes  Histogram `json:"request_bytes"`
	ResponseBytes Histogram `json:"response_bytes"`
}

// Stats returns the figures of all classes since the start or the last Reset.
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

// Reset sets all counters to zero, one after the other: calls that end meanwhile may be
// counted in part.
func (m *Metrics) Reset() {
	for i := range m.classes {
		c := &m.classes[i]
		counters := []*atomic.Uint64{&c.calls, &c.errors, &c.latency.sum, &c.requests.sum, &c.responses.sum}
		for _, list := range [][]atomic.Uint64{c.codes[:], c.latency.buckets[:], c.requests.buckets[:], c.responses.buckets[:]} {
			for j := range list {
				counters = append(counters, &list[j])
			}
		}
		for _, n := range counters {
			n.Store(0)
		}
	}
}

// metricsStage is the stage that counts into a Metrics.
type metricsStage struct{ m *Metrics }

func newMetrics(e *env, config []byte) (stage, error) {
	return metricsStage{&e.metrics}, decode("metrics", config)
}

func (metricsStage) config() any { return struct{}{} }

// wrap measures the time and the size of the arguments as they arrived.
func (s metricsStage) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		start, sent := time.Now(), len(r.Arguments)
		res, err := next(ctx, r)
		s.m.count(r, res, err, sent, time.Since(start))
		return res, err
	}
}

// count counts one request, which had `sent` bytes of arguments before other stages
// changed them.
func (m *Metrics) count(r *kernel.Request, res *kernel.Result, err error, sent int, took time.Duration) {
	c := &m.classes[classOf(r)]
	c.calls.Add(1)
	c.latency.add(LatencyBounds, took.Seconds(), uint64(took))
	c.requests.add(SizeBounds, float64(sent), uint64(sent))
	if err != nil {
		c.errors.Add(1)
		if i := slices.Index(manifest.Codes, manifest.AsError(err).Code); i >= 0 {
			c.codes[i].Add(1)
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

// classOf returns the request's class as an index into Classes. A request that was refused
// before the kernel looked at the tool is classified by the form of its name.
func classOf(r *kernel.Request) int {
	switch t := r.Target(); {
	case r.Plugin() == "":
		return unknownClass
	case r.Method == kernel.MethodRead:
		return resourceClass
	case r.Plugin() == kernel.ControlPlugin:
		return kernelClass
	case t != nil && t.NodeID != "":
		return deviceClass
	case t == nil:
		if _, ok := manifest.ParseToolName(r.Tool); ok {
			return deviceClass
		}
	}
	return pluginClass
}

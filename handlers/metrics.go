package handlers

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"agentctl/manifest"
	"agentctl/prober"
)

// DefaultInterval is the cadence of a stream whose caller gives none (RFC-0009 §4).
const DefaultInterval = 5 * time.Second

// Sampler is what Metrics uses of a *prober.Prober.
type Sampler interface {
	Now(ctx context.Context) (prober.Sample, error)
	Watch(ctx context.Context, interval time.Duration, fn func(prober.Sample) error) error
}

var _ Sampler = (*prober.Prober)(nil)

// Metrics answers system.metrics: snapshot with one frame, subscribe with {"interval_ms":N}
// and a stream of frames (RFC-0009 §5.1), the first at once. The relay forwards the bytes of a
// frame to its subscribers as they are encoded here. Use NewMetrics.
type Metrics struct {
	sampler Sampler
	clock   Clock
}

var _ Handler = (*Metrics)(nil)

// NewMetrics returns the handler of system.metrics.
func NewMetrics(s Sampler, clock Clock) *Metrics { return &Metrics{s, clock} }

// Capability is snapshot and subscribe with the default constraints.
func (m *Metrics) Capability() manifest.Capability { return manifest.Metrics() }

// Call answers one snapshot or opens one stream. While the clock is not set a snapshot is
// E_INTERNAL, and a stream has no frames.
func (m *Metrics) Call(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, Stream, error) {
	if tool.Verb == manifest.VerbSubscribe {
		return m.subscribe(tool.NodeID, args)
	}
	s, err := m.sampler.Now(ctx)
	switch {
	case ctx.Err() != nil:
		return nil, nil, ctx.Err()
	case err != nil:
		return nil, nil, manifest.E(manifest.Internal, "the board cannot be sampled; on the board try: agentctl status")
	}
	frame, err := m.encode(tool.NodeID, s)
	return frame, nil, err
}

func (m *Metrics) subscribe(nodeID string, args []byte) ([]byte, Stream, error) {
	in := struct {
		IntervalMS int64 `json:"interval_ms"`
	}{DefaultInterval.Milliseconds()}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, nil, err
	}
	result := strconv.AppendInt([]byte(`{"interval_ms":`), in.IntervalMS, 10)
	interval := time.Duration(in.IntervalMS) * time.Millisecond
	return append(result, '}'), func(ctx context.Context, send func([]byte) error) error {
		err := m.sampler.Watch(ctx, interval, func(s prober.Sample) error {
			frame, err := m.encode(nodeID, s)
			if err != nil {
				return nil // no frame: the clock or the disk is missing, which the next sample may have
			}
			return send(frame)
		})
		if errors.Is(err, prober.ErrStopped) {
			return nil // the device shuts down, which is not a failure
		}
		return err
	}, nil
}

// encode makes a frame of a sample that passes its Check.
func (m *Metrics) encode(nodeID string, s prober.Sample) ([]byte, error) {
	now, err := m.clock.now()
	if err != nil {
		return nil, err
	}
	err = s.Check()
	if errors.Is(err, prober.ErrClock) {
		// The sample was taken within the last second, just before the clock was set: the
		// current time is its time.
		s.TSMS, err = now, nil
	}
	if errors.Is(err, prober.ErrDisk) {
		return nil, manifest.E(manifest.Internal, prober.ErrDisk.Error()+"; on the board try: agentctl status")
	}
	if err != nil {
		return nil, manifest.E(manifest.Internal, "the sampler gave an impossible reading")
	}
	return appendFrame(make([]byte, 0, 288), nodeID, &s), nil
}

// appendFrame appends the nine fields in the order of the schema, without reflection, because it is
// called for every frame of every stream. The sample has passed its Check, and the node id
// needs no escaping. TestFrameCoversCatalogue compares the fields with the sensor catalogue.
func appendFrame(b []byte, nodeID string, s *prober.Sample) []byte {
	b = strconv.AppendInt(append(b, `{"ts_ms":`...), s.TSMS, 10)
	b = append(b, `,"node_id":"`...)
	b = append(b, nodeID...)
	b = appendNumber(append(b, `","cpu_pct":`...), s.CPUPct)
	b = strconv.AppendUint(append(b, `,"mem_bytes":`...), s.MemBytes, 10)
	b = strconv.AppendUint(append(b, `,"mem_total_bytes":`...), s.MemTotalBytes, 10)
	b = appendNumber(append(b, `,"disk_pct":`...), s.DiskPct)
	b = appendNumber(append(b, `,"load_1m":`...), s.Load1)
	b = appendNumber(append(b, `,"load_5m":`...), s.Load5)
	b = appendNumber(append(b, `,"load_15m":`...), s.Load15)
	return append(b, '}')
}

// appendNumber appends the shortest form that reads back as v.
func appendNumber(b []byte, v float64) []byte {
	format := byte('f')
	if v >= 1e15 {
		format = 'e' // avoids 300 digits
	}
	return strconv.AppendFloat(b, v, format, -1, 64)
}
